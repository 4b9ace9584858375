"""`make bench-agreement`: traces, replayed live and simulated: how far is the simulator from the truth?

    python -m loadtests.bench.agreement [--trace FILE ...] [--workers 2] [--load 0.5] [--out FILE]

Workers on a seeded model stand behind our gateway. Of each trace, one part of the requests is sent for learning:
whole, and with answers of two tokens, so that what a request costs is told from what a token costs. From that come a
cost model and what gateway, client and workers' servers take of the cores (`sim/run_fit.py`). Another part is sent
for comparing, turn about with the first, and simulated: the same requests at the same instants, on as many blocks a
worker, beside what other programs took of the cores just then. The error of a figure is (simulated - live) / live,
of the means over the rounds. Before all that a run that does not count: whoever sees a length for the first time
takes longer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtests.live.bench_command import run_bench
from loadtests.live.calibrate import calibrate
from loadtests.live.cores_used import CoresUsed, watched_cores
from loadtests.live.driver import Driver, Outcome, Pace, Target
from loadtests.live.fleet import SERVED_NAME, Fleet, running_fleet
from loadtests.live.fronts import Programs, running_front
from loadtests.live.prompts import PromptMaker, PromptStyle
from loadtests.live.results import result_of as live_result
from loadtests.provenance import provenance
from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.fit import Fit, fit, least_squares, means
from loadtests.sim.metrics import CacheBounds, cache_bounds, saturation_rate
from loadtests.sim.metrics import result_of as simulated_result
from loadtests.sim.policies import POLICIES
from loadtests.sim.run_fit import Run, Seen, fit_to_runs
from loadtests.sim.shared_cores import OthersWork
from loadtests.streaming_client import AnswerError, TimedAnswer
from loadtests.tiny_model import write_tiny_model
from loadtests.traces import Trace, TraceError, load_trace

EXCERPTS = [Path(__file__).parents[1] / "excerpts" / f"{name}.jsonl.gz"
            for name in ("mooncake_400", "tau_airline_64")]
BLOCK_SIZE = 16
PROMPT_MAX = 3000
SHORT_ANSWER = 2
MAX_BATCH_TOKENS, MAX_RUNNING = 512, 64   # the worker's defaults
CALIBRATION_ROUNDS = 3
COMPARED = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "request_mean_s", "hit_token_ratio",
            "max_mean_load")


class Parts(NamedTuple):
    """Of one trace: what is compared, and what is learnt from."""

    compared: Trace
    whole: Trace
    short: Trace


@dataclass(frozen=True, slots=True)
class Sent:
    """One live run."""

    trace: Trace
    outcomes: Sequence[Outcome]
    used: CoresUsed
    result: dict[str, Any]

    @property
    def serving_s(self) -> float:
        return sum(self.used.serving_s.values())

    def seen(self) -> list[Seen]:
        """Which worker answered each request, and when. AnswerError when one was not answered well."""
        answers = [_answer_of(outcome) for outcome in self.outcomes]
        names = sorted({answer.worker_id or "" for answer in answers})
        return [Seen(names.index(answer.worker_id or ""), outcome.late_s + answer.ttft_s, outcome.total_s)
                for outcome, answer in zip(self.outcomes, answers, strict=True)]


def _answer_of(outcome: Outcome) -> TimedAnswer:
    if outcome.answer is None:
        raise AnswerError(f"request {outcome.index} failed: {outcome.detail}", outcome.error or "")
    return outcome.answer


def parts_of(trace: Trace, *, num_requests: int, output_max: int) -> Parts:
    """Only prompts that fit, of ids alone, answers cut short. TraceError when there are too few for two parts."""
    kept = [replace(request, output_tokens=min(request.output_tokens, output_max), messages=())
            for request in trace.requests if request.prompt_tokens <= PROMPT_MAX]
    if len(kept) < 2 * num_requests:
        raise TraceError(f"{trace.name} has {len(kept)} requests that fit, for {num_requests} to compare and as many "
                         "to learn from")
    learnt = kept[num_requests:2 * num_requests]
    return Parts(*(replace(trace, requests=tuple(requests)) for requests in (
        kept[:num_requests], learnt,
        [replace(request, output_tokens=min(request.output_tokens, SHORT_ANSWER)) for request in learnt])))


class Stack:
    """Running workers, a gateway for each run, and how their simulated likeness is made."""

    def __init__(self, fleet: Fleet, blocks_per_worker: int) -> None:
        self._fleet = fleet
        num_workers, num_cores = len(fleet.workers), len(os.sched_getaffinity(0))
        self.settings = ClusterSettings(
            num_workers=num_workers, blocks_per_worker=blocks_per_worker, workers_per_machine=num_workers,
            cores_per_machine=num_cores)

    def bounds(self, trace: Trace) -> CacheBounds:
        return cache_bounds(trace, self.settings.blocks_per_worker * self.settings.num_workers)

    async def send(self, trace: Trace, run_id: str) -> Sent:
        """Once, to empty workers behind a new gateway."""
        fleet = self._fleet
        await fleet.empty()
        async with running_front("headstart", fleet, Programs()) as front:
            assert front.child is not None, "our gateway is our child"
            driver = Driver(Target(front.url), PromptMaker(PromptStyle(SERVED_NAME), BLOCK_SIZE), Pace(),
                            run_id=run_id)
            async with watched_cores([worker.process.pid for worker in fleet.workers],
                                     front.child.process.pid) as used:
                outcomes = await driver.run(trace)
        return Sent(trace, outcomes, used, live_result(outcomes, self.bounds(trace), run_id))

    def saturation(self, trace: Trace, fitted: Fit, serving: OthersWork) -> float:
        """Requests a second for which there are cores, if nobody else wants them."""
        settings = self.settings
        alone = saturation_rate(trace, fitted.model, num_workers=1, hit_ratio=self.bounds(trace).one_cache_ratio,
                                tokens_per_worker=settings.blocks_per_worker * BLOCK_SIZE)
        tokens = sum(request.output_tokens for request in trace.requests) / len(trace.requests)
        core_s = 1 / alone + serving.request_s + tokens * serving.token_s
        return min(settings.num_workers * alone, settings.cores_per_machine / core_s)

    def learn(self, runs: Sequence[Sent], first: Fit, serving: OthersWork) -> Fit:
        return fit_to_runs([Run(one.trace, one.seen(), replace(serving, other_programs=one.used.others))
                            for one in runs], first, self.settings)

    def simulate(self, like: Sent, fitted: Fit, serving: OthersWork) -> dict[str, Any]:
        """The same requests on simulated workers, beside the same other programs."""
        settings = replace(self.settings, model=fitted.model, network_s=fitted.request_s / 2,
                           others_work=replace(serving, other_programs=like.used.others))
        cluster = Cluster(like.trace, settings, POLICIES["headstart"])
        cluster.run()
        return simulated_result(cluster, "headstart", self.bounds(like.trace)).as_dict()


def serving_work(runs: Sequence[Sent]) -> OthersWork:
    """What a request and what a token takes of gateway, client and workers' servers, from runs with long and short
    answers."""
    amounts = np.array([[one.result["requests"], one.result["completion_tokens"]] for one in runs], dtype=float)
    request_s, token_s = least_squares(amounts, np.array([one.serving_s for one in runs]))
    return OthersWork(float(request_s), float(token_s))


class Rounds(NamedTuple):
    """What was sent: for learning, and for comparing."""

    learnt: list[Sent]
    compared: list[Sent]


async def compare(args: argparse.Namespace, trace: Trace, stack: Stack, first: Fit) -> dict[str, Any]:
    """Both results of one trace, and the errors."""
    parts = parts_of(trace, num_requests=args.requests, output_max=args.max_output)
    rate = args.load * stack.saturation(parts.whole, first, OthersWork())
    before = [await stack.send(part.at_rate(rate), "before") for part in (parts.whole, parts.short)]
    serving = serving_work(before)
    rate = args.load * stack.saturation(parts.compared, stack.learn(before, first, serving), serving)
    rounds = await _send_rounds(args.rounds, parts, rate, stack)
    serving = serving_work(rounds.learnt)
    fitted = stack.learn(rounds.learnt, first, serving)
    return {"trace": trace.name, "requests": args.requests, "rate_per_s": rate, "load": args.load,
            "cost_model": asdict(fitted.model), "request_s": fitted.request_s,
            "fit_error_ratio": fitted.mean_error_ratio, "serving_request_s": serving.request_s,
            "serving_token_s": serving.token_s, "cores_used": [_cores(one) for one in rounds.compared],
            **_beside([one.result for one in rounds.compared],
                      [stack.simulate(one, fitted, serving) for one in rounds.compared])}


async def _send_rounds(num_rounds: int, parts: Parts, rate: float, stack: Stack) -> Rounds:
    """Turn about, since the machine is not the same all the time."""
    rounds = Rounds([], [])
    for number in range(num_rounds):
        _say(f"{parts.compared.name}, round {number}: {rate:.1f} requests/s")
        rounds.learnt.append(await stack.send(parts.whole.at_rate(rate), f"whole-{number}"))
        rounds.compared.append(await stack.send(parts.compared.at_rate(rate), f"compared-{number}"))
        rounds.learnt.append(await stack.send(parts.short.at_rate(rate), f"short-{number}"))
    return rounds


def _beside(live: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the rounds, and how far they are apart."""
    ours, theirs = ({key: sum(one[key] for one in rounds) / len(rounds) for key in COMPARED}
                    for rounds in (simulated, live))
    return {"live": theirs, "simulated": ours,
            "error_ratio": {key: ours[key] / theirs[key] - 1 if theirs[key] else None for key in COMPARED},
            "live_rounds": live, "simulated_rounds": simulated}


