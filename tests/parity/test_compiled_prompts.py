"""Prompts in compiled code against float32 and against torch's own way, over families, cuts and mixed batches."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.test_compiled_decoder import COMPILED, LENGTH_MAX, compiled_model, exact_logits, rms
from tests.support.paged_runs import PagedRun
from tests.support.tiny_models import WINDOW, tiny_token_ids
from worker.model.compiled_loading import compile_prompts
from worker.model.forward_batch import SequenceRows
from worker.model.linear import multiplies_bf16

pytestmark = pytest.mark.skipif(not multiplies_bf16(torch.device("cpu")), reason="this CPU multiplies no bf16")
pytest.importorskip("numba")

LENGTHS = st.one_of(st.integers(1, LENGTH_MAX), st.sampled_from([1, 2, 15, 16, 17, WINDOW, WINDOW + 1]))
UNTOUCHED = 77.0        # no key or value is that large
Salted = tuple[int, SequenceRows]


def run_of(family: str, *, few_rows: bool = False, many_rows: bool = True, block_size: int = 16,
           threads: int = 1) -> PagedRun:
    """Through the compiled decoders that are named; what neither takes goes through torch."""
    model = copy.copy(compiled_model(family, block_size, threads))
    assert model._many_rows is not None
    model._few_rows = model._few_rows if few_rows else None
    model._many_rows = model._many_rows if many_rows else None
    return PagedRun(model)


def steps_of(run: PagedRun, cuts: list[list[int]]) -> list[list[Salted]]:
    """One list of sequences' rows a step: each sequence is cut at its lengths, and ends with LENGTH_MAX at most."""
    steps: list[list[Salted]] = [[] for _ in range(max(map(len, cuts)))]
    for salt, lengths in enumerate(cuts):
        tokens, table, start = tiny_token_ids(LENGTH_MAX, salt=salt), run.new_table(LENGTH_MAX), 0
        for step, length in zip(steps, lengths, strict=False):
            end = min(LENGTH_MAX, start + length)
            if start < end:
                step.append((salt, SequenceRows(tokens[start:end], start, table, start, True)))
            start = end
    return [step for step in steps if step]


def logits_of(run: PagedRun, steps: list[list[Salted]]) -> torch.Tensor:
    return torch.cat([run.step(*(share for _, share in step)) for step in steps])


