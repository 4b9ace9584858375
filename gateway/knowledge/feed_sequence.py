"""Is the next batch of events the next one? Pure bookkeeping for one worker's event feed.

Owns: which life of the worker (epoch) is followed and which sequence number comes next.
Must never: guess. A batch is applied only when every earlier one of the same life has been.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What a batch's number says about it."""

    NEXT = "next"            # apply it
    DUPLICATE = "duplicate"  # already applied: drop it
    GAP = "gap"              # some before it are missing: replay them first
    RESTART = "restart"      # another life of the worker: forget everything and start over


class FeedSequence:
    """One life's sequence, begun by a snapshot."""

    def __init__(self, epoch: str | None, next_seq: int) -> None:
        self.epoch = epoch
        self.next_seq = next_seq

    @property
    def last_seq(self) -> int | None:
        """The last batch that is in the index, applied or within the snapshot; None when there was none."""
        return self.next_seq - 1 if self.next_seq else None

    def is_last(self, seq: int, epoch: str | None) -> bool:
        """Whether this batch is that one: who can repeat it is the one we follow."""
        return seq == self.last_seq and (epoch is None or self.epoch is None or epoch == self.epoch)

    def judge(self, seq: int, epoch: str | None) -> Verdict:
        """`epoch` is None from engines that state none: there only a number going backwards tells of a restart."""
        if epoch is not None and self.epoch is not None and epoch != self.epoch:
            return Verdict.RESTART
        if seq < self.next_seq:
            return Verdict.DUPLICATE if epoch is not None else Verdict.RESTART
        return Verdict.NEXT if seq == self.next_seq else Verdict.GAP

    def applied(self, seq: int) -> None:
        """The batch `seq` is in the index now."""
        assert seq == self.next_seq, "a batch was applied out of order"
        self.next_seq = seq + 1
