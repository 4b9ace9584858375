"""A replay's report as JSON, as a table, and as files: report.json, requests.jsonl, table.md, replay.png.

Owns the layout. It must never compute a figure of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from loadtests.live.driver import Outcome
from loadtests.live.results import num_workers_of, result_of
from loadtests.provenance import provenance
from loadtests.sim.metrics import cache_bounds
from loadtests.traces import Trace

REQUESTS = "requests.jsonl"
NOTHING = "-"   # in a table, where nothing was measured
MORE_THAN_TRACE_RATIO = 0.1     # a template's own tokens are hits too that no trace counts


def replay_report(trace: Trace, outcomes: Sequence[Outcome], about: dict[str, Any], *, label: str) -> dict[str, Any]:
    """`replay --json`: the keys of `simulate --json`, the totals once more at the top, and where it was measured."""
    sent = trace if len(outcomes) == len(trace.requests) else replace(
        trace, requests=tuple(outcome.request for outcome in outcomes))
    result = result_of(outcomes, cache_bounds(sent, 1), label)
    return {"trace": trace.name, "format": trace.format, "block_size": trace.block_size,
            "workers": num_workers_of(outcomes), **provenance(), **about,
            # One request, or all at once: that is no rate.
            "rate_per_s": len(outcomes) / outcomes[-1].due_s if outcomes and outcomes[-1].due_s > 0 else None,
            "policies": [result],
            **{key: result[key] for key in ("errors", "cached_tokens", "prompt_tokens")}}


def _head(report: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """What was sent, and the times."""
    ms = {name: NOTHING if value is None else f"{1000 * value:.0f}"
          for name, value in result.items() if name.endswith("_s")}
    rate = NOTHING if report["rate_per_s"] is None else f"{report['rate_per_s']:.2f}"
    return [
        f"{report['trace']} to {report['url']} ({report['model']}): {result['requests']} answered, "
        f"{result['failed']} failed, {rate} requests/s, seed {report['seed']}, "
        f"commit {report['commit']}",
        f"ms: TTFT p50 {ms['ttft_p50_s']}, p90 {ms['ttft_p90_s']}, p99 {ms['ttft_p99_s']}, mean {ms['ttft_mean_s']}; "
        f"between tokens p50 {ms['inter_token_p50_s']}, p99 {ms['inter_token_p99_s']}; whole request mean "
        f"{ms['request_mean_s']}",
        f"sent late {result['late']}, by {ms['latest_s']} ms at most"]


def as_table(report: dict[str, Any]) -> str:
    """Plain text."""
    result = report["policies"][0]
    lines = [f"cut short: {result['requests'] + result['failed']} of {report['requests_in_trace']} requests had ended"
             ] if report.get("cut_short") else []
    lines += _head(report, result)
    if result["hit_token_ratio"] is not None:
        lines.append(f"hits {result['hit_token_ratio']:.1%} of {result['prompt_tokens']} prompt tokens; an infinite "
                     f"cache would have {result['ideal_hit_token_ratio']:.1%}, reckoned from the trace")
        if result["hit_token_ratio"] > result["ideal_hit_token_ratio"] + MORE_THAN_TRACE_RATIO:
            lines.append("more hits than the trace has: what every chat begins with by its template is shared too, "
                         "and an earlier run with this seed may have left its prompts in the cache; another --seed "
                         "makes other prompts")
    if report["workers"] is not None:
        load = result["max_mean_load"]
        lines.append(f"{report['workers']} workers answered, max/mean load among them "
                     f"{NOTHING if load is None else f'{load:.2f}'}")
    if result["prediction"] is not None:
        lines.append("predicted hits: {equal} of {compared} as reported, {too_much} too much, {too_little} too "
                     "little".format_map(result["prediction"]))
    lines += [f"error {kind}: {count}, first: {result['first_of_errors'].get(kind, '')}"
              for kind, count in result["errors"].items()]
    return "\n".join(lines)


def write_replay(report: dict[str, Any], outcomes: Sequence[Outcome], folder: Path) -> None:
    """Into `folder`, made if need be. The plot only where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    (folder / "table.md").write_text(f"```\n{as_table(report)}\n```\n")
    rows = [_row(outcome) for outcome in outcomes]
    (folder / REQUESTS).write_bytes(b"".join(map(_line, rows)))
    if rows and importlib.util.find_spec("matplotlib") is not None:
        from loadtests.plots import draw_replay

        draw_replay(report, rows, folder / "replay.png")


class RequestLog:
    """requests.jsonl while the replay runs: what a run leaves that is killed. write_replay() puts it in order."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REQUESTS
        self._path.write_bytes(b"")

    def keep(self, outcome: Outcome) -> None:
        """Add a line. A disk that is full by now is told when the report is written, and ends no run."""
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(_line(_row(outcome)))


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _row(outcome: Outcome) -> dict[str, Any]:
    """One request, without its text."""
    answer = outcome.answer
    row = {"index": outcome.index, "request_id": outcome.request_id, "session": outcome.request.session,
           "due_s": outcome.due_s, "late_s": outcome.late_s, "ttft_s": outcome.ttft_s, "total_s": outcome.total_s,
           "error": outcome.error, "detail": outcome.detail}
    if answer is None:
        return row
    return {**row, "worker": answer.worker_id, "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens, "completion_tokens": answer.completion_tokens,
            "matched_tokens": answer.matched_tokens, "token_at_s": answer.token_at_s}
