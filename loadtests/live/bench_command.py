"""What the commands of the live benches share: run one, print it, and end in one line when something is missing."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson

from loadtests.live.fleet import FleetError
from loadtests.live.waiting import NotInTime
from loadtests.local_stack import StackError
from loadtests.streaming_client import AnswerError
from loadtests.traces import TraceError

Report = dict[str, Any]
Bench = Callable[[argparse.Namespace], Coroutine[Any, Any, Report]]


def run_bench(parser: argparse.ArgumentParser, bench: Bench, as_table: Callable[[Report], str]) -> None:
    """Parse the command line, run `bench` on it, print its table, and write its report where --out says."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    args = parser.parse_args()
    try:
        report = asyncio.run(bench(args))
    except (StackError, FleetError, NotInTime, AnswerError, TraceError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(as_table(report))
    if args.out is not None:
        args.out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
