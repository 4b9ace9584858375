"""What routing learns from requests: how long answers are, how fast workers are, who served a session, what is hot.

Owns the memories of these; this is the shell that feeds the pure estimators with instants. Must never: decide.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from gateway.routing.busy_steps import BusySteps
from gateway.routing.cost import CandidateCost
from gateway.routing.endpoint import EndpointView
from gateway.routing.hot_prefixes import HotPrefixes
from gateway.routing.output_length import OutputLength
from gateway.routing.picker import RoutingDecision
from gateway.routing.rate_estimator import RateEstimator, Stretch, batch_bucket, length_bucket, settled
from gateway.routing.session_affinity import SessionAffinity
from gateway.routing.tier_ratios import TierRatios
from gateway.server.request_record import RequestRecord

# Between a worker's reports: what was observed beside the one says nothing about the other.
MOVED_RATIO = 2.0


class Learning:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self.outputs = OutputLength()
        self.hot = HotPrefixes()
        self.stretch = Stretch()
        self.busy_steps = BusySteps()
        self._rates = RateEstimator()
        self._tiers = TierRatios()
        self._sessions = SessionAffinity()
        self._epochs: dict[str, str] = {}
        self._reported: dict[str, tuple[float, float]] = {}
        self._compared: dict[str, tuple[float, float]] = {}   # the reports that observations are compared with
        self._odd: dict[str, frozenset[str]] = {}   # by endpoint: where observations are far from its report

    def endpoint_of(self, session: str | None) -> str | None:
        """Who served this session last."""
        return self._sessions.endpoint_of(session, now=time.monotonic()) if session is not None else None

    def tier_ratio(self, endpoint_id: str) -> float:
        """What loading from its slower tier takes there for a second of computing."""
        return self._tiers.ratio(endpoint_id, now=time.monotonic())

    def with_rates(self, views: list[EndpointView], prompt_tokens: int) -> list[EndpointView]:
        """The views with the rates to reckon with: one of a length for all, so that more cache never costs more.

        Observations are looked up only for an endpoint that reports no rates or was seen to be at odds with them.
        """
        odd = self._odd
        if not odd:
            for view in views:
                if not view.prefill_tokens_per_s or not view.decode_step_s:
                    break
            else:
                return views
        now = time.monotonic()
        return [self._with_rates(view, prompt_tokens, now) if view.endpoint_id in odd
                or not (view.prefill_tokens_per_s and view.decode_step_s) else view for view in views]

    def placed(self, record: RequestRecord, decision: RoutingDecision, session: str | None, *,
               reported: tuple[float, float]) -> None:
        """The request goes there, and this is what is expected of it. `reported`: the worker's own rates."""
        now, endpoint_id = time.monotonic(), decision.endpoint_id
        if session is not None:
            self._sessions.served(session, endpoint_id, now=now)
        if self._has_moved(endpoint_id, reported):
            self._forget_rates(endpoint_id)
        if self._epochs.get(endpoint_id) != decision.epoch:
            self._epochs[endpoint_id] = decision.epoch
            self._forget_rates(endpoint_id)
            self.busy_steps.forget(endpoint_id)
            self._tiers.forget(endpoint_id)
        self._reported[endpoint_id] = reported
        self._compared.setdefault(endpoint_id, reported)
        record.placed_at, record.expected = now, decision.cost

    def _has_moved(self, endpoint_id: str, reported: tuple[float, float]) -> bool:
        """A worker that is slow no more, or fast no more, says so: it should not be held against its report."""
        before = self._compared.get(endpoint_id)
        return before is not None and (_differ(before[0], reported[0]) or _differ(before[1], reported[1]))

    def _forget_rates(self, endpoint_id: str) -> None:
        self._rates.forget(endpoint_id)
        self._compared.pop(endpoint_id, None)
        self._odd.pop(endpoint_id, None)

    def first_token(self, expected: CandidateCost, placed_at: float) -> None:
        """A stream's first token came just now; `expected` of the worker when it was chosen, at `placed_at`."""
        self.busy_steps.saw(expected, time.monotonic() - placed_at)

    def ended(self, record: RequestRecord) -> None:
        """Compare what came with what was expected. A stream's first byte is its first token; other answers', not."""
        if record.outcome != "ok" or record.model is None:
            return
        if record.completion_tokens:
            self.outputs.observe(record.model, record.completion_tokens)
        expected, first_token_s = record.expected, record.first_token_s
        if expected is None or first_token_s is None or record.worker_id != expected.endpoint_id:
            return
        if expected.spared_s:
            if record.cached_tokens is not None and record.cached_tokens >= expected.matched_tokens:
                self._tiers.saw(expected, first_token_s, now=time.monotonic())
        elif not expected.room_s:   # waiting for memory says nothing about speed
            self._saw_prefill(expected.endpoint_id, expected.uncached_tokens + expected.queued_tokens,
                              first_token_s - expected.steps_s)
        if record.inter_token_s is not None:
            self._saw_step(expected.endpoint_id, expected.num_active + 1, record.inter_token_s)

    def _saw_prefill(self, endpoint_id: str, tokens: int, seconds: float) -> None:
        now = time.monotonic()
        self._rates.first_token(endpoint_id, tokens, seconds, now=now)
        observed = self._rates.prefill_tokens_per_s(endpoint_id, tokens, now=now)
        self._compare(endpoint_id, f"prefill {length_bucket(tokens)}", self._reported[endpoint_id][0], observed)

    def _saw_step(self, endpoint_id: str, num_streams: int, seconds: float) -> None:
        now = time.monotonic()
        self._rates.inter_token(endpoint_id, num_streams, seconds, now=now)
        observed = self._rates.decode_step_s(endpoint_id, num_streams, now=now)
        step_s = self._reported[endpoint_id][1]
        self.stretch.saw(seconds, step_s)
        self._compare(endpoint_id, f"step {batch_bucket(num_streams)}", step_s * self.stretch.ratio, observed)

    def _compare(self, endpoint_id: str, what: str, reported: float, observed: float) -> None:
        at_odds = self._odd.get(endpoint_id, frozenset())
        at_odds = at_odds - {what} if settled(reported, observed) == reported else at_odds | {what}
        if at_odds:
            self._odd[endpoint_id] = at_odds
        else:
            self._odd.pop(endpoint_id, None)

    def _with_rates(self, view: EndpointView, prompt_tokens: int, now: float) -> EndpointView:
        prefill = settled(view.prefill_tokens_per_s,
                          self._rates.prefill_tokens_per_s(view.endpoint_id, prompt_tokens, now=now))
        # What is observed has prompts in between; a step has not.
        observed = self._rates.decode_step_s(view.endpoint_id, view.num_running + 1, now=now)
        step_s = settled(view.decode_step_s, observed / self.stretch.ratio)
        if prefill == view.prefill_tokens_per_s and step_s == view.decode_step_s:
            return view
        return replace(view, prefill_tokens_per_s=prefill, decode_step_s=step_s)


def _differ(before: float, now: float) -> bool:
    return before > 0 and not before / MOVED_RATIO <= now <= before * MOVED_RATIO
