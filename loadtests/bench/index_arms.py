"""What the index benchmark asks of each arm that lives in this interpreter: ours, and a dict of holder masks.

A case sets itself up outside the measured time. The dict is what one would write in an afternoon: hash to a mask of
holders, and a walk down the prompt; it keeps no parents, counts nothing and forgets nothing by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.routing.prefix_index import PrefixIndex

NUM_ENDPOINTS = 64
NUM_BLOCKS = 2000
REPEATS = 20
# case -> unit; figures are by case, or by block.
CASES = {
    "match, all at one depth": "us",
    "match, each at another depth": "us",
    "match, all at one depth but one with a hole": "us",
    "match, nothing known": "us",
    "store, 16 blocks an event": "us/block",
    "store, 1 block an event": "us/block",
    "store, 1 block each of 16 streams": "us/block",
    "store, 1 block each of 64 streams": "us/block",
    "store of what another holds, one event": "us/block",
    "remove, tail first, 16 an event": "us/block",
}


class Arm(Protocol):
    """One index; `name` is in the table."""

    name: str

    def measure(self, case: str) -> float:
        """CPU microseconds of one run of the case."""


class Index(Protocol):
    """What both arms here offer."""

    def store(self, endpoint_id: str, hashes: Sequence[int], *, parent: int | None = None) -> object: ...

    def remove(self, endpoint_id: str, hashes: Sequence[int]) -> object: ...

    def match(self, hashes: Sequence[int], now: float) -> object: ...


class LocalArm:
    """The cases over any Index of this interpreter."""

    name = ""

    def __init__(self, rng: random.Random, make: Callable[[], Index]) -> None:
        self._rng = rng
        self._chain = self._hashes()
        self._same, self._apart, self._holed, self._growing = make(), make(), make(), make()
        for number in range(NUM_ENDPOINTS):
            self._same.store(f"e{number}", self._chain)
            self._holed.store(f"e{number}", self._chain)
            self._apart.store(f"e{number}", self._chain[:NUM_BLOCKS * (number + 1) // NUM_ENDPOINTS])
        self._holed.remove("e5", self._chain[NUM_BLOCKS // 2:NUM_BLOCKS // 2 + 1])

    def measure(self, case: str) -> float:
        """See Arm."""
        kind, _, how = case.partition(", ")
        if kind == "match":
            index = self._apart if "another depth" in how else self._holed if "hole" in how else self._same
            asked = self._hashes() if "nothing" in how else self._chain
            return _timed(lambda: [index.match(asked, 0.0) for _ in range(REPEATS)]) / REPEATS
        chain = self._hashes()
        if "streams" in how:
            return self._measure_streams(chain, int(how.split()[-2]))
        if kind == "store":
            return _timed(lambda: self._store(chain, 16 if how.startswith("16") else 1)) / NUM_BLOCKS
        self._store(chain, 16)
        if kind == "remove":
            pieces = [chain[at:at + 16][::-1] for at in range(0, NUM_BLOCKS, 16)][::-1]
            return _timed(lambda: [self._growing.remove("e0", piece) for piece in pieces]) / NUM_BLOCKS
        return _timed(lambda: self._growing.store("e1", chain)) / NUM_BLOCKS

    def _measure_streams(self, hashes: list[int], num_streams: int) -> float:
        """Each turn every stream has one more block: what a worker tells of in one batch, or in a row."""
        parents = self._hashes()[:num_streams]
        for first in parents:
            self._growing.store("e0", [first])
        turns = [hashes[at:at + num_streams] for at in range(0, NUM_BLOCKS - num_streams + 1, num_streams)]
        pairs = list(zip([parents, *turns], turns, strict=False))

        def work() -> None:
            for pair in pairs:
                self._store_each(*pair)

        return _timed(work) / (len(turns) * num_streams)

    def _store_each(self, parents: list[int], hashes: list[int]) -> None:
        """One block behind each of `parents`: one after the other, where the index knows no other way."""
        for parent, block_hash in zip(parents, hashes, strict=True):
            self._growing.store("e0", [block_hash], parent=parent)

    def _store(self, chain: list[int], length: int) -> None:
        parent = None
        for at in range(0, NUM_BLOCKS, length):
            piece = chain[at:at + length]
            self._growing.store("e0", piece, parent=parent)
            parent = piece[-1]

    def _hashes(self) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(NUM_BLOCKS)]


class OurArm(LocalArm):
    """gateway.routing.prefix_index."""

    name = "headstart"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, lambda: PrefixIndex(1 << 40))

    def _store_each(self, parents: list[int], hashes: list[int]) -> None:
        index = self._growing
        assert isinstance(index, PrefixIndex)
        assert index.store_each("e0", parents, hashes) == len(hashes)


class HolderMasks:
    """Hash to a mask of holders."""

    def __init__(self) -> None:
        self._mask: dict[int, int] = {}
        self._bits: dict[str, int] = {}

    def store(self, endpoint_id: str, hashes: Sequence[int], *, parent: int | None = None) -> None:
        """`parent` is not kept."""
        bit = self._bits.setdefault(endpoint_id, 1 << len(self._bits))
        mask = self._mask
        for block_hash in hashes:
            mask[block_hash] = mask.get(block_hash, 0) | bit

    def remove(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """A block without holders goes."""
        bit, mask = self._bits[endpoint_id], self._mask
        for block_hash in hashes:
            left = mask.get(block_hash, 0) & ~bit
            if left:
                mask[block_hash] = left
            else:
                mask.pop(block_hash, None)

    def match(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """A walk, until nobody is left."""
        depths: dict[int, int] = {}
        held = -1
        get = self._mask.get
        for depth, block_hash in enumerate(hashes):
            now_held = get(block_hash, 0) & held
            if now_held != held:
                if depth:
                    depths[depth] = held & ~now_held
                held = now_held
                if not held:
                    break
        else:
            depths[len(hashes)] = held
        return {name: depth for depth, ended in depths.items() for name, bit in self._bits.items() if ended & bit}


class DictArm(LocalArm):
    """HolderMasks."""

    name = "dict of masks"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, HolderMasks)


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1000
