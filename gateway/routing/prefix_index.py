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

from array import array
from collections.abc import Iterable, Sequence

from gateway.routing.bets import OpenBets, Speculation
from gateway.routing.block_tree import ROOT, ROW_BYTES, BlockTree
from gateway.routing.claims import STAKE_COUNT_BITS, STAKE_COUNT_MASK, Claims
from gateway.routing.holder_sets import SET_BYTES
from gateway.routing.holdings import Holdings
from gateway.routing.lanes import ONE, REFERENCES_MAX, Lanes
from gateway.routing.roster import NO_MATCH, Match, Roster
from gateway.routing.sweep import Sweep
from gateway.routing.unplaced_bets import UnplacedBets

__all__ = ["NO_MATCH", "Match", "PrefixIndex", "Speculation"]

# Measured with tracemalloc on CPython 3.11 (tests/unit/test_routing_prefix_index.py holds them to it).
LEAF_BYTES = 160
EXTRA_BYTES = 120  # of a count other than one in the first lane, or of a block that is bet on
SPECULATION_BYTES = 400
BET_BLOCK_BYTES = 4
# What one more block may cost at most: a row, a leaf, a set of its own, a count.
_WORST_BYTES = ROW_BYTES + LEAF_BYTES + SET_BYTES + EXTRA_BYTES + BET_BLOCK_BYTES

HISTORY_BETS_MAX = 4096


