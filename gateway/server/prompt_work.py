"""From a parsed request to token ids and block hashes, once per request and off the event loop when it is long.

Owns: the prompt threads, the limit on prompts that wait for one, and how a body's cache salt becomes an extra key.
Must never: look at workers' load, or keep a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from gateway.server.prompt_limit import PromptLimit
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, CompletionRequest
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme, block_hashes

# Rendering and tokenising run at about 1 MB/s: below this a hop to a thread costs more than it frees.
ON_LOOP_BODY_BYTES = 1024
NUM_THREADS = 2
MAX_WAITING_PROMPTS = 1024
_SHARING_GROUP = b""  # tenants will name theirs; until then all share one

T = TypeVar("T")
PromptRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`prompts` are the ids of each prompt; `hashes` the first prompt's block hashes under each hash scheme."""

    prompts: list[Sequence[int]]
    hashes: dict[HashScheme, list[int]]
    tokenize_s: float
    hash_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """What keeps equal prompts apart. `internal` is the salt header's value, None when the worker salts by itself."""

    extra_keys: tuple[ExtraKey, ...]
    internal: bytes | None


NO_SALT = CacheSalt((), None)


def cache_salt_of(body_salt: str | None, worker_token: str) -> CacheSalt:
    """The salt for a body's `cache_salt`: keyed by the deployment's secret; with none, the worker salts by itself."""
    if body_salt is None:
        return NO_SALT
    if not worker_token:
        return CacheSalt((ExtraKey(ExtraKeyKind.BODY_SALT, body_salt.encode()),), None)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in (_SHARING_GROUP, body_salt.encode()))
    salt = hmac.digest(worker_token.encode(), message, hashlib.sha256)
    return CacheSalt((ExtraKey(ExtraKeyKind.GATEWAY_SALT, salt),), salt)


class PromptWork:
    """A small thread pool; tokenizers release the GIL in it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")
        self._num_waiting = 0

    async def prepare(self, renderer: PromptRenderer, request: PromptRequest, *, num_body_bytes: int,
                      schemes: Iterable[HashScheme], extra_keys: tuple[ExtraKey, ...],
                      limit: PromptLimit | None = None) -> PreparedPrompt:
        """Render, tokenise and hash. ApiError 400 for what cannot be rendered or is longer than `limit`, 429 when
        too many wait already."""
        def work() -> PreparedPrompt:
            if limit is not None and limit.is_suspect(num_body_bytes):
                limit.check_texts(_texts(renderer, request))
            return _prepare(renderer, request, tuple(schemes), extra_keys, limit=limit)

        return await self.run(num_body_bytes, work)

    async def run(self, num_body_bytes: int, work: Callable[[], T]) -> T:
        """Do `work` here when it is short, in a prompt thread when not."""
        if num_body_bytes <= ON_LOOP_BODY_BYTES:
            return work()
        if self._num_waiting >= MAX_WAITING_PROMPTS:
            raise ApiError(429, "queue_full", "Too many prompts wait to be tokenised; try again shortly.",
                           headers={"Retry-After": "1"})
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Let go of the threads; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _texts(renderer: PromptRenderer, request: PromptRequest) -> list[str]:
    if isinstance(request, ChatRequest):
        return [renderer.chat_text(request)]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]


def _prepare(renderer: PromptRenderer, request: PromptRequest, schemes: tuple[HashScheme, ...],
             extra_keys: tuple[ExtraKey, ...], *, limit: PromptLimit | None) -> PreparedPrompt:
    began_at = time.perf_counter()
    # Who may share cached blocks may notice, by the time it takes, that a prompt's beginning was seen before.
    scope = "/".join([key.value.hex() for key in extra_keys])
    prompts: list[Sequence[int]] = ([renderer.chat_packed(request, scope=scope)] if isinstance(request, ChatRequest)
                                    else [*renderer.completion(request, scope=scope)])
    if limit is not None:
        limit.check_prompts(prompts)
    tokenized_at = time.perf_counter()
    hashes = {scheme: block_hashes(prompts[0], scheme, extra_keys) for scheme in schemes}
    return PreparedPrompt(prompts, hashes, tokenized_at - began_at, time.perf_counter() - tokenized_at)
