"""The cost's terms, one by one, in figures that can be done by hand."""

from __future__ import annotations

import pytest

from gateway.routing.cost import (
    DEFAULT_DECODE_STEP_S,
    DEFAULT_PREFILL_TOKENS_PER_S,
    EVICTED_REUSE_RATIO,
    OTHERS_DOUBT_RATIO,
    PRICE_MAX_S,
    ROOM_DOUBT_RATIO,
    ROOM_KEPT_RATIO,
    SESSION_BONUS_TOKENS,
    SLOW_TIER_RATIO,
    STREAM_WEIGHT,
    CandidateCost,
    Rates,
    Work,
    assumed_rates,
    candidate_cost,
)
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.memory_wait import Stream
from gateway.routing.prefix_index import NO_MATCH, Match


def view(**changes: object) -> EndpointView:
    fields: dict[str, object] = {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.02, **changes}
    return EndpointView("a", "1", **fields)  # type: ignore[arg-type]


def cost(endpoint: EndpointView, match: Match = NO_MATCH, load: LoadView = NO_LOAD, *, prompt_tokens: int = 1000,
         expected_output_tokens: int = 100, in_session: bool = False, now: float = 0.0,
         shared_ratio: float = 1.0) -> CandidateCost:
    return candidate_cost(endpoint, match, load, Work(prompt_tokens, expected_output_tokens, now, shared_ratio),
                          rates=Rates(), in_session=in_session)


def test_a_slower_tier_lies_between_a_hit_and_computing() -> None:
    fast, slow, none = (cost(view(), match).total_s for match in (Match(50, 0), Match(50, 0, 30), Match(20, 0)))
    assert fast < slow < none
    assert slow - fast == pytest.approx(SLOW_TIER_RATIO * 30 * 16 / 1000.0)


def test_what_loading_takes_is_as_seen_there_and_only_of_what_it_spares() -> None:
    work = Work(1000, 100, tier_ratio_of=lambda endpoint_id: {"a": 3.0}[endpoint_id])
    slow = candidate_cost(view(), Match(50, 10, 30), NO_LOAD, work, rates=Rates())
    assert (slow.spared_s, slow.tier_s) == pytest.approx((30 * 16 / 1000.0, 3.0 * 30 * 16 / 1000.0))
    assert slow.total_s - cost(view(), Match(50, 10)).total_s == pytest.approx(slow.tier_s)
    assert slow.first_token_s == slow.prefill_s + slow.tier_s
    short = candidate_cost(view(), Match(100, 0, 60), NO_LOAD, work, rates=Rates())
    assert short.spared_s == pytest.approx((1000 - 1 - 40 * 16) / 1000.0), "the prompt ends before"


def test_steps_are_as_many_as_the_worker_needs_and_as_long_as_they_took_lately() -> None:
    busy = LoadView(3, 600, 0)
    assert cost(view(), load=busy).num_steps == pytest.approx(0.5 + 1600 / 8192)
    small = cost(view(step_tokens=100), load=busy)
    assert small.num_steps == pytest.approx(16.5)
    assert small.steps_s == pytest.approx(16.5 * 0.02)
    work = Work(1000, 100, busy_step_of=lambda endpoint_id, num_active: {"a": 0.05}[endpoint_id] * num_active)
    seen = candidate_cost(view(step_tokens=100), NO_MATCH, busy, work, rates=Rates())
    assert seen.steps_s == pytest.approx(16.5 * 0.15)
    assert seen.others_s == pytest.approx(small.others_s), "what we do to others is told by steps that only decode"
    assert cost(view(step_tokens=100)).steps_s == cost(view()).num_steps == 0.0, "nobody is met where nobody runs"


def test_the_worked_example_at_the_top_of_the_file() -> None:
    worker = view(prefill_tokens_per_s=4000.0)
    here = cost(worker, Match(50, 0), LoadView(3, 680, 0), expected_output_tokens=128)
    assert (here.uncached_tokens, here.matched_tokens) == (200, 800)
    assert here.prefill_s == pytest.approx(0.053, abs=5e-4)
    assert here.queue_s == pytest.approx(0.17)
    assert here.steps_s == pytest.approx(0.012, abs=5e-4)
    assert here.others_s == pytest.approx(0.040, abs=5e-4)
    assert here.total_s == pytest.approx(0.275, abs=5e-4)
    assert here.first_token_s == pytest.approx(0.235, abs=5e-4)
    assert cost(worker, expected_output_tokens=128).total_s == pytest.approx(0.258, abs=5e-4)


def test_prefill_grows_with_the_positions_attended_to() -> None:
    short, long = cost(view(), prompt_tokens=1000), cost(view(), prompt_tokens=16_384)
    assert short.prefill_s == pytest.approx(1.0 * (1 + 1000 / 32_768))
    assert long.prefill_s == pytest.approx(16.384 * 1.5)


