"""What waiting sequences hold on to: the cached blocks that they will hit.

Owns the references of sequences that have not been admitted. A claim grows block by block as others seal what the
sequence needs, so that it keeps what its leader computed also when the leader leaves, and nobody's admission evicts
it. A claim never blocks anybody: it is given up before a running sequence is preempted or an earlier one kept out.

Together the claims cover at most `max_blocks` blocks. What lies beyond can still be hit, it is only not held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from worker.core.block_content import BlockContent
from worker.core.block_pool import BlockPool, Matchable
from worker.core.sequence import Sequence


class Claims:
    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pool = pool
        self._held: dict[int, list[int]] = {}
        self._num_claims: Counter[int] = Counter()   # of each block that is claimed at all

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence holds anything."""
        return bool(self._held.get(sequence.seq_id))

    @property
    def num_blocks(self) -> int:
        """Blocks under a claim, each counted once."""
        return len(self._num_claims)

    def holders(self) -> Counter[int]:
        """How many references on each block are claims."""
        return Counter(self._num_claims)

    def extend(self, sequence: Sequence) -> None:
        """Claim what has become findable behind the claim, as far as there is room for claims."""
        room = self.max_blocks - len(self._num_claims)
        if room <= 0 or sequence.chain is None:
            return
        held = self._held.get(sequence.seq_id, [])
        more = self._pool.match(_blocks_from(sequence, len(held), room), behind=held[-1] if held else None)
        if more:
            self._num_claims.update(more)
            self._held[sequence.seq_id] = held + more

    def found(self, sequence: Sequence) -> Matchable:
        """All that the sequence would hit now: what it claims, and what is findable behind that."""
        held = self._held.get(sequence.seq_id, [])
        more = self._pool.matchable(_blocks_from(sequence, len(held)), behind=held[-1] if held else None)
        return Matchable((*held, *more.block_ids), more.num_idle)

    def take(self, sequence: Sequence) -> list[int]:
        """End the claim: the references on its blocks are the caller's now."""
        held = self._held.pop(sequence.seq_id, [])
        self._num_claims.subtract(held)
        for block_id in held:
            if not self._num_claims[block_id]:
                del self._num_claims[block_id]
        return held

    def drop(self, sequence: Sequence) -> None:
        """Let go of everything; the blocks stay findable until somebody needs the room."""
        self._pool.release(self.take(sequence))


def _blocks_from(sequence: Sequence, start: int, num_max: int | None = None) -> Iterator[BlockContent]:
    """The contents of its full blocks from `start` on, one by one: a chain is long and mostly known already."""
    blocks = [] if sequence.chain is None else sequence.chain.blocks
    end = len(blocks) if num_max is None else min(len(blocks), start + num_max)
    return map(blocks.__getitem__, range(start, end))
