"""KV storage: what is written at a slot is gathered from its block; too little memory is an error in words."""

from __future__ import annotations

import pytest
import torch

from worker.model.kv_storage import KVStorage, blocks_to_read
from worker.model.model_error import ModelError
from worker.model.model_spec import LayerGeometry, ModelSpec

CPU = torch.device("cpu")
LAYERS = (LayerGeometry(2, 8, 8), LayerGeometry(1, 4, 6, window=32))    # layers may differ in every number


def storage(num_blocks: int = 5, dtype: torch.dtype = torch.float32, head_major: bool = False) -> KVStorage:
    return KVStorage.allocate(LAYERS, num_blocks=num_blocks, block_size=4, dtype=dtype, device=CPU,
                              head_major=head_major)


def test_shapes_follow_each_layer() -> None:
    made = storage()
    assert [tuple(keys.shape) for keys in made.keys] == [(6, 4, 2, 8), (6, 4, 1, 4)]
    assert [tuple(values.shape) for values in made.values] == [(6, 4, 2, 8), (6, 4, 1, 6)]
    assert made.num_bytes == 6 * 4 * (2 * 16 + 10) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_returns_what_was_written(dtype: torch.dtype) -> None:
    made = storage(dtype=dtype)
    keys, values = torch.arange(48.0).view(3, 2, 8), -torch.arange(48.0).view(3, 2, 8)
    made.write(0, torch.tensor([11, 8, 9]), keys, values)    # block 2, slots 3, 0, 1
    found_keys, found_values = made.gather(0, torch.tensor([4, 2, made.blank_block]), torch.float32)
    assert found_keys.shape == (12, 2, 8)
    assert torch.equal(found_keys[[7, 4, 5]], keys)
    assert torch.equal(found_values[[7, 4, 5]], values)
    assert not found_keys[[0, 1, 2, 3, 6, 8, 9, 10, 11]].any()


def test_both_orders_in_memory_look_the_same() -> None:
    token_major, head_major = storage(), storage(head_major=True)
    keys, values = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    slots, wanted = torch.tensor([4, 5, 6, 7, 16, 17, 0, 1, 2]), torch.tensor([4, 0, 1, head_major.blank_block])
    token_major.write(0, slots, keys, values)
    expected = token_major.gather(0, wanted, torch.float32)
    for made in (token_major, head_major):
        made.write(0, slots, keys, values)
        assert [store.shape for store in made.keys] == [store.shape for store in token_major.keys]
        assert made.num_bytes == token_major.num_bytes
        found = made.gather(0, wanted, torch.float32)
        by_head = made.gather_heads(0, wanted, torch.float32)
        assert all(map(torch.equal, found, expected))
        assert all(torch.equal(heads.transpose(0, 1), flat) for heads, flat in zip(by_head, expected, strict=True))
        made.clear(0, torch.tensor([0]))
        assert not made.keys[0][0].any()
        assert made.values[0][1].any()
    assert head_major.gather_heads(0, wanted, torch.float32)[0].is_contiguous()


def test_a_run_of_blocks_reads_as_its_ids_would() -> None:
    assert blocks_to_read([3], CPU) == slice(3, 4)
    assert blocks_to_read([1, 2, 3], CPU) == slice(1, 4)
    for ids in ([1, 3, 2, 4], [3, 2, 1], [1, 1], [0, 2]):
        assert isinstance(blocks_to_read(ids, CPU), torch.Tensor)
    for head_major in (False, True):
        made = storage(head_major=head_major)
        for layer, (heads, key_dim, value_dim) in enumerate([(2, 8, 8), (1, 4, 6)]):
            made.write(layer, torch.arange(20), torch.randn(20, heads, key_dim), torch.randn(20, heads, value_dim))
            run = made.gather_heads(layer, slice(1, 4), torch.float32)
            ids = made.gather_heads(layer, torch.tensor([1, 2, 3]), torch.float32)
            assert all(map(torch.equal, run, ids))
            assert not head_major or run[0].data_ptr() == made.keys[layer][1].data_ptr(), "a run is not copied"


def test_writing_nothing() -> None:
    made = storage()
    made.write(1, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, 4), torch.zeros(0, 1, 6))
    assert not any(tensor.any() for tensor in (*made.keys, *made.values))


@pytest.mark.parametrize(("num_blocks", "names"), [(0, "--kv-memory"), (10**15, "GiB")])
def test_memory_that_cannot_be_had(num_blocks: int, names: str) -> None:
    with pytest.raises(ModelError, match=names):
        storage(num_blocks)


def test_the_spec_speaks_for_the_widest_layer() -> None:
    spec = ModelSpec("m", LAYERS, max_context=64, vocab_size=9, eos_token_ids=(), kv_bytes_per_token=1,
                     dtype="float32", kv_dtype="float32", device="cpu")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.windows) == (2, 2, 8, (None, 32))
    assert [layer.elements_per_token() for layer in LAYERS] == [32, 10]
