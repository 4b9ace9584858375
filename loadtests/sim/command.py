"""`headstart simulate TRACE`: the gateway's routing code on a trace, in virtual time, beside other routers' policies.

Owns flags, progress and what is printed. The result is a function of trace, flags, seed and commit.
"""

from __future__ import annotations

import argparse
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import orjson

from loadtests.report_folder import folder_name, made_ready
from loadtests.sim.cost_model import DEFAULT_MODEL, MODELS, CostModel, from_rates
from loadtests.sim.grid import Cell, grid_report, run_cell
from loadtests.sim.grid_report import as_table as grid_table
from loadtests.sim.grid_report import write_figures, write_grid
from loadtests.sim.policies import POLICIES
from loadtests.sim.report import as_table, write_report
from loadtests.sim.simulation import SimulationPlan, prepare, report_of, run_policy
from loadtests.trace_fields import BLOCK_SIZE_MAX
from loadtests.traces import Trace, TraceError, load_trace
from loadtests.workloads import WORKLOADS
from worker.protocol.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    CommandParser,
    exit_with_problems,
    one_line,
    print_result,
)
from worker.protocol.flag_values import base_address, finite_number

PROG = "headstart simulate"
DEFAULT_SYNTHETIC_REQUESTS = 2000
PERCENT_FROM = 2.0
TRACES_KEPT = 16
RECORDED = "recorded"
ALL_POLICIES = "all"
WORKERS_MAX = 10_000
GATEWAYS_MAX = 1_000
SHARE_MAX = 1e6   # of saturation, of the footprint: beyond any use, and far from what a float cannot hold
SYNTHETIC_REQUESTS_MAX = 1_000_000
Number = TypeVar("Number", int, float)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, 1 when the result cannot be written, 2 when trace or flags are unusable, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        cells = _cells(args)
        policies = _policies(args.policy)
        for cell in cells:
            _check(cell.plan)
        if args.report is not None:
            made_ready(args.report)
        if len(cells) == 1 and cells[0].num_seeds == 1:
            return _one(args, cells[0], policies)
        return _many(args, cells, policies)
    except (TraceError, ValueError, OSError) as error:
        exit_with_problems(PROG, [str(error)])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _one(args: argparse.Namespace, cell: Cell, policies: Sequence[str]) -> int:
    plan = cell.plan
    prepared = prepare(_trace(args, cell.trace_name, plan.seed), plan)
    results = [run_policy(prepared, policy, _progress(policy)) for policy in policies]
    report = report_of(prepared, plan, results)
    status = _print(args, report, as_table(report))
    return _written(partial(write_report, report), args.report) or status


def _many(args: argparse.Namespace, cells: Sequence[Cell], policies: Sequence[str]) -> int:
    """A grid: what has been done so far is written after every cell, since a grid takes long."""
    done: list[dict[str, Any]] = []
    load = lru_cache(TRACES_KEPT)(lambda name, seed: _trace(args, name, seed))
    for cell in cells:
        done.append(run_cell(cell, load, policies, _show_step()))
        report = grid_report(done, cell.plan)
        status = _written(partial(write_figures if len(done) < len(cells) else write_grid, report), args.report)
    return _print(args, report, grid_table(report)) or status


