"""What routing learns from requests: how long answers are, how fast workers are, who served a session, what is hot.

Owns the four memories; this is the shell that feeds the pure estimators with instants. Must never: decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gateway.routing.cost import CandidateCost
from gateway.routing.endpoint import EndpointView
from gateway.routing.hot_prefixes import HotPrefixes
from gateway.routing.output_length import OutputLength
from gateway.routing.picker import RoutingDecision
from gateway.routing.rate_estimator import RateEstimator, settled
from gateway.routing.session_affinity import SessionAffinity
from gateway.server.request_record import RequestRecord


class Learning:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self.outputs = OutputLength()
        self.hot = HotPrefixes()
        self._rates = RateEstimator()
        self._sessions = SessionAffinity()
        self._epochs: dict[str, str] = {}

    def endpoint_of(self, session: str | None) -> str | None:
        """Who served this session last."""
        return self._sessions.endpoint_of(session, now=time.monotonic()) if session is not None else None

    def with_rates(self, views: Sequence[EndpointView], prompt_tokens: int) -> list[EndpointView]:
        """The views with the rates to reckon with: one of a length for all, so that more cache never costs more."""
        now = time.monotonic()
        return [self._with_rates(view, prompt_tokens, now) for view in views]

    def placed(self, record: RequestRecord, decision: RoutingDecision, session: str | None) -> None:
        """The request goes there, and this is what is expected of it."""
        now = time.monotonic()
        if session is not None:
            self._sessions.served(session, decision.endpoint_id, now=now)
        if self._epochs.get(decision.endpoint_id) != decision.epoch:
            self._epochs[decision.endpoint_id] = decision.epoch
            self._rates.forget(decision.endpoint_id)
        record.placed_at, record.expected = now, chosen_cost(decision)

    def ended(self, record: RequestRecord) -> None:
        """Compare what came with what was expected. A stream's first byte is its first token; other answers', not."""
        if record.outcome != "ok" or record.model is None:
            return
        if record.completion_tokens:
            self.outputs.observe(record.model, record.completion_tokens)
        expected, first_token_s = record.expected, record.first_token_s
        if expected is None or first_token_s is None or record.worker_id != expected.endpoint_id:
            return
        now = time.monotonic()
        if not expected.room_s:   # waiting for memory says nothing about speed
            self._rates.first_token(expected.endpoint_id, expected.uncached_tokens + expected.queued_tokens,
                                    first_token_s - expected.steps_s, now=now)
        if record.inter_token_s is not None:
            self._rates.inter_token(expected.endpoint_id, expected.num_active + 1, record.inter_token_s, now=now)

    def _with_rates(self, view: EndpointView, prompt_tokens: int, now: float) -> EndpointView:
        prefill = settled(view.prefill_tokens_per_s,
                          self._rates.prefill_tokens_per_s(view.endpoint_id, prompt_tokens, now=now))
        step_s = settled(view.decode_step_s,
                         self._rates.decode_step_s(view.endpoint_id, view.num_running + 1, now=now))
        if prefill == view.prefill_tokens_per_s and step_s == view.decode_step_s:
            return view
        return replace(view, prefill_tokens_per_s=prefill, decode_step_s=step_s)


def chosen_cost(decision: RoutingDecision) -> CandidateCost | None:
    """What the chosen endpoint was reckoned to cost; None of a policy that reckons nothing."""
    return next((cost for cost in decision.candidates if cost.endpoint_id == decision.endpoint_id), None)
