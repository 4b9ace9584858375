"""Synthetic workloads, seeded: shapes that published benchmarks use, and shapes meant to break a router.

Owns the shapes. Every function draws from random.Random(seed) and nothing else, so equal arguments give equal
requests. Arrivals are Poisson at 1 request/s; Trace.at_rate() sets another rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from loadtests.traces import Trace, TraceRequest

BLOCK = 64


def llm_d(num_requests: int, seed: int) -> Trace:
    """llm-d's published shape: 150 customers, 6,000 shared tokens each, 1,200 of one's own, 1,000 of output."""
    draw = random.Random(seed)
    blocks = _Blocks()
    contexts = [blocks.fresh(6000) for _ in range(150)]
    return _trace("llm_d", draw, (contexts[draw.randrange(150)] + blocks.fresh(1200) for _ in range(num_requests)),
                  outputs=lambda: 1000)


def hot_prefix(num_requests: int, seed: int, *, share: float) -> Trace:
    """One prefix of 6,000 tokens in `share` of the requests; the others have prefixes of 150 tenants."""
    draw = random.Random(seed)
    blocks = _Blocks()
    hot, others = blocks.fresh(6000), [blocks.fresh(2000) for _ in range(150)]

    def prompts() -> Iterator[list[int]]:
        for _ in range(num_requests):
            prefix = hot if draw.random() < share else others[draw.randrange(150)]
            yield prefix + blocks.fresh(400)
    return _trace(f"hot_prefix_{share:.0%}".rstrip("%"), draw, prompts(), outputs=lambda: draw.randint(50, 350))


def sibling_bursts(num_requests: int, seed: int) -> Trace:
    """Bursts of 8 requests within 50 ms on one new prefix of 4,000 tokens: parallel tool calls, best-of-n."""
    draw = random.Random(seed)
    blocks = _Blocks()
    requests: list[TraceRequest] = []
    at_s = 0.0
    while len(requests) < num_requests:
        at_s += draw.expovariate(1 / 8)
        prefix = blocks.fresh(4000)
        requests += [_request(at_s + draw.uniform(0, 0.05), prefix + blocks.fresh(200), draw.randint(50, 250), draw)
                     for _ in range(8)]
    ordered = sorted(requests[:num_requests], key=lambda request: request.at_s)
    return Trace("sibling_bursts", "synthetic", BLOCK, tuple(ordered))


def zero_sharing(num_requests: int, seed: int) -> Trace:
    """Nothing is ever shared: lengths from 200 to 4,000 tokens."""
    draw = random.Random(seed)
    blocks = _Blocks()
    return _trace("zero_sharing", draw, (blocks.fresh(draw.randint(200, 4000)) for _ in range(num_requests)),
                  outputs=lambda: draw.randint(50, 350))


def mt_bench(num_requests: int, seed: int) -> Trace:
    """Short two-turn conversations, as MT-bench has them: the second prompt holds the first and its answer."""
    draw = random.Random(seed)
    blocks = _Blocks()
    requests: list[TraceRequest] = []
    at_s = 0.0
    while len(requests) < num_requests:
        at_s += draw.expovariate(0.5)
        first = blocks.fresh(draw.randint(64, 300))
        requests.append(_request(at_s, first, 200, draw))
        requests.append(_request(at_s + 15 + draw.expovariate(0.1), first + blocks.fresh(264), 200, draw))
    ordered = sorted(requests[:num_requests], key=lambda request: request.at_s)
    return Trace("mt_bench", "synthetic", BLOCK, tuple(ordered))


def tenants(num_requests: int, seed: int) -> Trace:
    """2,000 tenants with prefixes of 1,000 tokens, asked for by a power law, 100 of one's own: for large fleets."""
    draw = random.Random(seed)
    blocks = _Blocks()
    prefixes = [blocks.fresh(1000) for _ in range(2000)]
    return _trace("tenants", draw, (prefixes[min(1999, int(draw.paretovariate(0.7)) - 1)] + blocks.fresh(100)
                                    for _ in range(num_requests)), outputs=lambda: draw.randint(20, 120))


WORKLOADS: dict[str, Callable[[int, int], Trace]] = {
    "llm_d": llm_d,
    "hot_prefix_25": lambda num, seed: hot_prefix(num, seed, share=0.25),
    "hot_prefix_100": lambda num, seed: hot_prefix(num, seed, share=1.0),
    "sibling_bursts": sibling_bursts,
    "zero_sharing": zero_sharing,
    "mt_bench": mt_bench,
    "tenants": tenants,
}


class _Blocks:
    """Hands out block ids that nobody had before."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, num_tokens: int) -> list[int]:
        num_blocks = max(1, num_tokens // BLOCK)
        self._next += num_blocks
        return list(range(self._next - num_blocks, self._next))


def _trace(name: str, draw: random.Random, prompts: Iterator[list[int]], *, outputs: Callable[[], int]) -> Trace:
    at_s, requests = 0.0, []
    for prompt in prompts:
        at_s += draw.expovariate(1.0)
        requests.append(_request(at_s, prompt, outputs(), draw))
    return Trace(name, "synthetic", BLOCK, tuple(requests))


def _request(at_s: float, block_ids: list[int], output_tokens: int, draw: random.Random) -> TraceRequest:
    return TraceRequest(at_s, len(block_ids) * BLOCK + draw.randrange(1, BLOCK), output_tokens, tuple(block_ids))
