"""`headstart check URL`: does the prefix cache behind this address work, and does the gateway know what is in it?

Owns the verdict. In front of a headstart gateway (and with its admin token) every worker is probed: the tokens that
the gateway predicted as cached must equal the tokens that the worker reported, and the worker must tokenise as the
gateway does. In front of any other OpenAI-compatible endpoint the same long template is sent twice and timed.
Sends real requests, of a few output tokens each; changes nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.check_probe import (
    PROBE_TIMEOUT_S,
    SILENCE_S,
    CallerMistake,
    EndpointError,
    ProbeResult,
    fetch_json,
    probe,
    probe_messages,
)
from worker.protocol.command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CommandParser, print_result
from worker.protocol.flag_values import base_address, bearer_token, finite_number

PROG = "headstart check"

LAPS_AT_ONCE_MAX = 4  # fresh prompts at once, per worker
PROBE_ROUNDS = 8  # of fresh prompts before a worker counts as unreachable through the gateway
EVENT_WAIT_S = 0.3  # lets the first answer's blocks reach the gateway's index before the second request


@dataclass(frozen=True, slots=True)
class WorkerCheck:
    """One worker's row: predicted and reported cached tokens of the second request, and what is wrong if anything."""

    id: str
    engine: str
    knowledge: str
    predicted_tokens: int | None
    reported_tokens: int | None
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class EndpointCheck:
    """The same long template twice, with different questions, as a client sees it."""

    model: str
    prompt_tokens: int | None
    first_ttft_s: float
    second_ttft_s: float
    cached_tokens: int | None
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    url: str
    endpoint: EndpointCheck
    workers: list[WorkerCheck] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.endpoint.ok and all(worker.ok for worker in self.workers)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0: all well. 1: the check found something, or nothing that answers. 2: the arguments are unusable."""
    args = _parser().parse_args(argv)
    try:
        report = asyncio.run(_run(args))
    except EndpointError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, CallerMistake) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    status = print_result(PROG, _as_json(report) if args.json else as_text(report))
    return status if report.ok else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        PROG,
        summary=__doc__.splitlines()[0] if __doc__ else "",
        example="headstart check http://127.0.0.1:8000 --json",
    )
    parser.add_argument(
        "url",
        metavar="URL",
        type=base_address,
        help="base address of a gateway or of any OpenAI-compatible endpoint",
    )
    parser.add_argument("--model", help="model to ask (default: the first of /v1/models)")
    parser.add_argument(
        "--api-key",
        type=bearer_token,
        default=os.environ.get("OPENAI_API_KEY"),
        help="sent as a bearer token (default: $OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--admin-token",
        type=bearer_token,
        default=os.environ.get("HEADSTART_ADMIN_TOKEN"),
        help="a headstart gateway's admin token (default: $HEADSTART_ADMIN_TOKEN)",
    )
    parser.add_argument("--admin-token-file", type=Path, help="file that holds it, as named by `headstart up`")
    parser.add_argument(
        "--timeout",
        type=finite_number,
        default=SILENCE_S,
        metavar="S",
        help=f"how long the endpoint may send nothing, before its first byte and between any (default {SILENCE_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


async def _run(args: argparse.Namespace) -> CheckReport:
    if args.timeout <= 0:
        raise CallerMistake("--timeout should be above 0")
    url, token = args.url, _admin_token(args)
    timeout = aiohttp.ClientTimeout(total=max(PROBE_TIMEOUT_S, args.timeout), sock_connect=args.timeout,
                                    sock_read=args.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        model = args.model or await _first_model(session, url, api_key=args.api_key)
        prober = _Prober(session=session, url=url, model=model, api_key=args.api_key)
        workers = await _listed_workers(session, url, token=token)
        endpoint = await _check_endpoint(prober)
        rows = await _check_workers(prober, workers) if workers is not None else []
        return CheckReport(url=url, endpoint=endpoint, workers=rows)


def _admin_token(args: argparse.Namespace) -> str | None:
    if args.admin_token_file is None:
        return args.admin_token or None
    named = f"--admin-token-file {args.admin_token_file}"
    try:
        token = bearer_token(args.admin_token_file.read_text())
    except OSError as error:
        raise CallerMistake(f"cannot read {named}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise CallerMistake(f"{named} is not text: is it the file that `headstart up` names?") from None
    except argparse.ArgumentTypeError as error:
        raise CallerMistake(f"{named} {error}") from error
    if not token:
        raise CallerMistake(f"{named} is empty: is it the file that `headstart up` names?")
    return token


async def _first_model(session: aiohttp.ClientSession, url: str, *, api_key: str | None) -> str:
    status, body = await fetch_json(session, f"{url}/v1/models", token=api_key)
    if status == 401:
        raise CallerMistake(f"{url}/v1/models wants an API key: pass --api-key")
    try:
        return str(body["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(
            f"{url}/v1/models lists no model (status {status}): no worker is ready, or pass --model"
        ) from None


async def _listed_workers(
    session: aiohttp.ClientSession, url: str, *, token: str | None
) -> list[dict[str, Any]] | None:
    """The gateway's workers, or None when this is no headstart gateway or we may not ask it."""
    status, body = await fetch_json(session, f"{url}/admin/workers", token=token)
    workers = body.get("workers") if isinstance(body, dict) else None
    if status == 200 and isinstance(workers, list):
        return [worker for worker in workers if isinstance(worker, dict) and "id" in worker]
    if status in (401, 403) and token:
        raise CallerMistake("the gateway refused the admin token: use the one in the file that `headstart up` names")
    return None


