"""Fast mode in bf16, on CPU and on a GPU where there is one: as close to the truth as transformers' own bf16.

Bits may move here from cut to cut, so the yardstick is the error against float32, next to the error that
transformers' plain forward makes in the same dtype.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.paged_runs import PagedRun
from tests.support.tiny_models import FAMILIES, reference_logits, tiny_model_folder, tiny_token_ids
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel, free_memory_bytes

LENGTH = 150
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@cache
def bf16_model(family: str, device: str) -> PagedModel:
    return load_model(resolve_model(str(tiny_model_folder(family))), dtype="bfloat16", device=device)


@cache
def yardstick(family: str) -> tuple[torch.Tensor, float]:
    """Float32 logits of every position, and the root mean square error of transformers' bf16 against them."""
    tokens, folder = tiny_token_ids(LENGTH), tiny_model_folder(family)
    exact = reference_logits(folder, tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        rounded = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return exact, rms(rounded - exact)


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_error_is_that_of_the_dtype(family: str, device: str) -> None:
    """Cold, then chunked with decodes: the last row of every step, against what rounding alone costs."""
    exact, allowed = yardstick(family)
    tokens, lengths = tiny_token_ids(LENGTH), [20, 1, 1, 1, 60, 17, 1, 49]
    run = PagedRun(bf16_model(family, device))
    cold = run.cut(tokens, run.new_table(LENGTH), [LENGTH]).cpu()
    chunked = run.cut(tokens, run.new_table(LENGTH), lengths).cpu()
    assert rms(cold - exact[-1:]) <= 3 * allowed      # one row's error wanders; the mean over rows does not
    assert rms(chunked - exact[torch.tensor(lengths).cumsum(0) - 1]) <= 2 * allowed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "llama_mqa", "gemma3"])
def test_decoding_together_equals_decoding_alone(family: str, device: str) -> None:
    """Nine sequences of unlike lengths, so in several groups with padding, on one storage."""
    run = PagedRun(bf16_model(family, device))
    shares = []
    for salt, length in enumerate([3, 150, 16, 17, 90, 149, 64, 33, 120]):
        tokens, table = tiny_token_ids(length + 1, salt=salt), run.new_table(length + 1)
        run.cut(tokens[:-1], table, [length])
        shares.append(SequenceRows(tokens[-1:], length, table, length, True))
    together = run.step(*shares)
    alone = torch.cat([run.step(share) for share in shares])
    assert rms(together - alone) <= yardstick(family)[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_sized_from_free_memory_and_a_hit(device: str) -> None:
    """Warm equals cold within rounding, and the shared blocks are neither computed nor written again."""
    model = bf16_model("llama", device)
    bytes_per_block = model.spec.kv_bytes_per_token * model.block_size
    run = PagedRun(model, num_blocks=min(4096, free_memory_bytes(model.spec.device) // 100 // bytes_per_block))
    tokens, table = tiny_token_ids(LENGTH), run.new_table(LENGTH)
    cold = run.cut(tokens, table, [LENGTH])
    before = run.contents(table[:8], 128)
    warm = run.cut(tokens, run.new_table(LENGTH, prefix=table[:8]), [LENGTH - 128], start=128)
    assert rms(warm - cold) <= 3 * yardstick("llama")[1]
    assert all(map(torch.equal, run.contents(table[:8], 128), before))