def _cores(sent: Sent) -> dict[str, float]:
    """Cores that each kept busy in the mean of a run."""
    span_s = sent.result["span_s"]
    return {"engines": sent.used.engines_s / span_s, "other_programs": sent.used.others_cores,
            **{name: seconds / span_s for name, seconds in sent.used.serving_s.items()}}


def as_table(report: dict[str, Any]) -> str:
    """Plain text."""
    lines = [f"{report['workers']} workers, commit {report['commit']}, machine load {report['load_1m']}"]
    for one in report["traces"]:
        lines += ["", f"{one['trace']}, {one['requests']} requests, {one['rate_per_s']:.1f} a second",
                  f"{'':<18}{'live':>10}{'simulated':>11}{'error':>9}"]
        for key in COMPARED:
            error = one["error_ratio"][key]
            lines.append(f"{key:<18}{one['live'][key]:>10.4f}{one['simulated'][key]:>11.4f}"
                         f"{'-' if error is None else f'{error:+.1%}':>9}")
    return "\n".join(lines)


async def _bench(args: argparse.Namespace) -> dict[str, Any]:
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", hidden=args.hidden, layers=args.layers, max_context=4096)
        async with running_fleet(model, num_workers=args.workers, arguments=[
                "--kv-memory", args.kv_memory, "--target-itl-ms", "0", "--log-level", "warning"]) as fleet:
            stack = Stack(fleet, int((await fleet.states())[0]["blocks"]["total"]))
            samples = await calibrate(fleet.urls, SERVED_NAME, rounds=CALIBRATION_ROUNDS, seed=args.seed)
            first = fit(means(samples), max_batch_tokens=MAX_BATCH_TOKENS, max_running=MAX_RUNNING)
            compared = [await compare(args, load_trace(path, seed=args.seed, block_size=BLOCK_SIZE), stack, first)
                        for path in args.trace or EXCERPTS]
    return {**about, "workers": args.workers, "cores": stack.settings.cores_per_machine, "rounds": args.rounds,
            "blocks_per_worker": stack.settings.blocks_per_worker, "seed": args.seed, "traces": compared}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.agreement",
                                     description="The simulator beside live runs of the same traces.")
    parser.add_argument("--trace", type=Path, nargs="*", help="instead of the excerpts of Mooncake's and tau-bench's")
    parser.add_argument("--requests", type=int, default=150, help="to compare, and as many to learn from")
    parser.add_argument("--rounds", type=int, default=3, help="live runs, of which the mean is taken")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.5, help="share of saturation")
    parser.add_argument("--max-output", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256, help="the model's width")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv-memory", default="96MiB", help="of each worker")
    run_bench(parser, _bench, as_table)


if __name__ == "__main__":
    main()
