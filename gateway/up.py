"""`headstart up`: one gateway and N workers on this machine, supervised, from one command line.

Owns: the admin token's file, the wait until all is ready, the one `ready` line, and the order of the stop. What runs
is decided in up_plan.py, that it keeps running in supervisor.py. Routes nothing and loads no model: the children do.

A restarted worker keeps its port, so the gateway meets it again under the same address and a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.supervisor import ChildSpec, StartFailure, Supervisor
from gateway.up_plan import PROG, UpPlan, child_specs, port_problem, read_plan, worker_urls
from worker.protocol.command_line import EXIT_FAILED, EXIT_OK, EXIT_USAGE

TOKEN_BYTES = 32
POLL_S = 0.2
POLL_TIMEOUT_S = 5.0
STOP_NOW_S = 6.0            # on Ctrl-C, for each of gateway and workers
STOP_MARGIN_S = 5.0         # on SIGTERM, on top of what draining may take


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Ctrl-C or SIGTERM; the exit status (0 stopped, 1 a child cannot be kept up, 2 a user's mistake)."""
    plan = read_plan(argv, os.environ)
    if (problem := port_problem(plan.gateway.host, plan.gateway.port)) is not None:
        return _complain(problem, EXIT_USAGE)
    with _admin_token(plan.gateway.admin_token) as (token, where):
        return asyncio.run(_run(plan, token, where))


async def _run(plan: UpPlan, admin_token: str, token_place: str) -> int:
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, asked.put_nowait, signum)
    specs = child_specs(plan, admin_token, os.environ)
    supervisor = Supervisor(specs, say=_say)
    supervisor.start()
    stopping = asyncio.create_task(asked.get())
    up = asyncio.create_task(_until_ready(plan, specs, admin_token))
    first: list[asyncio.Future[Any]] = [stopping, up, supervisor.failed]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if up.done() and not stopping.done() and not supervisor.failed.done():
        up.result()
        supervisor.settle()
        print(await _ready_line(plan, token_place), flush=True)
        await stopping
    up.cancel()
    if stopping.done():
        await _stop(supervisor, plan, stopping.result(), asked)
        return EXIT_OK
    stopping.cancel()
    await _stop(supervisor, plan, signal.SIGINT, asked)
    return _blame(supervisor.failed.result())


async def _stop(supervisor: Supervisor, plan: UpPlan, signum: signal.Signals,
                asked: asyncio.Queue[signal.Signals]) -> None:
    """The gateway first, so that no request meets a missing worker. A second signal ends everything at once."""
    draining = signum == signal.SIGTERM
    # To both commands SIGTERM says: finish what runs; a SIGINT behind it: now.
    signums = (signal.SIGTERM,) if draining else (signal.SIGTERM, signal.SIGINT)
    gateway_s = plan.gateway.drain_delay_s + plan.gateway.drain_s + STOP_MARGIN_S if draining else STOP_NOW_S
    worker_s = plan.worker_drain_s + STOP_MARGIN_S if draining else STOP_NOW_S
    impatient = asyncio.create_task(asked.get())
    impatient.add_done_callback(lambda task: None if task.cancelled() else supervisor.kill())
    await supervisor.stop(*signums, limit_s=gateway_s, names=["gateway"])
    await supervisor.stop(*signums, limit_s=worker_s)
    impatient.cancel()


async def _until_ready(plan: UpPlan, specs: Sequence[ChildSpec], admin_token: str) -> None:
    """Returns when the gateway and every worker say so, and the gateway knows every worker: it is ready itself from
    the first one on. On a terminal, shows the wait."""
    waiting = [f"{plan.ops_url}/readyz", *(f"{url}/readyz" for url in worker_urls(specs))]
    total, started_at = len(waiting), time.monotonic()
    async with _session() as http:
        while True:
            waiting = [url for url in waiting if not await _answers(http, url)]
            is_over = not waiting and await _knows_all(http, plan, admin_token)
            _progress(total - len(waiting), total, time.monotonic() - started_at, end="\n" if is_over else "")
            if is_over:
                return
            await asyncio.sleep(POLL_S)


async def _knows_all(http: aiohttp.ClientSession, plan: UpPlan, admin_token: str) -> bool:
    headers = {"Authorization": f"Bearer {admin_token}"}
    try:
        async with http.get(f"{plan.ops_url}/admin/workers", headers=headers) as response:
            rows = (await response.json())["workers"]
    except (aiohttp.ClientError, TimeoutError):
        return False
    return all(row["state"] != "unready" for row in rows)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _ready_line(plan: UpPlan, token_place: str) -> str:
    """One line that says where, and a request to paste."""
    model = plan.model
    async with _session() as http:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError):
            async with http.get(f"{plan.url}/v1/models") as response:
                model = str((await response.json())["data"][0]["id"])
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32,
            "temperature": 0}
    key = " -H 'authorization: Bearer KEY'" if plan.needs_keys else ""
    request = (f"curl -s {plan.url}/v1/chat/completions -H 'content-type: application/json'{key} "
               f"-d {shlex.quote(orjson.dumps(body).decode())}")
    workers = "1 worker" if plan.num_workers == 1 else f"{plan.num_workers} workers"
    return f"ready: {plan.url} with {workers}, admin token in {token_place}, try: {request}"


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)) as session:
        yield session


@contextlib.contextmanager
def _admin_token(configured: str) -> Iterator[tuple[str, str]]:
    """(token, where a person finds it): the given one, or a random one in a 0600 file that goes away at the end."""
    if configured:
        yield configured, "$HEADSTART_ADMIN_TOKEN"
        return
    folder = Path(tempfile.mkdtemp(prefix="headstart-"))  # 0700
    try:
        file, token = folder / "admin-token", secrets.token_hex(TOKEN_BYTES)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(token)
        yield token, str(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _progress(done: int, total: int, elapsed_s: float, *, end: str) -> None:
    if sys.stderr.isatty():
        line = f"\rstarting: {done} of {total} processes ready, {elapsed_s:.0f} s "
        print(line, end=end, file=sys.stderr, flush=True)


def _blame(failure: StartFailure) -> int:
    """The child's own line where it was a user's mistake; else what happened and where to look."""
    if failure.exit_code == EXIT_USAGE:
        print(failure.last_line, file=sys.stderr, flush=True)
        return EXIT_USAGE
    return _complain(f"{failure.name} keeps ending with status {failure.exit_code} before all is ready; its last "
                     f"line: {failure.last_line or '(none)'}", EXIT_FAILED)


def _complain(line: str, status: int) -> int:
    print(f"{PROG}: {line}", file=sys.stderr, flush=True)
    return status
