"""From a parsed request to token ids and block hashes, once per request and off the event loop when it is long.

Owns: the prompt threads and the limit on prompts that wait for one.
Must never: look at workers' load, or keep a prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from msgspec import Struct

from gateway.admission.cache_salt import CacheSalt
from gateway.server.prompt_limit import PromptLimit
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, CompletionRequest
from worker.prompt.segment_encoder import Replies
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import HashScheme, block_hashes
from worker.protocol.logs import get_logger

# Rendering and tokenising run at about 1 MB/s: below this a hop to a thread costs more than it frees.
ON_LOOP_BODY_BYTES = 1024
# What was seen before costs 2 ms a megabyte, so most turns of a conversation stay here too.
ON_LOOP_KNOWN_BYTES = 128 * 1024
ON_LOOP_NEW_CHARS = 2048
NUM_THREADS = 2
MAX_WAITING_PROMPTS = 1024

T = TypeVar("T")
_log = get_logger(__name__)
PromptRequest = ChatRequest | CompletionRequest
SaltOf = Callable[[Sequence[Sequence[int]]], CacheSalt]
"""The salt for these prompts: how much of it is public depends on their tokens."""


class PreparedPrompt(Struct, frozen=True, gc=False):
    """`prompts` are the ids of each prompt; `hashes` the first prompt's block hashes under each hash scheme."""

    prompts: list[Sequence[int]]
    hashes: dict[HashScheme, list[int]]
    salt: CacheSalt
    tokenize_s: float
    hash_s: float

    def chain(self, scheme: HashScheme | None) -> list[int]:
        """The block hashes under `scheme`; empty where there are none."""
        for known, hashes in self.hashes.items():
            if known is scheme:
                return hashes
        return [] if scheme is None else self.hashes.get(scheme, [])

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.prompts[0]) if len(self.prompts) == 1 else sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return len(self.prompts[0]) if len(self.prompts) == 1 else max(map(len, self.prompts))


class _Task(NamedTuple):
    """One request's prompt, and what is to be made of it."""

    renderer: PromptRenderer
    request: PromptRequest
    schemes: tuple[HashScheme, ...]
    salt_of: SaltOf
    scope: str
    limit: PromptLimit | None
    replies: Replies | None


class PromptWork:
    """A small thread pool; tokenizers release the GIL in it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")
        self._num_waiting = 0

    async def prepare(self, renderer: PromptRenderer, request: PromptRequest, *, num_body_bytes: int,
                      schemes: Iterable[HashScheme], salt_of: SaltOf, scope: str = "",
                      limit: PromptLimit | None = None, replies: Replies | None = None) -> PreparedPrompt:
        """Render, tokenise and hash. ApiError 400 for what cannot be rendered or is longer than `limit`, 429 when
        too many wait already. `scope` names who may notice that a prompt's beginning was tokenised before."""
        task = _Task(renderer, request, tuple(schemes), salt_of, scope, limit, replies)
        is_suspect = limit is not None and limit.is_suspect(num_body_bytes)
        text = None
        if (isinstance(request, ChatRequest) and not is_suspect
                and ON_LOOP_BODY_BYTES < num_body_bytes <= ON_LOOP_KNOWN_BYTES):
            began_at = time.perf_counter()
            text = renderer.chat_text(request)
            known = renderer.chat_packed_if_known(request, text, scope=scope, max_new_chars=ON_LOOP_NEW_CHARS,
                                                  replies=replies)
            if known is not None:
                return _hashed(task, [known], began_at)

        def work() -> PreparedPrompt:
            if limit is not None and is_suspect:
                limit.check_texts(_texts(renderer, request))
            return _prepare(task, text)

        return await self.run(num_body_bytes, work)

    def some_time(self, work: Callable[[], None]) -> None:
        """Do `work` in a prompt thread when there is time; it is dropped while many wait."""
        if self._num_waiting < MAX_WAITING_PROMPTS // 2:
            self._threads.submit(_logged, work)

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


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        _log.exception("prompt_work_failed")


def _texts(renderer: PromptRenderer, request: PromptRequest) -> list[str]:
    if isinstance(request, ChatRequest):
        return [renderer.chat_text(request)]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]


def _prepare(task: _Task, text: str | None) -> PreparedPrompt:
    """`text`: the rendered prompt, if that has been done."""
    renderer, request, scope, began_at = task.renderer, task.request, task.scope, time.perf_counter()
    # Who may share cached blocks may notice, by the time it takes, that a prompt's beginning was seen before.
    prompts: list[Sequence[int]] = (
        [renderer.chat_packed(request, scope=scope, text=text, replies=task.replies)]
        if isinstance(request, ChatRequest)
        else [*renderer.completion(request, scope=scope)])
    return _hashed(task, prompts, began_at)


def _hashed(task: _Task, prompts: list[Sequence[int]], began_at: float) -> PreparedPrompt:
    if task.limit is not None:
        task.limit.check_prompts(prompts)
    tokenized_at = time.perf_counter()
    salt = task.salt_of(prompts)
    hashes = {scheme: block_hashes(prompts[0], scheme, salt.extra_keys) for scheme in task.schemes}
    return PreparedPrompt(prompts, hashes, salt, tokenized_at - began_at, time.perf_counter() - tokenized_at)
