"""A grid's report as a table and as files: report.json, table.md, ratios.png.

Owns the layout. It must never compute a figure that is not in the report.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from loadtests.sim.paired import JUDGED

TITLES = {"ttft_p50_s": "p50", "ttft_p99_s": "p99", "ttft_mean_s": "mean"}


def name_of(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    extras = [f"{cell['gateways']} gateways" + (", one ledger" if cell["shared_ledger"] else "")
              ] if cell["gateways"] > 1 else []
    extras += ["restart storm"] if cell["restart_storm"] else []
    extras += [f"{cell['event_loss_ratio']:.0%} of events lost"] if cell["event_loss_ratio"] else []
    load = "recorded" if cell["load"] is None else f"{cell['load']:.0%}"
    pools = "=".join(f"{capacity:.0%}" for capacity in sorted(cell["capacities"]))
    return ", ".join([f"{cell['trace']} {cell['workers']}w {load}/{pools}", *extras])


def as_table(report: dict[str, Any]) -> str:
    """Markdown: a line a cell: ours, and ours over the best baseline with its interval."""
    lines = [f"{report['model']}, commit {report['commit']}. TTFT in seconds; ratio: ours over the baseline best "
             "there, geometric mean over seeds, with 95 % interval; below 1 is better.", "",
             "| cell: workload, workers, load/capacity | p50 | p99 | p50 ratio | p99 ratio | mean ratio | hits of "
             "one cache | max/mean: positions, time | blocks a worker |", "|---|---|---|---|---|---|---|---|---|"]
    lines += [_line(cell) for cell in report["cells"]]
    return "\n".join([*lines, "", *summary(report)])


def summary(report: dict[str, Any]) -> list[str]:
    """How many cells ours wins, is within 2 % of, and loses; which those are."""
    lines = [f"{len(report['cells'])} cells. Pools joined by = are one and the same, that of the longest request, "
             "and count once."] if any(len(cell["capacities"]) > 1 for cell in report["cells"]) else []
    for key in JUDGED:
        judged = [(name_of(cell), cell["verdicts"][key]) for cell in report["cells"] if cell["verdicts"]]
        counts = Counter(verdict["outcome"] for _, verdict in judged)
        lost = [f"{name} ({verdict['rival']} {verdict['ratio']:.2f}{'' if verdict['sure'] else '?'})"
                for name, verdict in judged if verdict["outcome"] == "loses"]
        lines.append(f"{TITLES[key]}: wins {counts['wins']}, within 2 % {counts['within']}, loses {counts['loses']}"
                     + (f": {'; '.join(lost)}" if lost else "") + ".")
    return [*lines, "A question mark: the interval holds 1."]


def write_figures(report: dict[str, Any], folder: Path) -> None:
    """report.json and table.md: quick enough for after every cell."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    (folder / "table.md").write_text(as_table(report) + "\n")


def write_grid(report: dict[str, Any], folder: Path) -> None:
    """Into `folder`, made if need be. The plots only where matplotlib is installed."""
    write_figures(report, folder)
    if importlib.util.find_spec("matplotlib") is not None:
        from loadtests.plots import draw_ratios

        for key in JUDGED:
            draw_ratios([(name_of(cell), cell["verdicts"][key]) for cell in report["cells"] if cell["verdicts"]],
                        f"time to first token, {TITLES[key]}: ours over the best baseline",
                        folder / f"{TITLES[key]}.png")


def _line(cell: dict[str, Any]) -> str:
    ours = next((policy for policy in cell["policies"] if policy["policy"] == "headstart"), cell["policies"][0])
    best = ours["one_cache_hit_token_ratio"]
    ratios = [_ratio(cell["verdicts"].get(key)) for key in JUDGED]
    hits = f"{ours['hit_token_ratio'] / best:.0%}" if best and ours["hit_token_ratio"] is not None else "-"
    times = [_seconds(ours[key]) for key in ("ttft_p50_s", "ttft_p99_s")]
    return " | ".join([f"| {name_of(cell)}", *times, *ratios, hits,
                       f"{ours['max_mean_load']:.2f}, {_time(ours)} | {cell['blocks_per_worker']:,} |"])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _time(ours: dict[str, Any]) -> str:
    return f"{ours['max_mean_busy']:.2f}" if ours["max_mean_busy"] else "-"


def _ratio(verdict: dict[str, Any] | None) -> str:
    if verdict is None:
        return "-"
    interval = "" if verdict["low"] is None else f" [{verdict['low']:.2f}, {verdict['high']:.2f}]"
    return f"{verdict['ratio']:.2f}{interval} {verdict['rival']}"
