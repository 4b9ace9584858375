"""The gateway's settings: flags over HEADSTART_GATEWAY_* over a TOML file over these defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gateway.admission.forwarded import proxies_problem
from gateway.admission.keys_file import api_keys_problem
from gateway.admission.worker_networks import worker_networks_problem
from gateway.routing.policies import POLICIES
from worker.protocol.logs import FORMATS, LEVELS
from worker.protocol.settings import setting

PORT_MAX = 65_535
# Signatures that a public key verifies. None of a shared secret: whoever could verify such a token could make one.
JWT_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
PROCESSES_MAX = 64
# What browsers send: lower case, no path, no slash at the end; schemes of their extensions too.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,A-Z]+")


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if "@" in url:      # not repeated here, nor by --print-config
        return "should hold no user and no password; what an engine asks for is its `api_key` in [[workers]]"
    return None if whole else f"should look like http://host:port, got {url!r}"


def _root_path_problem(path: str) -> str | None:
    return None if not path or path.startswith("/") else f"should begin with a slash, got {path!r}"


def _origins_problem(origins: tuple[str, ...]) -> str | None:
    for origin in origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            return f"should be * or origins such as https://app.example.com, as browsers send them; got {origin!r}"
    return None


def _algorithms_problem(names: tuple[str, ...]) -> str | None:
    wrong = [name for name in names if name not in JWT_ALGORITHMS]
    return f"should be of {', '.join(JWT_ALGORITHMS)}; got {', '.join(wrong)}" if wrong or not names else None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One configured worker. `api_key` and `ca_file` are for engines that ask for them."""

    url: str = setting(check=_url_problem)
    worker_id: str | None = None
    api_key: str | None = None
    ca_file: Path | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway process. Bytes, seconds and counts as the names say."""

    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, bounds=(0, PORT_MAX), help="port to listen on")
    ops_port: int | None = setting(None, bounds=(0, PORT_MAX),
                                   help="a port of its own for probes, metrics and /admin")
    processes: int = setting(1, bounds=(1, PROCESSES_MAX), help="processes that share the port and every limit")
    workers: tuple[WorkerSpec, ...] = setting((), flag="worker", help="a worker's address; one flag for each")
    worker_networks: tuple[str, ...] = setting(
        (), table="server", check=worker_networks_problem,
        help="networks and hosts where POST /admin/workers may add one; those of --worker anyhow")
    policy: str = setting("headstart", choices=tuple(POLICIES), help="how a worker is chosen")
    copies_ahead: bool = setting(True, help="have hot prefixes computed on idle workers before they are needed there")
    max_body_bytes: int = setting(32 * 1024 * 1024, bounds=(1, None), table="server", help="request bodies at most")
    max_connections: int = setting(16_384, bounds=(1, None), table="server", help="open connections of clients")
    head_timeout_s: float = setting(10.0, bounds=(0.01, None), table="server",
                                    help="from a request's first byte to the end of its headers")
    index_max_bytes: int = setting(512 * 1024 * 1024, bounds=(1, None), help="memory of the prefix index at most")
    text_memory_bytes: int = setting(64 * 1024 * 1024, bounds=(0, None),
                                     help="memory of texts tokenised before at most, for each model")
    remember_replies: bool = setting(True, help="let the next turn find an answer by its own tokens")
    reply_memory_bytes: int = setting(32 * 1024 * 1024, bounds=(0, None), help="memory of such answers at most")
    speculative_ttl_s: float = setting(5.0, bounds=(0, None), help="how long a routed prompt counts as cached")
    approximate_ttl_s: float = setting(120.0, bounds=(0, None), help="the same at a worker that tells no events")
    connect_timeout_s: float = setting(2.0, bounds=(0.001, None), help="connecting to a worker")
    first_byte_timeout_s: float = setting(600.0, bounds=(0.001, None), help="a worker's first byte")
    chunk_gap_timeout_s: float = setting(120.0, bounds=(0.001, None), help="silence inside a stream")
    max_retries: int = setting(2, bounds=(0, None), help="other workers tried before the first byte")
    max_migrations: int = setting(3, bounds=(0, None), table="failure",
                                  help="how often a stream may go on at another worker; 0: never")
    breaker_failures: int = setting(5, bounds=(1, None), table="failure",
                                    help="failures in a row after which a worker is avoided")
    breaker_open_s: float = setting(2.0, bounds=(0.001, None), table="failure",
                                    help="how long it is avoided before a probe; doubled after each that fails")
    breaker_open_max_s: float = setting(30.0, bounds=(0.001, None), table="failure", help="avoided at most")
    total_timeout_s: float = setting(3600.0, bounds=(0.001, None), table="failure",
                                     help="a request from its arrival to its last byte")
    hedge_after_s: float | None = setting(None, bounds=(0.001, None), table="failure",
                                          help="ask a second worker when a stream has not begun by then; none: never")
    max_hedges: int = setting(8, bounds=(1, None), table="failure", help="requests asked twice at the same time")
    health_interval_s: float = setting(1.0, bounds=(0.01, None), help="between two looks at a worker")
    max_inflight_per_worker: int = setting(512, bounds=(1, None), table="admission",
                                           help="requests under way at a worker; more wait here")
    max_queued_requests: int = setting(4096, bounds=(0, None), table="admission",
                                       help="requests that may wait, for each model")
    max_queued_bytes: int = setting(256 * 1024 * 1024, bounds=(0, None), table="admission",
                                    help="bytes of the bodies that may wait, for each model")
    max_queue_wait_s: float = setting(60.0, bounds=(0.001, None), table="admission",
                                      help="waiting for a worker at most")
    reserved_places_ratio: float = setting(0.125, bounds=(0.0, 0.9), table="admission",
                                           help="share of the places that a tenant alone leaves to others")
    catch_up_tokens: int = setting(32_768, bounds=(0, None), table="admission",
                                   help="how far, for a weight of 1, who used less than others may go before them")
    head_start_tokens: int = setting(8192, bounds=(0, None), table="admission",
                                     help="how far, for a weight of 1, who asks for less may go before others")
    ttft_slo_s: float | None = setting(None, bounds=(0.001, None), table="admission",
                                       help="refuse what would not begin within this; none: never")
    keepalive_s: float = setting(15.0, bounds=(0.01, None), table="stream", help="silence before a keep-alive")
    drain_delay_s: float = setting(5.0, bounds=(0, None), help="after SIGTERM: still accepting, no longer ready")
    drain_s: float = setting(120.0, bounds=(0, None), help="how long streams may finish after that")
    sync_timeout_s: float = setting(30.0, bounds=(0, None), help="ready without full knowledge of the caches after")
    expose_routing: bool = setting(True, table="privacy", help="x-headstart-worker and -matched-tokens in responses")
    # Empty: a random one in a 0600 file.
    admin_token: str = setting("", env="HEADSTART_ADMIN_TOKEN")
    admin_token_file: Path | None = setting(None, help="has the admin token, or gets a random one")
    keys_file: Path | None = setting(None, help="a TOML file of tenants and their keys' hashes; none: all may ask")
    # tenant=key, with commas; a key or its hash. Both may be given.
    api_keys: tuple[str, ...] = setting((), env="HEADSTART_API_KEYS", check=api_keys_problem)
    keys_reload_s: float = setting(2.0, bounds=(0.01, None), help="between two looks at the keys file")
    jwt_keys_file: Path | None = setting(None, table="jwt", help="public keys of an identity provider: PEM or JWKS")
    jwt_issuer: str | None = setting(None, table="jwt", help="whose tokens count: their `iss`")
    jwt_audience: str | None = setting(None, table="jwt", help="for whom they must be: their `aud`")
    jwt_algorithms: tuple[str, ...] = setting(("RS256", "ES256", "EdDSA"), table="jwt", check=_algorithms_problem,
                                              help="signatures that count")
    jwt_tenant_claim: str = setting("sub", table="jwt", help="the claim that holds a tenant's id; a.b: b within a")
    # Keys every tenant's cache salt; the same at every gateway in front of the same workers. Empty: the worker token.
    salt_secret: str = setting("", env="HEADSTART_SALT_SECRET")
    # Empty: workers tokenise for themselves.
    worker_token: str = setting("", env="HEADSTART_WORKER_TOKEN")
    log_format: str = setting("json", choices=FORMATS, help="log lines")
    log_level: str = setting("info", choices=LEVELS, help="log lines from here up")
    tls_cert: Path | None = setting(None, table="server", help="certificate chain (PEM), read again on SIGHUP")
    tls_key: Path | None = setting(None, table="server", help="its key (PEM)")
    root_path: str = setting("", table="server", check=_root_path_problem,
                             help="path prefix under which a proxy in front shows this gateway, stripped or not")
    cors_origins: tuple[str, ...] = setting((), table="server", check=_origins_problem,
                                            help="origins browsers may call from, with commas; *: all")
    trusted_proxies: tuple[str, ...] = setting((), table="server", check=proxies_problem,
                                                help="addresses and networks whose (X-)Forwarded headers count")