@pytest.mark.parametrize(("prompt_tokens", "match", "uncached"), [
    (1600, Match(100, 0), 1), (1601, Match(100, 0), 1), (1617, Match(100, 0), 17), (1600, Match(0, 100), 1),
    (1600, Match(90, 10), 1), (1600, Match(500, 0), 1), (1, Match(1, 0), 1), (0, NO_MATCH, 1)])
def test_a_full_hit_leaves_one_token_to_compute(prompt_tokens: int, match: Match, uncached: int) -> None:
    assert cost(view(), match, prompt_tokens=prompt_tokens).uncached_tokens == uncached


@pytest.mark.parametrize(("ledger", "waiting", "running", "queued"), [
    (0, 0, 0, 0), (500, 0, 0, 500), (0, 300, 200, 500), (500, 300, 200, 500), (100, 300, 200, 500),
    (900, 300, 200, 900)])
def test_queued_prefill_is_the_larger_of_ledger_and_report(
        ledger: int, waiting: int, running: int, queued: int) -> None:
    worker = view(waiting_prefill_tokens=waiting, running_prefill_tokens=running)
    assert cost(worker, load=LoadView(0, ledger, 0)).queue_s == pytest.approx(queued / 1000)


def test_active_streams_are_the_larger_of_ledger_and_report() -> None:
    assert cost(view(num_running=3, num_waiting=2), load=LoadView(4, 0, 0)).num_active == 5
    assert cost(view(num_running=3, num_waiting=2), load=LoadView(6, 0, 0)).num_active == 6


def test_a_stream_costs_one_prefilled_token_a_step_or_a_share_of_the_step() -> None:
    stall = 0.1 * 4 * cost(view()).prefill_s
    assert cost(view(), load=LoadView(4, 0, 0)).others_s == pytest.approx(STREAM_WEIGHT * 4 * 100 * 0.001 + stall)
    fast = view(prefill_tokens_per_s=50_000.0, decode_step_s=0.01)
    for prompt_tokens, share in ((100, 0.00575), (1000, 0.0125), (2000, 0.02), (6000, 0.02)):
        alone = cost(fast, prompt_tokens=prompt_tokens)
        assert cost(fast, load=LoadView(4, 0, 0), prompt_tokens=prompt_tokens).others_s == pytest.approx(
            STREAM_WEIGHT * 4 * 100 * share * 0.01 + 0.1 * 4 * alone.prefill_s)


def test_a_first_token_waits_for_the_decode_steps_in_between() -> None:
    assert cost(view()).steps_s == 0.0
    assert cost(view(), load=LoadView(1, 7192, 0)).steps_s == pytest.approx(1.5 * 0.02)


@pytest.mark.parametrize(("free", "held", "evicted"), [
    (69, 2000, 0), (68, 2000, 12), (0, 2000, 1100), (68, 2088, 100), (0, 900, 0), (0, 1000, 100)])
def test_what_must_be_evicted_may_be_asked_for_again(free: int, held: int, evicted: int) -> None:
    worker = view(blocks_total=1000, blocks_free=free, blocks_cached=900, held_tokens_at_report=2000)
    load = LoadView(held_tokens=held)
    assert cost(worker, load=load).evict_s == pytest.approx(EVICTED_REUSE_RATIO * evicted * 0.001)
    assert cost(worker, load=load).room_s == 0.0


FULL = {"blocks_total": 1000, "blocks_free": 0, "blocks_cached": 0}
POOL = 16_000
LIFE_S = 100 * 0.02


@pytest.mark.parametrize(("changes", "share"), [
    ({}, (1016 + 160) / POOL), ({"num_running": 8}, 1 / 8),         # at least until one has ended
    ({"num_running": 8, "held_tokens_at_report": -15_000}, (1016 + 160 + 15_000) / POOL)])   # who waits goes first
def test_waiting_for_memory_of_others(changes: dict[str, int], share: float) -> None:
    changes = {"num_running": 100, **changes}
    assert cost(view(**{**FULL, **changes})).room_s == pytest.approx(share * LIFE_S)


def with_streams(streams: list[Stream], *, prompt_tokens: int = 1000, match: Match = NO_MATCH, stretch: float = 1.0,
                 chain: tuple[int, ...] = (), **changes: object) -> CandidateCost:
    work = Work(prompt_tokens, 100, now=100.0, stretch=stretch, streams_of=lambda _: streams, chain=chain)
    load = LoadView(len(streams), 0, 0, len(streams))
    return candidate_cost(view(**{**FULL, **changes}), match, load, work, rates=Rates())


