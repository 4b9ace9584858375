"""The engine's own counters as Prometheus families, made at scrape time from the last EngineStats.

Owns nothing but the mapping of names. Before the model is ready there is nothing to tell, and nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.engine.messages import EngineReady, EngineStats


class EngineCollector(Collector):
    """`stats` and `ready` are replaced from the event loop as reports arrive."""

    def __init__(self, busy_ratio: Callable[[], float]) -> None:
        self.stats = EngineStats()
        self.ready: EngineReady | None = None
        self._busy_ratio = busy_ratio

    def describe(self) -> list[Metric]:
        return []       # families are known only once the model is; nothing to check for duplicates at registration

    def collect(self) -> Iterator[Metric]:
        if self.ready is None:
            return
        yield from self._pool(self.stats, self.ready)
        yield from self._work(self.stats)
        yield from self._vllm(self.stats, self.ready)

    def _pool(self, stats: EngineStats, ready: EngineReady) -> Iterator[Metric]:
        states = {"free": stats.blocks_free, "cached": stats.blocks_cached, "used": stats.blocks_used, "pinned": 0}
        yield _labelled("headstart_worker_kv_blocks", "Blocks by state; the states add up to the pool.",
                        "state", states)
        # One tier so far: device memory. Everything findable or in use lies there.
        tier = "gpu" if ready.device.startswith("cuda") else "cpu"
        yield _labelled("headstart_worker_kv_tier_blocks", "Blocks that hold something, by tier.", "tier",
                        {tier: stats.blocks_cached + stats.blocks_used})
        yield GaugeMetricFamily("headstart_worker_kv_usage_ratio", "Blocks held by sequences over all blocks.",
                                value=_usage_ratio(stats))
        yield GaugeMetricFamily("headstart_worker_kv_bytes_per_token", "KV bytes of one token position.",
                                value=ready.kv_bytes_per_token)
        kv_bytes = ready.num_blocks * ready.block_size * ready.kv_bytes_per_token
        yield _labelled("headstart_worker_device_memory_bytes", "Device memory by use, as measured at start.", "kind",
                        {"weights": ready.weights_bytes, "kv": kv_bytes, "activations": ready.activation_bytes,
                         "other": ready.other_bytes})
        slots = max(1, stats.blocks_used * ready.block_size)
        yield _labelled("headstart_worker_kv_waste_ratio", "Slots of held blocks without use, by reason.",
                        "kind", {"tail": stats.waste_tail_slots / slots,
                                 "reserved": stats.waste_reserved_slots / slots,
                                 "duplicate": stats.waste_duplicate_slots / slots})

    def _work(self, stats: EngineStats) -> Iterator[Metric]:
        yield _counter("headstart_worker_prefix_tokens", "Prompt tokens looked up and found, once per sequence.",
                       "outcome", {"queried": stats.queried_tokens_total, "hit": stats.hit_tokens_total})
        yield _counter("headstart_worker_evictions", "Cached blocks given up.", "reason",
                       {"capacity": stats.evictions_total})
        yield _counter("headstart_worker_recomputed_tokens", "Positions computed again.", "reason",
                       {"preempted": stats.recomputed_preempted_total, "evicted": stats.recomputed_evicted_total})
        yield CounterMetricFamily("headstart_worker_preemptions", "Running sequences that gave their blocks up.",
                                  value=stats.preemptions_total)
        yield CounterMetricFamily("headstart_worker_computed_positions", "Token positions computed.",
                                  value=stats.computed_positions_total)
        yield GaugeMetricFamily("headstart_worker_compute_busy_ratio", "Share of the last seconds spent in steps.",
                                value=self._busy_ratio())
        yield GaugeMetricFamily("headstart_worker_memory_bandwidth_ratio",
                                "What decoding reads over what the device was measured to read.",
                                value=stats.memory_bandwidth_ratio)
        yield CounterMetricFamily("headstart_worker_shrunk_steps", "Steps that did not fit into memory.",
                                  value=stats.shrunk_steps_total)

    def _vllm(self, stats: EngineStats, ready: EngineReady) -> Iterator[Metric]:
        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([ready.model], value)
            return family

        yield gauge("vllm:num_requests_running", "Sequences being computed.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Sequences waiting for room.", stats.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Blocks held by sequences over all blocks, 0 to 1.",
                    _usage_ratio(stats))
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", "model_name",
                       {ready.model: stats.queried_tokens_total})
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found.", "model_name",
                       {ready.model: stats.hit_tokens_total})
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape.",
                                 labels=["block_size", "num_gpu_blocks"])
        info.add_metric([str(ready.block_size), str(ready.num_blocks)], 1)
        yield info


def _usage_ratio(stats: EngineStats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
