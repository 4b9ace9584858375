"""Holds a sequence back while a running one computes the very block it needs next.

Owns who is held, and for whom. Holding is only ever a delay: when the leader has sealed the blocks both need, or has
left, the sequence goes on from there by itself; a leader's prefill is finite, and nobody follows more than
MAX_LEADERS of them one after the other. Nobody waits for a less urgent leader. It never looks into the pool.

Two sequences need the same block when its content (hash, tokens, extra keys) is equal and its parent is the same
block; the hash alone is a hint. Known approximation: the leader's speed does not matter, the follower waits for all
that they share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Blocks
from dataclasses import dataclass

from worker.core.sequence import Sequence

# Leaders that may fail a sequence (abort, error, preemption) before it stops waiting for others.
MAX_LEADERS = 8


@dataclass(frozen=True, slots=True)
class _Hold:
    leader: Sequence
    until_block: int
    num_leaders: int


class TwinGate:
    """Asked for each waiting sequence, and each running one in prefill, in each scheduling pass."""

    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}
        self._computing: defaultdict[int, list[Sequence]] = defaultdict(list)

    def begin_pass(self, leaders: Iterable[Sequence] = ()) -> None:
        """Note which block each of these computes next."""
        self._computing.clear()
        for sequence in leaders:
            self.add_leader(sequence)

    def add_leader(self, sequence: Sequence) -> None:
        """Whoever needs its next block too may follow it."""
        chain, index = sequence.chain, sequence.num_sealed_blocks
        if chain is not None and index < len(chain.blocks):
            self._computing[chain.blocks[index].block_hash].append(sequence)

    def still_held(self, sequence: Sequence, running: Collection[int]) -> bool:
        """Whether the leader found in an earlier pass is still at it. O(1): this is the common answer."""
        hold = self._holds.get(sequence.seq_id)
        if hold is None or hold.leader.seq_id not in running:
            return False
        return hold.leader.num_sealed_blocks < hold.until_block

    def hold(self, sequence: Sequence, matched_block_ids: tuple[int, ...]) -> int | None:
        """Hold the sequence back if a running one computes its next unmatched block.

        Returns how many leading blocks it will find sealed when the leader is done, or None when it should go ahead.
        """
        leader = self.leader_of(sequence, matched_block_ids)
        earlier = self._holds.get(sequence.seq_id)
        num_leaders = 1 if earlier is None else earlier.num_leaders + (earlier.leader is not leader)
        if leader is None or num_leaders > MAX_LEADERS:
            return None
        until_block = _num_shared(sequence, leader, len(matched_block_ids))
        self._holds[sequence.seq_id] = _Hold(leader, until_block, num_leaders)
        return until_block

    def forget(self, sequence: Sequence) -> None:
        """The sequence was admitted or has ended."""
        self._holds.pop(sequence.seq_id, None)

    def leader_of(self, sequence: Sequence, matched_block_ids: Blocks[int]) -> Sequence | None:
        """Who computes the block that comes behind these ones of the sequence's."""
        index = len(matched_block_ids)
        if sequence.chain is None or index >= len(sequence.chain.blocks):
            return None
        content = sequence.chain.blocks[index]
        for leader in self._computing.get(content.block_hash, ()):
            assert leader.chain is not None
            if leader.num_sealed_blocks != index or leader.chain.blocks[index] != content:
                continue
            if leader.priority > sequence.priority:
                continue
            if index == 0 or leader.block_table[index - 1] == matched_block_ids[-1]:
                return leader
        return None


def _num_shared(sequence: Sequence, leader: Sequence, start: int) -> int:
    """How many leading blocks both have in common, given that they agree up to and including block `start`."""
    assert sequence.chain is not None
    assert leader.chain is not None
    pairs = zip(sequence.chain.blocks[start:], leader.chain.blocks[start:], strict=False)
    num_equal = start
    for ours, theirs in pairs:
        if ours != theirs:
            break
        num_equal += 1
    return num_equal
