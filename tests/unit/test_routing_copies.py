"""A hot prefix goes to an idle endpoint with room while those that hold it are busy, and nowhere else."""

from __future__ import annotations

from dataclasses import replace as changed_prefix

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.routing.copies import HITS_MIN, RECENT_S, TOKENS_MIN, is_worth_copies, next_holder, num_active
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.hot_prefixes import HotPrefix
from gateway.routing.load_ledger import LoadView

PREFIX = HotPrefix("m", tuple(range(TOKENS_MIN // 16)), b"", 16, None, 0, num_hits=HITS_MIN, score=3.0, last_at=100.0)
HOLDER = EndpointView("holder", "1", blocks_total=1000, blocks_free=500, num_running=2)
IDLE = EndpointView("idle", "1", blocks_total=1000, blocks_free=900)


def chosen(*views: EndpointView, holders: tuple[str, ...] = ("holder",), **loads: LoadView) -> str | None:
    return next_holder(PREFIX, views, holders, loads)


def test_an_idle_endpoint_gets_what_busy_ones_hold() -> None:
    assert chosen(HOLDER, IDLE) == "idle"
    assert chosen(HOLDER, IDLE, replace(IDLE, endpoint_id="emptier", blocks_free=950)) == "emptier"
    assert chosen(replace(HOLDER, num_running=0), IDLE, holder=LoadView(2)) == "idle", "what we sent counts as well"


@pytest.mark.parametrize("changes", [
    {"num_running": 1}, {"num_waiting": 1}, {"ready": False}, {"draining": True}, {"block_size": 32},
    {"knowledge": Knowledge.NONE}, {"knowledge": Knowledge.APPROXIMATE}, {"blocks_total": 100, "blocks_free": 100},
    {"blocks_free": 100, "blocks_cached": 300}])
def test_only_one_that_has_nothing_else_to_do_and_room(changes: dict[str, object]) -> None:
    assert chosen(HOLDER, replace(IDLE, **changes)) is None  # type: ignore[arg-type]
    assert chosen(HOLDER, IDLE, idle=LoadView(1)) is None


def test_nobody_copies_while_holders_have_time_or_are_gone() -> None:
    assert chosen(replace(HOLDER, num_running=0), IDLE) is None
    assert chosen(IDLE) is None, "nobody holds it"
    assert chosen(HOLDER, replace(HOLDER, endpoint_id="second", num_running=0), replace(IDLE, endpoint_id="third"),
                  holders=("holder", "second")) == "third", "a mean of one is busy"
    assert chosen(replace(HOLDER, num_running=1), replace(HOLDER, endpoint_id="second", num_running=0), IDLE,
                  holders=("holder", "second")) is None


def test_only_what_is_long_and_asked_for_now_is_worth_it() -> None:
    assert is_worth_copies(PREFIX, 100.0 + RECENT_S)
    assert not is_worth_copies(PREFIX, 100.1 + RECENT_S)
    assert not is_worth_copies(changed_prefix(PREFIX, num_hits=HITS_MIN - 1), 100.0)
    assert not is_worth_copies(changed_prefix(PREFIX, chain=PREFIX.chain[1:]), 100.0)


@given(st.lists(st.builds(EndpointView, endpoint_id=st.sampled_from("abcdef"), epoch=st.just("1"),
                          ready=st.booleans(), draining=st.booleans(), blocks_total=st.sampled_from([0, 100, 1000]),
                          blocks_free=st.integers(0, 1000), num_running=st.integers(0, 2)),
                unique_by=lambda view: view.endpoint_id),
       st.frozensets(st.sampled_from("abcdef")),
       st.dictionaries(st.sampled_from("abcdef"), st.builds(LoadView, num_inflight=st.integers(0, 2))))
def test_whoever_is_chosen_is_idle_and_no_holder(views: list[EndpointView], holders: frozenset[str],
                                                 loads: dict[str, LoadView]) -> None:
    endpoint_id = next_holder(PREFIX, views, holders, loads)
    if endpoint_id is not None:
        [view] = [view for view in views if view.endpoint_id == endpoint_id]
        assert endpoint_id not in holders
        assert num_active(view, loads) == 0
        assert any(num_active(other, loads) for other in views if other.endpoint_id in holders)
