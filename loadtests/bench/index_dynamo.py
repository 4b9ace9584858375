"""Dynamo's radix tree under the cases of index_arms.py: for an interpreter with `ai-dynamo-runtime`, nothing of ours.

A case's name in by line, its CPU microseconds out: of the whole process, since the tree has a thread of its own, and
up to the answer to a question asked last. Events are JSON, as its interface wants them: made outside the measured
time, parsed inside it. A match is measured until Python has the scores as a dict, which is what a router written in
Python needs.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

RadixTree: Any = import_module("dynamo._core").RadixTree

NUM_ENDPOINTS, NUM_BLOCKS, REPEATS = 64, 2000, 20


def stored(hashes: Sequence[int], parent: int | None = None) -> bytes:
    """An event of the worker."""
    blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
    return json.dumps({"event_id": 1, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}).encode()


def removed(hashes: Sequence[int]) -> bytes:
    """An event of the worker."""
    return json.dumps({"event_id": 1, "data": {"removed": {"block_hashes": hashes}}}).encode()


class Cases:
    """As index_arms.LocalArm."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.chain = self.hashes()
        self.same, self.apart, self.holed, self.growing = RadixTree(), RadixTree(), RadixTree(), RadixTree()
        for worker in range(NUM_ENDPOINTS):
            self.same.apply_event(worker, stored(self.chain))
            self.holed.apply_event(worker, stored(self.chain))
            self.apart.apply_event(worker, stored(self.chain[:NUM_BLOCKS * (worker + 1) // NUM_ENDPOINTS]))
        self.holed.apply_event(5, removed(self.chain[NUM_BLOCKS // 2:NUM_BLOCKS // 2 + 1]))

    def hashes(self) -> list[int]:
        """Of a chain never seen before."""
        return [self.rng.getrandbits(64) for _ in range(NUM_BLOCKS)]

    def measure(self, case: str) -> float:
        """CPU microseconds of one run of the case."""
        kind, _, how = case.partition(", ")
        if kind == "match":
            tree = self.apart if "another depth" in how else self.holed if "hole" in how else self.same
            asked = self.hashes() if "nothing" in how else self.chain
            return timed(lambda: [tree.find_matches(asked).scores for _ in range(REPEATS)]) / REPEATS
        chain = self.hashes()
        length = 1 if kind == "store" and how.startswith("1 block") else 16
        back = int(how.split()[-2]) if "streams" in how else 1   # where the parent of an event's first block stands
        events = [stored(chain[at:at + length], chain[at - back] if at >= back else None)
                  for at in range(0, NUM_BLOCKS, length)]
        if kind == "store":
            return self.apply(0, events)
        for event in events:
            self.growing.apply_event(0, event)
        if kind == "remove":
            return self.apply(0, [removed(chain[at:at + 16][::-1]) for at in range(0, NUM_BLOCKS, 16)][::-1])
        return self.apply(1, [stored(chain)])

    def apply(self, worker: int, events: Sequence[bytes]) -> float:
        """CPU microseconds a block."""
        apply_event = self.growing.apply_event

        def work() -> None:
            for event in events:
                apply_event(worker, event)
            self.growing.find_matches([0])

        return timed(work) / NUM_BLOCKS


def timed(work: Callable[[], object]) -> float:
    """CPU microseconds."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1000


def main() -> None:
    """One line a case, until the pipe closes."""
    cases = Cases(int(sys.argv[1]))
    print(json.dumps({"version": version("ai-dynamo-runtime")}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"us": cases.measure(line.strip())}), flush=True)


if __name__ == "__main__":
    main()
