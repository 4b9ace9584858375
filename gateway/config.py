"""The gateway's settings: flags over HEADSTART_GATEWAY_* over a TOML file over these defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One configured worker. `api_key` and `ca_file` are for engines that ask for them."""

    url: str
    worker_id: str | None = None
    api_key: str | None = None
    ca_file: Path | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    ops_port: int | None = None
    workers: tuple[WorkerSpec, ...] = ()
    policy: str = "headstart"
    max_body_bytes: int = 32 * 1024 * 1024
    index_max_bytes: int = 512 * 1024 * 1024
    speculative_ttl_s: float = 5.0
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    chunk_gap_timeout_s: float = 120.0
    max_retries: int = 2
    health_interval_s: float = 1.0
    keepalive_s: float = 15.0
    drain_delay_s: float = 5.0
    drain_s: float = 120.0
    sync_timeout_s: float = 30.0
    expose_routing: bool = True
    admin_token: str = ""           # HEADSTART_ADMIN_TOKEN; empty: a random one in a 0600 file
    admin_token_file: Path | None = None
    worker_token: str = ""          # HEADSTART_WORKER_TOKEN; empty: workers tokenise for themselves
    log_format: str = "json"
    log_level: str = "info"
    root_path: str = ""
    cors_origins: tuple[str, ...] = field(default=())
    trusted_proxies: tuple[str, ...] = field(default=())
