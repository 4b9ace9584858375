"""The worker's settings: flags over HEADSTART_WORKER_* over a TOML file over these defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: str = "smollm2"
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    events_host: str = "127.0.0.1"
    events_port: int = 0            # 0: any free port; the replay socket takes another
    block_size: int = 16
    kv_memory: str = "1GiB"
    kv_dtype: str = "auto"
    exactness: str = "fast"
    kv_cache: str = "full"
    threads: str = "auto"
    device: str = "auto"
    chat_template: Path | None = None
    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 512
    max_context: int | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    drain_s: float = 120.0
    cache_dir: Path | None = None
    log_format: str = "json"
    log_level: str = "info"
    worker_token: str = ""          # HEADSTART_WORKER_TOKEN; empty: internal requests are refused
    hash_seed: str = ""             # HEADSTART_HASH_SEED; hex; empty: a seed shared by all unkeyed workers
