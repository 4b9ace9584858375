"""The way to a worker: one request out, one response back, bytes untouched.

Owns: the interface, and what can go wrong on the way, named. connection_pool.py holds the implementation.
Must never: interpret a body, or follow a redirect.
The interface is as narrow as the relay needs, so that the client behind it can be replaced; tests/conformance holds
every implementation to it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from msgspec import Struct


class FailureKind(Enum):
    """Where on the way a worker was lost."""

    CONNECT = "connect"
    RESET = "reset"
    TIMEOUT = "timeout"


class UpstreamFailure(Exception):
    """The worker could not be reached, or went away. `detail` is for the log and the operator."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class UpstreamRequest(Struct, frozen=True, gc=False):
    """One request to a worker. `ssl_context` is for https workers with a CA of their own; None verifies as usual.

    The implementation adds Host, Content-Length and that no content coding is wanted. A name or value that would
    break the head is our bug: ValueError.
    """

    url: str
    headers: Mapping[str, str]
    body: bytes
    ssl_context: ssl.SSLContext | None = None
    method: str = "POST"


# Deal with body bytes here and now; False leaves them to the reader.
Take = Callable[[bytes], bool]


class Takers(NamedTuple):
    """`take_framed` is given bytes as they came where a chunk of HTTP/1.1 begins, and takes one whole chunk alone."""

    take: Take
    take_framed: Take


class UpstreamResponse(Protocol):
    """Status and headers (names in lower case), then chunks."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The response headers."""
        ...

    @property
    def connect_s(self) -> float:
        """Seconds spent on getting a connection; next to nothing for a pooled one."""
        ...

    async def read_chunk(self, within_s: float | None = None, takers: Takers | None = None) -> bytes:
        """What has arrived, b"" at a proper end; UpstreamFailure(RESET) at any other. Cancelling it loses nothing.

        TimeoutError when nothing was returned for `within_s`: nothing is lost, and it may be called again. What
        arrives meanwhile may be offered to `takers` at once; what they take is not returned.
        """
        ...

    def close(self) -> None:
        """Done: a response read to its end gives its connection back, any other is cut at once (workers abort)."""
        ...


class Upstream(Protocol):
    """Opens requests."""

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send the request and await the response head, or raise UpstreamFailure."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...
