"""Where keys and values live: per layer two tensors [block, slot, kv_head, dim].

Owns the layout and the memory. Two orders in memory look the same from outside: token by token, as kernels on GPUs
want it, or `head_major`, where a gather leaves each head's keys in one piece, ready for a matrix product: several
interleaved KV heads cost a copy per product, eightfold the product's own time when decoding on CPU. Never decides
which block belongs to whom (worker.core does) and never looks at what it stores. One block more than asked for is
kept, always zero: `blank_block` pads block tables to a common length, so that what a gather reads beyond a sequence's
blocks is finite and the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker.model.model_error import ModelError
from worker.model.model_spec import LayerGeometry

# Which blocks to read: their ids, or a run of them that lie one behind the other.
Blocks = torch.Tensor | slice


def blocks_to_read(block_ids: Sequence[int], device: torch.device) -> Blocks:
    """As a run where they are one: it need not be gathered."""
    first, last = block_ids[0], block_ids[-1]
    if last - first == len(block_ids) - 1 and all(later - earlier == 1 for earlier, later in pairwise(block_ids)):
        return slice(first, last + 1)
    return torch.tensor(block_ids, device=device)


@dataclass(frozen=True, slots=True)
class KVStorage:
    """`keys[layer]` is [num_blocks + 1, block_size, num_kv_heads, key_dim]; `values[layer]` alike with value_dim.

    With `head_major` these are views of memory that is [num_kv_heads, num_blocks + 1, block_size, dim]; `by_head` has
    each layer's keys and values in that order, `slots_by_head` with the blocks end to end. Where a layer's values are
    the front of its keys, `values[layer]` is a view of `keys[layer]`.
    """

    block_size: int
    num_blocks: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    by_head: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    slots_by_head: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def head_major(self) -> bool:
        return bool(self.by_head)

    @classmethod
    def allocate(cls, layers: Sequence[LayerGeometry], *, num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device, head_major: bool = False) -> KVStorage:
        """Zeroed room for `num_blocks` blocks in every layer. ModelError when the memory cannot be had."""
        if num_blocks < 1:
            raise ModelError(f"a KV pool of {num_blocks} blocks cannot hold a token; give it more room: --kv-memory")
        rows = num_blocks + 1

        def zeros(num_heads: int, dim: int) -> torch.Tensor:
            if head_major:
                return torch.zeros(num_heads, rows, block_size, dim, dtype=dtype, device=device).permute(1, 2, 0, 3)
            return torch.zeros(rows, block_size, num_heads, dim, dtype=dtype, device=device)

        try:
            keys = [zeros(g.num_kv_heads, g.key_dim) for g in layers]
            values = [store[..., :g.value_dim] if g.value_in_key else zeros(g.num_kv_heads, g.value_dim)
                      for g, store in zip(layers, keys, strict=True)]
        except (RuntimeError, MemoryError) as error:   # torch.OutOfMemoryError is a RuntimeError; the CPU's is plain
            wanted = rows * block_size * sum(g.elements_per_token() for g in layers) * dtype.itemsize
            raise ModelError(f"{wanted / 2**30:.1f} GiB for {num_blocks} KV blocks cannot be had on {device}; "
                             "lower --kv-memory") from error
        by_head = tuple((k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)) for k, v in zip(keys, values, strict=True))
        slots = tuple((k.flatten(1, 2), v.flatten(1, 2)) for k, v in by_head) if head_major else ()
        return cls(block_size, num_blocks, tuple(keys), tuple(values), by_head if head_major else (), slots)

    @property
    def blank_block(self) -> int:
        """A block id that always reads as zeros and is never written."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        apart = (values for layer, values in enumerate(self.values) if not self._value_in_key(layer))
        return sum(tensor.nbytes for tensor in (*self.keys, *apart))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows of keys [n, kv_head, key_dim] and values at `slots` [n]: slot = block id * block_size + i."""
        self.write_heads(layer, slots, keys.transpose(0, 1), values.transpose(0, 1))

    def write_heads(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The same of keys [kv_head, n, key_dim] and values."""
        pairs = [(0, keys), (1, values)]
        for which, rows in pairs[:1] if self._value_in_key(layer) else pairs:
            if self.head_major:
                store = self.slots_by_head[layer][which]
                store.index_copy_(1, slots, _in(store.dtype, rows))
            else:
                store = (self.keys, self.values)[which][layer]
                store.view(-1, *store.shape[2:]).index_copy_(0, slots, rows.transpose(0, 1).to(store.dtype))

    def gather(self, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of these blocks [n], end to end: keys [n * block_size, kv_head, key_dim] and values, in `dtype`."""
        def gathered(store: torch.Tensor) -> torch.Tensor:
            return store.index_select(0, block_ids).flatten(0, 1).to(dtype)

        return self._pair(layer, gathered, (self.keys[layer], self.values[layer]))

    def gather_heads(self, layer: int, blocks: Blocks, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """These blocks head by head: keys [kv_head, n * block_size, key_dim] and values, in `dtype`. To be read only:
        a run of blocks is no copy, and then several heads do not lie as a product wants them: end to end."""
        if not self.head_major:
            ids = torch.arange(blocks.start, blocks.stop, device=self.keys[layer].device) \
                if isinstance(blocks, slice) else blocks
            keys, values = self.gather(layer, ids, dtype)
            return keys.transpose(0, 1), values.transpose(0, 1)

        def gathered(by_head: torch.Tensor) -> torch.Tensor:
            if not isinstance(blocks, slice):
                return _in(dtype, by_head.index_select(1, blocks).flatten(1, 2))
            return _in(dtype, by_head[:, blocks].flatten(1, 2))

        return self._pair(layer, gathered, self.by_head[layer])

    def clear(self, layer: int, block_ids: torch.Tensor) -> None:
        """Zero these blocks [n] whole."""
        self.keys[layer].index_fill_(0, block_ids, 0)
        if not self._value_in_key(layer):
            self.values[layer].index_fill_(0, block_ids, 0)

    def _value_in_key(self, layer: int) -> bool:
        return self.values[layer].data_ptr() == self.keys[layer].data_ptr()

    def _pair(self, layer: int, gathered: Callable[[torch.Tensor], torch.Tensor],
              stores: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys = gathered(stores[0])
        if self._value_in_key(layer):
            return keys, keys[..., :stores[1].shape[-1]]
        return keys, gathered(stores[1])


def _in(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
