"""The comparison of engines: which way its ratios point, and what its cases ask."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from loadtests.bench.engine_cases import STREAM_TOKENS, all_cases
from loadtests.bench.engines import Timing
from loadtests.bench.worker import measure, table


class SteadyEngine:
    """Computes `tokens_s` prompt tokens a second, then one token in `token_s`; remembers the prompts it has seen."""

    version = "1"

    def __init__(self, name: str, *, tokens_s: float, token_s: float, reuses_prefixes: bool = True) -> None:
        self.name, self.reuses_prefixes = name, reuses_prefixes
        self._tokens_s, self._token_s = tokens_s, token_s
        self._seen: list[list[int]] = []
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        self.asked += [(len(prompt), num_tokens) for prompt in prompts]
        cached = max((_common(prompt, seen) for prompt in prompts for seen in self._seen), default=0)
        self._seen += [list(prompt) for prompt in prompts]
        ttft_s = (len(prompts[0]) - cached * self.reuses_prefixes) / self._tokens_s + self._token_s
        total_s = ttft_s + (num_tokens - 1) * self._token_s
        return Timing((ttft_s,) * len(prompts), total_s, total_s, num_tokens * len(prompts))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)))


def test_an_engine_of_half_the_speed_is_beaten_two_to_one_in_time_and_in_throughput() -> None:
    ours = SteadyEngine("headstart", tokens_s=2000, token_s=0.02)
    theirs = SteadyEngine("peer", tokens_s=1000, token_s=0.04)
    cases = measure([ours, theirs], all_cases(), rounds=2)
    for name in ("cold TTFT 2048", "a token at context 6000", "16 streams on an 800 prefix"):
        assert cases[name]["times_faster_than"] == {"peer": pytest.approx(2.0, rel=0.02)}, name


def test_warm_cases_are_warm_and_skip_engines_that_keep_nothing() -> None:
    ours = SteadyEngine("headstart", tokens_s=2000, token_s=0.02)
    theirs = SteadyEngine("peer", tokens_s=2000, token_s=0.02, reuses_prefixes=False)
    cases = measure([ours, theirs], all_cases(), rounds=1)
    assert cases["same again TTFT 6000"]["median"] == {"headstart": pytest.approx(20)}
    assert cases["800 shared + 400 new TTFT"]["median"] == {"headstart": pytest.approx(220)}
    assert cases["cold TTFT 6000"]["median"]["headstart"] == pytest.approx(3020), "no case warms another"


def test_every_engine_gets_the_same_work() -> None:
    ours, theirs = (SteadyEngine(name, tokens_s=1000, token_s=0.01) for name in ("headstart", "peer"))
    measure([ours, theirs], all_cases(), rounds=1)
    assert ours.asked == theirs.asked
    assert ours.asked.count((850, STREAM_TOKENS)) == 1 + 4 + 16


def test_the_table_has_a_line_for_each_case_and_no_number_where_none_was_taken() -> None:
    ours = SteadyEngine("headstart", tokens_s=1000, token_s=0.01)
    theirs = SteadyEngine("peer", tokens_s=1000, token_s=0.01, reuses_prefixes=False)
    result = {"model": "m", "threads": 1, "rounds": 1, "commit": "c", "engines": {"headstart": "1", "peer": "1"},
              "cases": measure([ours, theirs], all_cases(), rounds=1)}
    lines = table(result).splitlines()
    assert [line[:30].strip() for line in lines[2:]] == [name for case in all_cases() for name in case.names]
    assert next(line for line in lines if line.startswith("same again TTFT 1200")).split()[-1] == "-"


def test_cases_draw_their_prompts_from_the_random_numbers_they_are_given() -> None:
    engine = SteadyEngine("headstart", tokens_s=1000, token_s=0.01)
    case = all_cases()[0]
    assert case.run(engine, random.Random(1))[0].value == pytest.approx(266)
    assert case.run(engine, random.Random(1))[0].value == pytest.approx(10), "the same prompt again is held"
