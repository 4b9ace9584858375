"""Every family: logits through block tables equal transformers' own plain forward; strict mode's bits never move."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from tests.support.paged_runs import PagedRun, random_cut
from tests.support.tiny_models import FAMILIES, WINDOW, reference_logits, tiny_model_folder, tiny_token_ids
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel

LENGTH = 150    # past four windows, off the block, row and tile multiples
BLOCK_SIZE = 16
# One family of each kind of attention and window; the others differ in parts that see one row at a time.
CUT_MORE_OFTEN = ("llama_mqa", "mistral", "gemma2", "gemma3", "mixtral", "deepseek_v3")


@cache
def tiny_model(family: str, exactness: str, kv_dtype: str = "auto") -> PagedModel:
    folder = resolve_model(str(tiny_model_folder(family)))
    return load_model(folder, dtype="float32", kv_dtype=kv_dtype, device="cpu", exactness=exactness,
                      block_size=BLOCK_SIZE)


@cache
def reference(family: str, length: int = LENGTH, salt: int = 0) -> torch.Tensor:
    return reference_logits(tiny_model_folder(family), tiny_token_ids(length, salt=salt))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture(params=["fast", "strict"])
def exactness(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
class TestEqualsTransformers:
    def test_cold(self, family: str, exactness: str) -> None:
        run, tokens = PagedRun(tiny_model(family, exactness)), tiny_token_ids(LENGTH)
        logits = run.cut(tokens, run.new_table(LENGTH), [LENGTH])
        assert_close(logits, reference(family)[-1:])

    def test_chunked_and_token_by_token(self, family: str, exactness: str) -> None:
        run, tokens = PagedRun(tiny_model(family, exactness)), tiny_token_ids(LENGTH)
        lengths = [1, 15, 16, 33, 40, *[1] * 10, LENGTH - 115]
        logits = run.cut(tokens, run.new_table(LENGTH), lengths)
        ends = torch.tensor(lengths).cumsum(0) - 1
        assert_close(logits, reference(family)[ends])

    def test_batched_with_others(self, family: str, exactness: str) -> None:
        """Prompts, a chunk and three decodes of unlike lengths in one pass; one of them wants no logits."""
        run = PagedRun(tiny_model(family, exactness))
        lengths = {1: LENGTH, 2: 70, 3: 5, 4: 100, 5: 41, 6: 97}
        tables = {salt: run.new_table(length) for salt, length in lengths.items()}
        for salt in (2, 4, 6):
            run.cut(tiny_token_ids(lengths[salt] - 1, salt=salt), tables[salt], [lengths[salt] - 1])

        def share(salt: int, start: int, *, wants_logits: bool = True) -> SequenceRows:
            tokens = tiny_token_ids(lengths[salt], salt=salt)[start:]
            return SequenceRows(tokens, start, tables[salt], start, wants_logits)

        logits = run.step(share(2, 69), share(1, 0), share(3, 0), share(4, 99), share(5, 0, wants_logits=False),
                          share(6, 96))
        expected = [reference(family, lengths[salt], salt)[-1] for salt in (2, 1, 3, 4, 6)]
        assert_close(logits, torch.stack(expected))

    def test_prefix_hit(self, family: str, exactness: str) -> None:
        """A second sequence on the first one's blocks, then a full hit that recomputes its last position alone."""
        run, tokens = PagedRun(tiny_model(family, exactness)), tiny_token_ids(LENGTH)
        table = run.new_table(LENGTH)
        run.cut(tokens, table, [LENGTH])
        shared = 6 * BLOCK_SIZE
        other = tokens[:shared] + tiny_token_ids(30, salt=9)
        hit_table = run.new_table(len(other), prefix=table[:6])
        logits = run.cut(other, hit_table, [30], start=shared)
        assert_close(logits, reference_logits(tiny_model_folder(family), other)[-1:])
        before = run.contents(table, LENGTH)
        full_hit = SequenceRows(tokens[shared - 1:shared], shared - 1, table[:6], shared, True)
        assert_close(run.step(full_hit), reference(family)[shared - 1:shared])
        assert all(map(torch.equal, run.contents(table, LENGTH), before)), "a sealed block was written"


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_bits_do_not_depend_on_cuts_hits_or_neighbours(family: str) -> None:
    model, tokens = tiny_model(family, "strict"), tiny_token_ids(LENGTH)
    cold = PagedRun(model)
    cold_table = cold.new_table(LENGTH)
    expected = cold.cut(tokens, cold_table, [LENGTH])
    contents = cold.contents(cold_table, LENGTH)
    rng = random.Random(family)
    for attempt in range(6 if family in CUT_MORE_OFTEN else 2):
        run = PagedRun(model, seed=attempt)
        table = run.new_table(LENGTH)
        lengths = random_cut(LENGTH, rng)
        logits = run.cut(tokens, table, lengths)
        assert torch.equal(logits[-1:], expected), lengths
        assert all(map(torch.equal, run.contents(table, LENGTH), contents)), lengths
    for start in (1, 16, WINDOW, 100, LENGTH - 1):    # warm: everything before `start` is there already
        assert torch.equal(cold.cut(tokens, cold_table, [LENGTH - start], start=start), expected), start
    shares = [SequenceRows(tiny_token_ids(9 * salt, salt=salt), 0, cold.new_table(9 * salt), 0, True)
              for salt in range(1, 8)]
    whole = SequenceRows(tokens, 0, cold.new_table(LENGTH), 0, True)
    assert torch.equal(cold.step(*shares[:3], whole, *shares[3:])[3:4], expected)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_strict_bits_past_two_key_tiles(family: str) -> None:
    length = 1100
    model, tokens = tiny_model(family, "strict"), tiny_token_ids(length)
    run = PagedRun(model)
    table = run.new_table(length)
    expected = run.cut(tokens, table, [length])
    assert_close(expected, reference(family, length)[-1:])
    for lengths in ([512, 512, 76], [511, 2, 587], [1, 1099], [500, 30, 494, *[1] * 3, 73], [1020, *[1] * 8, 72]):
        again = PagedRun(model, seed=1)
        assert torch.equal(again.cut(tokens, again.new_table(length), lengths)[-1:], expected), lengths


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
def test_what_lies_in_unused_slots_does_not_matter(family: str, exactness: str) -> None:
    """Blocks hold NaN and infinity from someone else; only the blank block must stay zero."""
    model, tokens = tiny_model(family, exactness), tiny_token_ids(LENGTH)
    clean, dirty = PagedRun(model), PagedRun(model)
    for store in (*dirty.storage.keys, *dirty.storage.values):
        store[:-1] = torch.nan
        store[:-1, ::2] = torch.inf
    lengths = [37, 70, 1, 1, 41]
    table, short_table = clean.new_table(LENGTH), clean.new_table(100)
    found, expected = (run.cut(tokens, table, lengths) for run in (dirty, clean))
    assert torch.equal(found, expected)
    for run in (dirty, clean):
        run.cut(tokens[:99], short_table, [99])
    pair = [SequenceRows([5], LENGTH - 1, table, LENGTH, True), SequenceRows([6], 99, short_table, 99, True)]
    assert torch.equal(dirty.step(*pair), clean.step(*pair))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_narrow_kv_stays_close_and_strict_stays_exact(kv_dtype: str) -> None:
    model, tokens = tiny_model("llama", "strict", kv_dtype), tiny_token_ids(LENGTH)
    run = PagedRun(model)
    logits = run.cut(tokens, run.new_table(LENGTH), [LENGTH])
    assert (logits - reference("llama")[-1]).abs().max() < 0.2
    assert torch.equal(run.cut(tokens, run.new_table(LENGTH), [70, 1, 79])[-1:], logits)
    assert run.storage.keys[0].dtype == getattr(torch, kv_dtype)


def test_latents_are_stored_once_and_not_expanded() -> None:
    model = tiny_model("deepseek_v3", "fast")
    storage = PagedRun(model).storage
    assert model.spec.kv_bytes_per_token == 2 * (32 + 8) * 4, "two layers of latent and rope in float32"
    assert storage.num_bytes == (256 + 1) * BLOCK_SIZE * model.spec.kv_bytes_per_token
    assert storage.values[0].data_ptr() == storage.keys[0].data_ptr()


def test_a_rope_that_turns_with_the_length_bounds_the_context() -> None:
    assert tiny_model("phi4_longrope", "fast").spec.max_context == 160
    assert tiny_model("phi4", "fast").spec.max_context == 2048


def test_an_empty_batch_and_a_batch_without_logits() -> None:
    run = PagedRun(tiny_model("llama", "fast"))
    assert run.step().shape == (0, run.model.spec.vocab_size)
    silent = SequenceRows([4, 5, 6], 0, run.new_table(3), 0, False)
    assert run.step(silent).shape == (0, run.model.spec.vocab_size)
