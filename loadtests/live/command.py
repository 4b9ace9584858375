"""`headstart replay TRACE --url URL`: a trace sent to a live server, open loop, and what its clients saw.

Owns flags, progress and what is printed. Works against any OpenAI-compatible server; what only a headstart gateway
tells is left out elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import aiohttp
import orjson

from loadtests.live.driver import OPEN_MAX, REQUEST_TIMEOUT_S, Driver, Outcome, Pace, Target
from loadtests.live.prompts import TOKENS_FROM, TOKENS_TO, Kind, PromptMaker, PromptStyle
from loadtests.live.report import RequestLog, as_table, replay_report, write_replay
from loadtests.live.server_metrics import counted_between, read_counters
from loadtests.report_folder import folder_name, made_ready
from loadtests.trace_fields import BLOCK_SIZE_MAX, SPAN_S_MAX
from loadtests.traces import Trace, TraceError, load_trace
from loadtests.workloads import WORKLOADS
from worker.protocol.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CommandParser,
    exit_with_problems,
    one_line,
    print_result,
)
from worker.protocol.flag_values import base_address, bearer_token, finite_number

PROG = "headstart replay"
DEFAULT_SYNTHETIC_REQUESTS = 200
SYNTHETIC_REQUESTS_MAX = 100_000
TOKEN_IDS_MAX = 1 << 31
ASK_MODEL_S = 10.0
SPEED_LEAST = 0.001   # an hour takes six weeks


class ServerError(Exception):
    """There is no server to send to; the message says what was tried."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when requests were answered, 1 when none was or no server is there, 2 on an unusable trace or flag, 130
    when interrupted, with a report of what had ended by then."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        trace = _shortened(_trace(args), args)
        if args.report is not None:
            made_ready(args.report)
        report, outcomes = asyncio.run(_replay(args, trace))
        return _told(args, report, outcomes)
    except (TraceError, ValueError) as error:
        exit_with_problems(PROG, [str(error)])
    except ServerError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _told(args: argparse.Namespace, report: dict[str, Any], outcomes: list[Outcome]) -> int:
    """Print and write it; the exit status."""
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if args.json else as_table(report)
    status = print_result(PROG, text)
    if args.report is not None:
        try:
            write_replay(report, outcomes, args.report)
        except OSError as error:
            print(f"{PROG}: --report {args.report}: {one_line(error)}", file=sys.stderr)
            status = EXIT_FAILED
    if report["cut_short"]:
        return EXIT_INTERRUPTED
    return status if report["policies"][0]["requests"] else EXIT_FAILED


async def _replay(args: argparse.Namespace, trace: Trace) -> tuple[dict[str, Any], list[Outcome]]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with aiohttp.ClientSession(headers=headers) as http:
        model = args.model or await _first_model(http, args.url)
        tokens_from, tokens_to = _tokens(args.token_ids)
        prompts = PromptMaker(PromptStyle(
            model, seed=args.seed, kind=args.prompts, tokens_from=tokens_from, tokens_to=tokens_to,
            output_max=args.max_output, is_plain=args.openai_only), trace.block_size)
        pace = Pace(speed=args.speed, open_max=args.max_open, timeout_s=args.timeout,
                    real_answers=args.answers == "real")
        driver = Driver(Target(args.url, headers, args.name_sessions), prompts, pace, run_id=secrets.token_hex(4),
                        keep=None if args.report is None else RequestLog(args.report).keep)
        before = await read_counters(http, args.url)
        outcomes, cut_short = await _until_interrupted(driver, trace)
        counted = counted_between(before, await read_counters(http, args.url))
    about = {"url": args.url, "model": model, "seed": args.seed, "speed": args.speed if args.rate is None else None,
             "rate": args.rate, "answers": args.answers, "max_open": args.max_open, "counted_by_server": counted,
             "cut_short": cut_short, "requests_in_trace": len(trace.requests)}
    return replay_report(trace, outcomes, about, label=args.label), outcomes


async def _until_interrupted(driver: Driver, trace: Trace) -> tuple[list[Outcome], bool]:
    """What became of the requests, and whether Ctrl-C came before their end: what had ended is worth a report."""
    try:
        return await driver.run(trace, _progress()), False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return driver.ended(), True


async def _first_model(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=ASK_MODEL_S)) as answer:
            status, raw = answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServerError(f"{url} does not answer ({one_line(error)}): is it running, and is this its "
                          "address?") from None
    if status in (401, 403):
        raise ServerError(f"{url}/v1/models answered {status}: pass --api-key")
    try:
        return str(orjson.loads(raw)["data"][0]["id"])
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        raise ServerError(f"{url}/v1/models names no model (status {status}): is a worker ready? Or pass "
                          "--model") from None


