"""From a parsed request to token ids and block hashes, once per request and off the event loop when it is long.

Owns: the prompt threads and the limit on prompts that wait for one.
Must never: look at workers' load, or keep a prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import Struct

from gateway.admission.cache_salt import CacheSalt
from gateway.server.beginnings import Beginning
from gateway.server.prompt_limit import PromptLimit
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, CompletionRequest
from worker.prompt.segment_encoder import Replies
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import ExtraKey, HashScheme, block_hashes
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
HashesOf = Callable[[Sequence[int], HashScheme, tuple[ExtraKey, ...]], list[int]]


class PreparedPrompt(Struct, frozen=True, gc=False):
    """`prompts` are the ids of each prompt; `hashes` the block hashes of the one that the request is placed by, under
    each hash scheme."""

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
    def placed_by(self) -> Sequence[int]:
        """The ids of the prompt that decides where the request goes."""
        return longest_of(self.prompts)


def longest_of(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """The prompt that a request is placed by: to compute it anew would take longest. The first of equals."""
    return prompts[0] if len(prompts) == 1 else max(prompts, key=len)


class PromptTask(Struct, gc=False):
    """One request's prompt, and what is to be made of it. `scope` names who may notice that a prompt's beginning was
    tokenised before; `text`: the rendered prompt, once that has been done; `beginning`: what its body begins with."""

    renderer: PromptRenderer
    request: PromptRequest
    num_body_bytes: int
    schemes: Sequence[HashScheme]
    salt_of: SaltOf
    scope: str = ""
    limit: PromptLimit | None = None
    replies: Replies | None = None
    text: str | None = None
    beginning: Beginning | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether the text may be too long for any worker, so that it is measured before it is tokenised."""
        return self.limit is not None and self.limit.is_suspect(self.num_body_bytes)


class PromptWork:
    """A small thread pool; tokenizers release the GIL in it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")
        self._num_waiting = 0

    def at_once(self, task: PromptTask) -> PreparedPrompt | None:
        """prepare(), if the prompt is short or mostly known; otherwise None."""
        if task.num_body_bytes <= ON_LOOP_BODY_BYTES:
            return _prepare(task)
        request = task.request
        if not isinstance(request, ChatRequest) or task.num_body_bytes > ON_LOOP_KNOWN_BYTES:
            return None
        began_at = time.perf_counter()
        task.text = task.renderer.chat_text(request)
        beginning = task.beginning
        if beginning is not None and (task.replies or not beginning.begins(task.renderer, task.text)):
            beginning = None
        known = task.renderer.chat_packed_if_known(
            request, task.text, scope=task.scope, max_new_chars=ON_LOOP_NEW_CHARS, replies=task.replies,
            begins=None if beginning is None else beginning.known)
        if known is None:
            return None
        return _hashed(task, [known], began_at, block_hashes if beginning is None else beginning.hashes)

    async def prepare(self, task: PromptTask) -> PreparedPrompt:
        """Render, tokenise and hash, in a prompt thread unless at_once() can. ApiError 400 for what cannot be
        rendered or is longer than the limit, 429 when too many wait already."""
        prepared = self.at_once(task)
        return await self.run(task.num_body_bytes, lambda: _prepare(task)) if prepared is None else prepared

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


def _texts(task: PromptTask) -> list[str]:
    request = task.request
    if isinstance(request, ChatRequest):
        task.text = task.renderer.chat_text(request) if task.text is None else task.text
        return [task.text]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]


def _prepare(task: PromptTask) -> PreparedPrompt:
    renderer, request, scope, began_at = task.renderer, task.request, task.scope, time.perf_counter()
    if task.limit is not None and task.is_suspect:
        task.limit.check_texts(_texts(task))
    # Who may share cached blocks may notice, by the time it takes, that a prompt's beginning was seen before.
    prompts: list[Sequence[int]] = (
        [renderer.chat_packed(request, scope=scope, text=task.text, replies=task.replies)]
        if isinstance(request, ChatRequest)
        else [*renderer.completion(request, scope=scope)])
    return _hashed(task, prompts, began_at)


def _hashed(task: PromptTask, prompts: list[Sequence[int]], began_at: float,
            hashes_of: HashesOf = block_hashes) -> PreparedPrompt:
    if task.limit is not None:
        task.limit.check_prompts(prompts)
    tokenized_at = time.perf_counter()
    salt, placed_by = task.salt_of(prompts), longest_of(prompts)
    hashes = {scheme: hashes_of(placed_by, scheme, salt.extra_keys) for scheme in task.schemes}
    return PreparedPrompt(prompts, hashes, salt, tokenized_at - began_at, time.perf_counter() - tokenized_at)
