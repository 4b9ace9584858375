"""The sampler: definitions against naive ones, distributions, and nothing matters but (seed, choice, i)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.model.counter_random import philox4x32, uniform
from worker.model.sampler import SamplerRow, most_likely, sample
from worker.prompt.sampling_params import SamplingParams

VOCAB = 400


def row(*, index: int = 0, choice: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
        banned: tuple[int, ...] = (), **params: Any) -> SamplerRow:
    return SamplerRow(SamplingParams(**params), choice, index, prompt, output, banned)


def noise(rows: int, vocab: int = VOCAB, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    """`count` tokens from one row of logits, one output index each."""
    rows = [row(index=index, **params) for index in range(count)]
    return Counter(one.token_id for one in sample(logits.expand(count, -1), rows))


@given(rows=st.integers(1, 4), vocab=st.sampled_from([1, 7, 511, 512, 1023, 1024, 1025, 2048, 3000]),
       seed=st.integers(0, 999), levels=st.sampled_from([2, 5, 1000]), padding=st.sampled_from([0, 64]))
@settings(max_examples=60, deadline=None)
def test_the_most_likely_is_the_first_of_the_largest(rows: int, vocab: int, seed: int, levels: int,
                                                     padding: int) -> None:
    """Few levels make many equals; padded rows do not lie end to end."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab + padding), generator=generator).float()[:, :vocab]
    logits[0, seed % vocab:] = -torch.inf
    assert most_likely(logits).tolist() == [min(range(vocab), key=lambda i: (-one[i], i)) for one in logits.tolist()]


class TestCounterRandom:
    def test_known_answers_of_philox(self) -> None:
        """From the reference implementation's kat_vectors (Random123)."""
        assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
        ones = 0xFFFFFFFF
        assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)

    def test_is_uniform_and_every_argument_counts(self) -> None:
        values = [uniform(5, 0, index) for index in range(4000)]
        assert all(0 <= value < 1 for value in values)
        buckets = Counter(int(value * 10) for value in values)
        assert all(abs(count - 400) < 100 for count in buckets.values())
        places = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 << 40, 0, 0)]
        assert len({uniform(*place) for place in places}) == len(places)

    @given(st.integers(-2**70, 2**70), st.integers(0, 200), st.integers(0, 2**40))
    def test_takes_any_seed(self, seed: int, choice: int, index: int) -> None:
        assert 0 <= uniform(seed, choice, index) < 1


class TestGreedy:
    def test_is_the_largest_logit(self) -> None:
        logits = noise(5)
        found = sample(logits, [row(temperature=0.0)] * 5)
        assert [one.token_id for one in found] == logits.argmax(-1).tolist()

    def test_an_empty_batch(self) -> None:
        assert sample(torch.empty(0, VOCAB), []) == []

    def test_logits_are_left_alone(self) -> None:
        logits = noise(2)
        before = logits.clone()
        sample(logits, [row(temperature=0.0, logit_bias={3: 9.0}, banned=(1, 2)), row(repetition_penalty=2.0,
                                                                                     prompt=(1, 2), output=(3,))])
        assert torch.equal(logits, before)

    def test_bias_and_bans(self) -> None:
        logits = noise(1)
        best = int(logits.argmax())
        assert sample(logits, [row(temperature=0.0, banned=(best, best))])[0].token_id != best
        assert sample(logits, [row(temperature=0.0, logit_bias={7: 100.0})])[0].token_id == 7
        assert sample(logits, [row(temperature=0.0, logit_bias={7: 100.0}, banned=(7,))])[0].token_id == best

    def test_repetition_penalty_is_transformers(self) -> None:
        """Over prompt and output; positive logits divided, negative multiplied."""
        from transformers import RepetitionPenaltyLogitsProcessor

        logits, prompt, output = noise(1), (1, 2, 3, 3), (4, 5, 5)
        best = int(logits.argmax())
        expected = RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([[*prompt, *output, best]]), logits.clone())
        found = sample(logits, [row(temperature=0.0, repetition_penalty=4.0, prompt=prompt, output=(*output, best))])
        assert found[0].token_id == int(expected.argmax()) != best

    def test_presence_and_frequency_penalties_count_the_output_only(self) -> None:
        logits = torch.tensor([[5.0, 4.0, 3.0]])
        assert sample(logits, [row(temperature=0.0, presence_penalty=1.5, output=(0, 0))])[0].token_id == 1
        assert sample(logits, [row(temperature=0.0, presence_penalty=1.5, prompt=(0, 0))])[0].token_id == 0
        assert sample(logits, [row(temperature=0.0, frequency_penalty=0.6, output=(0,))])[0].token_id == 0
        assert sample(logits, [row(temperature=0.0, frequency_penalty=0.6, output=(0, 0))])[0].token_id == 1
        assert sample(logits, [row(temperature=0.0, presence_penalty=-1.5, output=(1,))])[0].token_id == 1