@pytest.mark.parametrize("family", COMPILED)
@given(block_size=st.sampled_from([16, 32]),
       cuts=st.lists(st.lists(LENGTHS, min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=4, deadline=None)
def test_steps_are_as_near_to_float32_as_torchs_own(family: str, block_size: int, cuts: list[list[int]]) -> None:
    ours, theirs = (run_of(family, many_rows=many, block_size=block_size) for many in (True, False))
    steps = steps_of(ours, cuts)
    exact = torch.stack([exact_logits(family, salt)[share.start + len(share.token_ids) - 1]
                         for step in steps for salt, share in step])
    found, other = logits_of(ours, steps), logits_of(theirs, steps_of(theirs, cuts))
    assert rms(found - exact) <= 1.2 * rms(other - exact) + 0.002 * rms(exact)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_window", "llama_gelu", "phi4", "olmo2"])
def test_what_a_step_writes_is_what_torch_would_have_written(family: str) -> None:
    """Keys and values from `write_from` on, zeros behind them in a block that is opened, nothing anywhere else."""
    stores = []
    for many_rows in (True, False):
        run = run_of(family, many_rows=many_rows)
        for store in (*run.storage.keys, *run.storage.values):
            store.fill_(UNTOUCHED)
        tokens = tiny_token_ids(60)
        tables = [run.new_table(60) for _ in range(3)]
        run.step(SequenceRows(tokens[:16], 0, tables[0], 0, False))
        run.step(*(SequenceRows(tokens[start:end], start, table, write_from, True) for (start, write_from, end), table
                   in zip(((8, 16, 41), (0, 0, 32), (0, 0, 7)), tables, strict=True)))
        run.step(SequenceRows(tokens[41:43], 41, tables[0], 41, True))
        stores.append((*run.storage.keys, *run.storage.values))
    for mine, other in zip(*stores, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * float(other.float().abs().max()))
        assert torch.equal(mine == 0, other == 0)
        assert torch.equal(mine == UNTOUCHED, other == UNTOUCHED)


@pytest.mark.parametrize("family", ["gemma2", "smollm3", "olmo2_grouped"])
def test_threads_and_company_change_nothing(family: str) -> None:
    """Each row is computed as if it were alone, whoever computes it."""
    cuts = [[70, 33, 1], [1, 120, 16], [5, 5, 5]]
    results = []
    for threads in (1, 2, 5):
        run = run_of(family, threads=threads)
        results += [logits_of(run, steps_of(run, cuts)) for _ in range(2)]
    alone = run_of(family)
    one_by_one = [[logits_of(alone, [[share]]) for share in step] for step in steps_of(alone, cuts)]
    results.append(torch.cat([each for step in one_by_one for each in step]))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_a_prompt_as_long_as_several_chunks_and_tiles() -> None:
    """Windows begin within chunks, and rows are more than a thread takes at once."""
    tokens = [token for salt in range(5) for token in tiny_token_ids(LENGTH_MAX, salt=salt)]
    for family in ("gemma3", "llama", "gemma2"):
        found = []
        for many_rows in (True, False):
            run = run_of(family, many_rows=many_rows)
            table = run.new_table(len(tokens))
            found.append(run.cut(tokens, table, [300, 200, 250]))
        assert rms(found[0] - found[1]) <= 0.15 * rms(found[1])


def test_prompt_scores_are_those_of_every_row() -> None:
    tokens = tiny_token_ids(40)
    found = []
    for many_rows in (True, False):
        run = run_of("granite", many_rows=many_rows)
        table = run.new_table(40)
        found.append(run.step(SequenceRows(tokens, 0, table, 0, True, num_scored=39)))
    assert found[0].shape == found[1].shape == (40, run.model.spec.vocab_size)
    assert rms(found[0] - found[1]) <= 0.1 * rms(found[1])


def test_what_is_no_number_stays_in_its_sequence() -> None:
    run = run_of("gemma3")
    tokens = tiny_token_ids(60)
    tables = [run.new_table(60) for _ in range(3)]
    run.step(*(SequenceRows(tokens[:32], 0, table, 0, False) for table in tables))
    last = [SequenceRows(tokens[32:], 32, table, 32, True) for table in tables]
    expected = run.step(*last)
    run.storage.keys[0][tables[1][1]] = torch.nan
    found = run.step(*last)
    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_what_it_leaves_to_torch() -> None:
    run = run_of("llama")
    prompts = run.model._many_rows
    assert prompts is not None
    table = run.new_table(10)
    plain = SequenceRows([5, 6], 3, table, 3, True)
    others = [SequenceRows([5, 6], 3, table, 3, True, adapter=b"another"),
              SequenceRows([5, 6], 3, table, 3, True, pools=True)]
    assert prompts.takes(run.batch(plain, plain), run.storage)
    assert not any(prompts.takes(run.batch(plain, other), run.storage) for other in others)
    far = SequenceRows([5], 40_000, range(2501), 40_000, True)
    assert prompts.takes(run.batch(plain, far), run.storage)
    assert not prompts.takes(run.batch(plain, far, far), run.storage)
    assert not prompts.takes(run.batch(plain), run_of("llama", block_size=8).storage)


def test_compiled_code_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    model = compiled_model("llama")
    from worker.model.compiled.prompt_decoder import CompiledPrompts

    logits = CompiledPrompts.logits
    monkeypatch.setattr(CompiledPrompts, "logits", lambda *given: logits(*given).roll(1, -1))
    assert model._compact is not None
    with caplog.at_level(logging.WARNING):
        assert compile_prompts(model._few_rows, model._compact, model.spec.layers) is None
    assert "prompts run through torch" in caplog.text
