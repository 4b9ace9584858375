"""Runs that were done before: a JSON line each, so that a long report can be stopped, gone on with and added to.

Owns the file. A run is known by everything that its result depends on but the code: the workload, its number of
requests, the plan and the policy. The line says which commit it was made with; who changes a policy has its runs done
anew (`forget`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from loadtests.sim.simulation import SimulationPlan

Key = tuple[object, ...]


def key_of(workload: str, requests: int | None, plan: SimulationPlan, policy: str) -> Key:
    """What tells a run from every other."""
    return (workload, requests, plan.num_workers, plan.load, plan.capacity, plan.model.name, plan.seed,
            plan.num_gateways, plan.shared_ledger, plan.event_delay_s, plan.event_loss_ratio, plan.restart_storm,
            policy)


class RunStore:
    """Lines of `{"key": [...], "commit": ..., "result": {...}}`; the last one of a key counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[Key, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            row = orjson.loads(line)
            self._rows[tuple(row["key"])] = row

    def get(self, key: Key) -> dict[str, Any] | None:
        """The result, as it was put."""
        row = self._rows.get(key)
        return row["result"] if row is not None else None

    def put(self, key: Key, result: dict[str, Any], commit: str) -> None:
        """Written at once."""
        row = self._rows[key] = {"key": list(key), "commit": commit, "result": result}
        with self._path.open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")

    def forget(self, policies: set[str]) -> None:
        """Runs of these policies count no more. The file keeps them until they are put anew."""
        self._rows = {key: row for key, row in self._rows.items() if key[-1] not in policies}

    def commits(self, policy: str) -> list[str]:
        """With which code this policy's runs were made."""
        return sorted({row["commit"] for key, row in self._rows.items() if key[-1] == policy})
