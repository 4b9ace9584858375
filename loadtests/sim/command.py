"""`headstart simulate TRACE`: the gateway's routing code on a trace, in virtual time, beside other routers' policies.

Owns flags, progress and what is printed. The result is a function of trace, flags, seed and commit.
"""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from loadtests.sim.cost_model import DEFAULT_MODEL, MODELS, CostModel, from_rates
from loadtests.sim.policies import POLICIES
from loadtests.sim.report import as_table, write_report
from loadtests.sim.simulation import SimulationPlan, prepare, report_of, run_policy
from loadtests.traces import Trace, TraceError, load_trace
from loadtests.workloads import WORKLOADS
from worker.protocol.command_line import EXIT_OK, CommandParser, exit_with_problems

PROG = "headstart simulate"
DEFAULT_SYNTHETIC_REQUESTS = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 when trace or flags are unusable."""
    args = _parser().parse_args(argv)
    try:
        trace = _trace(args.trace, args.requests, seed=args.seed, block_size=args.block_size)
        plan = SimulationPlan(num_workers=args.workers, load=None if args.load == "recorded" else float(args.load),
                              capacity=args.capacity, model=_model(args.model), seed=args.seed,
                              num_gateways=args.gateways, event_delay_s=args.event_delay,
                              event_loss_ratio=args.event_loss, coalesce=not args.every_step)
        policies = _policies(args.policy)
        _check(plan)
    except (TraceError, ValueError, OSError) as error:
        exit_with_problems(PROG, [str(error)])
    prepared = prepare(trace, plan)
    results = [run_policy(prepared, policy, _progress(policy)) for policy in policies]
    report = report_of(prepared, plan, results)
    if args.report is not None:
        write_report(report, args.report)
    sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n" if args.json
                     else as_table(report) + "\n")
    return EXIT_OK


def _parser() -> CommandParser:
    parser = CommandParser(PROG, summary="Routing policies on a trace, in virtual time. Reproducible from seed and "
                           "commit.", example=f"{PROG} traces/conversation.jsonl.gz --workers 8 --policy all")
    parser.add_argument("trace", metavar="TRACE", help=f"a trace file (.jsonl, .jsonl.gz), or one of the synthetic "
                        f"workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="simulated workers (default 8)")
    parser.add_argument("--policy", default="headstart", metavar="NAME[,NAME...]",
                        help=f"all, or some of {', '.join(POLICIES)} (default headstart)")
    parser.add_argument("--load", default="0.8", metavar="SHARE", help="arrival rate as a share of saturation, or "
                        "'recorded' for the trace's own times (default 0.8)")
    parser.add_argument("--capacity", type=float, default=0.2, metavar="SHARE", help="KV blocks of all workers "
                        "together as a share of the trace's distinct blocks (default 0.2)")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help=f"how fast a worker is: "
                        f"{', '.join(MODELS)}, or a live worker's URL, for its rates (default {DEFAULT_MODEL})")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N; for a synthetic workload how "
                        f"many to make (default {DEFAULT_SYNTHETIC_REQUESTS})")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="instead of the trace's own")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="gateway replicas (default 1)")
    parser.add_argument("--event-delay", type=float, default=0.002, metavar="S", help="lag of cache events")
    parser.add_argument("--event-loss", type=float, default=0.0, metavar="SHARE", help="events that never arrive")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--every-step", action="store_true", help="run each decode step by itself: slower, equal")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json, table and plots there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _trace(name: str, requests: int | None, *, seed: int, block_size: int | None) -> Trace:
    if requests is not None and requests < 1:
        raise ValueError("--requests should be at least 1")
    if block_size is not None and block_size < 1:
        raise ValueError("--block-size should be at least 1")
    if name in WORKLOADS:
        trace = WORKLOADS[name](requests or DEFAULT_SYNTHETIC_REQUESTS, seed)
        return trace if block_size is None else replace(trace, block_size=block_size)
    return load_trace(Path(name), seed=seed, block_size=block_size).head(requests)


def _model(name: str) -> CostModel:
    if name in MODELS:
        return MODELS[name]
    if not name.startswith(("http://", "https://")):
        raise ValueError(f"unknown model {name!r}: use one of {', '.join(MODELS)}, or the URL of a worker")
    try:
        with urllib.request.urlopen(name.rstrip("/") + "/kv", timeout=10) as answer:
            rates = orjson.loads(answer.read())["rates"]
    except (OSError, KeyError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{name}: GET /kv did not answer with rates: {error}") from None
    return from_rates(rates["prefill_tokens_per_s"], rates["decode_step_s"])


def _policies(names: str) -> list[str]:
    chosen = list(POLICIES) if names == "all" else list(dict.fromkeys(name for name in names.split(",") if name))
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown or not chosen:
        raise ValueError(f"unknown policy {', '.join(unknown)!r}: use all, or some of {', '.join(POLICIES)}")
    return chosen


def _check(plan: SimulationPlan) -> None:
    for name, value, least in (("--workers", plan.num_workers, 1), ("--gateways", plan.num_gateways, 1),
                               ("--event-delay", plan.event_delay_s, 0)):
        if value < least:
            raise ValueError(f"{name} should be at least {least}, is {value}")
    if plan.capacity <= 0 or (plan.load is not None and plan.load <= 0):
        raise ValueError("--load and --capacity should be above 0: they are shares")
    if not 0 <= plan.event_loss_ratio < 1:
        raise ValueError("--event-loss is a share, at least 0 and below 1")


def _progress(policy: str) -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if done == total or done % max(1, total // 200) == 0:
            bar = "#" * round(30 * done / total)
            print(f"\r{policy:<16} [{bar:<30}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr,
                  flush=True)
    return show


if __name__ == "__main__":
    sys.exit(main())
