"""The worker's settings: flags over HEADSTART_WORKER_* over a TOML file over these defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.engine.engine_config import EngineSetupError
from worker.engine.kv_budget import parse_kv_memory
from worker.protocol.logs import FORMATS, LEVELS
from worker.protocol.settings import setting

PORT_MAX = 65_535
THREADS_MAX = 1024
SHOWN_CHARS = 20


def _threads_problem(value: str) -> str | None:
    significant = value.lstrip("0")[:len(str(THREADS_MAX)) + 1]
    if value == "auto" or (value.isdecimal() and 0 < int(significant or 0) <= THREADS_MAX):
        return None
    return f"should be auto or a number from 1 to {THREADS_MAX}, got {value[:SHOWN_CHARS]!r}"


def _seed_problem(value: str) -> str | None:
    try:
        bytes.fromhex(value)
    except ValueError:
        return "should be hex, an even number of digits; make one with: openssl rand -hex 32"
    return None


def _kv_memory_problem(value: str) -> str | None:
    try:
        parse_kv_memory(value)
    except EngineSetupError as error:
        return str(error).removeprefix("kv_memory ").removesuffix(".")
    return None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process. Sizes in bytes unless the name says otherwise; `kv_memory` may also be a share."""

    model: str = setting("smollm2", help="a Hugging Face folder, a .gguf file, a hub id, smollm2 or gemma3")
    served_name: str | None = setting(None, help="the name clients use; the model's own by default")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8100, bounds=(0, PORT_MAX), help="port to listen on")
    events_host: str = setting("127.0.0.1", help="address of the KV event sockets; events carry prompt tokens")
    # 0: any free port; the replay socket takes another.
    events_port: int = setting(0, bounds=(0, PORT_MAX), help="port of the KV event socket, 0 for any")
    block_size: int = setting(16, bounds=(1, 4096), help="token positions in a KV block")
    kv_memory: str = setting("1GiB", check=_kv_memory_problem,
                             help="KV memory: bytes such as 2GiB, or a share of what is free such as 0.9")
    kv_dtype: str = setting("auto", help="auto, float32, bfloat16 or float16")
    weight_dtype: str = setting("auto", choices=("auto", "int8"),
                                help="int8: weights rounded to 8 bits, tokens for a few streams sooner")
    exactness: str = setting("fast", choices=("strict", "fast"),
                             help="strict: cached and computed answers are equal bit for bit, slower")
    kv_cache: str = setting("full", choices=("full", "decode", "off"),
                            help="decode and off are for measuring and as oracles only")
    threads: str = setting("auto", check=_threads_problem, help="CPU threads of the engine")
    device: str = setting("auto", help="auto, cpu or cuda")
    chat_template: Path | None = setting(None, help="a Jinja file in place of the model's own template")
    max_batch_tokens: int = setting(512, bounds=(1, None), help="tokens computed in one step at most")
    max_running: int = setting(64, bounds=(1, None), help="sequences running at once")
    max_waiting: int = setting(512, bounds=(0, None), help="sequences waiting at most; more are refused with 429")
    # 0: no bound but max_batch_tokens.
    target_itl_ms: float = setting(200.0, bounds=(0, None),
                                   help="what a prefill may add to the gap between two tokens, 0 for no bound")
    batching: str = setting("continuous", choices=("continuous", "static"),
                            help="static is for measuring only: a batch ends before the next one begins")
    max_context: int | None = setting(None, bounds=(1, None), help="longest sequence (what model and pool allow)")
    max_body_bytes: int = setting(32 * 1024 * 1024, bounds=(1, None), help="request bodies at most")
    drain_delay_s: float = setting(5.0, bounds=(0, None), help="after SIGTERM: still accepting, no longer ready")
    drain_s: float = setting(120.0, bounds=(0, None), help="how long streams may finish after that")
    loras: tuple[str, ...] = setting((), flag="lora", help="a LoRA adapter in PEFT's format: name=DIR, one per flag")
    cache_dir: Path | None = setting(None, help="where converted models are kept")
    log_format: str = setting("json", choices=FORMATS, help="log lines")
    log_level: str = setting("info", choices=LEVELS, help="log lines from here up")
    # Empty: internal requests are refused, so the worker tokenises for itself.
    worker_token: str = setting("", env="HEADSTART_WORKER_TOKEN")
    # Hex. Empty: a seed shared by all unkeyed workers.
    hash_seed: str = setting("", env="HEADSTART_HASH_SEED", check=_seed_problem)