class TestDistribution:
    def test_frequencies_follow_the_softmax(self) -> None:
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
        found = draws(logits, 4000, temperature=0.7, seed=11)
        for token_id, probability in enumerate(torch.softmax(logits[0] / 0.7, -1).tolist()):
            deviation = math.sqrt(4000 * probability * (1 - probability))
            assert abs(found[token_id] - 4000 * probability) <= 4 * deviation

    def test_a_banned_token_is_never_drawn(self) -> None:
        assert set(draws(torch.zeros(1, 3), 500, banned=(1, 2))) == {0}

    @pytest.mark.parametrize("temperature", [1e-46, 1e-300, 5e-324, 9.9e-6])
    @pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {7: 0.5}}])
    def test_a_temperature_that_is_0_in_float32_is_greedy(self, temperature: float, more: dict[str, Any]) -> None:
        logits = noise(1)
        logits[0, 7] = logits.max() + 1.0
        assert set(draws(logits, 20, temperature=temperature, **more)) == {7}

    @pytest.mark.parametrize("penalty", [0.01, 100.0])
    def test_the_extremes_of_the_repetition_penalty_leave_numbers(self, penalty: float) -> None:
        logits = noise(1)
        found = sample(logits, [row(temperature=1.0, repetition_penalty=penalty, prompt=tuple(range(VOCAB // 2)),
                                    logprobs=1)])
        assert math.isfinite(found[0].logprob or 0.0)
        greedy = sample(logits, [row(temperature=0.0, repetition_penalty=penalty, prompt=tuple(range(VOCAB)))])
        assert greedy[0].token_id == (int(logits.argmax()))

    def test_a_tiny_temperature_is_greedy_and_does_not_overflow(self) -> None:
        logits = noise(1, scale=1e4)
        assert set(draws(logits, 50, temperature=1e-6)) == {int(logits.argmax())}

    @pytest.mark.parametrize(("params", "expected"), [
        ({"top_k": 1}, {0}), ({"top_k": 2}, {0, 1}), ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}), ({"top_p": 0.51}, {0, 1}), ({"top_p": 0.81}, {0, 1, 2}), ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 1}), ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),          # of the two left, the first holds 0.625
        ({"top_k": 2, "top_p": 0.63}, {0, 1}),
        ({"top_p": 0.9, "min_p": 0.3}, {0, 1}),
    ])
    def test_what_truncation_leaves(self, params: dict[str, Any], expected: set[int]) -> None:
        logits = torch.tensor([[0.5, 0.3, 0.12, 0.08]]).log()
        assert set(draws(logits, 400, **params)) == expected

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, 10**6), st.floats(0.05, 0.999), st.one_of(st.none(), st.integers(1, 900)),
           st.floats(0.0, 0.5), st.floats(0.3, 3.0))
    def test_the_kept_set_is_transformers(self, seed: int, top_p: float, top_k: int | None, min_p: float,
                                          temperature: float) -> None:
        """Every drawn token survives transformers' warpers; the draw lands where their distribution says."""
        from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        logits = noise(1, 3000, scale=1.5, seed=seed)
        warped = logits / temperature
        if top_k is not None:
            warped = TopKLogitsWarper(top_k)(None, warped)
        warped = TopPLogitsWarper(top_p)(None, warped)
        if min_p > 0:
            warped = MinPLogitsWarper(min_p)(None, warped)
        probabilities = torch.softmax(warped[0].double(), -1)
        order = probabilities.argsort(descending=True, stable=True)
        params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        rows = [row(index=index, **params) for index in range(3)]
        for index, one in enumerate(sample(logits.expand(3, -1), rows)):
            position = int((order == one.token_id).nonzero())
            before = float(probabilities[order[:position]].sum())
            # Two float32 roundings of a boundary may differ by a candidate's share, never by more.
            assert before - 2e-3 <= uniform(seed, 0, index) <= before + float(probabilities[one.token_id]) + 2e-3


