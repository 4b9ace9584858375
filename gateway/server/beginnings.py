"""Beginnings that many chats share: their messages, ids and hashes as they were when they last came.

Owns the memory of them and its bound. Must never: let one scope of tenants notice what another sent, or be believed:
bytes of bodies and characters of prompts are compared each time.

What comes once is worth nothing here, so a beginning is understood when it comes for the second time. Of one body
there may be several: the one before its last message, which others share, and the whole, for the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from worker.prompt.chat_beginning import ChatBeginning, beginning_of, ends_before, last_end, parse_behind
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest
from worker.prompt.segment_encoder import KnownText
from worker.protocol.block_hash import ExtraKey, HashScheme, block_hashes, continue_chain

# What of `text_memory_bytes` is for them, whatever the model; each model's texts have the rest.
BEGINNINGS_SHARE = 4
BODY_MIN_BYTES = 4096       # shorter ones are understood as quickly as they are found
SEEN_MAX = 4096             # beginnings that have come once
TRIES_MAX = 3               # to understand one of them
CHAINS_MAX = 2              # of one beginning, for different schemes and salts
CHAIN_BLOCK_MIN = 8         # chains of shorter blocks are not kept
TAIL_SHARE = 4              # where so small a part is behind a known beginning, no longer one is worth it
_CHAIN_TOKEN_BYTES = 40 // CHAIN_BLOCK_MIN
_ENTRY_BYTES, _MESSAGE_BYTES = 2000, 400     # beside texts and ids

Key = tuple[str, bytes]     # scope, digest


class Beginning(Struct):
    """`renderer`: whose ids `known` has. Chains are those of the blocks that lie in it as a whole."""

    chat: ChatBeginning
    renderer: PromptRenderer
    known: KnownText
    chains: dict[tuple[HashScheme, tuple[ExtraKey, ...]], list[int]]
    num_bytes: int

    def begins(self, renderer: PromptRenderer, text: str) -> bool:
        """Whether this is how a prompt begins."""
        return renderer is self.renderer and text.startswith(self.known.text)

    def hashes(self, token_ids: Sequence[int], scheme: HashScheme, extra_keys: tuple[ExtraKey, ...]) -> list[int]:
        """block_hashes() of a prompt that begins so."""
        chain = self.chains.get((scheme, extra_keys))
        if chain is not None:
            return chain + continue_chain(chain[-1], token_ids[len(chain) * scheme.block_size:], scheme)
        hashes = block_hashes(token_ids, scheme, extra_keys)
        num_blocks = len(self.known.token_ids) // scheme.block_size
        is_keyed_here = all(key.start < num_blocks * scheme.block_size for key in extra_keys)
        if num_blocks and is_keyed_here and scheme.block_size >= CHAIN_BLOCK_MIN and len(self.chains) < CHAINS_MAX:
            self.chains[scheme, extra_keys] = hashes[:num_blocks]
        return hashes


class Beginnings:
    """At most `max_bytes`; the least recently used go first. Lives on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[Key, Beginning] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()   # how often each was tried in vain
        self.num_bytes = 0
        self.num_found = 0

    def find(self, scope: str, body: bytes) -> tuple[Beginning | None, int | None]:
        """The longest known beginning of a body, and where the one ends that is worth to learn(), if there is one."""
        to_learn, whole = None, last_end(body)
        self._note(_key(scope, body, whole))    # what the next turn goes on from
        for end in ends_before(body, whole):
            key = _key(scope, body, end)
            found = self._known.get(key)
            if found is not None and body.startswith(found.chat.body):
                self._known.move_to_end(key)
                is_long = (len(body) - end) * TAIL_SHARE <= len(body)
                return found, None if is_long else to_learn
            if to_learn is None:
                to_learn = end if self._seen.get(key, TRIES_MAX) < TRIES_MAX else None
                self._note(key)
        return None, to_learn

    def read(self, beginning: Beginning, body: bytes) -> ChatRequest | None:
        """What a body says that begins so; None leaves it to the parser. A salt of its own is a scope of its own."""
        request = parse_behind(beginning.chat, body)
        if request is None or request.cache_salt is not None:
            return None
        self.num_found += 1
        return request

    def learn(self, scope: str, body: bytes, end: int, *, request: ChatRequest, renderer: PromptRenderer) -> None:
        """Understand the beginning of a body that has been found right and says `request`."""
        key = _key(scope, body, end)
        self._seen[key] = self._seen.get(key, 0) + 1
        chat = beginning_of(body, end) if request.cache_salt is None else None
        if chat is None:
            return
        known = renderer.known_beginning(replace(request, messages=chat.messages), scope=scope)
        if known is None:
            return
        num_bytes = (_ENTRY_BYTES + _MESSAGE_BYTES * len(chat.messages) + end + 2 * getsizeof(known.text)
                     + len(known.token_ids) * (known.token_ids.itemsize + CHAINS_MAX * _CHAIN_TOKEN_BYTES))
        if num_bytes > self._max_bytes // 4:
            return
        self._forget(key)
        del self._seen[key]
        self._known[key] = Beginning(chat, renderer, known, {}, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def check_invariants(self) -> None:
        """AssertionError when a bound is broken."""
        assert self.num_bytes == sum(known.num_bytes for known in self._known.values()) <= self._max_bytes
        assert len(self._seen) <= SEEN_MAX

    def _forget(self, key: Key) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self.num_bytes -= known.num_bytes

    def _note(self, key: Key) -> None:
        self._seen.setdefault(key, 0)
        self._seen.move_to_end(key)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)


def _key(scope: str, body: bytes, end: int) -> Key:
    return scope, xxh3_128_digest(memoryview(body)[:end])
