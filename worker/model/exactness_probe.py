"""Asks the machine itself whether strict mode's promise holds on it.

That equal rows give equal bits in matrix products of equal kind was found on one CPU; another BLAS, another
instruction set or another thread count may not agree (three threads do not: torch cuts gelu's input into three runs
whose ends fall off the vector width). The probe runs a few dozen positions of the loaded model, cut
and batched in several ways, and compares every key, value and logit bit by bit. Before that it multiplies by one
matrix of each shape, alone, with as many rows as a longer prompt has: a BLAS may cut a product of 200 rows otherwise
than one of 40 or of 600. It takes a second or two and proves nothing beyond what it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.kv_storage import KVStorage
from worker.model.paged_model import PagedModel
from worker.model.strict_attention import KEY_TILE

_NUM_POSITIONS = 40
# Chunk lengths, each adding up to _NUM_POSITIONS: whole, ragged, on and off the row multiple, token by token.
_CUTS = ((40,), (1, 39), (16, 24), (23, 17), (36, 1, 1, 1, 1))
_NEIGHBOURS = (3, 21)
# Rows of the products compared, the last of them against the others; fewer where a product would take more.
_PRODUCT_ROWS = (16, 48, 64, 128, 208, 256, 512)
_PRODUCT_OPERATIONS_MAX = 4e9


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """`exact`: every cut of the probe gave the same bits. `note` is one line for the start-up log."""

    exact: bool
    note: str


def probe_exactness(model: PagedModel) -> ExactnessReport:
    """Compute the same positions whole, chunked, token by token and batched, and compare the bits."""
    if model.exactness != "strict":
        return ExactnessReport(False, "fast: answers may differ in the last bits from one batch or cut to the next")
    threads, num_ways = torch.get_num_threads(), len(_CUTS) + 1
    found = _uneven_product(model) or _uneven_cut(model)
    if found is not None:
        return ExactnessReport(False, f"strict: with {threads} threads here, {found}, so a cache hit may change an "
                                      "answer's last bits; try --threads 1 or another power of two")
    return ExactnessReport(True, f"strict: {_NUM_POSITIONS} positions around {_start(model) + _NUM_POSITIONS} gave "
                                 f"the same bits in {num_ways} cuts and batches, {threads} threads")


def _uneven_cut(model: PagedModel) -> str | None:
    """A way to cut or batch the probe's positions that gives other bits; None where none was found."""
    probe = _Probe(model)
    expected = probe.run(_CUTS[0], neighbours=())
    for cut in _CUTS[1:]:
        if not _equal(probe.run(cut, neighbours=()), expected):
            return f"positions cut {cut} differ from those computed whole"
    batched = probe.run(_CUTS[0], neighbours=_NEIGHBOURS)
    return None if _equal(batched, expected) else "positions batched with others differ from those computed alone"


@torch.inference_mode()
def _uneven_product(model: PagedModel) -> str | None:
    """A product in which a row's bits depend on how many rows there are; None where none was found."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.matrices():
        num_out, num_in = weight.shape
        rows_max = max(_PRODUCT_ROWS[1], _PRODUCT_OPERATIONS_MAX / (2 * num_out * num_in))
        most, *fewer = sorted((count for count in _PRODUCT_ROWS if count <= rows_max), reverse=True)
        rows = torch.randn(most, num_in, generator=generator).to(weight)
        whole = linear(rows, weight)
        for count in fewer:
            if not torch.equal(linear(rows[:count], weight), whole[:count]):
                return f"{count} rows by a matrix of {num_in} x {num_out} differ from the same among {most}"
    return None


class _Probe:
    """A storage whose past is random numbers, so that a long context costs nothing; runs cuts over it."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.start = _start(model)
        end = self.start + _NUM_POSITIONS
        self._blocks_each = -(-end // model.block_size)
        self._storage = model.make_storage(self._blocks_each * (1 + len(_NEIGHBOURS)))
        generator = torch.Generator().manual_seed(1)
        for tensor in (*self._storage.keys, *self._storage.values):
            noise = torch.randn(tensor[:-1].shape, generator=generator)    # the last block stays blank
            tensor[:-1].copy_(noise)

    def run(self, cut: Sequence[int], *, neighbours: Sequence[int]) -> list[torch.Tensor]:
        """Logits of the last position, then its sequence's K/V in every layer, after computing chunk by chunk."""
        begin, logits = 0, torch.empty(0)
        for length in cut:
            last = begin + length == _NUM_POSITIONS
            others = [self._rows(index + 1, 0, count, wants_logits=last) for index, count in enumerate(neighbours)]
            # In the middle of the batch, where its rows are neither first nor last.
            others.insert(len(others) // 2, self._rows(0, begin, length, wants_logits=last))
            logits = self._model.forward(ForwardBatch(tuple(others)), self._storage)
            begin += length
        return [logits[len(neighbours) // 2], *_contents(self._storage, self._blocks_each)]

    def _rows(self, sequence: int, begin: int, length: int, *, wants_logits: bool) -> SequenceRows:
        vocab = self._model.spec.vocab_size
        token_ids = [(7919 * position + 104729 * sequence + 13) % vocab for position in range(begin, begin + length)]
        table = range(sequence * self._blocks_each, (sequence + 1) * self._blocks_each)
        start = self.start + begin
        return SequenceRows(token_ids, start, table, start, wants_logits)


def _start(model: PagedModel) -> int:
    """Just short of the third key tile, so that rows fall on both sides of its edge; less in a small context."""
    return max(0, min(2 * KEY_TILE - _NUM_POSITIONS // 2, model.spec.max_context - _NUM_POSITIONS))


def _contents(storage: KVStorage, num_blocks: int) -> list[torch.Tensor]:
    return [tensor[:num_blocks].clone() for tensor in (*storage.keys, *storage.values)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