class TestIndependence:
    @settings(deadline=None, max_examples=30)
    @given(st.permutations(range(6)))
    def test_the_rest_of_the_batch_does_not_matter(self, order: list[int]) -> None:
        logits = noise(6)
        kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0},
                                       {"min_p": 0.05, "repetition_penalty": 1.2}, {"logit_bias": {1: 5.0}}]
        rows = [row(index=index, seed=3, output=(1, 2), **kind) for index, kind in enumerate(kinds)]
        together = sample(logits[order], [rows[index] for index in order])
        alone = [sample(logits[index:index + 1], [rows[index]])[0] for index in order]
        assert together == alone

    def test_seed_choice_and_index_each_matter_and_repeat(self) -> None:
        logits = torch.zeros(1, 10_000)
        rows = [row(seed=1), row(seed=2), row(seed=1, choice=1), row(seed=1, index=1), row(seed=1)]
        tokens = [one.token_id for one in sample(logits.expand(5, -1), rows)]
        assert len(set(tokens)) == 4
        assert tokens[0] == tokens[4]


class TestLogprobs:
    def test_are_of_the_raw_distribution(self) -> None:
        logits = noise(1)
        expected = torch.log_softmax(logits[0], -1)
        found = sample(logits, [row(temperature=0.0, logit_bias={7: 100.0}, logprobs=3)])[0]
        assert found.token_id == 7
        assert found.logprob == pytest.approx(float(expected[7]))
        assert [token_id for token_id, _ in found.top] == expected.topk(3).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected.topk(3).values.tolist())

    def test_only_where_asked(self) -> None:
        silent, chosen_only = sample(noise(2), [row(), row(logprobs=0)])
        assert (silent.logprob, silent.top) == (None, ())
        assert chosen_only.logprob is not None
        assert chosen_only.top == ()

    def test_more_than_the_vocabulary(self) -> None:
        assert len(sample(torch.zeros(1, 5), [row(logprobs=20)])[0].top) == 5


def test_only_allowed_tokens_are_chosen() -> None:
    logits = torch.arange(20, dtype=torch.float32).repeat(3, 1)
    allowed = bytes([0b00000010, 0b00000101])    # 1, 8 and 10; beyond 15 nothing
    rows = [SamplerRow(SamplingParams(temperature=temperature, seed=seed, logit_bias={19: 100.0}), choice=0,
                       output_index=0, prompt_token_ids=(), output_token_ids=(), allowed=allowed)
            for seed, temperature in enumerate((0.0, 1.0, 2.0))]
    before = logits.clone()
    chosen = [one.token_id for one in sample(logits, rows)]
    assert chosen[0] == 10
    assert set(chosen) <= {1, 8, 10}
    assert torch.equal(logits, before)
    lone = replace(rows[1], allowed=bytes([0, 0, 0b00001000, 0, 0, 0, 0xFF]))    # longer than the vocabulary
    assert sample(logits[:1], [lone])[0].token_id == 19
