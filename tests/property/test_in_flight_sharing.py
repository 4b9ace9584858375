"""Sequences that arrive while others compute what they need: nothing is computed twice, whoever leaves when.

The naive model is a set of prefixes, spelled out: the first to reach a full block pays for it, everybody pays for
his own tail. Leaders abort, fail and run out of memory at any moment; each such mishap may cost the work of the step
it hits and what a half-filled block held, and no more. The fake runner proves that nothing half-computed is read.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_pair import SchedulerPair
from worker.core.prefill_pace import PrefillPace
from worker.core.scheduler import SchedulerConfig
from worker.core.sequence import StopRule

BLOCK = 4
STEM = list(range(100, 140))    # long enough for several chunks
MAX_BATCH_TOKENS = 10
ONE_TOKEN = StopRule(1)

# A prompt follows the stem for a while and then goes its own way.
prompts = st.builds(lambda length, own, tail: STEM[:length] + [own] * tail,
                    st.integers(1, len(STEM)), st.sampled_from([1, 2]), st.integers(0, 9))
arrivals = st.lists(st.tuples(prompts, st.integers(0, 3)), min_size=1, max_size=8)
mishaps = st.lists(st.sampled_from(["", "", "", "abort", "abort in flight", "fail", "too large"]), max_size=12)


def naive_cost(given_prompts: Iterable[list[int]]) -> int:
    """Each distinct full block once, and each prompt's own tail: at least the position whose logits it needs."""
    prefixes: set[tuple[int, ...]] = set()
    cost = 0
    for prompt in given_prompts:
        num_full = len(prompt) // BLOCK
        whole = [tuple(prompt[:BLOCK * (index + 1)]) for index in range(num_full)]
        new = [prefix for prefix in whole if prefix not in prefixes]
        prefixes.update(new)
        tail = len(prompt) - num_full * BLOCK
        cost += len(new) * BLOCK + (tail or int(not new))
    return cost


def make_pair(pace: PrefillPace | None) -> SchedulerPair:
    config = SchedulerConfig(max_batch_tokens=MAX_BATCH_TOKENS, max_running=8, max_waiting=8, pace=pace)
    return SchedulerPair(config, num_blocks=120, block_size=BLOCK)


@given(arrivals, st.sampled_from([None, PrefillPace(1.0, 0.3)]))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_undisturbed_nothing_is_computed_twice(arriving: list[tuple[list[int], int]],
                                               pace: PrefillPace | None) -> None:
    pair = make_pair(pace)
    for prompt, num_steps in arriving:
        assert pair.submit(prompt, ONE_TOKEN) is None
        for _ in range(num_steps):
            pair.step()
            pair.check()
    pair.drain()
    assert pair.real.counters.computed_positions == naive_cost(prompt for prompt, _ in arriving)
    assert pair.real.num_claimed_blocks == 0


@given(arrivals, mishaps)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_whoever_leaves_another_takes_over(arriving: list[tuple[list[int], int]], happening: list[str]) -> None:
    pair = make_pair(None)
    for prompt, _ in arriving:
        pair.submit(prompt, ONE_TOKEN)
    num_mishaps = 0
    for mishap in happening:
        if not pair.live:
            break
        num_mishaps += mishap != ""
        first = min(pair.live)
        if mishap == "abort":
            pair.abort(first)
        pair.step(aborting=[first] if mishap == "abort in flight" and first in pair.live else [],
                  num_failing=int(mishap == "fail"), too_large=mishap == "too large")
        pair.check()
    pair.drain()
    most = naive_cost(prompt for prompt, _ in arriving) + num_mishaps * (BLOCK - 1) * len(arriving)
    assert pair.real.counters.computed_positions <= most, "a committed position was thrown away"
    assert pair.real.num_claimed_blocks == 0
