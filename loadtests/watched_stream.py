"""A client's view of one stream while it runs: how far it is, who answers, and what came, byte by byte.

Owns the reading of one answer. Decides nothing about what is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

_VARIES = re.compile(rb'"(created|cached_tokens)":\d+')


@dataclass(slots=True)
class WatchedStream:
    """One request and what came of it so far. `expected_bytes` 0: not known."""

    request_id: str
    body: Mapping[str, object]
    expected_bytes: int = 0
    worker_id: str | None = None
    num_bytes: int = 0
    answer: bytes = b""
    error: str | None = None

    @property
    def done_ratio(self) -> float:
        """How much of what is expected has come."""
        return self.num_bytes / self.expected_bytes if self.expected_bytes else 0.0

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        """Ask, and read to the end. What goes wrong is in `error`, as a client would see it."""
        pieces = []
        try:
            async with session.post(url, json=self.body, headers={"x-request-id": self.request_id}) as response:
                self.worker_id = response.headers.get("x-headstart-worker")
                async for data in response.content.iter_any():
                    self.num_bytes += len(data)
                    pieces.append(data)
                if response.status != 200:
                    self.error = f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.error = repr(error)
        self.answer = b"".join(pieces)
        if self.error is None:
            self.error = flaw_of(self.answer)


def flaw_of(answer: bytes) -> str | None:
    """What is wrong with a stream by itself."""
    if b"event: error" in answer or b'data: {"error"' in answer:
        return "an error event: " + answer[-300:].decode("utf-8", "replace")
    if not answer.endswith(b"data: [DONE]\n\n") or answer.count(b"data: [DONE]") != 1:
        return "no [DONE], or more than one"
    if answer.count(b'"role":"assistant"') != 1:
        return "not exactly one chunk with the role"
    if len(set(re.findall(rb'"id":"([^"]+)"', answer))) != 1 or len(set(_created(answer))) != 1:
        return "more than one id or time of creation"
    return None


def _created(answer: bytes) -> list[bytes]:
    return re.findall(rb'"created":(\d+)', answer)


def comparable(answer: bytes) -> bytes:
    """The answer without what may differ between two runs: the time, what a cache happened to hold, and the comments
    that keep a quiet connection open (no event, and no part of one)."""
    events = [event for event in answer.split(b"\n\n") if event != b": keep-alive"]
    return _VARIES.sub(rb'"\1":0', b"\n\n".join(events))
