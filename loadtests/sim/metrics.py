"""What a run gave: the keys of `simulate --json`, and what the best cache could have given.

Owns the arithmetic over finished requests, and the two yardsticks: an infinite cache, and one LRU cache as large as
all workers together. It must never run anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from loadtests.sim.cluster import Cluster
from loadtests.sim.cost_model import CostModel
from loadtests.traces import Trace

REFERENCE_STREAMS = 32   # that share a decode step, when saturation is computed


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Seconds, tokens and ratios of one policy. `max_mean_load`: positions computed by the busiest worker against
    the mean; `max_mean_requests` the same by requests, `max_mean_busy` by seconds in which a worker computed.
    `failed` requests fit no worker and count nowhere else. None: of nothing, where all failed."""

    policy: str
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    ttft_max_s: float | None
    hit_token_ratio: float | None
    ideal_hit_token_ratio: float
    max_mean_load: float
    requests: int
    failed: int
    one_cache_hit_token_ratio: float
    request_mean_s: float | None
    request_p99_s: float | None
    max_mean_requests: float
    preemptions: int
    busy_ratio: float
    span_s: float
    max_mean_busy: float = 0.0  # of runs that were kept before it was counted

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Share of the prompt tokens that a cache of that kind holds when asked in order of arrival."""

    infinite_ratio: float
    one_cache_ratio: float


def result_of(cluster: Cluster, policy: str, bounds: CacheBounds) -> PolicyResult:
    """Of a run that has ended."""
    done = [request for request in cluster.requests if not request.failed and request.first_token_at is not None
            and request.ended_at is not None]
    ttft = sorted((request.first_token_at or 0.0) - request.arrives_at for request in done)
    whole = sorted((request.ended_at or 0.0) - request.arrives_at for request in done)
    prompt = sum(request.prompt_tokens for request in done)
    workers, retired = cluster.workers, cluster.retired
    computed = {worker.worker_id: worker.scheduler.counters.computed_positions for worker in workers}
    busy_s = {worker.worker_id: worker.busy_s for worker in workers}
    for worker in retired:
        computed[worker.worker_id] += worker.scheduler.counters.computed_positions
        busy_s[worker.worker_id] += worker.busy_s
    counted = {worker.worker_id: 0 for worker in workers}
    for request in done:
        counted[request.worker_id] += 1
    span_s = cluster.clock.now
    return PolicyResult(
        policy=policy, ttft_mean_s=mean(ttft), ttft_p50_s=quantile(ttft, 0.5), ttft_p90_s=quantile(ttft, 0.9),
        ttft_p95_s=quantile(ttft, 0.95), ttft_p99_s=quantile(ttft, 0.99), ttft_max_s=quantile(ttft, 1.0),
        hit_token_ratio=sum(request.cached_tokens for request in done) / prompt if prompt else None,
        ideal_hit_token_ratio=bounds.infinite_ratio,
        max_mean_load=_max_mean(list(computed.values())),
        requests=len(done), failed=len(cluster.requests) - len(done),
        one_cache_hit_token_ratio=bounds.one_cache_ratio, request_mean_s=mean(whole),
        request_p99_s=quantile(whole, 0.99), max_mean_requests=_max_mean(list(counted.values())),
        max_mean_busy=_max_mean(list(busy_s.values())),
        preemptions=sum(worker.scheduler.counters.preemptions for worker in workers + retired),
        busy_ratio=sum(busy_s.values()) / max(1e-9, span_s) / len(workers),
        span_s=span_s)


def cache_bounds(trace: Trace, num_blocks: int) -> CacheBounds:
    """What an infinite cache and one LRU cache of `num_blocks` would hit, in tokens, at most prompt - 1 each."""
    prompt = sum(request.prompt_tokens for request in trace.requests)
    return CacheBounds(_hit_tokens(trace, None) / max(1, prompt), _hit_tokens(trace, num_blocks) / max(1, prompt))


def saturation_rate(trace: Trace, model: CostModel, *, num_workers: float, tokens_per_worker: int,
                    hit_ratio: float) -> float:
    """Requests per second at which the workers have no idle second left, if `hit_ratio` of the tokens are hits.

    A request needs its uncached prefill, and its share of decode steps of REFERENCE_STREAMS streams, or of as many
    mean requests as the pool holds where those are fewer.
    """
    held = sum(request.prompt_tokens + request.output_tokens for request in trace.requests) / len(trace.requests)
    streams = max(1, min(REFERENCE_STREAMS, int(tokens_per_worker / held)))
    seconds = 0.0
    for request in trace.requests:
        cached = int(request.prompt_tokens * hit_ratio)
        seconds += (model.prefill_s(request.prompt_tokens, cached) - model.floor_s
                    + request.output_tokens * model.decode_step_s(streams, request.prompt_tokens) / streams)
    return num_workers * len(trace.requests) / seconds


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Of an ascending list, the nearest rank; None of an empty one."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))] if ordered else None


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def _hit_tokens(trace: Trace, num_blocks: int | None) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    num_tokens = 0
    for request, chain in zip(trace.requests, trace.chains(), strict=True):
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        num_tokens += min(depth * trace.block_size, request.prompt_tokens - 1)
        for block in reversed(chain):   # the tail is forgotten first
            held[block] = None
            held.move_to_end(block)
        while num_blocks is not None and len(held) > num_blocks:
            held.popitem(last=False)
    return num_tokens


def _max_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
