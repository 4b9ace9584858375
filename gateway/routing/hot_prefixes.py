"""Which prefixes are asked for most, with what it takes to compute them again elsewhere.

Owns a bounded table of prefixes by the hash of their last block. It must never be shown with tokens: those are for
workers, behind their token. A prefix is how far a prompt was known somewhere when it was routed; one seen for the
first time is only noted, so that the ever longer prompts of a conversation fill nothing.

Scores halve every HALF_LIFE_S. Known approximation: a prefix and a longer one that holds it count apart.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from worker.protocol.block_hash import pack_tokens, unpack_tokens

BLOCKS_MIN = 4
PREFIXES_MAX = 256
TOKENS_MAX = 4 << 20
SEEN_MAX = 4096
HALF_LIFE_S = 300.0


class Sighting(NamedTuple):
    """One request: `chain` are all its block hashes, of which `depth` were known; the salt is the workers'."""

    model: str
    chain: Sequence[int]
    depth: int
    token_ids: Sequence[int]
    block_size: int
    salt: bytes | None = None
    salt_from: int = 0


@dataclass(slots=True)
class HotPrefix:
    """`score` is as of `last_at`. `rank` orders scores as they are at any instant, without asking for one."""

    model: str
    chain: tuple[int, ...]
    packed_tokens: bytes
    block_size: int
    salt: bytes | None
    salt_from: int
    num_hits: int
    score: float
    last_at: float
    first_at: float
    rank: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.chain) * self.block_size

    def token_ids(self) -> list[int]:
        return unpack_tokens(self.packed_tokens)

    def hit(self, now: float) -> None:
        """Once more."""
        self.score = self.score * math.exp2((self.last_at - now) / HALF_LIFE_S) + 1
        self.last_at = now
        self.rank = math.log2(self.score) + now / HALF_LIFE_S
        self.num_hits += 1

    def score_at(self, now: float) -> float:
        return self.score * math.exp2((self.last_at - now) / HALF_LIFE_S)


class HotPrefixes:
    """At most `prefixes_max` prefixes of `tokens_max` tokens together; the lowest score goes first."""

    def __init__(self, *, prefixes_max: int = PREFIXES_MAX, tokens_max: int = TOKENS_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._tokens_max = tokens_max
        self._prefixes: dict[int, HotPrefix] = {}
        self._coldest: list[tuple[float, int]] = []  # a heap of (rank once, key): ranks only rise
        self._num_tokens = 0
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def hit(self, chain: Sequence[int], depth: int, now: float) -> bool:
        """Count one more request of which the first `depth` blocks of `chain` were known, if that is listed; whether
        it was."""
        prefix = self._prefixes.get(chain[depth - 1]) if depth >= BLOCKS_MIN else None
        if prefix is None:
            return False
        prefix.hit(now)
        return True

    def note(self, sighting: Sighting, now: float) -> None:
        """Count it."""
        if sighting.depth < BLOCKS_MIN or self.hit(sighting.chain, sighting.depth, now):
            return
        key = sighting.chain[sighting.depth - 1]
        if key in self._seen:
            del self._seen[key]
            self._add(key, sighting, now)
        else:
            self._seen[key] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)

    def get(self, key: int) -> HotPrefix | None:
        """The prefix whose last block has this hash."""
        return self._prefixes.get(key)

    def hottest(self, count: int, now: float) -> list[tuple[int, HotPrefix]]:
        """(hash, prefix), the highest score first."""
        ranked = sorted(self._prefixes.items(), key=lambda item: item[1].score_at(now), reverse=True)
        return ranked[:count]

    def _add(self, key: int, sighting: Sighting, now: float) -> None:
        num_tokens = sighting.depth * sighting.block_size
        if num_tokens > self._tokens_max:
            return
        prefix = self._prefixes[key] = HotPrefix(
            sighting.model, tuple(sighting.chain[:sighting.depth]), pack_tokens(sighting.token_ids[:num_tokens]),
            sighting.block_size, sighting.salt, sighting.salt_from, num_hits=1, score=1.0, last_at=now, first_at=now)
        prefix.hit(now)
        self._num_tokens += num_tokens
        while len(self._prefixes) > self._prefixes_max or self._num_tokens > self._tokens_max:
            self._num_tokens -= self._prefixes.pop(self._take_coldest()).num_tokens
        heappush(self._coldest, (prefix.rank, key))  # only now: the newest stays

    def _take_coldest(self) -> int:
        """The key of the lowest rank among those in the heap, which leaves it."""
        heap = self._coldest
        while (rank := self._prefixes[heap[0][1]].rank) > heap[0][0]:
            heapreplace(heap, (rank, heap[0][1]))
        return heappop(heap)[1]
