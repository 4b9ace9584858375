"""Engines side by side: each started, asked over HTTP with token ids, and put to sleep while another is measured.

Owns the processes it starts. An engine that is not asked is stopped by SIGSTOP, so that its idle threads take nothing
from the one that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import aiohttp
import orjson

from loadtests.local_stack import Child, StackError, free_port
from loadtests.plain_http import fetch

ANSWER_TIMEOUT_S = 600.0
START_TIMEOUT_S = 900.0  # vLLM compiles its model first
CONTEXT_TOKENS = 8192
STREAMS_MAX = 16
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch of prompts sent at once. `ttft_s`: of each; `total_s`: until the last token of the last."""

    ttft_s: tuple[float, ...]
    total_s: float
    cpu_s: float
    num_tokens: int


class Engine(Protocol):
    """An engine under test. `reuses_prefixes`: whether it can be asked the warm cases."""

    name: str
    version: str
    reuses_prefixes: bool

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        """Greedy, `num_tokens` from each prompt, all sent at once."""
        ...


@dataclass(slots=True)
class HttpEngine:
    """Anything with POST /v1/completions that takes token ids and streams.

    `extra`: what this engine must be told so that it generates exactly `max_tokens`."""

    name: str
    child: Child
    model: str
    version: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    reuses_prefixes: bool = True

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        pid = self.child.process.pid
        with awake(pid):
            cpu_before = cpu_seconds(pid)
            ttft_s, total_s = asyncio.run(self._all(prompts, num_tokens))
            return Timing(tuple(ttft_s), total_s, cpu_seconds(pid) - cpu_before, num_tokens * len(prompts))

    async def _all(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], float]:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            started_at = time.perf_counter()
            ttft_s = await asyncio.gather(*(self._one(session, prompt, num_tokens) for prompt in prompts))
            return list(ttft_s), time.perf_counter() - started_at

    async def _one(self, session: aiohttp.ClientSession, prompt: Sequence[int], num_tokens: int) -> float:
        body = orjson.dumps({"model": self.model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
                             "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True},
                             **self.extra})
        usage: dict[str, object] = {}
        started_at, ttft_s = time.perf_counter(), 0.0
        async with session.post(f"{self.child.url}/v1/completions", data=body,
                                headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise StackError(f"{self.name} answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - started_at
                    usage = orjson.loads(line[6:]).get("usage") or usage
        if usage.get("completion_tokens") != num_tokens:
            raise StackError(f"{self.name} was asked for {num_tokens} tokens and counted {usage}")
        return ttft_s


class Transformers:
    """loadtests.bench.transformers_arm in a process of its own: one batch, no server, nothing kept between calls."""

    name = "transformers"
    reuses_prefixes = False

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._pid = process.pid
        self._in: IO[bytes] | None = process.stdin
        self._out: IO[bytes] | None = process.stdout
        self.version = str(self._ask(None)["version"])

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        with awake(self._pid):
            answer = self._ask({"tokens": [list(prompt) for prompt in prompts], "steps": num_tokens})
        return Timing((answer["ttft_s"],) * len(prompts), answer["total_s"], answer["cpu_s"],
                      num_tokens * len(prompts))

    def _ask(self, task: dict[str, Any] | None) -> dict[str, Any]:
        assert self._in is not None
        assert self._out is not None
        if task is not None:
            self._in.write(orjson.dumps(task) + b"\n")
            self._in.flush()
        answer = self._out.readline().strip()
        if not answer:
            raise StackError("transformers ended before it answered")
        return dict(orjson.loads(answer))


@contextlib.contextmanager
def headstart(model: str, threads: int) -> Iterator[HttpEngine]:
    """`headstart worker` on `model`."""
    port = free_port()
    command = [sys.executable, "-m", "worker", "--model", model, "--port", str(port), "--threads", str(threads),
               "--kv-memory", "2GiB"]
    with _served("headstart", command, port, threads, ready="/readyz") as child:
        yield HttpEngine("headstart", child, _model_id(child), git_commit())


@contextlib.contextmanager
def llama_cpp(server: str, gguf: str, threads: int) -> Iterator[HttpEngine]:
    """llama.cpp's `llama-server` on a GGUF file of like precision."""
    port = free_port()
    command = [server, "-m", gguf, "--port", str(port), "-t", str(threads), "-tb", str(threads), "-fa", "on",
               "-np", str(STREAMS_MAX), "-kvu", "-c", str(6 * CONTEXT_TOKENS), "--swa-full"]
    with _served("llama.cpp", command, port, threads, ready="/health") as child:
        yield HttpEngine("llama.cpp", child, _model_id(child), _first_line([server, "--version"]))


@contextlib.contextmanager
def vllm(executable: str, folder: str, threads: int) -> Iterator[HttpEngine]:
    """vLLM's CPU build on a Hugging Face folder. It is told the architecture: folders made from GGUF do not say."""
    port = free_port()
    command = [executable, "serve", folder, "--port", str(port), "--dtype", "bfloat16", "--max-model-len",
               str(CONTEXT_TOKENS), "--max-num-seqs", str(STREAMS_MAX), "--enable-prefix-caching",
               "--hf-overrides", orjson.dumps({"architectures": [_architecture(folder)]}).decode()]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                   "HF_HUB_OFFLINE": "1"}
    with _served("vllm", command, port, threads, ready="/health", environment=environment) as child:
        yield HttpEngine("vllm", child, folder, _first_line([executable, "--version"]))


@contextlib.contextmanager
def transformers(folder: str, dtype: str, threads: int) -> Iterator[Transformers]:
    """transformers on a Hugging Face folder, with its defaults."""
    command = [sys.executable, "-m", "loadtests.bench.transformers_arm", folder, dtype, str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=_environment(threads)) as process:
        engine = Transformers(process)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield engine
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.close() if process.stdin else None


@contextlib.contextmanager
def awake(pid: int) -> Iterator[None]:
    """Let a sleeping process tree run for the length of this block."""
    family = [pid, *descendants(pid)]
    for member in family:
        os.kill(member, signal.SIGCONT)
    try:
        yield
    finally:
        for member in [pid, *descendants(pid)]:
            os.kill(member, signal.SIGSTOP)


def descendants(pid: int) -> list[int]:
    """Process ids of all live children, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its live descendants, in the kernel's ticks of 10 ms."""
    return sum(_own_cpu_seconds(member) for member in [pid, *descendants(pid)])


def _own_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _served(name: str, command: Sequence[str], port: int, threads: int, *, ready: str,
            environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by Child.stop
    try:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   env={**_environment(threads), **(environment or {})})
    except OSError as error:
        log.close()
        raise StackError(f"{name}: {error}") from None
    child = Child(process=process, url=f"http://127.0.0.1:{port}", log=log)
    try:
        child.wait_ready(ready, START_TIMEOUT_S)
        with awake(process.pid):  # at its end the engine sleeps
            pass
        yield child
    finally:
        if process.poll() is None:
            for member in [process.pid, *descendants(process.pid)]:
                os.kill(member, signal.SIGCONT)
        child.stop()


def _environment(threads: int) -> dict[str, str]:
    """How threads wait is each engine's own choice, as on a user's machine: the others sleep meanwhile."""
    inherited = {name: value for name, value in os.environ.items() if name not in WAITING}
    return {**inherited, "OMP_NUM_THREADS": str(threads)}


def _architecture(folder: str) -> str:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AutoConfig.from_pretrained(folder).model_type])


def _model_id(child: Child) -> str:
    with awake(child.process.pid):
        return str(fetch(f"{child.url}/v1/models")["data"][0]["id"])


def _first_line(command: Sequence[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    lines = [line for line in (found.stdout + found.stderr).splitlines() if "version" in line or line[:1].isdigit()]
    return lines[0].strip() if lines else "unknown"


def git_commit() -> str:
    """Of the tree that is run, short."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
