"""`make bench-live`: policies and other routers in front of the same live workers, near saturation, arms interleaved.

    python -m loadtests.bench.live [--sglang-router PATH] [--vllm-router PATH] [--trace FILE] [--out FILE]

Four workers on a seeded model, one thread each, are sent tau-bench conversations, open loop, at a share of the rate
that saturates them (found first, by clients that ask without a pause). Every round sends the same requests at the
same instants through each arm, beginning with the next arm; before each the workers' caches are emptied and the front
is started afresh. One run before all rounds does not count: whoever is first finds workers that are not warm. Figures
leave out what was due during the warm-up, in which every prefix is computed for the first time; `from_the_start` has
everything. Of our own arms the gateway's log tells for each request what was predicted and what was found. Routers
with session affinity are told the session, ours is not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from loadtests.live.bench_command import run_bench
from loadtests.live.driver import Driver, Outcome, Pace, Target
from loadtests.live.fleet import SERVED_NAME, Fleet, running_fleet
from loadtests.live.fronts import OUR_POLICIES, SGLANG, VLLM, Programs, running_front
from loadtests.live.hit_check import HitCheck, checked
from loadtests.live.prompts import PromptMaker, PromptStyle
from loadtests.live.results import result_of
from loadtests.live.sessions import overlapping, saturation_per_s, text_of
from loadtests.provenance import provenance
from loadtests.sim.metrics import cache_bounds
from loadtests.tiny_model import write_tiny_model
from loadtests.traces import Trace, load_trace

EXCERPT = Path(__file__).parents[1] / "excerpts" / "tau_airline_64.jsonl.gz"
ARMS = (*OUR_POLICIES, SGLANG, *VLLM)
VOCAB_SIZE = 4096
CONTEXT = 8192
PROMPT_MAX = 5000          # tokens as the trace reckons them; with the answer they fit the context
CLIENTS_A_WORKER = 4       # that ask without a pause while saturation is looked for
QUANTILES = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s")


class Bench:
    """The fleet, the trace, and what each arm gave."""

    def __init__(self, args: argparse.Namespace, trace: Trace, fleet: Fleet) -> None:
        self._args = args
        self._trace = trace
        self._bounds = cache_bounds(trace, 1)
        self._fleet = fleet
        self._programs = Programs(args.sglang_router, args.vllm_router)
        self._prompts = PromptMaker(PromptStyle(SERVED_NAME, output_max=args.max_output), trace.block_size)
        self.left_out = {arm: reason for arm in ARMS if (reason := self._programs.missing(arm))}
        self.arms = [arm for arm in args.arms.split(",") if arm not in self.left_out]
        self.outcomes: defaultdict[str, list[list[Outcome]]] = defaultdict(list)
        self.hits: defaultdict[str, HitCheck] = defaultdict(HitCheck)

    async def run(self) -> dict[str, Any]:
        """The report."""
        about = provenance()
        async with running_front(self.arms[0], self._fleet, self._programs) as front:
            saturation = await saturation_per_s(self._trace, front.url, self._prompts, span_s=self._args.span,
                                                clients=CLIENTS_A_WORKER * len(self._fleet.workers))
        rate = self._args.load * saturation
        _say(f"saturation {saturation:.1f} requests/s with {self.arms[0]}; sending {rate:.1f}")
        sent_in = [overlapping(self._trace, rate=rate, span_s=self._args.span, seed=self._args.seed + number)
                   for number in range(self._args.rounds)]
        await self._one(self.arms[0], sent_in[0], None)
        for number, sent in enumerate(sent_in):
            turn = number % len(self.arms)
            for arm in self.arms[turn:] + self.arms[:turn]:
                await self._one(arm, sent, number)
        return {**about, "trace": self._trace.name, "workers": len(self._fleet.workers), "load": self._args.load,
                "saturation_per_s": saturation, "rate_per_s": rate, "span_s": self._args.span,
                "warm_up_s": self._args.warm_up,
                "rounds": self._args.rounds, "seed": self._args.seed, "max_output": self._args.max_output,
                "kv_memory": self._args.kv_memory, "left_out": self.left_out,
                "versions": {arm: self._programs.version(arm) for arm in self.arms},
                "predicted_hits": self._all_hits().as_dict(),
                "arms": [self._arm(arm) for arm in self.arms]}

    async def _one(self, arm: str, sent: Trace, number: int | None) -> None:
        """One arm in the round of this number; None: before them all, so that workers are warm, and not counted."""
        await self._fleet.empty()
        async with running_front(arm, self._fleet, self._programs) as front:
            driver = Driver(Target(front.url, name_sessions=True), self._prompts, Pace(),
                            run_id=f"{arm.replace(' ', '-')}-{number}")
            outcomes = await driver.run(sent)
            if number is None:
                return
            if front.child is not None:
                self.hits[arm].add(await checked(front, outcomes, sent.block_size))
        self.outcomes[arm].append(outcomes)
        result = self._figures(outcomes, arm)
        _say(f"round {number} {arm:<34} p50 {result['ttft_p50_s'] or 0:.3f} p90 {result['ttft_p90_s'] or 0:.3f} "
             f"hits {result['hit_token_ratio'] or 0:.1%} late {result['late']} errors {result['errors']}")

    def _all_hits(self) -> HitCheck:
        """Over our own arms, whatever their policy: what a worker holds is known alike."""
        total = HitCheck()
        for check in self.hits.values():
            total.add(check)
        return total

    def _arm(self, arm: str) -> dict[str, Any]:
        """Pooled over the rounds, and ours over it: below 1 ours is better."""
        rounds = self.outcomes[arm]
        pooled, ours = self._pooled(arm), self._pooled(self.arms[0])
        each = [self._warm(outcomes, arm) for outcomes in rounds]
        first = [self._warm(outcomes, arm) for outcomes in self.outcomes[self.arms[0]]]
        by_round = [mine["ttft_p90_s"] / one["ttft_p90_s"] for mine, one in zip(first, each, strict=True)
                    if mine["ttft_p90_s"] and one["ttft_p90_s"]]
        whole = self._figures(list(chain.from_iterable(rounds)), arm)
        return {**pooled, "from_the_start": {key: whole[key] for key in (*QUANTILES, "hit_token_ratio", "requests")},
                "rounds": [{key: one[key] for key in (*QUANTILES, "hit_token_ratio")} for one in each],
                "ours_over_it": {key: ours[key] / pooled[key] if ours[key] and pooled[key] else None
                                 for key in QUANTILES},
                "ours_over_it_p90_by_round": by_round,
                "ours_over_it_p90_median": statistics.median(by_round) if by_round else None,
                "predicted_hits": self.hits[arm].as_dict() if arm in self.hits else None}

    def _pooled(self, arm: str) -> dict[str, Any]:
        return self._warm(list(chain.from_iterable(self.outcomes[arm])), arm)

    def _warm(self, outcomes: Sequence[Outcome], arm: str) -> dict[str, Any]:
        return self._figures([outcome for outcome in outcomes if outcome.due_s >= self._args.warm_up], arm)

    def _figures(self, outcomes: Sequence[Outcome], arm: str) -> dict[str, Any]:
        return result_of(outcomes, self._bounds, arm)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_table(report: dict[str, Any]) -> str:
    """Plain text, in the order of the arms."""
    lines = [f"{report['trace']}, {report['workers']} workers, {report['rate_per_s']:.1f} requests/s "
             f"({report['load']:.0%} of saturation), {report['rounds']} rounds, commit {report['commit']}",
             f"{'':<34}{'p50':>8}{'p90':>8}{'p99':>8}  seconds{'hits':>9}{'load':>7}   ours / it, p90"]
    for arm in report["arms"]:
        lines.append(f"{arm['policy']:<34}{arm['ttft_p50_s'] or 0:>8.3f}{arm['ttft_p90_s'] or 0:>8.3f}"
                     f"{arm['ttft_p99_s'] or 0:>8.3f}"
                     f"{arm['hit_token_ratio'] or 0:>18.1%}{arm['max_mean_load'] or 0:>7.2f}"
                     f"{arm['ours_over_it']['ttft_p90_s'] or 0:>10.3f}   {arm['requests']} answered {arm['errors']}")
        if arm["predicted_hits"]:
            lines.append(f"{'':<34}hit within a block of [confirmed, matched]: {arm['predicted_hits']['within']} of "
                         f"{arm['predicted_hits']['compared']}")
    for arm in report["arms"][1:]:
        ratio = arm["ours_over_it_p90_median"]
        lines.append(f"p90 of {report['arms'][0]['policy']} over {arm['policy']}, median of the rounds: "
                     + ("none" if ratio is None else f"{ratio:.2f} ({'better' if ratio < 1 else 'not better'})"))
    hits = report["predicted_hits"]
    lines.append(f"reported hit within a block of [confirmed, matched], all our arms: {hits['within']} of "
                 f"{hits['compared']}")
    return "\n".join([*lines, *(f"{arm}: left out, {reason}" for arm, reason in report["left_out"].items())])


async def _bench(args: argparse.Namespace) -> dict[str, Any]:
    whole = load_trace(args.trace, seed=args.seed)
    trace = replace(whole, requests=tuple(request for request in whole.requests
                                          if request.prompt_tokens <= PROMPT_MAX))
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", hidden=args.hidden, layers=args.layers, max_context=CONTEXT,
                                 vocab_size=VOCAB_SIZE, text=text_of(trace))
        async with running_fleet(model, num_workers=args.workers,
                                 arguments=["--kv-memory", args.kv_memory, "--log-level", "warning"]) as fleet:
            return await Bench(args, trace, fleet).run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.live",
                                     description="Policies and routers in front of the same live workers.")
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="conversations (an excerpt of tau-bench)")
    parser.add_argument("--sglang-router", default=SGLANG, metavar="PATH")
    parser.add_argument("--vllm-router", default="vllm-router", metavar="PATH")
    parser.add_argument("--arms", default=",".join(ARMS), help="the first one is what the others are compared with")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--span", type=float, default=10.0, help="seconds of arrivals a run")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of it that do not count")
    parser.add_argument("--load", type=float, default=0.85, help="share of saturation")
    parser.add_argument("--max-output", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128, help="the model's width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-memory", default="24MiB", help="of each worker")
    run_bench(parser, _bench, as_table)


if __name__ == "__main__":
    main()
