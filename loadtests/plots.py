"""Pictures of results. Owns colours and axes; computes nothing that a table does not also show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
