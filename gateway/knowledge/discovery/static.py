"""Workers named in the configuration: the list never changes while the gateway runs.

Owns: ids for workers that were given none. An id survives restarts of either side: it is the URL's host and port.
Must never: reach out to a worker; whether one answers is worker_poll's business.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.config import WorkerSpec


class DiscoveryError(ValueError):
    """A configured worker makes no sense. The message is one line with a remedy."""


@dataclass(frozen=True, slots=True)
class DiscoveredWorker:
    """Where a worker is and how to speak to it. `url` has no trailing slash."""

    endpoint_id: str
    url: str
    api_key: str | None
    ssl_context: ssl.SSLContext | None
    pid: int | None


def static_workers(specs: Iterable[WorkerSpec]) -> tuple[DiscoveredWorker, ...]:
    """The configured workers, checked; DiscoveryError for a bad URL, an unreadable CA file, or an id or a URL used
    twice."""
    workers = tuple(_worker(spec) for spec in specs)
    ids, by_url = set[str](), dict[str, str]()
    for worker in workers:
        if worker.endpoint_id in ids:
            raise DiscoveryError(f"two workers are called {worker.endpoint_id!r}: give each its own URL or worker_id")
        if worker.url in by_url:  # its places and its load would be counted twice
            raise DiscoveryError(f"{by_url[worker.url]!r} and {worker.endpoint_id!r} are one worker, {worker.url}: "
                                 "leave one of them out")
        ids.add(worker.endpoint_id)
        by_url[worker.url] = worker.endpoint_id
    return workers


def _worker(spec: WorkerSpec) -> DiscoveredWorker:
    parts = urlsplit(spec.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DiscoveryError(f"worker URL {spec.url!r} should look like http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise DiscoveryError(f"worker {parts.hostname}: its URL would show a password; use api_key instead")
    try:
        context = ssl.create_default_context(cafile=spec.ca_file) if spec.ca_file is not None else None
    except OSError as error:  # ssl.SSLError is one too
        raise DiscoveryError(f"worker {spec.url}: cannot use ca_file {spec.ca_file}: {error}") from error
    return DiscoveredWorker(endpoint_id=spec.worker_id or parts.netloc, url=spec.url.rstrip("/"),
                            api_key=spec.api_key, ssl_context=context, pid=spec.pid)
