"""Drives a PagedModel the way a scheduler would: sequences with shuffled block tables, cut into steps at will."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.kv_storage import KVStorage
from worker.model.paged_model import PagedModel


@dataclass
class PagedRun:
    """A storage and a shuffled list of free blocks. Blocks are never given back."""

    model: PagedModel
    num_blocks: int = 256
    seed: int = 0
    storage: KVStorage = field(init=False)
    free_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.storage = self.model.make_storage(self.num_blocks)
        self.free_blocks = random.Random(self.seed).sample(range(self.num_blocks), self.num_blocks)

    def new_table(self, num_tokens: int, *, prefix: Sequence[int] = ()) -> list[int]:
        """Blocks for `num_tokens` positions, the first of them `prefix`."""
        num_new = -(-num_tokens // self.model.block_size) - len(prefix)
        return [*prefix, *(self.free_blocks.pop() for _ in range(num_new))]

    def step(self, *shares: SequenceRows) -> torch.Tensor:
        return self.model.forward(self.batch(*shares), self.storage)

    @staticmethod
    def batch(*shares: SequenceRows) -> ForwardBatch:
        return ForwardBatch(shares)

    def cut(self, token_ids: Sequence[int], table: Sequence[int], lengths: Sequence[int], *,
            start: int = 0) -> torch.Tensor:
        """Compute positions from `start` on in steps of `lengths`; logits [steps, vocab] of each step's last row."""
        assert start + sum(lengths) == len(token_ids)
        logits = []
        for length in lengths:
            logits.append(self.step(SequenceRows(token_ids[start:start + length], start, table, start, True)))
            start += length
        return torch.cat(logits)

    def contents(self, table: Sequence[int], num_tokens: int) -> list[torch.Tensor]:
        """Copies of a sequence's keys and values in every layer, [num_tokens, kv_head, dim] each."""
        ids = torch.tensor(table)
        return [store[ids].flatten(0, 1)[:num_tokens].clone() for store in (*self.storage.keys, *self.storage.values)]


def random_cut(num_tokens: int, rng: random.Random) -> list[int]:
    """Lengths that add up to `num_tokens`: a mix of single tokens, ragged and large chunks."""
    lengths: list[int] = []
    while (rest := num_tokens - sum(lengths)) > 0:
        lengths.append(min(rest, rng.choice([1, 2, 15, 16, 17, rng.randint(1, 64), rng.randint(1, num_tokens)])))
    return lengths