def test_waiting_for_memory_until_our_own_streams_end() -> None:
    early, late = Stream(2000, 0, 100, 99.0), Stream(2000, 0, 100, 99.8)
    assert with_streams([late, early]).room_s == pytest.approx(1.0), "the first of them gives back enough"
    assert with_streams([late, early], prompt_tokens=3000).room_s == pytest.approx(1.8)
    assert with_streams([late, early], stretch=2.0).room_s == pytest.approx(3.0), "prompts in between: half as fast"
    assert with_streams([Stream(2000, 0, 100, 1.0)]).room_s == pytest.approx(LIFE_S / 4), "longer than expected"


def test_who_waits_for_memory_goes_first() -> None:
    running, waiting = Stream(1500, 0, 100, 99.0), Stream(1200, 500, 100, None)
    alone = with_streams([running]).room_s
    behind = with_streams([running, waiting], held_tokens_at_report=-1200)
    assert alone == pytest.approx(1.0)
    assert behind.room_s == pytest.approx(1.0 + 0.5 + LIFE_S), "its prompt is computed and its life lived before"


def test_a_prompt_that_barely_fits_may_have_to_wait() -> None:
    stream = [Stream(5000, 0, 100, 99.0)]
    needed, doubt = 1016 + ROOM_KEPT_RATIO * POOL, ROOM_DOUBT_RATIO * POOL
    half = int((needed + doubt / 2) / 16)
    assert with_streams(stream, blocks_cached=int(needed / 16) - 1).room_s == pytest.approx(0.5, abs=0.02)
    assert with_streams(stream, blocks_cached=half).room_s == pytest.approx(0.25, abs=0.02)
    assert with_streams(stream, blocks_cached=int((needed + doubt) / 16) + 1).room_s == 0.0


def test_the_more_work_is_others_the_likelier_they_hold_what_matches() -> None:
    stream, chain = [Stream(3000, 0, 100, 99.0)], tuple(range(62))
    waits = [with_streams(stream, match=Match(60, 0), chain=chain, blocks_cached=20, others_ratio=ratio).room_s
             for ratio in (0.0, 0.2, 0.5, 0.9)]
    assert waits[0] > waits[1] > waits[2] == waits[3]


def test_what_matches_needs_room_unless_somebody_holds_it_anyway() -> None:
    worker, load = view(**{**FULL, "blocks_cached": 120}), LoadView(4, 0, 0, 4)
    assert cost(worker, Match(50, 0), load).room_s == 0.0
    assert cost(worker, Match(50, 0), load, shared_ratio=0.0).room_s > 0.0
    chain = tuple(range(62))
    holder, other = Stream(100, 0, 100, 99.0, chain[:50]), Stream(100, 0, 100, 99.0, (-1, *chain[1:50]))
    assert with_streams([holder], match=Match(50, 0), chain=chain, blocks_cached=90).room_s == 0.0
    assert with_streams([other], match=Match(50, 0), chain=chain, blocks_cached=90).room_s > 0.0


def test_where_others_send_much_more_may_have_come_since_the_report() -> None:
    assert cost(view()).doubt_s == 0.0
    assert cost(view(others_ratio=0.5)).doubt_s == pytest.approx(OTHERS_DOUBT_RATIO * 0.5 * LIFE_S)
    assert cost(view(others_ratio=0.5)).first_token_s == cost(view()).first_token_s, "a doubt, not an expectation"


def test_an_idle_worker_whose_pool_is_used_by_nobody_has_room() -> None:
    assert cost(view(blocks_total=60, blocks_cached=60)).room_s == 0.0
    assert cost(view(blocks_total=60)).room_s > 0.0  # somebody has it, though no stream is known


def test_an_unknown_pool_costs_nothing() -> None:
    assert cost(view(blocks_total=0)).room_s == cost(view(blocks_total=0)).evict_s == 0.0


@pytest.mark.parametrize(("price_s", "counted"), [(-1.0, 0.0), (0.25, 0.25), (1e9, PRICE_MAX_S)])
def test_a_price_is_bounded(price_s: float, counted: float) -> None:
    assert cost(view(price_s=price_s)).price_s == counted


def test_the_session_bonus_is_small() -> None:
    assert cost(view(), in_session=True).session_s == pytest.approx(SESSION_BONUS_TOKENS / 1000)
    assert cost(view()).session_s == 0.0


def test_unknown_rates_are_those_of_the_peers_or_constants() -> None:
    unknown = view(prefill_tokens_per_s=0.0, decode_step_s=0.0)
    assert assumed_rates([]) == Rates(DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_DECODE_STEP_S)
    assert assumed_rates([unknown]) == Rates(DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_DECODE_STEP_S)
    known = [unknown, view(), view(prefill_tokens_per_s=3000.0, decode_step_s=0.0)]
    assert assumed_rates(known) == Rates(2000.0, 0.02)
    assert cost(unknown).prefill_s == pytest.approx(1000 / DEFAULT_PREFILL_TOKENS_PER_S * (1 + 1000 / 32_768))
