"""Replays: prompts that share what the trace shares, figures over outcomes, and a server's counters."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.live.driver import Outcome
from loadtests.live.prompts import WORDS, PromptMaker, PromptStyle
from loadtests.live.report import as_table, replay_report
from loadtests.live.results import ERROR_KINDS_MAX, errors_of, num_workers_of, result_of
from loadtests.live.server_metrics import counted_between, counters_in
from loadtests.sim.metrics import CacheBounds
from loadtests.streaming_client import TimedAnswer
from loadtests.traces import Message, Trace, TraceRequest

REQUEST = TraceRequest(0.0, 40, 5, (1, 2))
CHAINS = st.lists(st.integers(0, 3), max_size=6)


def common(one: list[object] | tuple[object, ...], other: list[object] | tuple[object, ...]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(CHAINS, CHAINS, st.integers(1, 5), st.integers(0, 4))
def test_prompts_share_the_blocks_that_the_trace_shares(one: list[int], other: list[int], size: int,
                                                        own: int) -> None:
    maker = PromptMaker(PromptStyle("m"), size)
    first, second = (maker.asked(TraceRequest(0.0, len(ids) * size + own, 1, tuple(ids)), index, {}).body["prompt"]
                     for index, ids in enumerate((one, other)))
    assert [len(first), len(second)] == [len(one) * size + own, len(other) * size + own]
    assert common(first, second) >= common(tuple(one), tuple(other)) * size
    again = PromptMaker(PromptStyle("m"), size)
    assert again.asked(TraceRequest(0.0, len(first), 1, tuple(one)), 0, {}).body["prompt"] == first


def test_blocks_of_different_ids_seeds_and_requests_differ() -> None:
    prompts = [tuple(PromptMaker(PromptStyle("m", seed), 16).asked(request, index, {}).body["prompt"])
               for seed in (0, 1) for index, request in enumerate((REQUEST, TraceRequest(0.0, 40, 5, (2, 1))))]
    pieces = {prompt[at:at + 16] for prompt in prompts for at in (0, 16)}
    assert len(pieces) == 4                       # two blocks under each of two seeds
    assert len({prompt[32:] for prompt in prompts}) == 4   # and a tail of each request's own


def test_words_are_as_many_as_tokens() -> None:
    asked = PromptMaker(PromptStyle("m", kind="words", is_plain=True), 16).asked(REQUEST, 0, {})
    words = asked.body["messages"][0]["content"].split(" ")
    assert (len(words), set(words) <= set(WORDS), asked.path) == (40, True, "/v1/chat/completions")
    assert "ignore_eos" not in asked.body


def test_a_conversation_is_sent_in_roles_that_every_template_knows() -> None:
    said = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"), Message("tool", "t"))
    request = TraceRequest(0.0, 9, 5, (), "c", said, "answer")
    maker = PromptMaker(PromptStyle("m", output_max=3), 16)
    recorded, real = (maker.asked(request, 0, answers).body for answers in ({}, {2: "really"}))
    assert [message["role"] for message in recorded["messages"]] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in recorded["messages"]] == ["s", "u", "a", "t"]
    assert [message["content"] for message in real["messages"]] == ["s", "u", "really", "t"]
    assert recorded["max_tokens"] == 3


def outcome(index: int, *, error: str | None = None, worker: str | None = "w0", cached: int = 16) -> Outcome:
    answer = None if error else TimedAnswer((0.5, 0.7, 1.0), 1.0, "x", 40, cached, 3, worker, 16)
    return Outcome(index, REQUEST, str(index), float(index), 0.25, 1.25, answer, error)


def test_figures_count_from_when_a_request_was_due() -> None:
    outcomes = [outcome(0), outcome(1, cached=32, worker="w1"), outcome(2, error="429 queue_full")]
    result = result_of(outcomes, CacheBounds(0.5, 0.5), "live")
    assert (result["ttft_p50_s"], result["requests"], result["failed"]) == (0.75, 2, 1)
    assert result["hit_token_ratio"] == 48 / 80
    assert (result["inter_token_p50_s"], result["inter_token_max_s"]) == pytest.approx((0.2, 0.3))
    assert result["max_mean_load"] == pytest.approx(27 * 2 / (27 + 11))
    assert (result["late"], result["span_s"]) == (3, 3.25)
    assert result["prediction"] == {"compared": 2, "equal": 1, "too_much": 0, "too_little": 1,
                                    "mean_absolute_tokens": 8.0}
    assert num_workers_of(outcomes) == 2


@pytest.mark.parametrize(("cached", "is_odd"), [(16, True), (0, False)])
def test_more_hits_than_the_trace_has_are_remarked_on(cached: int, is_odd: bool) -> None:
    trace, about = Trace("t", "synthetic", 16, (REQUEST,)), {"url": "u", "model": "m", "seed": 0}
    table = as_table(replay_report(trace, [outcome(0, cached=cached)], about, label="live"))
    assert ("another --seed" in table) == is_odd


def test_one_request_is_no_rate() -> None:
    trace, about = Trace("t", "synthetic", 16, (REQUEST,)), {"url": "u", "model": "m", "seed": 0}
    report = replay_report(trace, [outcome(0)], about, label="live")
    assert report["rate_per_s"] is None
    assert "- requests/s" in as_table(report)


def test_kinds_of_errors_are_bounded() -> None:
    outcomes = [outcome(index, error=f"kind {index}") for index in range(ERROR_KINDS_MAX + 5)]
    counted = errors_of([*outcomes, outcome(0, error="often"), outcome(1, error="often")])
    assert len(counted) == ERROR_KINDS_MAX + 1
    assert (counted["often"], sum(counted.values())) == (2, len(outcomes) + 2)


def test_counters_add_up_over_workers_and_survive_a_restart() -> None:
    text = ('# TYPE headstart_retries counter\nheadstart_retries_total{reason="a"} 2\n'
            '# TYPE headstart_cached_tokens counter\nheadstart_cached_tokens_total{model="m",source="reported"} 5\n'
            'headstart_cached_tokens_total{model="n",source="reported"} 6\n'
            '# TYPE other counter\nother_total 7\n')
    before = counters_in(text)
    assert before == {'headstart_retries_total{reason="a"}': 2.0,
                      'headstart_cached_tokens_total{source="reported"}': 11.0}
    after = {'headstart_retries_total{reason="a"}': 1.0, 'headstart_cached_tokens_total{source="reported"}': 11.0}
    assert counted_between(before, after) == {'headstart_retries_total{reason="a"}': 1.0}