@dataclass(slots=True)
class _Prober:
    session: aiohttp.ClientSession
    url: str
    model: str
    api_key: str | None

    async def fresh_pair(self) -> tuple[ProbeResult, ProbeResult]:
        """A template never sent before, then the same template with another question."""
        nonce = secrets.token_hex(6)
        first = await self._ask(nonce, "Which section comes first?")
        await asyncio.sleep(EVENT_WAIT_S)
        return first, await self._ask(nonce, "Name the section that comes last, please.")

    async def _ask(self, nonce: str, question: str) -> ProbeResult:
        messages = probe_messages(nonce, question)
        return await probe(self.session, self.url, model=self.model, messages=messages, api_key=self.api_key)


async def _check_endpoint(prober: _Prober) -> EndpointCheck:
    await prober.fresh_pair()  # the very first request also pays for warm-up, which is not what is asked here
    first, second = await prober.fresh_pair()
    cached, impossible = second.cached_tokens, first.impossible or second.impossible
    if impossible:
        detail = impossible
    elif cached:
        faster = first.ttft_s / second.ttft_s if second.ttft_s > 0 else 1.0
        detail = (
            f"{cached} of {second.prompt_tokens} prompt tokens came from the cache; "
            f"the second TTFT was {faster:.1f}x shorter"
        )
    else:
        detail = "prefix cache is off or not reported: the second request shows no cached tokens"
    return EndpointCheck(
        model=prober.model,
        prompt_tokens=second.prompt_tokens,
        first_ttft_s=first.ttft_s,
        second_ttft_s=second.ttft_s,
        cached_tokens=cached,
        ok=bool(cached) and not impossible,
        detail=detail,
    )


