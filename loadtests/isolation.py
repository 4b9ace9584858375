"""Can a tenant tell what another has sent? 400 probes, judged by everything a client can see.

    python -m loadtests.isolation --json loadtests/results/isolation-DATE.json

Before each probe tenant `a` sends, by a coin, either the very prompt that is probed or another of its length, so that
load tells nothing. Then the prober sends the prompt and looks at TTFT, cached tokens, the gateway's prediction and
where it was sent. The AUC says how well each of these tells the two cases apart: 0.5 is not at all. The same probes
by `a` itself must find the hits, or the test could not fail.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import orjson

from loadtests.bench.relay_prompts import words
from loadtests.tenant_stack import TenantStack, ask, running_tenants

NUM_PROBES = 400
PROMPT_CHARS = 4000
HIDDEN, LAYERS = 256, 6
Z_99 = 2.576
OWN_MIN = 0.95
WARM_UP = 8


def auc(scores: list[float], labels: list[bool]) -> float:
    """The chance that a labelled probe scores above one that is not; ties count half. 0.5: the score says nothing."""
    with_label, without = ([score for score, label in zip(scores, labels, strict=True) if label is wanted]
                           for wanted in (True, False))
    wins = sum((one > other) + (one == other) / 2 for one in with_label for other in without)
    return wins / (len(with_label) * len(without))


def half_width(labels: list[bool]) -> float:
    """Half of the 99 % interval around an AUC of 0.5 (the rank-sum statistic's own variance)."""
    ones, zeros = labels.count(True), labels.count(False)
    return float(Z_99 * ((ones + zeros + 1) / (12 * ones * zeros)) ** 0.5)


async def probe(stack: TenantStack, prober: str, num_probes: int, seed: int) -> dict[str, object]:
    """What the prober finds: an AUC for everything it sees."""
    rng = random.Random(f"{prober} {seed}")
    labels = [rng.random() < 0.5 for _ in range(num_probes)]
    seen: dict[str, list[float]] = {"ttft": [], "cached_tokens": [], "matched_tokens": [], "same_worker": []}
    ttfts: dict[bool, list[float]] = {True: [], False: []}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for _ in range(WARM_UP):
            await ask(session, stack, prober, words(rng, PROMPT_CHARS))
        for number, was_sent in enumerate(labels):
            prompt, other = (f"{number} {words(rng, PROMPT_CHARS)}" for _ in range(2))
            first = await ask(session, stack, "a", prompt if was_sent else other)
            found = await ask(session, stack, prober, prompt)
            assert found.ttft_s is not None, f"refused: {found}"
            seen["ttft"].append(-found.ttft_s)
            seen["cached_tokens"].append(found.cached_tokens)
            seen["matched_tokens"].append(found.matched_tokens)
            seen["same_worker"].append(found.worker == first.worker)
            ttfts[was_sent].append(found.ttft_s)
            _show(prober, number + 1, num_probes)
    medians = {f"ttft_p50_s_{'sent' if was_sent else 'not_sent'}": sorted(values)[len(values) // 2]
               for was_sent, values in ttfts.items()}
    return {"prober": prober, "probes": num_probes, "half_width_99": round(half_width(labels), 4),
            "auc": {name: round(auc(scores, labels), 4) for name, scores in seen.items()},
            **{name: round(value, 4) for name, value in medians.items()}}


def _show(prober: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done % 50 == 0:
        print(f"tenant {prober} [{'#' * (30 * done // total):<30}] {done}/{total}",
              end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def verdict(other: dict[str, object], own: dict[str, object]) -> dict[str, bool]:
    """What must hold."""
    others: dict[str, float] = other["auc"]  # type: ignore[assignment]
    owns: dict[str, float] = own["auc"]  # type: ignore[assignment]
    margin = float(str(other["half_width_99"]))
    return {**{f"another tenant learns nothing by {name}": abs(area - 0.5) <= margin
               for name, area in others.items()},
            **{f"a tenant finds its own by {name}": owns[name] > OWN_MIN
               for name in ("ttft", "cached_tokens", "matched_tokens")}}


def main() -> int:
    """Measure and print; 1 when something can be told."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.isolation",
                                     description="Can a tenant tell what another has sent?",
                                     epilog="example: python -m loadtests.isolation --probes 400")
    parser.add_argument("--probes", type=int, default=NUM_PROBES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    with running_tenants(("a", "b"), hidden=HIDDEN, layers=LAYERS) as stack:
        other, own = (asyncio.run(probe(stack, prober, arguments.probes, arguments.seed)) for prober in ("b", "a"))
    checks = verdict(other, own)
    commit = subprocess.run(["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"],
                            cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    result = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "seed": arguments.seed,
              "machine": f"{os.cpu_count()} cores", "load_average": os.getloadavg(),
              "model": f"Llama, {LAYERS} layers, {HIDDEN} wide", "prompt_chars": PROMPT_CHARS,
              "another_tenant": other, "own_tenant": own, "checks": checks, "ok": all(checks.values())}
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text)
    print(text, end="")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
