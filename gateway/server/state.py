"""What the routes share. Owns nothing itself: each part has its one writer (see the parts' own files)."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.knowledge.endpoint_table import EndpointTable
from gateway.knowledge.index_writer import IndexWriter
from gateway.knowledge.joining import Joining
from gateway.routing.breaker import BreakerLimits
from gateway.routing.load_ledger import LoadLedger
from gateway.routing.prefix_index import PrefixIndex
from gateway.server.access import Access
from gateway.server.admission import Admission
from gateway.server.beginnings import BEGINNINGS_SHARE
from gateway.server.breakers import Breakers
from gateway.server.metrics import GatewayMetrics
from gateway.shared.membership import Membership


@dataclass(frozen=True, slots=True)
class GatewayState:
    """One gateway process's tables and settings."""

    config: GatewayConfig
    table: EndpointTable
    index: PrefixIndex
    ledger: LoadLedger
    writer: IndexWriter
    joining: Joining
    metrics: GatewayMetrics
    access: Access
    admission: Admission
    breakers: Breakers


def new_state(config: GatewayConfig, table: EndpointTable, access: Access,
              membership: Membership | None = None) -> GatewayState:
    """Empty tables for these workers; what several processes share comes from their membership."""
    index, ledger = PrefixIndex(config.index_max_bytes), LoadLedger() if membership is None else membership.ledger
    writer = IndexWriter(index)
    admission, metrics = Admission(config, table, membership), GatewayMetrics(table, index, ledger)
    breakers = Breakers(table, BreakerLimits(config.breaker_failures, config.breaker_open_s,
                                             max(config.breaker_open_s, config.breaker_open_max_s)))
    metrics.watch_queue(lambda: admission.num_waiting)
    metrics.watch_breakers(breakers.states)
    joining = Joining(table, config.text_memory_bytes - config.text_memory_bytes // BEGINNINGS_SHARE)
    return GatewayState(config, table, index, ledger, writer, joining, metrics, access, admission, breakers)
