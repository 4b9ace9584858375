"""Tenants with keys in front of real workers on a seeded model: what isolation and flood are measured on.

Owns the children it starts, and the keys file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from gateway.admission.tenants import hash_key
from loadtests.local_stack import Child, free_port, start
from loadtests.tiny_model import write_tiny_model

MODEL = "tiny"
EXACT_S = 180.0


@dataclass(frozen=True)
class TenantStack:
    """A gateway that asks for keys. `keys`: one for each tenant."""

    gateway: Child
    keys: dict[str, str]
    workers: list[Child]

    @property
    def url(self) -> str:
        """Where completions are asked for."""
        return self.gateway.url + "/v1/completions"


@dataclass(frozen=True, slots=True)
class Found:
    """What a client sees of one streamed answer. `ttft_s` is None for one that was refused."""

    status: int
    ttft_s: float | None
    cached_tokens: int
    matched_tokens: int
    worker: str


async def ask(session: aiohttp.ClientSession, stack: TenantStack, tenant: str, prompt: str, *,
              max_tokens: int = 1) -> Found:
    """One streamed completion for this tenant."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    began_at, ttft_s, text = time.perf_counter(), None, b""
    headers = {"Authorization": f"Bearer {stack.keys[tenant]}"}
    async with session.post(stack.url, json=body, headers=headers) as answer:
        async for chunk in answer.content.iter_any():
            if ttft_s is None and answer.status == 200:
                ttft_s = time.perf_counter() - began_at
            text += chunk
        if answer.status != 200:
            return Found(answer.status, None, 0, 0, "")
        return Found(200, ttft_s, _cached_tokens(text), int(answer.headers["x-headstart-matched-tokens"]),
                     answer.headers["x-headstart-worker"])


def _cached_tokens(stream: bytes) -> int:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return int(orjson.loads(events[-1])["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextlib.contextmanager
def running_tenants(tenants: Sequence[str], *, hidden: int, layers: int, num_workers: int = 2,
                    arguments: Sequence[str] = (), core_apart: bool = False) -> Iterator[TenantStack]:
    """Ready, with the caches' contents known; stopped at the end. `core_apart`: workers have the first core that this
    process may use, everything else the others, this process included."""
    keys = {name: f"hs-{secrets.token_hex(16)}" for name in tenants}
    env = {"HEADSTART_ADMIN_TOKEN": secrets.token_hex(16), "HEADSTART_WORKER_TOKEN": secrets.token_hex(16),
           "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as children:
        model = write_tiny_model(Path(folder) / "model", hidden=hidden, layers=layers)
        keys_file = Path(folder) / "keys.toml"
        keys_file.write_text("".join(f'[[tenants]]\nid = "{name}"\nkeys = ["{hash_key(key)}"]\n'
                                     for name, key in keys.items()))
        ports, workers = [free_port() for _ in range(num_workers)], list[Child]()
        cores = sorted(os.sched_getaffinity(0)) if core_apart else []
        for port in ports:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores[:1])  # for its children; then back, for the rest
            worker = start(["worker", f"--model={model}", f"--port={port}", "--threads=1", "--kv-memory=256MiB",
                            f"--served-name={MODEL}", "--log-level=warning"], url=f"http://127.0.0.1:{port}", env=env)
            children.callback(worker.stop)
            workers.append(worker)
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[1:])
            children.callback(os.sched_setaffinity, 0, cores)
        port = free_port()
        gateway = start(["gateway", f"--port={port}", f"--keys-file={keys_file}", "--log-level=warning", *arguments,
                         *(f"--worker=http://127.0.0.1:{worker}" for worker in ports)],
                        url=f"http://127.0.0.1:{port}", env=env)
        children.callback(gateway.stop)
        gateway.wait_ready()
        _until_exact(gateway, env["HEADSTART_ADMIN_TOKEN"])
        yield TenantStack(gateway, keys, workers)


def _until_exact(gateway: Child, admin_token: str) -> None:
    headers = {"Authorization": f"Bearer {admin_token}"}
    request = urllib.request.Request(gateway.url + "/admin/workers", headers=headers)
    deadline = time.monotonic() + EXACT_S
    while True:
        with urllib.request.urlopen(request, timeout=20) as response:
            workers = orjson.loads(response.read())["workers"]
        if all(worker["state"] == "ready" and worker["knowledge"] == "exact" for worker in workers):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gateway does not know its workers: {gateway.log_tail()}")
        time.sleep(0.2)
