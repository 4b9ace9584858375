"""`make bench-agreement`: one trace, replayed live and simulated: how far is the simulator from the truth?

    python -m loadtests.bench.agreement [--trace FILE] [--workers 2] [--load 0.4] [--out FILE]

Workers on a seeded model are measured, a cost model is fitted to that, and the trace is sent to them through our
gateway at a share of the saturation which the simulator reckons from that model. They are measured again after each
run, for a model of the whole time. With it the simulator runs the same requests at the same instants on as many
blocks a worker. The error of a figure is (simulated - live) / live.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from loadtests.live.bench_command import run_bench
from loadtests.live.calibrate import calibrate
from loadtests.live.driver import Driver, Outcome, Pace, Target
from loadtests.live.fleet import SERVED_NAME, Fleet, running_fleet
from loadtests.live.fronts import Programs, running_front
from loadtests.live.prompts import PromptMaker, PromptStyle
from loadtests.live.results import result_of as live_result
from loadtests.provenance import provenance
from loadtests.sim.cluster import Cluster, ClusterSettings
from loadtests.sim.fit import DecodeStep, Fit, Prefill, fit, means
from loadtests.sim.metrics import CacheBounds, cache_bounds, saturation_rate
from loadtests.sim.metrics import result_of as simulated_result
from loadtests.sim.policies import POLICIES
from loadtests.tiny_model import write_tiny_model
from loadtests.traces import Trace, load_trace

EXCERPT = Path(__file__).parents[1] / "excerpts" / "mooncake_400.jsonl.gz"
BLOCK_SIZE = 16
PROMPT_MAX = 2000
MAX_BATCH_TOKENS, MAX_RUNNING = 512, 64   # the worker's defaults
CALIBRATION_ROUNDS = 4
DRIFT_TOKENS = 512   # whose prefill says how much slower the machine became
COMPARED = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "request_mean_s", "hit_token_ratio",
            "max_mean_load")


def shaped(trace: Trace, *, num_requests: int, output_max: int) -> Trace:
    """Only prompts that fit, answers cut short: what both sides are given."""
    kept = [replace(request, output_tokens=min(request.output_tokens, output_max))
            for request in trace.requests if request.prompt_tokens <= PROMPT_MAX]
    return replace(trace, requests=tuple(kept[:num_requests]))


async def compare(args: argparse.Namespace, trace: Trace, fleet: Fleet) -> dict[str, Any]:
    """Both results, and the errors."""
    about = provenance()
    samples = await calibrate(fleet.urls, SERVED_NAME, rounds=CALIBRATION_ROUNDS, seed=args.seed)
    fitted = before = _fit(samples)
    blocks = int((await fleet.states())[0]["blocks"]["total"])
    bounds = cache_bounds(trace, blocks * args.workers)
    saturation = saturation_rate(trace, fitted.model, num_workers=args.workers, hit_ratio=bounds.one_cache_ratio,
                                 tokens_per_worker=blocks * BLOCK_SIZE)
    timed = trace.at_rate(args.load * saturation)
    _say(f"fitted to {fitted.mean_error_ratio:.0%}; sending {args.load * saturation:.1f} requests/s")
    lives = []
    for number in range(args.rounds):
        lives.append(await _live(timed, fleet, bounds, f"round-{number}"))
        samples += await calibrate(fleet.urls, SERVED_NAME, rounds=CALIBRATION_ROUNDS, seed=args.seed + number + 1)
        fitted = _fit(samples)
    simulated = simulate(timed, fitted, num_workers=args.workers, num_blocks=blocks, bounds=bounds)
    live = {key: sum(one[key] for one in lives) / len(lives) for key in COMPARED}
    return {**about, "trace": trace.name, "requests": len(trace.requests), "workers": args.workers,
            "blocks_per_worker": blocks, "load": args.load, "rate_per_s": args.load * saturation, "seed": args.seed,
            "cost_model": asdict(fitted.model), "request_s": fitted.request_s,
            "fit_mean_error_ratio": fitted.mean_error_ratio,
            "slower_meanwhile": fitted.model.prefill_s(DRIFT_TOKENS) / before.model.prefill_s(DRIFT_TOKENS),
            "live": live, "live_rounds": lives,
            "simulated": simulated,
            "error_ratio": {key: simulated[key] / live[key] - 1 if live[key] else None for key in COMPARED}}


def _fit(samples: Sequence[Prefill | DecodeStep]) -> Fit:
    return fit(means(samples), max_batch_tokens=MAX_BATCH_TOKENS, max_running=MAX_RUNNING)


async def _live(timed: Trace, fleet: Fleet, bounds: CacheBounds, run_id: str) -> dict[str, Any]:
    await fleet.empty()
    async with running_front("headstart", fleet, Programs()) as front:
        prompts = PromptMaker(PromptStyle(SERVED_NAME), BLOCK_SIZE)
        outcomes: Sequence[Outcome] = await Driver(Target(front.url), prompts, Pace(), run_id=run_id).run(timed)
    return live_result(outcomes, bounds, "live")


def simulate(timed: Trace, fitted: Fit, *, num_workers: int, num_blocks: int, bounds: CacheBounds) -> dict[str, Any]:
    """The same requests on simulated workers like those that were measured."""
    settings = ClusterSettings(num_workers=num_workers, blocks_per_worker=num_blocks, model=fitted.model,
                               network_s=fitted.request_s / 2)
    cluster = Cluster(timed, settings, POLICIES["headstart"])
    cluster.run()
    return simulated_result(cluster, "headstart", bounds).as_dict()


def as_table(report: dict[str, Any]) -> str:
    """Plain text."""
    lines = [f"{report['trace']}, {report['requests']} requests, {report['workers']} workers, "
             f"{report['rate_per_s']:.1f} requests/s ({report['load']:.0%} of the reckoned saturation), commit "
             f"{report['commit']}, machine load {report['load_1m']}",
             f"{'':<18}{'live':>10}{'simulated':>11}{'error':>9}"]
    for key in COMPARED:
        error = report["error_ratio"][key]
        lines.append(f"{key:<18}{report['live'][key]:>10.4f}{report['simulated'][key]:>11.4f}"
                     f"{'-' if error is None else f'{error:+.1%}':>9}")
    return "\n".join(lines)


async def _bench(args: argparse.Namespace) -> dict[str, Any]:
    trace = shaped(load_trace(args.trace, seed=args.seed, block_size=BLOCK_SIZE), num_requests=args.requests,
                   output_max=args.max_output)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", hidden=args.hidden, layers=args.layers, max_context=4096)
        async with running_fleet(model, num_workers=args.workers, arguments=[
                "--kv-memory", args.kv_memory, "--target-itl-ms", "0", "--log-level", "warning"]) as fleet:
            return await compare(args, trace, fleet)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.agreement",
                                     description="The simulator beside a live run of the same trace.")
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="with block ids (an excerpt of Mooncake's)")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2, help="live runs, of which the mean is taken")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.4, help="share of saturation")
    parser.add_argument("--max-output", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256, help="the model's width")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv-memory", default="96MiB", help="of each worker")
    run_bench(parser, _bench, as_table)


if __name__ == "__main__":
    main()
