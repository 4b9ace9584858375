"""What the engine process needs to know at start. The worker's own config (worker/config.py) makes one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class EngineSetupError(Exception):
    """A path, model or setting with which no engine can start: one line, saying what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine process.

    `kv_memory` is bytes ("2GiB") or a share of what is free ("0.9"). `kv_cache`: "full" shares prefixes, "decode"
    keeps K/V for the running sequence only, "off" recomputes the whole sequence at every token; the last two exist
    for measuring and as oracles. `threads` 0 lets the engine choose. `target_itl_ms` is what prefill may add to the
    gap between two tokens of a decoding sequence, 0: no bound. `batching` "static" is for measuring. `lora` are
    adapters as name=DIR. `weight_dtype` "int8" rounds weights to 8 bits, "auto" leaves them as the device computes.
    `log_format` and `log_level` as worker.protocol.logs has them.
    """

    model: str = "smollm2"
    served_name: str | None = None
    block_size: int = 16
    kv_memory: str = "1GiB"
    kv_dtype: str = "auto"
    exactness: str = "fast"
    kv_cache: str = "full"
    threads: int = 0
    device: str = "auto"
    hash_seed: bytes = b""
    chat_template: Path | None = None
    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 512
    max_context: int | None = None
    target_itl_ms: float = 0.0
    batching: str = "continuous"
    cache_dir: Path | None = None
    lora: tuple[str, ...] = ()
    weight_dtype: str = "auto"
    log_format: str = "json"
    log_level: str = "info"
