"""A tenant that floods at 20 times its share, and one that does not: virtual time, the gateway's own line."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace

import pytest
from msgspec import structs

from gateway.admission.line import Line
from gateway.admission.places import Places
from gateway.admission.queue import FairQueue, Waiting

SHARE = 0.5                 # two tenants of the same weight
QUEUED_MAX = 200


@dataclass(frozen=True)
class Load:
    """Requests of one tenant: Poisson arrivals at `tokens_per_s`, sizes from a quarter of the mean to 2.5 times."""

    tenant_id: str
    tokens_per_s: float
    mean_tokens: int = 800

    def arrivals(self, chance: random.Random, duration_s: float) -> list[tuple[float, str, int]]:
        at, found = 0.0, []
        while True:
            at += chance.expovariate(self.tokens_per_s / self.mean_tokens)
            if at >= duration_s:
                return found
            found.append((at, self.tenant_id, round(self.mean_tokens * chance.choice((0.25, 0.5, 0.75, 1, 1, 2.5)))))


@dataclass(frozen=True)
class Fleet:
    """`num_places` that compute 1,000 prompt tokens a second each, then keep their place for an answer of
    `answer_s`. A first token comes when the prompt has been computed."""

    num_places: int
    answer_s: float = 0.0
    reserved_ratio: float = 0.125
    catch_up_tokens: int = 32_768
    head_start_tokens: int = 8192
    duration_s: float = 80.0

    def prompt_s(self, tokens: int) -> float:
        return tokens / 1000.0

    def tokens_per_s(self, mean_tokens: int = 800) -> float:
        return self.num_places * mean_tokens / (self.prompt_s(mean_tokens) + self.answer_s)


@dataclass
class Outcome:
    """The seconds to each first token of one tenant, its requests that found no room, and those refused early."""

    ttft_s: list[float]
    num_lost: int = 0
    num_hopeless: int = 0


def outcome(fleet: Fleet, loads: list[Load], of: str, seed: int) -> Outcome:
    queue = FairQueue(max_requests=QUEUED_MAX, max_bytes=1 << 30, ageing_s=10.0,
                      catch_up_tokens=fleet.catch_up_tokens, head_start_tokens=fleet.head_start_tokens)
    line = Line(queue, Places(), reserved_ratio=fleet.reserved_ratio)
    arrivals = sorted(one for load in loads
                      for one in load.arrivals(random.Random(f"{load.tenant_id}-{seed}"), fleet.duration_s))
    ends: list[tuple[float, str]] = []
    found = Outcome([])

    def begin(entry: Waiting, now: float) -> None:
        prompt_s = fleet.prompt_s(entry.cost_tokens)
        heapq.heappush(ends, (now + prompt_s + fleet.answer_s, entry.tenant_id))
        if entry.tenant_id == of:
            found.ttft_s.append(now + prompt_s - entry.arrived_at)

    def serve_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            at, tenant_id = heapq.heappop(ends)
            line.give_back(tenant_id)
            while (entry := line.take_next(fleet.num_places)) is not None:
                begin(entry, at)
            queue.check_invariants()

    for at, tenant_id, tokens in arrivals:
        serve_until(at)
        entry = Waiting(tenant_id, tokens, 1000, at)
        if line.take_at_once(entry, fleet.num_places):
            begin(entry, at)
            continue
        hopeless = queue.is_hopeless(structs.replace(entry, cost_tokens=0))
        pushed_out = queue.offer(entry)
        assert pushed_out is None or not hopeless, "refused early is refused"
        lost = [tenant_id] if pushed_out is None else [victim.tenant_id for victim in pushed_out]
        found.num_lost += lost.count(of)
        found.num_hopeless += hopeless and tenant_id == of
    serve_until(float("inf"))
    assert line.num_holding == 0
    return found


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def quiet_and_flood(fleet: Fleet, quiet_of_share: float) -> tuple[Load, Load]:
    rate = SHARE * fleet.tokens_per_s()
    return Load("quiet", quiet_of_share * rate), Load("flood", 20 * rate)


MANY = Fleet(16)
ONE = Fleet(1, duration_s=1600.0)
LONG_ANSWERS = Fleet(32, answer_s=8.0, duration_s=700.0)


@pytest.mark.parametrize(("fleet", "quiet_of_share", "seed"), [
    (MANY, 0.3, 1), (MANY, 0.6, 2), (MANY, 0.6, 3), (ONE, 0.5, 1), (ONE, 0.5, 2), (LONG_ANSWERS, 0.2, 1)])
def test_a_flood_at_20_times_its_share_leaves_the_quiet_one_alone(fleet: Fleet, quiet_of_share: float,
                                                                  seed: int) -> None:
    quiet, flood = quiet_and_flood(fleet, quiet_of_share)
    alone, beside = outcome(fleet, [quiet], "quiet", seed), outcome(fleet, [quiet, flood], "quiet", seed)
    assert len(alone.ttft_s) == len(beside.ttft_s) > 200
    assert alone.num_lost == beside.num_lost == 0
    assert p99(beside.ttft_s) <= 1.5 * p99(alone.ttft_s), (p99(alone.ttft_s), p99(beside.ttft_s))


@pytest.mark.parametrize(("fleet", "quiet_of_share"), [
    (replace(LONG_ANSWERS, reserved_ratio=0.0), 0.2), (replace(ONE, catch_up_tokens=0, head_start_tokens=0), 0.5)])
def test_without_these_measures_a_flood_is_felt(fleet: Fleet, quiet_of_share: float) -> None:
    """Without places left to others one waits for the end of an answer; without catching up or a head start, at one's
    own share for what one asks at once."""
    quiet, flood = quiet_and_flood(fleet, quiet_of_share)
    alone, beside = (p99(outcome(fleet, loads, "quiet", 1).ttft_s) for loads in ([quiet], [quiet, flood]))
    assert beside > 1.5 * alone, (alone, beside)


@pytest.mark.parametrize(("head_start_tokens", "is_felt"), [(Fleet.head_start_tokens, False), (0, True)])
def test_a_flood_that_has_just_begun_goes_before_nobody(head_start_tokens: int, *, is_felt: bool) -> None:
    """At its first moment nobody has anything to catch up; whoever then asks for a little is not made to share."""
    begin = replace(ONE, duration_s=30.0, head_start_tokens=head_start_tokens)
    quiet, flood = quiet_and_flood(begin, 0.5)
    alone, beside = ([second for seed in range(60) for second in outcome(begin, loads, "quiet", seed).ttft_s]
                     for loads in ([quiet], [quiet, flood]))
    assert len(alone) == len(beside) > 400
    assert (p99(beside) > 1.5 * p99(alone)) == is_felt, (p99(alone), p99(beside))


def test_the_flood_itself_gets_all_that_is_left_and_no_more_than_it_can_have() -> None:
    total = MANY.tokens_per_s()
    quiet, flood = Load("quiet", 0.2 * total), Load("flood", 10 * total)
    found = outcome(MANY, [quiet, flood], "flood", 0)
    served = len(found.ttft_s) * flood.mean_tokens / MANY.duration_s
    assert 0.65 * total < served < total
    assert found.num_lost > len(found.ttft_s), "what it cannot have is refused"
    assert found.num_hopeless > 0.9 * found.num_lost, "and nearly all of it before its tokens are counted"


def test_first_come_first_served_would_not_do() -> None:
    """The tests above can fail: in one line for all, the flood's backlog is everybody's."""
    total = MANY.tokens_per_s()
    quiet, flood = Load("quiet", 0.2 * total), Load("flood", 10 * total)
    alone = outcome(MANY, [quiet], "quiet", 0)
    one_line = outcome(MANY, [Load("both", quiet.tokens_per_s + flood.tokens_per_s)], "both", 0)
    assert p99(one_line.ttft_s) > 5 * p99(alone.ttft_s)
