"""A tenant that floods at 20 times its share, and one that does not: virtual time, the gateway's own queue."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from gateway.admission.queue import FairQueue, Waiting

NUM_PLACES = 16
TOKENS_PER_S = 1000.0       # of each place
TOTAL_TOKENS_PER_S = NUM_PLACES * TOKENS_PER_S
SHARE = 0.5                 # two tenants of the same weight
DURATION_S = 80.0


@dataclass(frozen=True)
class Load:
    """Requests of one tenant: Poisson arrivals at `tokens_per_s`, sizes from a quarter of the mean to 2.5 times."""

    tenant_id: str
    tokens_per_s: float
    mean_tokens: int = 800

    def arrivals(self, chance: random.Random) -> list[tuple[float, str, int]]:
        at, found = 0.0, []
        while True:
            at += chance.expovariate(self.tokens_per_s / self.mean_tokens)
            if at >= DURATION_S:
                return found
            found.append((at, self.tenant_id, round(self.mean_tokens * chance.choice((0.25, 0.5, 0.75, 1, 1, 2.5)))))


def ttft_s(loads: list[Load], of: str, seed: int) -> tuple[list[float], int]:
    """The seconds until each answer of one tenant, and how many of its requests found no room."""
    queue = FairQueue(max_requests=200, max_bytes=1 << 30, ageing_s=10.0)
    arrivals = sorted(one for load in loads for one in load.arrivals(random.Random(f"{load.tenant_id}-{seed}")))
    free_at = [0.0] * NUM_PLACES
    heapq.heapify(free_at)
    times: list[float] = []
    num_lost = 0

    def serve_until(now: float) -> None:
        while len(queue) and free_at[0] <= now:
            entry = queue.take()
            assert entry is not None
            begin = max(heapq.heappop(free_at), entry.arrived_at)
            heapq.heappush(free_at, begin + entry.cost_tokens / TOKENS_PER_S)
            if entry.tenant_id == of:
                times.append(begin + entry.cost_tokens / TOKENS_PER_S - entry.arrived_at)

    for at, tenant_id, tokens in arrivals:
        serve_until(at)
        pushed_out = queue.offer(Waiting(tenant_id, tokens, 1000, at))
        lost = [tenant_id] if pushed_out is None else [victim.tenant_id for victim in pushed_out]
        num_lost += lost.count(of)
        serve_until(at)
    serve_until(float("inf"))
    return times, num_lost


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.parametrize(("quiet_of_share", "seed"), [(0.3, 1), (0.6, 2), (0.6, 3)])
def test_a_flood_at_20_times_its_share_leaves_the_quiet_one_alone(quiet_of_share: float, seed: int) -> None:
    quiet = Load("quiet", quiet_of_share * SHARE * TOTAL_TOKENS_PER_S)
    flood = Load("flood", 20 * SHARE * TOTAL_TOKENS_PER_S)
    alone, lost_alone = ttft_s([quiet], "quiet", seed)
    beside, lost_beside = ttft_s([quiet, flood], "quiet", seed)
    assert len(alone) == len(beside) > 200
    assert lost_alone == lost_beside == 0
    assert p99(beside) <= 1.5 * p99(alone), (p99(alone), p99(beside))


def test_the_flood_itself_gets_all_that_is_left_and_no_more_than_it_can_have() -> None:
    quiet, flood = Load("quiet", 0.2 * TOTAL_TOKENS_PER_S), Load("flood", 10 * TOTAL_TOKENS_PER_S)
    times, num_lost = ttft_s([quiet, flood], "flood", 0)
    served = len(times) * flood.mean_tokens / DURATION_S
    assert 0.7 * TOTAL_TOKENS_PER_S < served < TOTAL_TOKENS_PER_S
    assert num_lost > len(times), "what it cannot have is refused"


def test_first_come_first_served_would_not_do() -> None:
    """The test above can fail: in one line for all, the flood's backlog is everybody's."""
    quiet, flood = Load("quiet", 0.2 * TOTAL_TOKENS_PER_S), Load("flood", 10 * TOTAL_TOKENS_PER_S)
    alone, _ = ttft_s([quiet], "quiet", 0)
    one_line, _ = ttft_s([Load("both", quiet.tokens_per_s + flood.tokens_per_s)], "both", 0)
    assert p99(one_line) > 5 * p99(alone)
