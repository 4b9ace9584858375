"""A transformers model whose attention reads and writes KV blocks."""

from __future__ import annotations

import torch

from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage
from worker.model.model_spec import ModelSpec


class PagedModel:
    """Runs one ForwardBatch at a time over a KVStorage made by `make_storage`."""

    spec: ModelSpec

    def make_storage(self, num_blocks: int) -> KVStorage:
        """Room for `num_blocks` blocks in every layer. Raises ModelError when the memory cannot be had."""
        raise AssertionError("not loaded")

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Write K/V and return logits float32 [number of sequences wanting logits, vocab], in batch order."""
        raise AssertionError("not loaded")


def free_memory_bytes(device: str) -> int:
    """What `device` ("cpu", "cuda", "cuda:0") could still give to a KV pool, in bytes."""
    raise AssertionError(device)
