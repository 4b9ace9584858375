"""Everything one request leaves behind: the facts for its metrics and its one log line. Never prompt text.

Owns: the record. Must never: decide anything by it.
"""

from __future__ import annotations

import time

from msgspec import Struct, field

from gateway.errors import Rejected
from gateway.relay.relay import StreamEnd
from gateway.relay.sse import Usage
from gateway.routing.cost import CandidateCost
from worker.protocol.api_error import ApiError

STAGES = ("parse", "tokenize", "hash", "match", "pick", "connect")
_STAGE_FIELDS = {stage: f"{stage}_ms" for stage in STAGES}


class RequestRecord(Struct):
    """Filled in as the request goes its way. Instants are time.monotonic(); tokens are the first prompt's.

    `admitted`: a worker took the request (its answer is a 200), so that its prompt tokens count.

    `confirmed_tokens` and `matched_tokens` bound what the worker should report as cached; None: not comparable.
    `cacheable_tokens` is the longest match on any worker: what the best choice for the cache alone would have found.
    `moved_to`: workers that went on with a stream after another one was lost.
    `expected` is what the worker chosen at `placed_at` was reckoned to cost.
    `rejected` says which limit of the gateway refused, in more words than the error's code.
    `outcome`: ok, client_error, client_left, no_worker, worker_error, or gateway_error for our own bugs.
    """

    request_id: str
    route: str
    began_at: float = field(default_factory=time.monotonic)
    client: str | None = None
    tenant: str | None = None
    model: str | None = None
    stream: bool = False
    worker_id: str | None = None
    reason: str | None = None
    knowledge: str | None = None
    prompt_tokens: int | None = None
    matched_tokens: int | None = None
    confirmed_tokens: int | None = None
    cacheable_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    num_chunks: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    retries: list[str] = field(default_factory=list)
    moved_to: list[str] = field(default_factory=list)
    queued_s: float | None = None
    ttft_s: float | None = None
    placed_at: float | None = None
    expected: CandidateCost | None = None
    inter_token_s: float | None = None
    admitted: bool = False
    status: int = 500
    outcome: str = "gateway_error"
    error: str | None = None
    rejected: str | None = None

    def first_byte(self) -> None:
        """The first body bytes are about to go to the client."""
        self.ttft_s = time.monotonic() - self.began_at

    @property
    def first_token_s(self) -> float | None:
        """From the choice of the worker to its first token; None where the first byte is not that, or another's."""
        if not (self.stream and self.admitted) or self.ttft_s is None or self.placed_at is None or self.retries:
            return None
        return self.began_at + self.ttft_s - self.placed_at

    def reported(self, usage: Usage | None) -> None:
        """What the worker says it did; a figure already known from its headers stays."""
        if usage is None:
            return
        self.completion_tokens = usage.completion_tokens
        self.prompt_tokens = self.prompt_tokens or usage.prompt_tokens
        if self.cached_tokens is None:
            self.cached_tokens = usage.cached_tokens

    def stream_ended(self, end: StreamEnd) -> None:
        """The stream is over, well or not."""
        self.reported(end.tail.stream_usage())
        self.num_chunks = end.num_chunks
        num_gaps = (self.completion_tokens or end.num_chunks) - 1
        if num_gaps > 0:
            self.inter_token_s = (end.last_chunk_at - end.first_chunk_at) / num_gaps
        if end.failure is None:
            self.outcome = "ok"
        else:
            self.outcome, self.error = "worker_error", end.failure.code

    def hit_error_tokens(self) -> int | None:
        """How far the reported figure lies from the predicted range: positive when too much was predicted.

        None when there is nothing to compare.
        """
        low, high, cached = self.confirmed_tokens, self.matched_tokens, self.cached_tokens
        if low is None or high is None or cached is None:
            return None
        return max(0, low - cached) or min(0, high - cached)

    def refused(self, error: ApiError) -> None:
        """The request ends in this error object."""
        self.status, self.error = error.status, error.code
        self.rejected = error.reason if isinstance(error, Rejected) else error.code
        self.outcome = {503: "no_worker"}.get(error.status, "client_error" if error.status < 500 else "worker_error")

    def log_fields(self, duration_s: float) -> dict[str, object]:
        """The request's log line, without what does not apply."""
        ttft_s, inter_token_s = self.ttft_s, self.inter_token_s
        every = {
            "request_id": self.request_id, "route": self.route, "client": self.client, "tenant": self.tenant,
            "model": self.model, "stream": self.stream, "status": self.status, "outcome": self.outcome,
            "error": self.error, "worker": self.worker_id,
            "reason": self.reason, "knowledge": self.knowledge, "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens, "confirmed_tokens": self.confirmed_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens, "retries": self.retries or None,
            "moved_to": self.moved_to or None,
            "queued_ms": _ms(self.queued_s) if self.queued_s else None,
            "rejected": self.rejected if self.status == 429 else None,
            "ttft_ms": None if ttft_s is None else _ms(ttft_s),
            "inter_token_ms": None if inter_token_s is None else _ms(inter_token_s),
            "duration_ms": _ms(duration_s),
        }
        fields: dict[str, object] = {name: value for name, value in every.items() if value is not None}
        for stage, seconds in self.stages.items():
            fields[_STAGE_FIELDS[stage]] = _ms(seconds)
        return fields


def _ms(seconds: float) -> float:
    """To the microsecond; round() of a float would take five times as long."""
    return int(seconds * 1e6 + 0.5) / 1000
