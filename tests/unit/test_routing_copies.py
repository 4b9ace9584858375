"""A hot prefix goes to an endpoint that had nothing to do lately, when that saves more than it costs; once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as changed_prefix

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.routing.copies import (
    HITS_MIN,
    HORIZON_MAX_S,
    RECENT_S,
    SPARE_BUSY_MAX,
    TOKENS_MIN,
    Fleet,
    expected_hits,
    is_worth_copies,
    next_holder,
)
from gateway.routing.copy_plan import AGAIN_S, LOOK_EVERY_S, Copy, CopyPlan, Sight
from gateway.routing.endpoint import EndpointView, Knowledge
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes, Sighting
from gateway.routing.load_ledger import LoadView
from gateway.routing.recent_load import RecentLoad, num_active
from gateway.routing.shared_cores import Crowding

NOW = 100.0
LOOKS = 41    # a quarter of a second apart
PREFIX = HotPrefix("m", tuple(range(64)), b"", 16, None, 0, num_hits=40, score=3.0, last_at=NOW, first_at=NOW - 20)
HOLDER = EndpointView("holder", "1", blocks_total=1000, blocks_free=500, num_running=2, waiting_prefill_tokens=400,
                      prefill_tokens_per_s=4000.0, decode_step_s=0.01)
IDLE = EndpointView("idle", "1", blocks_total=1000, blocks_free=900, prefill_tokens_per_s=4000.0, decode_step_s=0.01)


def recent_of(*views: EndpointView, loads: Mapping[str, LoadView] = {}, looks: int = LOOKS) -> RecentLoad:
    """As if all had been like this for ten seconds."""
    recent = RecentLoad()
    for number in range(looks):
        recent.look(views, loads, NOW - (looks - 1 - number) / 4)
    return recent


def chosen(*views: EndpointView, holders: tuple[str, ...] = ("holder",), prefix: HotPrefix = PREFIX,
           recent: RecentLoad | None = None, passed_over: tuple[str, ...] = (), **loads: LoadView) -> str | None:
    fleet = Fleet(views, loads, recent_of(*views, loads=loads) if recent is None else recent)
    return next_holder(prefix, holders, fleet, NOW, passed_over=passed_over)


def test_a_spare_endpoint_gets_what_busy_ones_hold() -> None:
    emptier = replace(IDLE, endpoint_id="emptier", blocks_free=950)
    assert chosen(HOLDER, IDLE) == "idle"
    assert chosen(HOLDER, IDLE, emptier) == "emptier"
    assert chosen(HOLDER, IDLE, emptier, passed_over=("emptier",)) == "idle"
    quiet = replace(HOLDER, num_running=0, waiting_prefill_tokens=0)
    assert chosen(quiet, IDLE, holder=LoadView(2, 400)) == "idle", "what we sent counts as well"


@pytest.mark.parametrize("changes", [
    {"num_running": 1}, {"num_waiting": 1}, {"ready": False}, {"draining": True}, {"block_size": 32},
    {"knowledge": Knowledge.NONE}, {"knowledge": Knowledge.APPROXIMATE}, {"blocks_total": 100, "blocks_free": 100},
    {"blocks_free": 100, "blocks_cached": 300}])
def test_only_one_that_has_nothing_else_to_do_and_room(changes: dict[str, object]) -> None:
    changed = replace(IDLE, **changes)
    assert chosen(HOLDER, changed, recent=recent_of(HOLDER, IDLE)) is None
    assert chosen(HOLDER, IDLE, recent=recent_of(HOLDER, IDLE), idle=LoadView(1)) is None


@pytest.mark.parametrize(("period", "copied"), [(2, None), (3, None), (8, "idle")])
def test_one_that_is_idle_for_an_instant_is_not_spare(period: int, copied: str | None) -> None:
    recent, others = RecentLoad(), [replace(IDLE, endpoint_id="drained", draining=True)]
    for number in range(LOOKS):
        busy = number % period == 1
        recent.look([HOLDER, replace(IDLE, num_running=int(busy)), *others], {}, NOW - (LOOKS - 1 - number) / 4)
    now_and_then = recent.of("idle")
    assert now_and_then is not None
    assert (now_and_then.busy_share <= SPARE_BUSY_MAX) == (copied is not None)
    assert chosen(HOLDER, IDLE, *others, recent=recent) == copied


def test_near_saturation_nobody_copies() -> None:
    """Where all have work now and then; one that has none is spare, however busy the others are."""
    now_and_then, recent = [replace(IDLE, endpoint_id=name) for name in "abc"], RecentLoad()
    for number in range(LOOKS):
        busy = [replace(view, num_running=(number + at) % 3 % 2) for at, view in enumerate(now_and_then)]
        recent.look([HOLDER, *busy], {}, NOW - (LOOKS - 1 - number) / 4)
    assert chosen(HOLDER, *now_and_then, recent=recent) is None
    others = [replace(HOLDER, endpoint_id=f"busy{number}") for number in range(7)]
    assert chosen(HOLDER, IDLE, *others) == "idle"


def test_one_whose_cores_are_busy_is_not_spare() -> None:
    recent = RecentLoad()
    for number in range(LOOKS):
        recent.look([HOLDER, IDLE], {}, NOW - (LOOKS - 1 - number) / 4,
                    {"idle": Crowding(2, SPARE_BUSY_MAX + 0.05, True, 1, 1)})
    assert chosen(HOLDER, IDLE, recent=recent) is None


def test_who_was_not_watched_for_long_is_not_spare_and_tells_of_no_wait() -> None:
    assert chosen(HOLDER, IDLE, recent=recent_of(HOLDER, IDLE, looks=20)) is None, "4.75 s"
    assert chosen(HOLDER, IDLE, recent=recent_of(HOLDER, IDLE, looks=21)) == "idle"
    assert chosen(HOLDER, replace(IDLE, epoch="2"), recent=recent_of(HOLDER)) is None
    paused = recent_of(HOLDER, IDLE)
    paused.look([HOLDER, IDLE], {}, NOW + 3)
    assert paused.of("idle") is None
    restarted = recent_of(HOLDER, IDLE)
    restarted.look([HOLDER, replace(IDLE, epoch="2")], {}, NOW + 0.1)
    assert restarted.of("idle") is None
    assert restarted.of("holder") is not None


def test_a_copy_must_save_more_than_it_costs() -> None:
    """1,024 tokens at 4,000 a second: 0.256 s. A hit waits 0.1 s and more at the holder."""
    waits = recent_of(HOLDER).of("holder")
    assert waits is not None
    needed = 2 * 0.256 / min(waits.wait_s, 0.256)
    for num_hits in range(HITS_MIN, 40):
        prefix = changed_prefix(PREFIX, num_hits=num_hits)
        assert chosen(HOLDER, IDLE, prefix=prefix) == ("idle" if num_hits > needed else None)
    full = replace(IDLE, blocks_free=0, blocks_cached=1000)
    assert chosen(HOLDER, full, prefix=changed_prefix(PREFIX, num_hits=int(needed) + 1)) is None, "it evicts as much"
    assert chosen(HOLDER, full, prefix=changed_prefix(PREFIX, num_hits=int(needed * 1.2) + 1)) == "idle"


def test_a_prefix_may_take_half_of_a_pool_where_that_pays() -> None:
    """A third of the memory: in small pools what everybody asks for was never copied, and most stood idle."""
    assert chosen(HOLDER, replace(IDLE, blocks_total=192, blocks_free=192)) == "idle"
    assert chosen(HOLDER, replace(IDLE, blocks_total=127, blocks_free=127)) is None, "more than a half"


def test_nobody_copies_while_holders_have_time_or_are_gone() -> None:
    quiet = replace(HOLDER, num_running=0, waiting_prefill_tokens=0)
    assert chosen(quiet, IDLE) is None
    assert chosen(IDLE) is None, "nobody holds it"
    assert chosen(HOLDER, IDLE, holders=("gone",)) is None
    assert chosen(HOLDER, replace(quiet, endpoint_id="second"), replace(IDLE, endpoint_id="third"),
                  holders=("holder", "second")) == "third"


def test_only_what_is_long_and_asked_for_now_is_worth_it() -> None:
    least = changed_prefix(PREFIX, num_hits=HITS_MIN, chain=tuple(range(TOKENS_MIN // 16)))
    assert is_worth_copies(least, NOW + RECENT_S)
    assert not is_worth_copies(least, NOW + RECENT_S + 0.1)
    assert not is_worth_copies(changed_prefix(least, num_hits=HITS_MIN - 1), NOW)
    assert not is_worth_copies(changed_prefix(least, chain=least.chain[1:]), NOW)


def test_what_was_asked_for_so_long_is_expected_for_as_long_again() -> None:
    assert expected_hits(PREFIX, NOW) == 40
    assert expected_hits(changed_prefix(PREFIX, first_at=NOW - 10 * HORIZON_MAX_S), NOW) == pytest.approx(4)
    assert expected_hits(changed_prefix(PREFIX, first_at=NOW), NOW) == 40


@given(st.lists(st.builds(EndpointView, endpoint_id=st.sampled_from("abcdef"), epoch=st.just("1"),
                          ready=st.booleans(), draining=st.booleans(), blocks_total=st.sampled_from([0, 1000, 2000]),
                          blocks_free=st.integers(0, 1000), num_running=st.sampled_from([0, 0, 0, 2]),
                          waiting_prefill_tokens=st.sampled_from([0, 2000])),
                unique_by=lambda view: view.endpoint_id),
       st.frozensets(st.sampled_from("abcdef")), st.frozensets(st.sampled_from("abcdef"), max_size=2),
       st.dictionaries(st.sampled_from("abcdef"), st.builds(LoadView, num_inflight=st.integers(0, 2))))
def test_whoever_is_chosen_is_spare_and_no_holder(views: list[EndpointView], holders: frozenset[str],
                                                  passed_over: frozenset[str], loads: dict[str, LoadView]) -> None:
    fleet = Fleet(views, loads, recent_of(*views, loads=loads))
    endpoint_id = next_holder(PREFIX, holders, fleet, NOW, passed_over=passed_over)
    if endpoint_id is not None:
        assert endpoint_id not in holders | passed_over
        active = {view.endpoint_id: num_active(view, loads.get(view.endpoint_id, LoadView())) for view in views}
        assert active[endpoint_id] == 0
        assert any(active[other] for other in holders & set(active))


class Watched:
    """One process's plan, a prefix that it has routed `hits` times in two seconds, and looks since."""

    def __init__(self, hits: int = 40, looks_before: int = 0) -> None:
        hot = HotPrefixes()
        for number in range(hits):
            hot.note(Sighting("m", range(64), 64, range(1024), 16), NOW + 2 * number / hits)
        [(self.key, _)] = hot.hottest(1, NOW)
        self.plan = CopyPlan(hot)
        self.holders = {"holder"}
        self.looks_before = looks_before
        self.num_views = 0

    def views(self) -> list[EndpointView]:
        self.num_views += 1
        return [replace(view, models=frozenset({"m"})) for view in (HOLDER, IDLE, replace(IDLE, endpoint_id="third"))]

    def looks(self, count: int, *, after_s: float = 2.0) -> list[tuple[int, Copy]]:
        """(the number of the look, what it chose); whoever is given a copy is not believed to hold it."""
        sight = Sight(self.views, {}, lambda prefix: self.holders, {self.key: self.looks_before}.__getitem__)
        chosen = [self.plan.next(sight, NOW + after_s + number * LOOK_EVERY_S) for number in range(count)]
        return [(number, copy) for number, copy in enumerate(chosen) if copy is not None]


def test_each_worker_is_given_a_prefix_once() -> None:
    copies = Watched().looks(30)
    assert [number for number, _ in copies] == [20, 21], "as soon as they have been watched for five seconds"
    assert {copy.endpoint_id for _, copy in copies} == {"idle", "third"}
    assert AGAIN_S > 30 * LOOK_EVERY_S


def test_processes_take_turns_and_those_behind_find_it_done() -> None:
    first, second = Watched(), Watched(looks_before=1)
    assert [number for number, _ in first.looks(21)] == [20]
    assert second.looks(21) == []
    second.holders = {"holder", "idle", "third"}   # they have been told by then
    assert second.looks(9, after_s=2.0 + 21 * LOOK_EVERY_S) == []
    lonely = Watched(looks_before=1)
    assert lonely.looks(22)[0][0] == 21, "somebody who is not there keeps nobody waiting for long"


def test_while_there_is_nothing_to_copy_nobody_is_looked_at() -> None:
    watched = Watched(hits=HITS_MIN - 1)
    assert watched.looks(30) == []
    assert watched.num_views == 0
