"""Remembered replies: how a model spelled what it answered, so that the next turn finds the answer in the cache.

Owns: for each tenant, model and `cache_salt` the stretches of replies whose ids are not the tokenizer's own (most
replies have none and cost nothing here), within bounds. Must never: let a tenant's replies change another's prompts,
or be used with strict workers, whose prompts are to be the tokenizer's to the last id.
Approximation: of replies with the same text the latest counts. Every process of a gateway remembers its own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock

from gateway.admission.tenants import Tenant
from gateway.config import GatewayConfig
from gateway.relay.transcript import Transcript
from gateway.server.prompt_work import PreparedPrompt, PromptRequest, PromptWork
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest
from worker.prompt.segment_memory import SegmentMemory
from worker.protocol.block_hash import HashScheme
from worker.protocol.told_tokens import decode_told

Learn = Callable[[Sequence[Sequence[int]]], None]
OWNER_SHARE = 8  # no owner has more than this part of the room
OWNERS_MAX = 4096
ON_LOOP_TOKENS = 512  # to look a longer reply's spelling up takes half a millisecond
STRICT = "strict"


def told_in_stream(blocks: Iterable[bytes]) -> list[list[int]]:
    """The ids of each choice, from a stream's blocks with the comments in which its worker told them."""
    choices: dict[int, list[int]] = {}
    for block in blocks:
        told = decode_told(block)
        if told is not None:
            choices.setdefault(told.choice, []).extend(told.token_ids)
    return [choices[choice] for choice in sorted(choices)]


def learn_from_stream(learn: Learn | None, transcript: Transcript | None) -> None:
    """A stream has ended well: what it told is a reply, where the stream was short enough to be kept."""
    if learn is not None and transcript is not None and transcript.is_kept:
        learn(told_in_stream(transcript.kept_blocks()))


class ReplyMemory:
    """At most `max_bytes` for all owners. Safe to use from several threads.

    `num_replies` counts by what was found: `canonical` (nothing to remember), `kept`, `unknown` (a tokenizer or a
    reply that cannot be recognised again).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._owners: OrderedDict[str, SegmentMemory] = OrderedDict()  # the last has learned or been asked last
        self._lock = Lock()
        self.num_replies = {"canonical": 0, "kept": 0, "unknown": 0}

    @property
    def num_bytes(self) -> int:
        """What all owners hold."""
        return sum(memory.num_bytes for memory in list(self._owners.values()))

    def of(self, owner: str) -> SegmentMemory | None:
        """An owner's replies, for the encoder; None when there are none."""
        with self._lock:
            memory = self._owners.get(owner)
            if memory is not None:
                self._owners.move_to_end(owner)
        return memory

    def learn(self, owner: str, renderer: PromptRenderer, prompt: Sequence[int], reply: Sequence[int], *,
              scope: str) -> None:
        """A model has answered `prompt` with `reply`. `scope` is the memory of texts to look its spelling up in."""
        stretches = renderer.tokenizer.reply_stretches(prompt, reply)
        found = "canonical" if stretches else "unknown"
        for key, token_ids in stretches:
            own = renderer.tokenizer.encode_packed(key[1], add_special_tokens=False, scope=scope)
            if own == token_ids:
                if (memory := self._owners.get(owner)) is not None:
                    memory.discard(key)
            else:
                found = "kept"
                self._keep(owner, key, token_ids)
        self.num_replies[found] += 1

    def check_invariants(self) -> None:
        """AssertionError when a bound is broken."""
        assert self.num_bytes <= self._max_bytes
        assert len(self._owners) <= OWNERS_MAX
        for memory in self._owners.values():
            memory.check_invariants()

    def _keep(self, owner: str, key: tuple[str, str], token_ids: array[int]) -> None:
        with self._lock:
            memory = self._owners.setdefault(owner, SegmentMemory(self._max_bytes // OWNER_SHARE))
            self._owners.move_to_end(owner)
            memory.discard(key)
            memory.put(key, token_ids)
            while len(self._owners) > OWNERS_MAX or (self.num_bytes > self._max_bytes and len(self._owners) > 1):
                self._owners.popitem(last=False)


class Remembering:
    """Which requests learn and use replies, and when that is done. Lives on the event loop."""

    def __init__(self, config: GatewayConfig, prompt_work: PromptWork) -> None:
        self._is_on = config.remember_replies and bool(config.worker_token)
        self._prompt_work = prompt_work
        self.memory = ReplyMemory(config.reply_memory_bytes)

    def owner(self, request: PromptRequest, tenant: Tenant, schemes: Sequence[HashScheme]) -> str | None:
        """Whose replies may spell this prompt, and who learns its answer; None: nobody's."""
        if not (self._is_on and schemes and isinstance(request, ChatRequest)):
            return None
        if STRICT in [scheme.exactness for scheme in schemes]:
            return None
        return f"{request.model}\n{tenant.tenant_id}\n{request.cache_salt or ''}"

    def learner(self, owner: str | None, renderer: PromptRenderer, prepared: PreparedPrompt,
                scope: str) -> Learn | None:
        """What is to be told the ids of the answer's choices."""
        if owner is None:
            return None

        def learn(choices: Sequence[Sequence[int]]) -> None:
            for reply in choices:
                learn_one = partial(self.memory.learn, owner, renderer, prepared.prompts[0], reply, scope=scope)
                if len(reply) <= ON_LOOP_TOKENS:  # before the client can come back with it
                    learn_one()
                else:
                    self._prompt_work.some_time(learn_one)

        return learn
