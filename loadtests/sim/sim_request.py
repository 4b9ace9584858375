"""A trace's request on its way through the simulator: token ids and block hashes made when they are needed.

Owns the step from block ids to tokens. A block with id b is b repeated, so equal blocks are equal and the hash chain
is the real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtests.traces import Trace, TraceRequest
from worker.protocol.block_hash import HashScheme, block_hashes

PROMPT_TOKEN_MASK = (1 << 31) - 1


def scheme_of(trace: Trace) -> HashScheme:
    """The hash scheme of every simulated worker for this trace."""
    return HashScheme(block_size=trace.block_size, seed=b"simulator", model="simulated", weights="", tokenizer="",
                      template="", kv_dtype="bfloat16", exactness="fast")


@dataclass(slots=True)
class SimRequest:
    """One request; the instants are filled in as they come. `failed`: no worker could ever hold it. `priority` as
    worker.core has it."""

    index: int
    arrives_at: float
    source: TraceRequest
    block_size: int
    hashes: list[int] = field(default_factory=list)
    worker_id: str = ""
    first_token_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0
    predicted_tokens: int = 0
    failed: bool = False
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.source.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return self.source.output_tokens

    def token_ids(self) -> list[int]:
        """The prompt. The tokens behind the last full block are this request's own."""
        size = self.block_size
        tokens: list[int] = []
        for block_id in self.source.block_ids:
            tokens += [block_id & PROMPT_TOKEN_MASK] * size
        return tokens + [self.index & PROMPT_TOKEN_MASK] * (self.source.prompt_tokens - len(tokens))

    def hash_blocks(self, scheme: HashScheme) -> list[int]:
        """The chain of the full blocks; computed once."""
        if not self.hashes:
            self.hashes = block_hashes(self.token_ids(), scheme)
        return self.hashes


def requests_of(trace: Trace) -> list[SimRequest]:
    """In order of arrival, from 0 on. A prompt is at least as long as its full blocks."""
    first = trace.requests[0].at_s if trace.requests else 0.0
    return [SimRequest(index, request.at_s - first, request, trace.block_size)
            for index, request in enumerate(trace.requests)]
