"""A simulation's report as a table, and as files: report.json, table.md, ttft.png.

Owns the layout. It must never compute a figure that is not in the report.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import orjson

COLUMNS = (("policy", "policy", 16, "s"), ("ttft p50", "ttft_p50_s", 9, ".3f"), ("p90", "ttft_p90_s", 9, ".3f"),
           ("p99", "ttft_p99_s", 9, ".3f"), ("mean", "ttft_mean_s", 9, ".3f"), ("hit", "hit_token_ratio", 6, ".1%"),
           ("of one cache", "", 12, ".1%"), ("max/mean", "max_mean_load", 8, ".2f"),
           ("by time", "max_mean_busy", 7, ".2f"),
           ("request", "request_mean_s", 9, ".2f"), ("busy", "busy_ratio", 5, ".0%"))


def as_table(report: dict[str, Any]) -> str:
    """Plain text, the lowest TTFT p99 first."""
    head = (f"{report['trace']}: {report['policies'][0]['requests']} requests, {report['workers']} workers "
            f"({report['model']}), {report['rate_per_s']:.2f} requests/s, {report['blocks_per_worker']} blocks of "
            f"{report['block_size']} tokens each, seed {report['seed']}, commit {report['commit']}\n"
            f"hits of an infinite cache {report['policies'][0]['ideal_hit_token_ratio']:.1%}, of one cache as large "
            f"as all {report['policies'][0]['one_cache_hit_token_ratio']:.1%}; seconds\n")
    titles = " ".join(f"{title:<{width}}" if kind == "s" else f"{title:>{width}}"
                      for title, _, width, kind in COLUMNS)
    rows = [_row(policy) for policy in sorted(report["policies"], key=_tail)]
    return "\n".join([head, titles, *rows, *_verdicts(report["verdicts"])])


def _verdicts(verdicts: dict[str, dict[str, Any]]) -> list[str]:
    """Ours beside the best of the others, one run of each."""
    said = [f"{name.removeprefix('ttft_').removesuffix('_s')} {verdict['ratio']:.2f} of {verdict['rival']}'s"
            + (" (loses)" if verdict["outcome"] == "loses" else "") for name, verdict in verdicts.items()]
    return ["", f"ours beside the best of the others, one seed: {', '.join(said)}"] if said else []


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Into `folder`, made if need be. The plot only where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    (folder / "table.md").write_text(f"```\n{as_table(report)}\n```\n")
    if importlib.util.find_spec("matplotlib") is not None and all(map(math.isfinite, map(_tail, report["policies"]))):
        from loadtests.plots import draw_simulation

        draw_simulation(report, folder / "ttft.png")


def _tail(policy: dict[str, Any]) -> float:
    return math.inf if policy["ttft_p99_s"] is None else float(policy["ttft_p99_s"])


def _row(policy: dict[str, Any]) -> str:
    best, hits = policy["one_cache_hit_token_ratio"], policy["hit_token_ratio"]
    values = {**policy, "": None if hits is None else hits / best if best else 1.0}
    return " ".join(f"{values[key]:<{width}}" if kind == "s" else f"{'-':>{width}}" if values[key] is None
                    else f"{values[key]:>{width}{kind}}" for _, key, width, kind in COLUMNS)