async def _check_workers(prober: _Prober, workers: list[dict[str, Any]]) -> list[WorkerCheck]:
    """Send fresh templates until each ready worker has served one twice.

    As many at once as there are workers, and in each round so many more: a worker that the gateway takes for the
    slower one gets a prompt as soon as the others have enough of them.
    """
    wanted = {str(worker["id"]) for worker in workers if worker.get("state") == "ready"}
    seen: dict[str, ProbeResult] = {}
    for round_number in range(PROBE_ROUNDS):
        if not wanted - seen.keys():
            break
        num_at_once = len(wanted) * min(round_number + 1, LAPS_AT_ONCE_MAX)
        pairs = await asyncio.gather(*(prober.fresh_pair() for _ in range(num_at_once)))
        for first, second in pairs:
            if second.worker_id is not None and first.worker_id == second.worker_id:
                seen[second.worker_id] = second
        _progress(len(seen), len(wanted), round_number)
    return [verdict(worker, seen.get(str(worker["id"]))) for worker in workers]


def verdict(worker: dict[str, Any], second: ProbeResult | None) -> WorkerCheck:
    """One worker's row, from its /admin/workers item and the second request it served (None: it served none)."""
    def row(*, ok: bool, detail: str) -> WorkerCheck:
        return WorkerCheck(
            id=str(worker.get("id")),
            engine=str(worker.get("engine", "unknown")),
            knowledge=str(worker.get("knowledge", "none")),
            predicted_tokens=second.predicted_tokens if second else None,
            reported_tokens=second.cached_tokens if second else None,
            ok=ok,
            detail=detail,
        )

    parity = worker.get("parity") or {}
    if parity.get("ok") is False:
        return row(ok=False, detail=_parity_detail(parity))
    if worker.get("state") != "ready":
        return row(ok=False, detail=f"worker is {worker.get('state')}: {worker.get('detail') or 'see its log'}")
    if second is None:
        return row(ok=False, detail="no probe reached it through the gateway: is it overloaded or excluded?")
    if second.impossible:
        return row(ok=False, detail=second.impossible)
    if not second.cached_tokens:
        return row(ok=False, detail="the second request reported no cached tokens: is its prefix cache on?")
    if second.predicted_tokens != second.cached_tokens:
        return row(ok=False, detail="predicted and reported differ: its events are late, lost or of another scheme")
    return row(ok=True, detail="predicted = reported")


def _parity_detail(parity: dict[str, Any]) -> str:
    return (
        f"tokenises differently from the gateway: first differing token at position {parity.get('position')}: "
        f"gateway {parity.get('gateway_token')}, worker {parity.get('worker_token')}; "
        "start every worker of a model with the same --chat-template and tokenizer"
    )


def _progress(done: int, total: int, round_number: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * round(20 * done / max(1, total))
        text = f"\rprobing workers [{bar:<20}] {done}/{total} (round {round_number + 1})"
        print(text, end="\n" if done == total else "", file=sys.stderr, flush=True)


def _as_json(report: CheckReport) -> str:
    return orjson.dumps({**asdict(report), "ok": report.ok}, option=orjson.OPT_INDENT_2).decode()


def as_text(report: CheckReport) -> str:
    """The report as people read it."""
    endpoint = report.endpoint
    lines = [
        f"{report.url}  model {endpoint.model}",
        f"  first TTFT   {endpoint.first_ttft_s * 1000:8.1f} ms   "
        f"(a template never seen, {endpoint.prompt_tokens or '?'} tokens)",
        f"  second TTFT  {endpoint.second_ttft_s * 1000:8.1f} ms   (same template, another question)",
        f"  {'ok  ' if endpoint.ok else 'FAIL'} {endpoint.detail}",
    ]
    if report.workers:
        lines.append(f"  {'worker':<24} {'engine':<10} {'knowledge':<12} {'predicted':>9} {'reported':>9}")
    for worker in report.workers:
        counts = f"{_shown(worker.predicted_tokens):>9} {_shown(worker.reported_tokens):>9}"
        lines.append(
            f"  {worker.id:<24} {worker.engine:<10} {worker.knowledge:<12} {counts}  "
            f"{'ok' if worker.ok else 'FAIL'}: {worker.detail}"
        )
    if not report.workers:
        lines.append("  workers: not listed (no headstart gateway, or no admin token: pass --admin-token-file)")
    return "\n".join(lines)


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
