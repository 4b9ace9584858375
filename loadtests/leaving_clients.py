"""Clients that leave: how long until the engine is told, and until their sequences and blocks are gone.

`python -m loadtests.leaving_clients --model DIR|smollm2`. A gateway and one worker that runs one sequence at a time,
all real processes. The clock starts when a client drops its connection; it stops at the worker's own log lines
`client_left` (the abort is in the engine's queue) and `request_finished` (the step that ran has taken the sequence
down). Both processes share this machine's clock. Owns the processes it starts, and kills no other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.kill_trials import Fleet, Plan, stamp
from loadtests.local_stack import Child

PHASES = ("queued", "before_first_byte", "mid_stream")
WAIT_S = 60.0
LOOK_S = 0.002
LOG_BYTES = 8 * 1024 * 1024


class Leaver:
    """One client with a connection of its own, so that leaving is one call."""

    def __init__(self, gateway: Child, request_id: str, body: dict[str, Any]) -> None:
        self._host, self._port = gateway.url.removeprefix("http://").split(":")
        payload = json.dumps(body).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nx-request-id: {request_id}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n")
        self._request = head.encode() + payload
        self.request_id = request_id

    async def ask(self) -> None:
        """Send the request."""
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        self._writer.write(self._request)
        await self._writer.drain()

    async def read(self, num_bytes: int) -> None:
        """Take so much of the answer."""
        await self._reader.readexactly(num_bytes)

    def leave(self) -> float:
        """Drop the connection; when it was, in Unix time."""
        left_at = time.time()
        self._writer.transport.abort()
        return left_at


def body_of(model: str, *, stream: bool, number: int) -> dict[str, Any]:
    """A request that would take long."""
    return {"model": model, "messages": [{"role": "user", "content": f"Number {number}: tell me a long story."}],
            "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": stream}


async def until(what: str, condition: Any) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"never: {what}")
        await asyncio.sleep(LOOK_S)


class Trials:
    """One phase after the other, each many times."""

    def __init__(self, fleet: Fleet, plan: Plan, session: aiohttp.ClientSession) -> None:
        self._gateway = fleet.gateway
        [self._worker] = fleet.workers.values()
        self._model = plan.served_name
        self._session = session

    async def run(self, phase: str, number: int) -> dict[str, float]:
        """{told_ms, gone_ms, step_ms}: from leaving to the abort in the queue, to the end, and between both."""
        busy = None
        if phase == "queued":
            busy = Leaver(self._gateway, f"busy-{number}", body_of(self._model, stream=True, number=number))
            await busy.ask()
            await busy.read(800)
        leaver = Leaver(self._gateway, f"{phase}-{number}", body_of(self._model, stream=phase == "mid_stream",
                                                                    number=number))
        await leaver.ask()
        if phase == "mid_stream":
            await leaver.read(1500)
        else:
            await until(phase, lambda: self._load("waiting" if phase == "queued" else "running"))
        left_at = leaver.leave()
        await until("the request's end in the log", lambda: self._logged("request_finished", leaver.request_id))
        told_at = self._at("client_left", leaver.request_id)
        gone_at = self._at("request_finished", leaver.request_id)
        if busy is not None:
            busy.leave()
        await until("an idle worker", self._is_idle)
        return {"told_ms": round((told_at - left_at) * 1000, 2), "gone_ms": round((gone_at - left_at) * 1000, 2),
                "step_ms": round((gone_at - told_at) * 1000, 2)}

    async def _kv(self) -> dict[str, Any]:
        async with self._session.get(f"{self._worker.url}/kv") as response:
            return dict(await response.json(content_type=None))

    async def _load(self, name: str) -> int:
        return int((await self._kv())["load"][name])

    async def _is_idle(self) -> bool:
        state = await self._kv()
        return bool(state["load"]["running"] == state["load"]["waiting"] == state["blocks"]["used"] == 0)

    async def _logged(self, event: str, request_id: str) -> bool:
        return bool(self._lines(event, request_id))

    def _at(self, event: str, request_id: str) -> float:
        [line] = self._lines(event, request_id)
        return datetime.fromisoformat(line["at"]).timestamp()

    def _lines(self, event: str, request_id: str) -> list[dict[str, Any]]:
        found = []
        for line in self._worker.log_tail(LOG_BYTES).splitlines():
            if f'"{request_id}"' in line:
                with contextlib.suppress(json.JSONDecodeError):  # it is being written
                    found.append(json.loads(line))
        return [line for line in found if line["event"] == event and line["request_id"] == request_id]


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and worst of each figure."""
    return {name: {"p50": sorted(row[name] for row in rows)[len(rows) // 2], "max": max(row[name] for row in rows)}
            for name in rows[0]}


async def measure(plan: Plan, num_trials: int) -> dict[str, Any]:
    """The report."""
    fleet = Fleet(plan)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
            await fleet.until_ready(session)
            trials = Trials(fleet, plan, session)
            rows = {phase: [await trials.run(phase, number) for number in range(num_trials)] for phase in PHASES}
    finally:
        fleet.stop()
    return {**stamp(), "model": plan.served_name, "trials_per_phase": num_trials,
            "phases": {phase: summary(found) for phase, found in rows.items()}, "by_trial": rows}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.leaving_clients", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default=None)
    parser.add_argument("--trials", type=int, default=30, help="for each phase")
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    plan = Plan(arguments.model, arguments.name or Path(arguments.model).name, 0, 1, 1, 1, 900, 0, 0,
                ("--kv-memory", arguments.kv_memory, "--max-running", "1"), log_level="info")
    report = asyncio.run(measure(plan, arguments.trials))
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "by_trial"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
