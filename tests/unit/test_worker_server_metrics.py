"""Names, counting and the busy window of the worker's metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.engine.messages import EngineReady, EngineStats, SequenceStats, StepReport
from worker.protocol.block_hash import HashScheme
from worker.server.metrics import BUSY_WINDOW_S, BusyWindow, WorkerMetrics

SCHEME = HashScheme(block_size=16, seed=b"", model="tiny", weights="w", tokenizer="t", template="c",
                    kv_dtype="float32", exactness="fast")
READY = EngineReady(folder="", model="tiny", hash_scheme=SCHEME, num_blocks=100, block_size=16, max_context=512,
                    vocab_size=384, eos_token_ids=(2,), device="cpu", dtype="float32", kv_dtype="float32",
                    kv_bytes_per_token=64, exactness="fast", prefill_tokens_per_s=1.0, decode_step_s=0.1)
STATS = EngineStats(blocks_total=100, blocks_free=60, blocks_cached=30, blocks_used=10, num_running=2, num_waiting=3,
                    queried_tokens_total=500, hit_tokens_total=320, evictions_total=4, preemptions_total=1,
                    recomputed_preempted_total=17, recomputed_evicted_total=33)


def samples(metrics: WorkerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render().decode()
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def observed() -> WorkerMetrics:
    metrics = WorkerMetrics()
    metrics.observe_ready(READY, EngineStats())
    metrics.observe_step(StepReport(stats=STATS, step_s=0.2, step_kind="mixed", batch_size=5))
    return metrics


@pytest.mark.parametrize(("name", "labels", "value"), [
    ("headstart_worker_kv_blocks", {"state": "free"}, 60),
    ("headstart_worker_kv_blocks", {"state": "cached"}, 30),
    ("headstart_worker_kv_blocks", {"state": "used"}, 10),
    ("headstart_worker_kv_blocks", {"state": "pinned"}, 0),
    ("headstart_worker_kv_tier_blocks", {"tier": "cpu"}, 40),
    ("headstart_worker_kv_usage_ratio", {}, 0.1),
    ("headstart_worker_kv_bytes_per_token", {}, 64),
    ("headstart_worker_device_memory_bytes", {"kind": "kv"}, 100 * 16 * 64),
    ("headstart_worker_prefix_tokens_total", {"outcome": "queried"}, 500),
    ("headstart_worker_prefix_tokens_total", {"outcome": "hit"}, 320),
    ("headstart_worker_evictions_total", {"reason": "capacity"}, 4),
    ("headstart_worker_recomputed_tokens_total", {"reason": "preempted"}, 17),
    ("headstart_worker_recomputed_tokens_total", {"reason": "evicted"}, 33),
    ("headstart_worker_preemptions_total", {}, 1),
    ("headstart_worker_step_seconds_count", {"kind": "mixed"}, 1),
    ("headstart_worker_batch_size_sum", {}, 5),
    ("vllm:num_requests_running", {"model_name": "tiny"}, 2),
    ("vllm:num_requests_waiting", {"model_name": "tiny"}, 3),
    ("vllm:kv_cache_usage_perc", {"model_name": "tiny"}, 0.1),
    ("vllm:prefix_cache_queries_total", {"model_name": "tiny"}, 500),
    ("vllm:prefix_cache_hits_total", {"model_name": "tiny"}, 320),
    ("vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "100"}, 1),
])
def test_value_by_name(name: str, labels: dict[str, str], value: float) -> None:
    assert samples(observed())[name, tuple(sorted(labels.items()))] == value


def test_every_phase_has_a_series_before_the_first_request() -> None:
    found = {dict(labels)["phase"] for name, labels in samples(WorkerMetrics())
             if name == "headstart_worker_ttft_seconds_count"}
    assert found == {"tokenize", "queue", "allocate", "prefill", "recompute", "sample"}


def test_recomputation_is_observed_only_where_there_was_some() -> None:
    metrics = WorkerMetrics()
    phases = {"queue": 0.0, "prefill": 0.3, "recompute": 0.0}
    stats = SequenceStats(prompt_tokens=1, cached_tokens=0, computed_tokens=1, recomputed_tokens=0, output_tokens=1,
                          preemptions=0, phases=phases, inter_token_p50_s=None, inter_token_max_s=None)
    metrics.observe_sequence(stats)
    found = samples(metrics)
    assert found["headstart_worker_ttft_seconds_count", (("phase", "queue"),)] == 1
    assert found["headstart_worker_ttft_seconds_count", (("phase", "recompute"),)] == 0


def test_an_idle_report_is_no_step() -> None:
    metrics = WorkerMetrics()
    metrics.observe_ready(READY, EngineStats())
    metrics.observe_step(StepReport(stats=STATS))
    assert ("headstart_worker_batch_size_sum", ()) in samples(metrics)
    assert samples(metrics)["headstart_worker_batch_size_sum", ()] == 0


def test_busy_ratio_counts_the_part_of_a_step_inside_the_window() -> None:
    window = BusyWindow()
    assert window.ratio(0.0) == 0.0
    window.add(100.0, 4.0)
    window.add(104.0, 2.0)
    assert window.ratio(104.0) == pytest.approx(6.0 / BUSY_WINDOW_S)
    assert window.ratio(108.0) == pytest.approx((2.0 + 2.0) / BUSY_WINDOW_S), "half of the first lies outside"
    assert window.ratio(200.0) == 0.0


def test_busy_ratio_never_exceeds_one() -> None:
    window = BusyWindow()
    for second in range(30):
        window.add(float(second), 1.5)
    assert window.ratio(29.0) == 1.0
