"""Strict mode on real weights: however a prompt is cut, cached or batched, its logits are the same bits.

SmolLM2 past two 512-key tiles and Gemma 3 past its 512-token window, with one thread and with two. The same runs
check every key and value in storage, and that what a hit claims not to compute is not computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.paged_runs import PagedRun, random_cut
from worker.model.exactness_probe import probe_exactness
from worker.model.forward_batch import SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel

pytestmark = pytest.mark.model

BLOCK_SIZE = 16
# Model, prompt length, lengths of a chunked run, positions from which a warm run starts.
CASES = {
    "smollm2": (1100, [1, 15, 17, 300, 179, 512, 76], [640, 1023, 1088]),
    "gemma3": (720, [1, 30, 480, 2, 207], [500, 513, 704]),
}
NUM_NEIGHBOURS = 7


class CountingRun(PagedRun):
    """A PagedRun that counts the positions it computes."""

    num_computed = 0

    def step(self, *shares: SequenceRows) -> torch.Tensor:
        self.num_computed += sum(len(share.token_ids) for share in shares)
        return super().step(*shares)


@cache
def strict_model(name: str) -> PagedModel:
    return load_model(resolve_model(name), device="cpu", exactness="strict", block_size=BLOCK_SIZE)


@cache
def prose(name: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(resolve_model(name).path / "tokenizer.json"))
    text = (Path(__file__).parents[1] / "support" / "texts" / "moby_dick_excerpt.txt").read_text(encoding="utf-8")
    return list(tokenizer.encode(text).ids)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def neighbours(name: str, run: PagedRun) -> list[SequenceRows]:
    """Seven other prompts of 3 to 39 tokens."""
    shares = []
    for index in range(NUM_NEIGHBOURS):
        length = 3 + 6 * index
        tokens = prose(name)[2000 + 50 * index:][:length]
        shares.append(SequenceRows(tokens, 0, run.new_table(length), 0, True))
    return shares


@pytest.mark.parametrize("name", CASES)
def test_cold_warm_chunked_batched_and_token_by_token_agree_to_the_bit(name: str, num_threads: int) -> None:
    length, chunks, warm_starts = CASES[name]
    tokens = prose(name)[:length]
    run = CountingRun(strict_model(name))
    table = run.new_table(length)
    expected = run.cut(tokens, table, [length])
    contents = run.contents(table, length)

    chunked = CountingRun(strict_model(name), seed=1)
    chunked_table = chunked.new_table(length)
    assert torch.equal(chunked.cut(tokens, chunked_table, chunks)[-1:], expected)
    assert all(map(torch.equal, chunked.contents(chunked_table, length), contents))

    for start in warm_starts:
        run.num_computed = 0
        shared = table[:start // BLOCK_SIZE]
        hit = start // BLOCK_SIZE * BLOCK_SIZE
        warm = run.cut(tokens, run.new_table(length, prefix=shared), [length - hit], start=hit)
        assert torch.equal(warm, expected), start
        assert run.num_computed == length - hit
    full_hit = run.step(SequenceRows(tokens[-1:], length - 1, table, length, True))
    assert torch.equal(full_hit, expected)

    tail = run.cut(tokens, table, [1] * 6, start=length - 6)
    assert torch.equal(tail[-1:], expected)

    others, hit = neighbours(name, run), length // 2 // BLOCK_SIZE * BLOCK_SIZE
    share = SequenceRows(tokens[hit:], hit, run.new_table(length, prefix=table[:hit // BLOCK_SIZE]), hit, True)
    batched = run.step(*others[:3], share, *others[3:])
    assert torch.equal(batched[3:4], expected)
    assert all(map(torch.equal, run.contents(table, length), contents)), "a shared block was written"


@pytest.mark.parametrize("name", CASES)
def test_the_probe_agrees(name: str) -> None:
    report = probe_exactness(strict_model(name))
    assert report.exact, report.note


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_random_cuts(name: str, num_threads: int) -> None:
    length = CASES[name][0] + 300
    tokens, rng = prose(name)[:length], random.Random(name)
    run = PagedRun(strict_model(name))
    table = run.new_table(length)
    expected = run.cut(tokens, table, [length])
    contents = run.contents(table, length)
    for attempt in range(10):
        other = PagedRun(strict_model(name), seed=attempt)
        other_table, lengths = other.new_table(length), random_cut(length, rng)
        assert torch.equal(other.cut(tokens, other_table, lengths)[-1:], expected), lengths
        assert all(map(torch.equal, other.contents(other_table, length), contents)), lengths
