"""What a server's /metrics counted while a replay ran: of our gateway and worker, and of engines with vLLM's names.

Owns which counters are worth a line. A server without /metrics, or with others', is no error.
"""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

READ_TIMEOUT_S = 10.0
COUNTERS = frozenset((
    "headstart_cached_tokens_total", "headstart_prompt_tokens_total", "headstart_hit_error_tokens_count",
    "headstart_retries_total", "headstart_migrations_total", "headstart_rejected_total",
    "headstart_worker_prefix_tokens_total", "headstart_worker_evictions_total", "headstart_worker_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "sglang:prompt_tokens_total", "sglang:cached_tokens_total"))
# Labels that tell apart what must not be added up; the others (worker, model) are.
TELLING = ("source", "direction", "outcome", "reason")


async def read_counters(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Now; empty where there are none."""
    try:
        async with http.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=READ_TIMEOUT_S)) as answer:
            text = await answer.text() if answer.status == 200 else ""
        return counters_in(text)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return {}


def counters_in(text: str) -> dict[str, float]:
    """The counters of a Prometheus text, by name and telling labels. ValueError when it is none."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in COUNTERS:
                labels = ",".join(f'{name}="{sample.labels[name]}"' for name in TELLING if name in sample.labels)
                key = f"{sample.name}{{{labels}}}" if labels else sample.name
                values[key] = values.get(key, 0.0) + sample.value
    return values


def counted_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What moved. A counter that went back was restarted: its new value counts."""
    moved = {name: value - before.get(name, 0.0) if value >= before.get(name, 0.0) else value
             for name, value in after.items()}
    return {name: value for name, value in moved.items() if value}
