"""Free ids: which rows of the block tree's columns are free, as runs of consecutive ids.

Owns them: a chain wants its ids in a row, and one that goes tail first gives them back so. It must never know what an
id was used for. Known approximation: a run that came back between two others does not join them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class FreeIds:
    """A stack of runs, the top one apart: from `first` up to, and without, `end`."""

    __slots__ = ("_ends", "_firsts", "end", "first")

    def __init__(self) -> None:
        self.first = self.end = 0
        self._firsts = array("i")
        self._ends = array("i")

    def next_run(self) -> bool:
        """The top run is used up: the one below it is the top. Whether there was one."""
        if not self._firsts:
            return False
        self.first, self.end = self._firsts.pop(), self._ends.pop()
        return True

    def add_run(self, first: int, end: int) -> None:
        """These are free now, and next."""
        if self.first < self.end:
            self._firsts.append(self.first)
            self._ends.append(self.end)
        self.first, self.end = first, end

    def take(self, num_max: int) -> int:
        """The first of as many ids in a row as the top run has, `num_max` at most; `first` says how many."""
        taken = self.first
        self.first = min(taken + num_max, self.end)
        return taken

    def give_back(self, block: int) -> None:
        """`block` is free again."""
        if block == self.first - 1:
            self.first = block
        elif block == self.end:
            self.end += 1
        else:
            self.add_run(block, block + 1)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.end)
        for first, end in zip(self._firsts, self._ends, strict=True):
            yield from range(first, end)
