"""A transformers model whose attention reads and writes KV blocks.

Owns the loaded weights and the choice between strict and fast attention. Knows tensors and positions, never requests;
never allocates or frees a block. One forward at a time: the pass is a value handed down to the layers, not a global.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from worker.model.attention import AttentionPass
from worker.model.batch_layout import BatchLayout
from worker.model.compact_decoder import CompactDecoder
from worker.model.fast_attention import FastAttention
from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage
from worker.model.lora import LoraLayers
from worker.model.model_spec import ModelSpec
from worker.model.strict_attention import ROW_MULTIPLE, StrictAttention


class StepDecoder(Protocol):
    """What computes steps of some kind in place of the compact decoder."""

    def takes(self, batch: ForwardBatch, storage: KVStorage) -> bool: ...

    def logits(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """float32 [rows whose logits are wanted, vocab], after every layer's K/V were written."""
        ...


class PagedModel:
    """Runs one ForwardBatch at a time over a KVStorage made by `make_storage`."""

    def __init__(self, model: Any, spec: ModelSpec, *, exactness: str, block_size: int,
                 compact: CompactDecoder | None = None, adapters: LoraLayers | None = None,
                 few_rows: StepDecoder | None = None, many_rows: StepDecoder | None = None) -> None:
        """`compact` computes in place of `model`, which then has no weights of its own, and in place of that
        `few_rows`, or else `many_rows`, what it takes. `adapters` are wired in."""
        assert compact is None or exactness == "fast", "strict mode runs transformers' own modules"
        self.spec = spec
        self._compact = compact
        self._few_rows = few_rows
        self._many_rows = many_rows
        self._adapters = adapters
        self.exactness = exactness
        self.block_size = block_size
        self._model = model
        self._device = torch.device(spec.device)
        self._kv_dtype: torch.dtype = getattr(torch, spec.kv_dtype)

    def make_storage(self, num_blocks: int) -> KVStorage:
        """Room for `num_blocks` blocks in every layer. Raises ModelError when the memory cannot be had."""
        return KVStorage.allocate(self.spec.layers, num_blocks=num_blocks, block_size=self.block_size,
                                  dtype=self._kv_dtype, device=self._device,
                                  head_major=self.exactness == "fast" and self._device.type == "cpu")

    def matrices(self) -> list[torch.Tensor]:
        """One weight [out, in] of each shape that the model's own linear layers have."""
        by_shape = {module.weight.shape: module.weight for module in self._model.modules()
                    if isinstance(module, torch.nn.Linear)}
        return list(by_shape.values())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage,
                pooled: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Write K/V and return logits float32 [rows whose logits are wanted, vocab], in batch order.

        To `pooled` is added, for each sequence that pools, the sum float64 [hidden] of its rows' last hidden states.
        """
        if not batch.sequences:
            return torch.empty(0, self.spec.vocab_size, device=self._device)
        for decoder in (self._few_rows, self._many_rows):
            if decoder is not None and decoder.takes(batch, storage):
                return decoder.logits(batch, storage)
        strict = self.exactness == "strict"
        layout = BatchLayout.build(batch, block_size=self.block_size, device=self._device,
                                   row_multiple=ROW_MULTIPLE if strict else 1)
        if self._adapters is not None:
            self._adapters.begin(batch, layout)
        attention_pass = StrictAttention(layout, storage) if strict else FastAttention(layout, storage)
        see_hidden = None
        if pooled is not None and any(rows.pools for rows in batch.sequences):
            see_hidden = partial(_pool, batch, layout, pooled)
        if self._compact is not None:
            logits = self._compact.logits(layout, attention_pass, see_hidden=see_hidden)
            return logits[:layout.num_logits].float()
        with _hidden_seen(self._model.base_model, see_hidden):
            return self._through_modules(layout, attention_pass)

    def _through_modules(self, layout: BatchLayout, attention_pass: AttentionPass) -> torch.Tensor:
        inputs = {"input_ids": layout.token_ids, "position_ids": layout.position_ids, "use_cache": False,
                  "attention_pass": attention_pass}
        if layout.num_logits == 0:
            self._model.base_model(**inputs)
            return torch.empty(0, self.spec.vocab_size, device=self._device)
        # The family's own head, on the wanted rows alone: soft-capping and logit scaling live there.
        logits = self._model(**inputs, logits_to_keep=layout.logits_rows).logits[0]
        wanted: torch.Tensor = logits[:layout.num_logits].float()
        return wanted


def _pool(batch: ForwardBatch, layout: BatchLayout, pooled: list[torch.Tensor], hidden: torch.Tensor) -> None:
    pooled += [hidden[span.first_row:span.first_row + span.num_rows].double().sum(dim=0)
               for rows, span in zip(batch.sequences, layout.spans, strict=True) if rows.pools]


@contextmanager
def _hidden_seen(base_model: Any, see: Callable[[torch.Tensor], None] | None) -> Iterator[None]:
    """While transformers' modules run: its base model's last hidden states are shown, those of every row."""
    if see is None:
        yield
        return
    hook = base_model.register_forward_hook(lambda module, given, out: see(out.last_hidden_state[0]))
    try:
        yield
    finally:
        hook.remove()


def free_memory_bytes(device: str) -> int:
    """What `device` ("cpu", "cuda", "cuda:0") could still give to a KV pool, in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limits = [bound for bound in (_available_memory_bytes(), _cgroup_headroom_bytes()) if bound is not None]
    return min(limits)


def _available_memory_bytes() -> int:
    """MemAvailable where the kernel tells, else the physical pages that are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass   # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_headroom_bytes() -> int | None:
    """What a container's memory limit (cgroup v2) leaves, file cache that can be dropped included; None: no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, int(limit) - used)
    except (OSError, ValueError, KeyError):
        return None   # no cgroup v2 here
