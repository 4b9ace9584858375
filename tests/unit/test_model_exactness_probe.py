"""The probe reports an exact machine as exact, and one that is not, whatever it is that moves."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_model_folder
from worker.model import exactness_probe
from worker.model.exactness_probe import probe_exactness
from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel


def tiny(family: str, exactness: str) -> PagedModel:
    return load_model(resolve_model(str(tiny_model_folder(family))), device="cpu", exactness=exactness)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_strict_holds_here(family: str) -> None:
    report = probe_exactness(tiny(family, "strict"))
    assert report.exact, report.note


def test_fast_promises_nothing() -> None:
    report = probe_exactness(tiny("llama", "fast"))
    assert not report.exact
    assert report.note.startswith("fast:")


class NoisyLogits(PagedModel):
    """Rounds differently when there are few rows, as an unpadded matrix product does."""

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        logits = super().forward(batch, storage)
        return logits * (1 + 2 ** -20) if sum(len(rows.token_ids) for rows in batch.sequences) < 16 else logits


class NoisyNeighbours(PagedModel):
    """Lets a neighbour move one bit of what is stored."""

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        logits = super().forward(batch, storage)
        if len(batch.sequences) > 1:
            storage.values[-1][0, 0, 0, 0] += 1
        return logits


@pytest.mark.parametrize(("broken", "found"), [(NoisyLogits, "(36, 1, 1, 1, 1)"), (NoisyNeighbours, "batched")])
def test_a_machine_that_is_not_exact_is_found_out(broken: type[PagedModel], found: str) -> None:
    model = tiny("llama", "strict")
    report = probe_exactness(broken(model._model, model.spec, exactness="strict", block_size=model.block_size))
    assert not report.exact
    assert found in report.note


def test_a_product_that_depends_on_its_number_of_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MKL's does with two threads, where more rows than the probe computes are cut another way than few."""
    def few_rows_otherwise(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = rows @ weight.T
        return product * (1 + 2 ** -20) if 48 < len(rows) < 256 else product

    monkeypatch.setattr(exactness_probe, "linear", few_rows_otherwise)
    report = probe_exactness(tiny("llama", "strict"))
    assert not report.exact
    assert "208 rows" in report.note
