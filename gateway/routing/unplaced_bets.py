"""Unplaced bets: on blocks that nobody but the one request has named yet, so that the tree need not know of them.

Events mostly confirm such a bet before anybody else comes by there, and then it has cost an entry in a dict. Whoever
does come by, with a prompt, a bet or an event, has it placed first, so that nobody can tell the difference.

Owns which bets are unplaced. What placing means is the prefix index's business. Known approximation: the blocks count
as asked for when they are placed, not when they were bet on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from gateway.routing.bets import OpenBets, Speculation
from gateway.routing.block_tree import ROOT, BlockTree
from gateway.routing.claims import Claims
from gateway.routing.holder_sets import NOBODY

UNPLACED_BETS_MAX = 4096
UNPLACED_HASH_BYTES = 44   # of a chain that is kept for one


class UnplacedBets:
    """By the hash of the first block bet on. No two have a block in common, and `tree` has none of their blocks.

    `place` puts a bet into the tree: on the hashes that it is given, below the block that it is given.
    """

    def __init__(self, tree: BlockTree, open_bets: OpenBets,
                 place: Callable[[Speculation, int, Sequence[int]], None]) -> None:
        self.by_first: dict[int, Speculation] = {}
        self._tree = tree
        self._open = open_bets
        self._place = place
        self._num_hashes = 0

    def may_add(self, chain: Sequence[int], depth: int) -> bool:
        """Whether a bet on `chain` from `depth` on can stay unplaced, if the tree does not know the first block."""
        by_first = self.by_first
        if not by_first:
            return True
        return len(by_first) < UNPLACED_BETS_MAX and by_first.keys().isdisjoint(chain[depth:])

    def add(self, bet: Speculation, chain: Sequence[int], depth: int) -> None:
        """It is on `chain` from `depth` on."""
        bet.chain, bet.depth = chain, depth
        self.by_first[chain[depth]] = bet
        self._num_hashes += len(chain)

    def void(self, bet: Speculation) -> None:
        """It is over."""
        self._drop(bet)
        self._open.take(bet)

    def of(self, claims: Claims) -> list[Speculation]:
        """Those of one endpoint."""
        return [bet for bet in self.by_first.values() if bet.claims is claims]

    def meet(self, claims: Claims, hashes: Sequence[int], parent: int | None) -> None:
        """`claims` come to hold the chain `hashes` below `parent`: a bet on just that is over, others are placed."""
        bet = self.by_first.get(hashes[0])
        if bet is not None and bet.claims is claims and bet.num_blocks <= len(hashes):
            chain, depth = bet.chain, bet.depth
            if hashes[bet.num_blocks - 1] == chain[-1] and parent == (chain[depth - 1] if depth else None):
                self.void(bet)
        self.place_all(hashes)

    def below(self, hashes: Sequence[int], depth: int) -> Speculation | None:
        """The bet that goes on with the chain `hashes`, of which the tree knows the first `depth`."""
        by_first = self.by_first
        return by_first.get(hashes[depth]) if by_first and depth < len(hashes) else None

    def place_all(self, hashes: Sequence[int]) -> None:
        """Place the bets that begin with any of `hashes`."""
        by_first = self.by_first
        if not by_first or by_first.keys().isdisjoint(hashes):
            return
        for bet in [by_first[block_hash] for block_hash in hashes if block_hash in by_first]:
            if bet.chain:
                self.place(bet)

    def place(self, bet: Speculation) -> None:
        """Somebody comes by: from now on the tree knows its blocks, and again what has gone above them since."""
        chain, depth, tree = bet.chain, bet.depth, self._tree
        start = tree.find(chain[depth - 1]) if depth else ROOT
        if not start and depth:
            self.place_all(chain[:depth])
            known, is_cut = tree.known(ROOT, chain[:depth])
            if len(known) < depth and not is_cut:
                known += tree.append(known[-1] if known else ROOT, chain[len(known):depth], NOBODY)
            if len(known) < depth:   # another prefix has a block of this name by now
                self._drop(bet)
                self._place(bet, ROOT, ())
                return
            start = known[-1]
        self._drop(bet)
        self._place(bet, start, chain[depth:])

    def find(self, block_hash: int) -> int:
        """As the tree's, where it may be a block of any of these bets: all of them are placed."""
        for bet in list(self.by_first.values()):
            if bet.chain:
                self.place(bet)
        return self._tree.find(block_hash)

    def memory_bytes(self) -> int:
        """Of the chains; bets are counted by others."""
        return UNPLACED_HASH_BYTES * self._num_hashes

    def _drop(self, bet: Speculation) -> None:
        self._num_hashes -= len(bet.chain)
        del self.by_first[bet.chain[bet.depth]]

    def check_invariants(self, names: Container[int]) -> None:
        """AssertionError names what is wrong; `names` are the hashes that the tree knows."""
        blocks = [block for bet in self.by_first.values() for block in bet.chain[bet.depth:]]
        assert len(blocks) == len(set(blocks)), "a block is in two unplaced bets"
        assert not any(block in names for block in blocks), "the tree knows the block of an unplaced bet"
        assert self._num_hashes == sum(len(bet.chain) for bet in self.by_first.values()), "hashes are miscounted"
