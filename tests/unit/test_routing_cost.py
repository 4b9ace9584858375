"""The cost's terms, one by one, in figures that can be done by hand."""

from __future__ import annotations

import pytest

from gateway.routing.cost import (
    DEFAULT_DECODE_STEP_S,
    DEFAULT_PREFILL_TOKENS_PER_S,
    EVICTED_REUSE_RATIO,
    PRICE_MAX_S,
    SESSION_BONUS_TOKENS,
    CandidateCost,
    Rates,
    Work,
    assumed_rates,
    candidate_cost,
)
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.prefix_index import NO_MATCH, Match


def view(**changes: object) -> EndpointView:
    fields: dict[str, object] = {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.02, **changes}
    return EndpointView("a", "1", **fields)  # type: ignore[arg-type]


def cost(endpoint: EndpointView, match: Match = NO_MATCH, load: LoadView = NO_LOAD, *, prompt_tokens: int = 1000,
         expected_output_tokens: int = 100, in_session: bool = False) -> CandidateCost:
    return candidate_cost(endpoint, match, load, Work(prompt_tokens, expected_output_tokens),
                          rates=Rates(), in_session=in_session)


def test_the_worked_example_at_the_top_of_the_file() -> None:
    worker = view(prefill_tokens_per_s=4000.0)
    here = cost(worker, Match(50, 0), LoadView(3, 400, 0), expected_output_tokens=128)
    assert (here.uncached_tokens, here.matched_tokens) == (200, 800)
    assert here.prefill_s == pytest.approx(0.053, abs=5e-4)
    assert here.queue_s == pytest.approx(0.1)
    assert here.decode_s == pytest.approx(0.154, abs=5e-4)
    assert here.stall_s == pytest.approx(0.016, abs=5e-4)
    assert here.total_s == pytest.approx(0.322, abs=5e-4)
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
    assert cost(view(), load=LoadView(4, 0, 0)).decode_s == pytest.approx(4 * 100 * 0.001)
    fast = view(prefill_tokens_per_s=50_000.0, decode_step_s=0.01)
    assert cost(fast, load=LoadView(4, 0, 0)).decode_s == pytest.approx(4 * 100 * 0.0002)


@pytest.mark.parametrize(("free", "cached", "evicted", "missing"), [
    (100, 0, 0, 0), (69, 900, 0, 0), (68, 900, 1, 0), (0, 900, 69, 0), (0, 9, 9, 60), (0, 0, 0, 69)])
def test_memory_pressure(free: int, cached: int, evicted: int, missing: int) -> None:
    worker = view(blocks_total=1000, blocks_free=free, blocks_cached=cached)
    assert cost(worker).memory_s == pytest.approx((EVICTED_REUSE_RATIO * evicted + missing) * 0.016)


def test_an_unknown_pool_costs_nothing() -> None:
    assert cost(view(blocks_total=0)).memory_s == 0.0


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
