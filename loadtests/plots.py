"""Pictures of results. Owns colours and axes; computes nothing that a table does not also show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from loadtests.demo import DemoReport

INK = "#222831"
COLOURS = {"cold": "#8d99ae", "warm": "#2a9d8f", "round robin": "#e9a03b", "off": "#c8553d", "full": "#2a9d8f"}


def draw_demo(report: DemoReport, output: Path) -> None:
    """Two panels: TTFT by arm (bars at p50, whiskers to p95 and p99), and ms per token against position."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    names = [arm.arm for arm in report.arms]
    medians = [1000 * arm.ttft_p50_s for arm in report.arms]
    left.bar(names, medians, color=[COLOURS[name] for name in names], width=0.6)
    for index, arm in enumerate(report.arms):
        left.vlines(index, 1000 * arm.ttft_p50_s, 1000 * arm.ttft_p99_s, color=INK, linewidth=1)
        left.scatter([index, index], [1000 * arm.ttft_p95_s, 1000 * arm.ttft_p99_s], color=INK, s=14, zorder=3)
        share = arm.computed_tokens / max(1, arm.prompt_tokens)
        left.annotate(
            f"{medians[index]:.0f} ms\n{share:.0%} computed",
            (index, medians[index]),
            ha="left",
            va="bottom",
            xytext=(5, 2),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    left.set_ylabel("time to first token, ms (bar p50, dots p95 and p99)")
    left.set_title("One 800-token system prompt, many questions")
    for mode, curve in report.curves.items():
        right.plot(range(1, len(curve) + 1), curve, label=f"--kv-cache {mode}", color=COLOURS[mode], linewidth=1.2)
    right.set_xlabel("position in the answer, tokens")
    right.set_ylabel("inter-token time, ms")
    right.set_ylim(bottom=0)
    right.set_title("What the KV cache saves at every token")
    if report.curves:
        right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def draw_simulation(report: dict[str, Any], output: Path) -> None:
    """TTFT by policy (bars at p50, dots at p90 and p99, logarithmic) and hit tokens beside the best cache's."""
    policies = sorted(report["policies"], key=lambda policy: float(policy["ttft_p99_s"]))
    names = [policy["policy"] for policy in policies]
    colours = [COLOURS["warm"] if name == "headstart" else COLOURS["cold"] for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    left.bar(names, [policy["ttft_p50_s"] for policy in policies], color=colours, width=0.6)
    for index, policy in enumerate(policies):
        left.vlines(index, policy["ttft_p50_s"], policy["ttft_p99_s"], color=INK, linewidth=1)
        left.scatter([index, index], [policy["ttft_p90_s"], policy["ttft_p99_s"]], color=INK, s=14, zorder=3)
    left.set_yscale("log")
    left.set_ylabel("time to first token, s (bar p50, dots p90 and p99)")
    left.set_title(f"{report['trace']}, {report['workers']} workers, {report['rate_per_s']:.2f} requests/s")
    right.bar(names, [policy["hit_token_ratio"] for policy in policies], color=colours, width=0.6)
    right.axhline(policies[0]["one_cache_hit_token_ratio"], color=INK, linewidth=1, linestyle="--")
    right.annotate("one cache as large as all", (len(names) - 0.5, policies[0]["one_cache_hit_token_ratio"]),
                   ha="right", va="bottom", fontsize=8, color=INK)
    right.set_ylabel("share of prompt tokens found cached")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", rotation=35)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def draw_ratios(rows: list[tuple[str, dict[str, Any]]], title: str, output: Path) -> None:
    """A dot a row at ours over the best baseline, with its interval; below 1 ours is better (logarithmic)."""
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.26 * len(rows)), constrained_layout=True)
    for place, (_, verdict) in enumerate(reversed(rows)):
        colour = COLOURS["warm"] if verdict["ratio"] <= 1.02 else COLOURS["off"]
        if verdict["low"] is not None:
            axes.hlines(place, verdict["low"], verdict["high"], color=colour, linewidth=1.2)
        axes.scatter([verdict["ratio"]], [place], color=colour, s=18, zorder=3)
        axes.annotate(verdict["rival"], (1, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=7, color=INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)], fontsize=7)
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.axvline(1.02, color=INK, linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=120)
    plt.close(figure)


def draw_replay(report: dict[str, Any], rows: list[dict[str, Any]], output: Path) -> None:
    """Left: each request's TTFT at its time, by the share of its prompt that was cached; failures below. Right: TTFT
    and gaps between tokens as shares of all (logarithmic)."""
    well = [row for row in rows if row["error"] is None]
    failed = [row["due_s"] for row in rows if row["error"] is not None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    shares = [row["cached_tokens"] / max(1, row["prompt_tokens"]) for row in well]
    dots = left.scatter([row["due_s"] for row in well], [row["ttft_s"] for row in well], c=shares, s=9, vmin=0,
                        vmax=1, cmap="viridis_r")
    left.scatter(failed, [0.0] * len(failed), color=COLOURS["off"], marker="x", s=20, label=f"{len(failed)} failed")
    figure.colorbar(dots, ax=left, label="share of the prompt found cached")
    left.set_xlabel("due, s")
    left.set_ylabel("time to first token, s")
    rate = report["rate_per_s"]
    left.set_title(report["trace"] if rate is None else f"{report['trace']}, {rate:.2f} requests/s")
    gaps = [later - earlier for row in well for earlier, later in pairwise(row["token_at_s"])]
    for name, values, colour in (("time to first token", [row["ttft_s"] for row in well], COLOURS["warm"]),
                                 ("between tokens", gaps, COLOURS["round robin"])):
        right.plot(sorted(values), [(place + 1) / len(values) for place in range(len(values))], label=name,
                   color=colour)
    right.set_xscale("log")
    right.set_xlabel("s")
    right.set_ylabel("share of all that took at most so long")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    plt.close(figure)