class PrefixIndex:
    """One writer (the event loop). Instants are seconds of any one monotonic clock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_evicted_blocks = 0
        self.num_refused_blocks = 0  # no known parent, or a collision
        self._tree = BlockTree()
        self._holdings = Holdings(self._tree)
        self._roster = Roster()
        self._sweep: Sweep | None = None
        self._lanes = Lanes()
        self._bets = OpenBets()
        self._unplaced = UnplacedBets(self._tree, self._bets, self._place)
        self._next_serial = 0
        self._num_extra = 0  # references and stakes, over all endpoints
        self._num_spent = 0  # blocks that came and sets that were made: beyond a limit, the bound is looked at
        self._spent_max = 0

    # ---- writing -------------------------------------------------------------------------------------------------

    def store(self, endpoint_id: str, hashes: Sequence[int], tier: str = "gpu", *, group: int = 0,
              parent: int | None = None) -> int:
        """`endpoint_id` holds the chain `hashes`, which follows the block hashed `parent` (None: from the root on).

        Each call adds one reference per block and (tier, group). Returns how many blocks were taken in: fewer than
        given when the parent is not in the index, or after a hash that is known under another parent.
        """
        tree = self._tree
        start = ROOT if parent is None else tree.find(parent) or self._unplaced.find(parent)
        if (not start and parent is not None) or not hashes:
            self.num_refused_blocks += len(hashes)
            return 0
        claims = self._roster.by_id.get(endpoint_id) or self._roster.join(endpoint_id)
        shift = 0 if tier == "gpu" and not group else self._lanes.shift(tier, group)
        if self._unplaced.by_first:
            self._unplaced.meet(claims, hashes, parent)
        if len(hashes) == 1 and not shift and self._holdings.append_one(claims, start, hashes[0]):
            claims.num_confirmed += 1   # a decoding engine's events
            self._settle(1)
            return 1
        is_new = not tree.find(hashes[0])
        bits = claims.bits if self._lanes.fast >> shift & 1 else claims.confirmed_bit | claims.any_bit
        known, is_cut = tree.known(start, hashes) if not is_new else ([], False)
        num_stored = len(known)
        last = start
        if known:
            last = known[-1]
            self._num_extra += claims.reference(known, shift, self._holdings.bits_of)
            self._holdings.grant(claims, known, bits)
        if num_stored < len(hashes) and not is_cut:
            fresh = self._append(claims, last, hashes[num_stored:] if known else hashes, bits)
            claims.num_confirmed += len(fresh)
            if shift:
                claims.references.update(dict.fromkeys(fresh, ONE << shift))
                self._num_extra += len(fresh)
            num_stored += len(fresh)
            last = fresh[-1] if fresh else last
        self.num_refused_blocks += len(hashes) - num_stored
        if num_stored == len(known):
            tree.touch(last)
        self._settle(len(hashes))
        return num_stored

    def store_next(self, endpoint_id: str, parent: int, block_hash: int) -> bool:
        """store() of one block in the first lane, behind one that the endpoint holds, as it comes from a decoding
        stream; False, and nothing done, where it is known, its parent is not held or a bet is on it."""
        claims = self._roster.by_id.get(endpoint_id)
        start = self._tree.find(parent)
        if (claims is None or not start or block_hash in self._unplaced.by_first
                or not self._holdings.bits_of(start, claims) & claims.confirmed_bit
                or not self._holdings.append_one(claims, start, block_hash)):
            return False
        claims.num_confirmed += 1
        self._settle(1)
        return True

    def store_each(self, endpoint_id: str, parents: Sequence[int], hashes: Sequence[int]) -> int:
        """store() of each of `hashes` as one block in the first lane, which follows the one hashed as beside it: many
        streams that decode. Up to the first that is known, whose parent this endpoint does not hold alone, or where
        bets or the bound have to be looked at; returns how many went before. The next is for store()."""
        claims = self._roster.by_id.get(endpoint_id)
        by_first, num_blocks = self._unplaced.by_first, self._num_spent + self._holdings.sets.num_made
        if (claims is None or num_blocks + len(hashes) > self._spent_max
                or (by_first and not by_first.keys().isdisjoint(hashes))):
            return 0
        num_stored = self._holdings.append_each(claims, parents, hashes)
        claims.num_confirmed += num_stored
        self._num_spent += num_stored
        return num_stored

    def remove(self, endpoint_id: str, hashes: Iterable[int], tier: str = "gpu", *, group: int = 0) -> int:
        """Drop one reference per hash. Returns how many were there to drop; the count never goes below zero."""
        claims = self._roster.by_id.get(endpoint_id)
        if claims is None:
            return 0
        shift = self._lanes.shift(tier, group)
        tree, holdings, references = self._tree, self._holdings, claims.references
        find, discard, drop = tree.find, tree.discard_childless, holdings.drop
        set_of, claimed, confirmed_bit = tree.set_of, holdings.sets.claimed, claims.confirmed_bit
        num_dropped = 0
        for block_hash in hashes:
            block = find(block_hash)
            if not block or not claimed[set_of[block]] & confirmed_bit:
                continue
            counts = references.get(block, ONE)
            if not counts >> shift & REFERENCES_MAX:
                continue
            num_dropped += 1
            counts -= 1 << shift
            if counts:
                self._num_extra += claims.count(block, counts)
                if not counts & self._lanes.fast:
                    drop(claims, block, claims.fast_bit)
                continue
            if references:
                self._num_extra += claims.count(block, ONE)
            claims.num_confirmed -= 1
            drop(claims, block, claims.bits)
            discard(block)
        self._settle(0)
        return num_dropped

    def speculate(self, endpoint_id: str, hashes: Sequence[int], expires_at: float, *,
                  blocks_max: int | None = None, confirmed: int | None = None) -> Speculation:
        """Bet that `endpoint_id` will hold the chain `hashes` (from the root on) until `expires_at`.

        Blocks it holds already need no bet. Marks the chain as just used, so every booking should come by here.
        With `blocks_max` the bets are all that is known of an endpoint that can hold so many blocks: beyond that the
        oldest bets go first, as its own least recently used blocks do. A single prompt may be larger.
        `confirmed`: what match() has just said of it, if that was asked.
        """
        tree = self._tree
        claims = self._roster.by_id.get(endpoint_id) or self._roster.join(endpoint_id)
        depth = self._holdings.confirmed_depth(claims, hashes) if confirmed is None else confirmed
        start = tree.find(hashes[depth - 1]) if depth else ROOT
        self._next_serial += 1
        speculation = Speculation(claims, expires_at, self._next_serial)
        last = start
        if (blocks_max is None and depth < len(hashes) and not tree.find(hashes[depth])
                and self._unplaced.may_add(hashes, depth)):
            self._unplaced.add(speculation, hashes, depth)
        else:
            rest = hashes[depth:]
            self._unplaced.place_all(rest)
            last = self._stake_all(speculation, start, rest)
        if speculation.chain or speculation.num_blocks:
            self._bets.place(speculation)
            if blocks_max is not None:
                self._keep_history(claims, speculation, blocks_max)
        tree.touch(last)
        self._settle(len(hashes) + SPECULATION_BYTES // _WORST_BYTES + 1)
        return speculation

    def withdraw(self, speculation: Speculation) -> None:
        """Take back what this bet added and nobody confirmed or bets on as well. Twice is harmless."""
        if speculation.chain:
            self._unplaced.void(speculation)
        blocks = self._bets.take(speculation)
        claims, serial = speculation.claims, speculation.serial
        stakes = claims.stakes
        for block in reversed(blocks):  # tail first: nothing below is left to visit
            stake = stakes.get(block)
            # A younger first bet: ours was settled, or a block's id names another block by now.
            if stake is None or stake >> STAKE_COUNT_BITS > serial:
                continue
            if stake & STAKE_COUNT_MASK > 1:
                stakes[block] = stake - 1
                continue
            del stakes[block]
            self._num_extra -= 1
            self._holdings.drop(claims, block, claims.any_bit)
            self._tree.discard_childless(block)
        self._settle(0)

    def expire(self, now: float) -> None:
        """Forget the bets that are past due."""
        for bet in self._bets.due(now):
            self.withdraw(bet)

    def purge(self, endpoint_id: str) -> None:
        """Forget the endpoint altogether, at once. Its open bets become harmless."""
        self.retire(endpoint_id)
        while self.sweep(1 << 20):
            pass

    def retire(self, endpoint_id: str) -> None:
        """Nothing matches the endpoint from now on; sweep() gives back what it took up."""
        claims = self._roster.retire(endpoint_id)
        if claims is None:
            return
        for bet in self._unplaced.of(claims):
            self._unplaced.void(bet)
        self._num_extra -= len(claims.references) + len(claims.stakes)
        claims.clear()
        self._holdings.sets.retired_bits |= claims.bits

    def sweep(self, num_blocks: int) -> bool:
        """Give memory of retired endpoints back, working for about as long as so many blocks take (about a
        microsecond each). Returns whether there is more to do."""
        sets = self._holdings.sets
        if self._sweep is None:
            if not sets.retired_bits:
                return False
            self._sweep = Sweep(self._tree, sets, sets.retired_bits)
        if not self._sweep.step(num_blocks):
            sets.retired_bits &= ~self._sweep.bits
            self._roster.recycle(self._sweep.bits)
            self._sweep = None
        return bool(sets.retired_bits)

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], now: float) -> dict[str, Match]:
        """Per endpoint that holds at least the first block: how far it holds the chain `hashes` (from the root on).

        Equal to walking the chain endpoint by endpoint, in time of the number of different depths. Bets past due at
        `now` are forgotten first; otherwise nothing changes.
        """
        if self._bets.is_due(now):
            self.expire(now)
        depths, ends = self._holdings.ends(hashes)
        while (bet := self._unplaced.below(hashes, depths[-1] if depths else 0)) is not None:
            self._unplaced.place(bet)
            depths, ends = self._holdings.ends(hashes)
        return self._roster.matches(depths, ends)

    def holds(self, endpoint_id: str, block_hash: int) -> bool:
        """Whether the endpoint has a confirmed claim on this block, reachable or not."""
        claims = self._roster.by_id.get(endpoint_id)
        block = self._tree.find(block_hash) if claims is not None else ROOT
        return claims is not None and block != ROOT and bool(
            self._holdings.bits_of(block, claims) & claims.confirmed_bit)

    def num_blocks(self, endpoint_id: str | None = None) -> int:
        """Distinct blocks that the endpoint is confirmed to hold; without an endpoint, all blocks known."""
        if endpoint_id is None:
            return len(self._tree)
        claims = self._roster.by_id.get(endpoint_id)
        return claims.num_confirmed if claims is not None else 0

    def num_speculative_blocks(self, endpoint_id: str) -> int:
        claims = self._roster.by_id.get(endpoint_id)
        if claims is None:
            return 0
        return len(claims.stakes) + sum(bet.num_blocks for bet in self._unplaced.of(claims))

    def memory_bytes(self) -> int:
        """An estimate from the counts: blocks, leaves, holder sets, counts beyond the usual, bets."""
        return (self._tree.memory_bytes() + LEAF_BYTES * len(self._tree.leaves) + SET_BYTES * len(self._holdings.sets)
                + EXTRA_BYTES * self._num_extra + self._unplaced.memory_bytes()
                + SPECULATION_BYTES * len(self._bets) + BET_BLOCK_BYTES * self._bets.num_blocks)

    def check_invariants(self) -> None:
        """AssertionError names what is wrong. Walks everything."""
        tree, holdings = self._tree, self._holdings
        tree.check_invariants()
        holdings.check_invariants(list(self._roster.by_id.values()))
        blocks = tree.blocks()
        for claims in self._roster.by_id.values():
            assert self._roster.slots[claims.slot] is claims, "slot and claims disagree"
            held = {block: holdings.bits_of(block, claims) for block in blocks}
            confirmed = {block for block, bits in held.items() if bits & claims.confirmed_bit}
            assert claims.references.keys() <= confirmed, "a count without a claim"
            assert claims.stakes.keys() == {b for b, bits in held.items() if bits == claims.any_bit}, "bets differ"
            assert len(confirmed) == claims.num_confirmed, "confirmed blocks and their count differ"
            for block in confirmed:
                counts = claims.references.get(block, ONE)
                is_fast = bool(counts & self._lanes.fast)
                assert counts, "a claim without a reference"
                assert bool(held[block] & claims.fast_bit) == is_fast, "a tier is wrong"
                assert held[block] & claims.any_bit, "a confirmed block that is not held at all"
            assert all(stake & STAKE_COUNT_MASK for stake in claims.stakes.values()), "a bet by nobody"
        assert self._num_extra == sum(len(c.references) + len(c.stakes) for c in self._roster.by_id.values())
        self._bets.check_invariants()
        self._unplaced.check_invariants({tree.names.key_of[block] for block in blocks})
        assert not len(tree) or self.memory_bytes() <= self.max_bytes, "over the bound"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _append(self, claims: Claims, parent: int, hashes: Sequence[int], bits: int) -> list[int]:
        """New blocks below `parent`, claimed for `bits`; the first of `hashes` is known to be unknown."""
        holder_set = self._holdings.fresh_set(parent, bits)
        blocks = self._tree.append(parent, hashes, holder_set)
        self._holdings.made(claims, holder_set, len(blocks))
        return blocks

    def _stake(self, claims: Claims, blocks: list[int]) -> array[int]:
        """One more bet on each of `blocks` that is not confirmed; returns those."""
        before = len(claims.stakes)
        unconfirmed = claims.stake(blocks, self._next_serial, self._holdings.bits_of)
        if len(claims.stakes) > before:
            self._num_extra += len(claims.stakes) - before
            self._holdings.grant(claims, blocks, claims.any_bit)
        return unconfirmed

    def _stake_all(self, speculation: Speculation, start: int, hashes: Sequence[int]) -> int:
        """The bet is on the chain `hashes` below `start`, as far as it is not confirmed. Returns the last block."""
        claims = speculation.claims
        known, is_cut = self._tree.known(start, hashes)
        last = known[-1] if known else start
        unconfirmed = self._stake(claims, known) if known else array("i")
        if len(known) < len(hashes) and not is_cut:
            fresh = self._append(claims, last, hashes[len(known):], claims.any_bit)
            claims.stakes.update(dict.fromkeys(fresh, speculation.serial << STAKE_COUNT_BITS | 1))
            self._num_extra += len(fresh)
            unconfirmed.extend(fresh)
            last = fresh[-1] if fresh else last
        speculation.place(unconfirmed)
        return last

    def _place(self, bet: Speculation, start: int, hashes: Sequence[int]) -> None:
        """An unplaced bet is on `hashes` below `start` from now on. The bound is for the next writing to look at:
        nothing must go while this one is under way."""
        num_before = bet.num_blocks
        self._num_spent += len(bet.chain)
        self._stake_all(bet, start, hashes)
        self._bets.shrank(bet, num_before)

    def _keep_history(self, claims: Claims, speculation: Speculation, blocks_max: int) -> None:
        history = claims.history
        history.append(speculation)
        while len(history) > 1 and (len(claims.stakes) > blocks_max or len(history) > HISTORY_BETS_MAX
                                    or not history[0].num_blocks):
            self.withdraw(history.popleft())

    def _settle(self, num_blocks: int) -> None:
        """After every growth, by so many blocks at most: look at the bound, if they may have reached it."""
        self._num_spent += num_blocks
        if self._num_spent + self._holdings.sets.num_made > self._spent_max:
            self._make_room()

    def _make_room(self) -> None:
        """The oldest leaves go while the bound is passed."""
        leaves = self._tree.leaves
        while leaves and self.memory_bytes() > self.max_bytes:
            self._evict(next(iter(leaves)))
        unplaced = self._unplaced.by_first
        while unplaced and self.memory_bytes() > self.max_bytes:
            self._unplaced.void(next(iter(unplaced.values())))
        left = max(0, self.max_bytes - self.memory_bytes()) // _WORST_BYTES
        self._spent_max = self._num_spent + self._holdings.sets.num_made + left

    def _evict(self, leaf: int) -> None:
        claimed, reached = self._holdings.clear(leaf)
        for claims in self._roster.owners(claimed):
            before = len(claims.references) + len(claims.stakes)
            claims.references.pop(leaf, None)
            claims.stakes.pop(leaf, None)
            self._num_extra += len(claims.references) + len(claims.stakes) - before
            claims.num_confirmed -= bool(claimed & claims.confirmed_bit)
            claims.num_unreached -= bool((claimed ^ reached) & claims.bits)
        self.num_evicted_blocks += 1
        self._tree.demote(self._tree.discard_childless(leaf))