def _written(write: Callable[[Path], None], folder: Path | None) -> int:
    """0, or 1 and a line where the folder cannot take the report any more: the run is not lost with it."""
    try:
        if folder is not None:
            write(folder)
    except OSError as error:
        print(f"{PROG}: --report {folder}: {one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _print(args: argparse.Namespace, report: dict[str, Any], table: str) -> int:
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if args.json else table
    return print_result(PROG, text)


def _cells(args: argparse.Namespace) -> list[Cell]:
    for flag in ("seeds", "workers_per_machine", "cores_per_machine"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} should be at least 1")
    model = _model(args.model)
    return [Cell(name, SimulationPlan(
        num_workers=workers, load=load, capacity=capacity, model=model, seed=args.seed, num_gateways=args.gateways,
        event_delay_s=args.event_delay, event_loss_ratio=args.event_loss, coalesce=not args.every_step,
        shared_ledger=args.shared_ledger, restart_storm=args.restart_storm,
        copies_ahead=not args.no_copies, workers_per_machine=args.workers_per_machine,
        cores_per_machine=args.cores_per_machine), args.seeds)
        for name in args.trace for workers in _numbers("--workers", args.workers, int)
        for capacity in map(_share, _numbers("--capacity", args.capacity, finite_number))
        for load in _loads(args.load)]


def _loads(text: str) -> list[float | None]:
    return [None if part == RECORDED else _share(_numbers("--load", part, finite_number)[0])
            for part in text.split(",")]


def _numbers(flag: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        raise ValueError(f"{flag} should be numbers with commas between, is {text!r}") from None


def _share(value: float) -> float:
    """50 and 0.5 are one half: nobody asks for more than PERCENT_FROM times everything."""
    return value / 100 if value > PERCENT_FROM else value


def _parser() -> CommandParser:
    parser = CommandParser(PROG, summary="Routing policies on a trace, in virtual time. Reproducible from seed and "
                           "commit.", example=f"{PROG} traces/conversation.jsonl.gz --workers 8 --policy all")
    parser.add_argument("trace", metavar="TRACE", nargs="+", help="a trace file (.jsonl, .jsonl.gz), or one of "
                        f"the synthetic workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--workers", default="8", metavar="N[,N...]", help="simulated workers (default 8)")
    parser.add_argument("--policy", default="headstart", metavar="NAME[,NAME...]",
                        help=f"all, or some of {', '.join(POLICIES)} (default headstart)")
    parser.add_argument("--load", default="0.8", metavar="SHARE[,...]", help="arrival rate as a share of saturation, "
                        f"above {PERCENT_FROM:.0f} in per cent; or '{RECORDED}': the trace's own times (default 0.8)")
    parser.add_argument("--capacity", default="0.2", metavar="SHARE[,...]", help="KV blocks of all workers together "
                        "as a share of the trace's distinct blocks (default 0.2)")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help=f"how fast a worker is: "
                        f"{', '.join(MODELS)}, or a live worker's URL, for its rates (default {DEFAULT_MODEL})")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N; for a synthetic workload how "
                        f"many to make (default {DEFAULT_SYNTHETIC_REQUESTS})")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="instead of the trace's own")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="gateway replicas (default 1)")
    parser.add_argument("--shared-ledger", action="store_true", help="gateways know each other's bookings at once, "
                        "as the processes of one gateway do")
    parser.add_argument("--restart-storm", action="store_true", help="in the middle every worker is replaced by a "
                        "cold one, one after the other")
    parser.add_argument("--workers-per-machine", type=int, default=1, metavar="N", help="workers that share "
                        "the cores of one machine, a thread each (default 1)")
    parser.add_argument("--cores-per-machine", type=int, default=1, metavar="N", help="cores of each (default 1)")
    parser.add_argument("--no-copies", action="store_true", help="no hot prefix is copied ahead of need")
    parser.add_argument("--event-delay", type=finite_number, default=0.002, metavar="S", help="lag of cache events")
    parser.add_argument("--event-loss", type=finite_number, default=0.0, metavar="SHARE",
                        help="events that never arrive")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="so many seeds, compared in pairs, with "
                        "confidence intervals (default 1)")
    parser.add_argument("--every-step", action="store_true", help="run each decode step by itself: slower, equal")
    parser.add_argument("--report", type=folder_name, metavar="DIR", help="write report.json, table and plots there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _trace(args: argparse.Namespace, name: str, seed: int) -> Trace:
    requests, block_size = args.requests, args.block_size
    if requests is not None and requests < 1:
        raise ValueError("--requests should be at least 1")
    if block_size is not None and not 1 <= block_size <= BLOCK_SIZE_MAX:
        raise ValueError(f"--block-size should be from 1 to {BLOCK_SIZE_MAX}")
    if name in WORKLOADS:
        if requests is not None and requests > SYNTHETIC_REQUESTS_MAX:
            raise ValueError(f"--requests should be at most {SYNTHETIC_REQUESTS_MAX} for a synthetic workload")
        trace = WORKLOADS[name](requests or DEFAULT_SYNTHETIC_REQUESTS, seed)
        return trace if block_size is None else replace(trace, block_size=block_size)
    if not Path(name).exists():
        raise TraceError(f"{name}: neither a file nor one of the workloads {', '.join(WORKLOADS)}")
    return load_trace(Path(name), seed=seed, block_size=block_size).head(requests)


def _model(name: str) -> CostModel:
    if name in MODELS:
        return MODELS[name]
    if "://" not in name:
        raise ValueError(f"unknown model {name!r}: use one of {', '.join(MODELS)}, or the URL of a worker")
    try:
        with urllib.request.urlopen(base_address(name) + "/kv", timeout=10) as answer:
            rates = orjson.loads(answer.read())["rates"]
        return from_rates(rates["prefill_tokens_per_s"], rates["decode_step_s"])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--model {error}") from None
    except (OSError, HTTPException, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: GET /kv did not answer with rates: {one_line(error)}") from None


def _policies(names: str) -> list[str]:
    chosen = list(dict.fromkeys(name for name in names.split(",") if name))
    unknown = [name for name in chosen if name not in (*POLICIES, ALL_POLICIES)]
    if unknown or not chosen:
        raise ValueError(f"unknown policy {', '.join(unknown)!r}: use all, or some of {', '.join(POLICIES)}")
    return list(POLICIES) if ALL_POLICIES in chosen else chosen


def _check(plan: SimulationPlan) -> None:
    for name, value, most in (("--workers", plan.num_workers, WORKERS_MAX),
                              ("--gateways", plan.num_gateways, GATEWAYS_MAX)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} should be from 1 to {most}, is {value}")
    if plan.shared_ledger and plan.num_gateways == 1:
        raise ValueError("--shared-ledger is for several gateways: give --gateways 2 or more")
    if plan.event_delay_s < 0:
        raise ValueError(f"--event-delay should be at least 0, is {plan.event_delay_s}")
    for name, share in (("--load", plan.load), ("--capacity", plan.capacity)):
        if share is not None and not 0 < share <= SHARE_MAX:
            raise ValueError(f"{name} should be above 0 and at most {SHARE_MAX:.0f}, is {share}: it is a share")
    if not 0 <= plan.event_loss_ratio < 1:
        raise ValueError("--event-loss is a share, at least 0 and below 1")


def _show_step() -> Callable[[str], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda step: print(f"\r\x1b[K{step}", end="", file=sys.stderr, flush=True)


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
