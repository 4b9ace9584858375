"""What live comparisons are made of: arrivals, the check of predicted hits, the fitted cost model."""

from __future__ import annotations

import random

import pytest

from loadtests.live.fronts import OUR_POLICIES, SGLANG, VLLM, Programs
from loadtests.live.hit_check import HitCheck
from loadtests.live.sessions import SESSION_SHARE, SESSIONS_MIN, by_session, overlapping, text_of
from loadtests.sim.cost_model import CostModel, pairs_of
from loadtests.sim.fit import DecodeStep, Prefill, fit
from loadtests.traces import Message, Trace, TraceRequest

CONVERSATIONS = Trace("c", "conversations", 16, tuple(
    TraceRequest(float(turn), 100 * turn + 50, 5, tuple(range(turn)), f"s{session}",
                 tuple(Message("user", f"{session} {at}") for at in range(turn + 1)))
    for session in range(40) for turn in range(10)))


@pytest.mark.parametrize(("rate", "span_s", "seed"), [(3.0, 8.0, 0), (20.0, 10.0, 1), (30.0, 10.0, 2)])
def test_conversations_overlap_and_each_keeps_its_order(rate: float, span_s: float, seed: int) -> None:
    sent = overlapping(CONVERSATIONS, rate=rate, span_s=span_s, seed=seed)
    assert sent == overlapping(CONVERSATIONS, rate=rate, span_s=span_s, seed=seed)
    arrivals = [request.at_s for request in sent.requests]
    assert arrivals == sorted(arrivals)
    steady = [at_s for at_s in arrivals if at_s >= SESSION_SHARE * span_s]
    assert len(steady) == pytest.approx(rate * span_s * (1 - SESSION_SHARE), rel=0.25), "once they are under way"
    assert max(arrivals) < span_s
    sessions = by_session(sent)
    assert len(sessions) >= min(SESSIONS_MIN, rate * span_s / 2)
    for turns in sessions:
        assert [len(turn.block_ids) for turn in turns] == list(range(len(turns)))
    firsts, lasts = [turns[0].at_s for turns in sessions], [turns[-1].at_s for turns in sessions]
    assert max(firsts) > span_s / 2 > min(firsts)
    assert sum(last > other for last in lasts for other in firsts) > len(sessions)


def test_a_tokenizer_learns_each_text_once() -> None:
    lines = text_of(CONVERSATIONS).split("\n")
    assert len(lines) == len(set(lines)) == 400


@pytest.mark.parametrize(("low", "high", "cached", "counts"), [
    (32, 64, 32, (1, 1, 0, 0)), (32, 64, 64, (1, 1, 0, 0)), (32, 64, 16, (0, 1, 0, 0)), (32, 64, 80, (0, 1, 0, 0)),
    (32, 64, 0, (0, 0, 1, 0)), (32, 64, 96, (0, 0, 0, 1))])
def test_a_hit_is_within_a_block_of_what_was_predicted(low: int, high: int, cached: int,
                                                       counts: tuple[int, int, int, int]) -> None:
    check, total = HitCheck(), HitCheck()
    check.note({"request_id": "r", "confirmed_tokens": low, "matched_tokens": high, "cached_tokens": cached}, 16)
    assert (check.exact, check.within, check.too_much, check.too_little) == counts
    assert len(check.examples) == 1 - counts[1]
    total.add(check)
    total.add(check)
    assert total.as_dict()["compared"] == 2
    assert total.as_dict()["within_ratio"] == counts[1]


def test_a_missing_program_is_named() -> None:
    programs = Programs(sglang_router="no-such-router", vllm_router="no-such-either")
    assert [programs.missing(name) for name in OUR_POLICIES] == [None] * 3
    assert "no-such-router" in str(programs.missing(SGLANG))
    assert all("no-such-either" in str(programs.missing(name)) for name in VLLM)


def test_the_fit_finds_the_model_that_the_measurements_came_from() -> None:
    true = CostModel("true", "", floor_s=3e-3, weights_s=0.0, token_s=2e-4, pair_s=1e-8, context_s=5e-7, row_s=1e-4)
    request_s, draw = 2e-3, random.Random(1)

    def measured(seconds: float) -> float:
        return seconds * draw.uniform(0.99, 1.01)

    samples: list[Prefill | DecodeStep] = []
    for _ in range(20):
        for length in (32, 128, 512, 1024, 2048):
            steps = [min(512, length - at) for at in range(0, length, 512)]
            seconds = sum(true.step_s(size, pairs_of(512 * at, size), 0, 0) for at, size in enumerate(steps))
            samples.append(Prefill(length, measured(request_s + seconds)))
        samples += [DecodeStep(streams, context, measured(true.step_s(0, 0.0, streams, streams * context)))
                    for streams, context in ((1, 64), (1, 1024), (4, 256), (8, 64), (8, 1024))]
    found = fit(samples, max_batch_tokens=512, max_running=64)
    assert found.mean_error_ratio < 0.01
    for prompt, cached in ((100, 0), (1500, 0), (1500, 1200)):
        assert found.model.prefill_s(prompt, cached) == pytest.approx(true.prefill_s(prompt, cached), rel=0.1)
    assert found.model.decode_step_s(6, 500) == pytest.approx(true.decode_step_s(6, 500), rel=0.05)
    assert found.request_s == pytest.approx(request_s, rel=0.5)


def test_a_term_that_noise_would_make_negative_is_nothing() -> None:
    samples: list[Prefill | DecodeStep] = [Prefill(length, 1e-3 + 1e-4 * length) for length in (32, 128, 512)]
    samples += [DecodeStep(1, context, 2e-3 - 1e-7 * context) for context in (64, 512, 1024)]
    found = fit(samples, max_batch_tokens=512, max_running=64)
    assert found.model.context_s == 0.0
    assert min(found.model.floor_s, found.model.token_s, found.model.row_s, found.request_s) >= 0
    with pytest.raises(ValueError, match="too few"):
        fit(samples[:2], max_batch_tokens=512, max_running=64)