def _parser() -> CommandParser:
    parser = CommandParser(PROG, summary="Send a trace's requests to a live server at the trace's times, whatever "
                           "becomes of the earlier ones.",
                           example=f"{PROG} traces/tau_airline.jsonl.gz --url http://127.0.0.1:8000 --speed 60")
    parser.add_argument("trace", metavar="TRACE", help="a trace file (.jsonl, .jsonl.gz), or one of the synthetic "
                        f"workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--url", required=True, type=base_address, metavar="URL",
                        help="base address of an OpenAI-compatible server")
    parser.add_argument("--model", help="model to ask (default: the first of /v1/models)")
    parser.add_argument("--api-key", type=bearer_token, default=os.environ.get("OPENAI_API_KEY"),
                        help="sent as a bearer token (default: $OPENAI_API_KEY)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=finite_number, default=1.0, metavar="X",
                      help=f"so many times as fast (default 1, at least {SPEED_LEAST:g})")
    pace.add_argument("--rate", type=finite_number, metavar="R",
                      help="instead: so many requests a second in the mean")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N; for a synthetic workload how "
                        f"many to make (default {DEFAULT_SYNTHETIC_REQUESTS})")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="instead of the trace's own: ids are kept, "
                        "prompts shrink or grow")
    parser.add_argument("--max-prompt", type=int, metavar="TOKENS", help="leave out requests with longer prompts")
    parser.add_argument("--max-output", type=int, metavar="TOKENS", help="ask for no longer answers")
    parser.add_argument("--prompts", choices=get_args(Kind), default="ids", help="for traces without text: token "
                        "ids to /v1/completions, or words to /v1/chat/completions (default ids)")
    parser.add_argument("--token-ids", default=f"{TOKENS_FROM}:{TOKENS_TO}", metavar="FROM:TO", help="which ids "
                        f"prompts are made of; the model must have them (default {TOKENS_FROM}:{TOKENS_TO})")
    parser.add_argument("--answers", choices=("recorded", "real"), default="recorded", help="what a conversation's "
                        "next turn says that the assistant said; with real it waits for it (default recorded)")
    parser.add_argument("--openai-only", action="store_true", help="send OpenAI's own fields only: without "
                        "ignore_eos, so answers may be shorter")
    parser.add_argument("--name-sessions", action="store_true", help="tell each request's session, as `user` and "
                        "x-session-id")
    parser.add_argument("--max-open", type=int, default=OPEN_MAX, metavar="N", help="requests under way at most; "
                        f"beyond it they are sent late, and counted (default {OPEN_MAX})")
    parser.add_argument("--timeout", type=finite_number, default=REQUEST_TIMEOUT_S, metavar="S",
                        help=f"for one request (default {REQUEST_TIMEOUT_S:.0f})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws times and prompts; with the same one "
                        "a second run finds the first one's prompts in the cache (default 0)")
    parser.add_argument("--label", default="live", help="the name of this run in the report (default live)")
    parser.add_argument("--report", type=folder_name, metavar="DIR", help="write report.json, requests.jsonl, table "
                        "and plots there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--requests", args.requests), ("--block-size", args.block_size),
                        ("--max-open", args.max_open), ("--max-output", args.max_output),
                        ("--max-prompt", args.max_prompt)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} should be at least 1")
    for flag, value in (("--speed", args.speed), ("--rate", args.rate), ("--timeout", args.timeout)):
        if value is not None and not value > 0:
            raise ValueError(f"{flag} should be above 0")
    if args.speed < SPEED_LEAST:
        raise ValueError(f"--speed should be at least {SPEED_LEAST:g}, is {args.speed:g}")
    if args.block_size is not None and args.block_size > BLOCK_SIZE_MAX:
        raise ValueError(f"--block-size should be at most {BLOCK_SIZE_MAX}")
    if args.trace in WORKLOADS and args.requests is not None and args.requests > SYNTHETIC_REQUESTS_MAX:
        raise ValueError(f"--requests should be at most {SYNTHETIC_REQUESTS_MAX} for a synthetic workload")
    _tokens(args.token_ids)


def _tokens(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end) <= TOKEN_IDS_MAX):
        raise ValueError(f"--token-ids should be FROM:TO with FROM below TO, at most {TOKEN_IDS_MAX}, is {text!r}")
    return int(first), int(end)


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace in WORKLOADS:
        trace = WORKLOADS[args.trace](args.requests or DEFAULT_SYNTHETIC_REQUESTS, args.seed)
        return trace if args.block_size is None else trace.with_block_size(args.block_size)
    return load_trace(Path(args.trace), seed=args.seed, block_size=args.block_size)


def _shortened(trace: Trace, args: argparse.Namespace) -> Trace:
    """What is left of it by the flags, at the rate that was asked for."""
    fitting = [request for request in trace.requests
               if args.max_prompt is None or request.prompt_tokens <= args.max_prompt]
    if not fitting:
        raise TraceError(f"{args.trace}: no prompt has at most {args.max_prompt} tokens (--max-prompt)")
    kept = replace(trace, requests=tuple(fitting)).head(args.requests)
    paced = kept if args.rate is None else kept.at_rate(args.rate)
    if not paced.span_s / args.speed <= SPAN_S_MAX:   # nor nan, of a rate that is nearly none
        took_s = paced.span_s / args.speed
        raise ValueError(f"{args.trace} would take {took_s:.0f} s: give a higher --speed or --rate")
    return paced


def _progress() -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        bar = "#" * round(30 * done / total)
        print(f"\rreplay [{bar:<30}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    return show


if __name__ == "__main__":
    sys.exit(main())
