"""The memories of prompts as metrics: texts tokenised before, and replies spelled in a way of their own.

Owns the mapping of names; the figures are read from the memories at a scrape.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.knowledge.joining import Joining
from gateway.server.beginnings import Beginnings
from gateway.server.replies import ReplyMemory


class PromptMemoryCollector(Collector):
    """Every model that has a reference, and the replies of all of them."""

    def __init__(self, joining: Joining, beginnings: Beginnings, replies: ReplyMemory) -> None:
        self._joining = joining
        self._beginnings = beginnings
        self._replies = replies

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        segments = CounterMetricFamily("headstart_tokenizer_cache_segments", "Stretches of prompts looked up.",
                                       labels=["model", "outcome"])
        held = GaugeMetricFamily("headstart_tokenizer_cache_bytes", "Memory of texts tokenised before.",
                                 labels=["model"])
        for model, reference in self._joining.references().items():
            tokenizer = reference.renderer.tokenizer
            found, missed = tokenizer.segment_finds
            segments.add_metric([model, "found"], found)
            segments.add_metric([model, "missed"], missed)
            held.add_metric([model], tokenizer.remembered_bytes)
        replies = CounterMetricFamily("headstart_replies", "Replies: spelled as the tokenizer would, or not.",
                                      labels=["outcome"])
        for outcome, count in self._replies.num_replies.items():
            replies.add_metric([outcome], count)
        yield segments
        yield held
        yield CounterMetricFamily("headstart_chat_beginnings_found", "Long chats whose beginning was known.",
                                  value=self._beginnings.num_found)
        yield GaugeMetricFamily("headstart_chat_beginnings_bytes", "Memory of beginnings of long chats.",
                                value=self._beginnings.num_bytes)
        yield replies
        yield GaugeMetricFamily("headstart_reply_memory_bytes", "Memory of replies spelled in a way of their own.",
                                value=self._replies.num_bytes)
