"""The prefix index: block hash -> endpoints believed to hold that block.

Owns the claims. A confirmed claim comes from an endpoint's own events and is reference-counted per (tier, group),
since an engine may hold one logical block several times. A speculative claim is a bet: the request we just sent there
will leave its blocks behind. Bets stand apart, expire, and are replaced by the confirmation. It must never be taken
for the truth: a match is a hint, the worker verifies the hit.

All hashes are our own (worker.protocol.block_hash). Chains of different hash schemes never meet, since their roots
differ, so one index holds every model and block size.

Bounded: above `max_bytes` the least recently used tails go, whoever claims them, last block first: a parent never
goes before its children. Recency is that of the newest block below, kept per leaf; a block asked for in the middle of
a chain gets one second chance when its tail goes, which is an approximation of exact LRU.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from gateway.routing.block_tree import ROOT, BlockTree
from gateway.routing.claims import Claims, Speculation

__all__ = ["NO_MATCH", "Match", "PrefixIndex", "Speculation"]

# Measured with tracemalloc on CPython 3.11 (tests/unit/test_routing_prefix_index.py holds them to it). Tables double,
# so the true figure swings around these.
BLOCK_BYTES = 165
CLAIM_BYTES = 60
LEAF_BYTES = 160
SPECULATION_BYTES = 400

REFERENCES_MAX = 0xFFFF
LANES_MAX = 64
NAME_SETS_MAX = 4096
_LANE_BITS = 16


class Match(NamedTuple):
    """How much of a prompt an endpoint holds. Consecutive from the first block on; a gap ends the match.

    `speculative_blocks` are those beyond the confirmed run that hold when speculative claims count too.
    """

    confirmed_blocks: int
    speculative_blocks: int


NO_MATCH = Match(0, 0)


class PrefixIndex:
    """One writer (the event loop). Instants are seconds of any one monotonic clock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_evicted_blocks = 0
        self.num_refused_blocks = 0  # no known parent, or a collision
        self._tree = BlockTree()
        self._claims: dict[str, Claims] = {}
        self._slots: list[Claims | None] = []
        self._num_claims = 0
        self._lane_shift: dict[tuple[str, int], int] = {}
        self._pending: list[Speculation] = []  # heap by expiry
        self._next_serial = 0
        self._names: dict[int, tuple[str, ...]] = {}

    # ---- writing -------------------------------------------------------------------------------------------------

    def store(self, endpoint_id: str, hashes: Sequence[int], tier: str = "gpu", *, group: int = 0,
              parent: int | None = None) -> int:
        """`endpoint_id` holds the chain `hashes`, which follows the block hashed `parent` (None: from the root on).

        Each call adds one reference per block and (tier, group). Returns how many blocks were taken in: fewer than
        given when the parent is not in the index, or after a hash that is known under another parent.
        """
        start = ROOT if parent is None else self._tree.id_of.get(parent)
        if start is None or not hashes:
            self.num_refused_blocks += len(hashes)
            return 0
        claims = self._claims_of(endpoint_id)
        shift = self._shift(tier, group)
        known, fresh = self._tree.extend(start, hashes)
        if known:
            self._reference(claims, known, shift)
        if fresh:
            claims.references.update(dict.fromkeys(fresh, 1 << shift))
            self._tree.grant_fresh(fresh, claims.bits)
            self._num_claims += len(fresh)
        num_stored = len(known) + len(fresh)
        self.num_refused_blocks += len(hashes) - num_stored
        self._settle((fresh or known or [ROOT])[-1])
        return num_stored

    def remove(self, endpoint_id: str, hashes: Iterable[int], tier: str = "gpu", *, group: int = 0) -> int:
        """Drop one reference per hash. Returns how many were there to drop; the count never goes below zero."""
        claims = self._claims.get(endpoint_id)
        if claims is None:
            return 0
        shift = self._shift(tier, group)
        num_dropped = 0
        for block_hash in hashes:
            block = self._tree.id_of.get(block_hash)
            references = claims.references.get(block, 0) if block is not None else 0
            if block is None or not references >> shift & REFERENCES_MAX:
                continue
            num_dropped += 1
            references -= 1 << shift
            if references:
                claims.references[block] = references
            else:
                del claims.references[block]
                self._drop_claim(block, claims.bits)
                self._tree.discard_unclaimed(block)
        return num_dropped

    def speculate(self, endpoint_id: str, hashes: Sequence[int], expires_at: float) -> Speculation:
        """Bet that `endpoint_id` will hold the chain `hashes` (from the root on) until `expires_at`.

        Blocks it holds already need no bet. Marks the chain as just used, so every booking should come by here.
        """
        claims = self._claims_of(endpoint_id)
        depth = self._confirmed_depth(claims, hashes)
        start = self._tree.id_of[hashes[depth - 1]] if depth else ROOT
        known, fresh = self._tree.extend(start, hashes[depth:])
        references = claims.references
        unconfirmed = [block for block in known if block not in references] if references else known
        self._next_serial += 1
        speculation = Speculation(claims, unconfirmed + fresh, expires_at, self._next_serial)
        stake = (speculation.serial,)
        if unconfirmed:
            self._stake(claims, unconfirmed, stake)
        if fresh:
            claims.stakes.update(dict.fromkeys(fresh, stake))
            self._tree.grant_fresh(fresh, claims.any_bit)
            self._num_claims += len(fresh)
        heapq.heappush(self._pending, speculation)
        self._settle((fresh or known or [start])[-1])
        return speculation

    def withdraw(self, speculation: Speculation) -> None:
        """Take back what this bet added and nobody confirmed or bets on as well. Twice is harmless."""
        claims, blocks = speculation.take()
        serial = speculation.serial
        for block in reversed(blocks):  # tail first: nothing below is left to visit
            stake = claims.stakes.get(block)
            # A block's id may name another block by now; its stakes then are others'.
            if stake is None or serial not in stake:
                continue
            if len(stake) > 1:
                claims.stakes[block] = tuple(other for other in stake if other != serial)
                continue
            del claims.stakes[block]
            self._drop_claim(block, claims.any_bit)
            self._tree.discard_unclaimed(block)

    def expire(self, now: float) -> None:
        """Forget the bets that are past due."""
        while self._pending and self._pending[0].expires_at <= now:
            self.withdraw(heapq.heappop(self._pending))

    def purge(self, endpoint_id: str) -> None:
        """Forget the endpoint altogether, in time proportional to its blocks. Its open bets become harmless."""
        claims = self._claims.pop(endpoint_id, None)
        if claims is None:
            return
        tree, keep = self._tree, ~claims.bits
        blocks = [*claims.references, *claims.stakes]
        for block in blocks:
            tree.mask[block] &= keep
            tree.num_claims[block] -= 1
        for block in reversed(blocks):
            tree.discard_unclaimed(block)
        self._num_claims -= len(blocks)
        claims.references.clear()
        claims.stakes.clear()
        self._slots[claims.slot] = None

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], now: float) -> dict[str, Match]:
        """Per endpoint that holds at least the first block: how far it holds the chain `hashes` (from the root on).

        Equal to walking the chain endpoint by endpoint, in time of the number of different depths. Bets past due at
        `now` are forgotten first; otherwise nothing changes.
        """
        if self._pending and self._pending[0].expires_at <= now:
            self.expire(now)
        matches: dict[str, Match] = {}
        confirmed: dict[str, int] = {}
        confirmed_bits = self._confirmed_bits()
        for depth, lost in self._ends(hashes):
            exact = lost & confirmed_bits
            either = lost >> 1 & confirmed_bits
            if exact == either:  # the usual case: nothing speculative
                names = self._names_of(exact)
                if len(names) == 1:
                    matches[names[0]] = Match(depth, 0)
                else:
                    matches.update(dict.fromkeys(names, Match(depth, 0)))
                continue
            confirmed.update(dict.fromkeys(self._names_of(exact), depth))
            for endpoint_id in self._names_of(either):
                num_confirmed = confirmed.get(endpoint_id, 0)
                matches[endpoint_id] = Match(num_confirmed, depth - num_confirmed)
        return matches

    def holds(self, endpoint_id: str, block_hash: int) -> bool:
        """Whether the endpoint has a confirmed claim on this block, reachable or not."""
        claims = self._claims.get(endpoint_id)
        return claims is not None and self._tree.id_of.get(block_hash) in claims.references

    def num_blocks(self, endpoint_id: str | None = None) -> int:
        """Distinct blocks that the endpoint is confirmed to hold; without an endpoint, all blocks known."""
        if endpoint_id is None:
            return len(self._tree)
        claims = self._claims.get(endpoint_id)
        return len(claims.references) if claims is not None else 0

    def num_speculative_blocks(self, endpoint_id: str) -> int:
        claims = self._claims.get(endpoint_id)
        return len(claims.stakes) if claims is not None else 0

    def memory_bytes(self) -> int:
        """An estimate from the counts: blocks, claims, leaves, bets."""
        return (BLOCK_BYTES * len(self._tree) + CLAIM_BYTES * self._num_claims + LEAF_BYTES * len(self._tree.leaves)
                + SPECULATION_BYTES * len(self._pending))

    def check_invariants(self) -> None:
        """AssertionError names what is wrong. Walks everything."""
        tree = self._tree
        tree.check_invariants()
        num_claims: dict[int, int] = {}
        for claims in self._claims.values():
            assert self._slots[claims.slot] is claims, "slot and claims disagree"
            assert claims.references.keys().isdisjoint(claims.stakes), "a block is both confirmed and a bet"
            assert all(claims.references.values()), "a claim without a reference"
            for block in chain(claims.references, claims.stakes):
                num_claims[block] = num_claims.get(block, 0) + 1
            for block in tree.id_of.values():
                reach = claims.bits_of(block) & tree.mask[tree.parent[block]]
                assert tree.mask[block] & claims.bits == reach, f"wrong reach of {claims.endpoint_id}"
        assert num_claims == {b: tree.num_claims[b] for b in tree.id_of.values() if tree.num_claims[b]}
        assert self._num_claims == sum(num_claims.values()), "the sum of claims is off"
        assert not len(tree) or self.memory_bytes() <= self.max_bytes, "over the bound"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _claims_of(self, endpoint_id: str) -> Claims:
        claims = self._claims.get(endpoint_id)
        if claims is None:
            slot = self._slots.index(None) if None in self._slots else len(self._slots)
            claims = self._claims[endpoint_id] = Claims(endpoint_id, slot)
            self._slots[slot:slot + 1] = [claims]
            self._names.clear()
        return claims

    def _shift(self, tier: str, group: int) -> int:
        lane = (tier, group)
        shift = self._lane_shift.get(lane)
        if shift is None:
            # Beyond the limit, which only nonsense reaches, lanes share the last counter.
            shift = self._lane_shift[lane] = _LANE_BITS * min(len(self._lane_shift), LANES_MAX - 1)
        return shift

    def _reference(self, claims: Claims, blocks: list[int], shift: int) -> None:
        """One more reference on each of `blocks`, a chain of known blocks; the first one confirms."""
        references, stakes, num_claims, one = claims.references, claims.stakes, self._tree.num_claims, 1 << shift
        for block in blocks:
            held = references.get(block)
            if held is not None:
                if held >> shift & REFERENCES_MAX < REFERENCES_MAX:
                    references[block] = held + one
                continue
            references[block] = one
            if block in stakes:
                del stakes[block]
            else:
                num_claims[block] += 1
                self._num_claims += 1
        self._tree.grant(blocks, claims.bits, claims.bits_of)

    def _stake(self, claims: Claims, blocks: list[int], stake: tuple[int]) -> None:
        stakes, num_claims = claims.stakes, self._tree.num_claims
        for block in blocks:
            others = stakes.get(block)
            if others is not None:
                stakes[block] = others + stake
                continue
            stakes[block] = stake
            num_claims[block] += 1
            self._num_claims += 1
        self._tree.grant(blocks, claims.any_bit, claims.bits_of)

    def _drop_claim(self, block: int, bits: int) -> None:
        self._tree.num_claims[block] -= 1
        self._num_claims -= 1
        self._tree.revoke(block, bits)

    def _settle(self, block: int) -> None:
        """After every growth: `block` is the newest; the oldest go if there is no room."""
        self._tree.touch(block)
        leaves = self._tree.leaves
        while leaves and self.memory_bytes() > self.max_bytes:
            self._evict(next(iter(leaves)))

    def _evict(self, leaf: int) -> None:
        for claims in self._claims.values():
            if claims.references.pop(leaf, None) is not None or claims.stakes.pop(leaf, None) is not None:
                self._drop_claim(leaf, claims.bits)
        self.num_evicted_blocks += 1
        self._tree.demote(self._tree.discard_unclaimed(leaf))

    def _confirmed_depth(self, claims: Claims, hashes: Sequence[int]) -> int:
        """How far the endpoint's confirmed claims reach along the chain."""
        block_of, mask, bit = self._tree.id_of.get, self._tree.mask, claims.confirmed_bit
        return bisect_left(hashes, True, key=lambda block_hash: (block := block_of(block_hash)) is None
                           or not mask[block] & bit)

    def _ends(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """(depth, bits whose run ends there), ascending. Masks only lose bits along a chain: equal ends, one run."""
        ends: list[tuple[int, int]] = []
        if not hashes:
            return ends
        block_of, mask = self._tree.id_of.get, self._tree.mask
        first = mask[block] if (block := block_of(hashes[0])) is not None else 0
        if not first:
            return ends
        last_index = len(hashes) - 1
        last = mask[block] if (block := block_of(hashes[last_index])) is not None else 0
        waiting = [(0, first, last_index, last)] if first != last else []
        while waiting:
            low, low_mask, high, high_mask = waiting.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                middle_mask = mask[block] if (block := block_of(hashes[middle])) is not None else 0
                if middle_mask == low_mask:
                    low = middle
                elif middle_mask == high_mask:
                    high = middle
                else:
                    waiting.append((middle, middle_mask, high, high_mask))
                    high, high_mask = middle, middle_mask
            ends.append((high, low_mask & ~high_mask))
        if last:
            ends.append((len(hashes), last))
        return ends

    def _confirmed_bits(self) -> int:
        """Every endpoint's confirmed bit: 0b…0101."""
        return ((1 << 2 * len(self._slots)) - 1) // 3

    def _names_of(self, bits: int) -> tuple[str, ...]:
        """The endpoints whose confirmed bits these are; remembered, since prompts share holders."""
        names = self._names.get(bits)
        if names is None:
            if len(self._names) >= NAME_SETS_MAX:
                self._names.clear()
            names = tuple(claims.endpoint_id for claims in self._slots
                          if claims is not None and bits & claims.confirmed_bit)
            self._names[bits] = names
        return names
