"""What a policy is to the simulator: it chooses, and is told what became of its choices.

Owns the interface and the wrapper around the server's own policies. A policy belongs to one gateway replica and may
keep state; what it knows of caches and loads comes in as the server's PickInput.
"""

from __future__ import annotations

from msgspec import structs

from gateway.routing.busy_steps import BusySteps
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision, decide
from gateway.routing.policies import policy_named
from loadtests.sim.shortlist import ENDPOINTS_MIN, Shortlist
from loadtests.sim.sim_request import SimRequest


class RoutingPolicy:
    """`uses_index`: it wants exact matches in PickInput, so cache events are delivered and bets are placed.
    `makes_copies`: its gateway has hot prefixes computed ahead of need. `busy_steps`: what its gateway learns."""

    name = ""
    uses_index = False
    makes_copies = False
    speculative_ttl_s = 5.0
    busy_steps: BusySteps

    def choose(self, given: PickInput, request: SimRequest) -> RoutingDecision | NoEndpoint:
        """Where the request goes. `request` is for its block hashes; its answer's length is nobody's to know."""
        position = self.position(given, request)
        return decide(given, given.endpoints[position], "load")

    def position(self, given: PickInput, request: SimRequest) -> int:
        """For policies that only say which of `given.endpoints`."""
        raise AssertionError(f"policy {self.name!r} overrides neither choose() nor position()")

    def endpoint_changed(self, view: EndpointView, load: LoadView) -> None:
        """What is known of this endpoint, or booked there, is another now."""

    def booked(self, request: SimRequest, worker_id: str) -> None:
        """It was sent there."""

    def prefill_done(self, request: SimRequest, worker_id: str) -> None:
        """Its first token came."""

    def ended(self, request: SimRequest, worker_id: str) -> None:
        """It has ended."""


class ServerPolicy(RoutingPolicy):
    """One of gateway.routing.policies, as the gateway runs it."""

    def __init__(self, name: str, *, uses_index: bool) -> None:
        self.name = name
        self.uses_index = uses_index
        self.makes_copies = name == "headstart"
        self._policy = policy_named(name)
        self._shortlist: Shortlist | None = None

    def choose(self, given: PickInput, request: SimRequest) -> RoutingDecision | NoEndpoint:
        if not self.uses_index or len(given.endpoints) < ENDPOINTS_MIN:
            return self._policy(given)
        if self._shortlist is None:
            self._shortlist = Shortlist(given.endpoints, given.loads, self.busy_steps)
        return self._policy(structs.replace(given, endpoints=self._shortlist.narrow(given)))

    def endpoint_changed(self, view: EndpointView, load: LoadView) -> None:
        if self._shortlist is not None:
            self._shortlist.update(view, load)


def num_inflight(given: PickInput) -> list[int]:
    """Requests that this router has under way on each endpoint, in their order."""
    return [given.loads.get(view.endpoint_id, NO_LOAD).num_inflight for view in given.endpoints]


def best_by_chance(scores: list[float], ratio: float) -> int:
    """The position of the highest score; among equals by chance (`ratio` uniform in [0, 1))."""
    best = max(scores)
    tied = [index for index, score in enumerate(scores) if score == best]
    return tied[int(ratio * len(tied))]
