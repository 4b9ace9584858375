"""Pick and book: from a prepared prompt to a worker with the request's load on its account.

Owns: the one place where index, ledger and endpoint table are read for a decision and written with its consequences.
Must never: await between reading and booking; nothing here is a coroutine.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, structs

from gateway import errors
from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.relay.retry import AttemptFailed
from gateway.relay.upstream import UpstreamRequest
from gateway.routing.endpoint import Knowledge
from gateway.routing.hot_prefixes import Sighting
from gateway.routing.load_ledger import Footprint, LoadLedger, LoadView
from gateway.routing.picker import NoEndpoint, PickInput, RoutingDecision
from gateway.routing.policies import Policy
from gateway.routing.prefix_index import NO_MATCH, Match, PrefixIndex, Speculation
from gateway.routing.usual_cost import Standings
from gateway.server.breakers import Breakers
from gateway.server.learning import Learning
from gateway.server.placement import Books, Placement
from gateway.server.prefills import Prefills
from gateway.server.prompt_work import PreparedPrompt
from gateway.server.request_record import RequestRecord
from gateway.shared.notes import Notes, SharedBet
from worker.protocol.block_hash import ExtraKeyKind, HashScheme

KV_CACHE_FULL = "full"
# A shorter new tail is not worth a word to the gateway's other processes.
TOLD_BET_MIN_BLOCKS = 32
# Whoever loses a race for a worker's last place looks for another worker, so often in all and at any one.
TRIES_MAX, TRIES_AT_ONE_MAX = 32, 3
EXPECTED_PREFILL_MAX_S = 120.0
EXPLAINED = ("endpoint_id", "epoch", "reason", "matched_tokens", "match_confirmed_tokens",
             "match_speculative_tokens", "uncached_tokens")
APPROXIMATE_BLOCKS_MAX = 10_000  # of an endpoint that does not say how many it has



class RoutedPrompt(Struct, frozen=True, gc=False):
    """What a decision needs of a request. `max_tokens` None: up to the end of the context. `session`: a key by which
    it and other turns of it are known, whose it is included."""

    model: str
    prepared: PreparedPrompt
    max_tokens: int | None
    num_choices: int = 1
    stream: bool = False
    session: str | None = None

    @property
    def is_one_sequence(self) -> bool:
        """Whether what the worker reports as cached is about one prompt computed once."""
        return len(self.prepared.prompts) == 1 and self.num_choices == 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the longest prompt, by which a request of several is placed."""
        return len(self.prepared.placed_by)


@dataclass(frozen=True, slots=True)
class BetTtl:
    """How long a routed prompt counts as cached unless events say more."""

    with_events_s: float
    without_events_s: float


class Dispatcher:
    """Decides by `policy` and books. Lives on the event loop."""

    def __init__(self, table: EndpointTable, index: PrefixIndex, ledger: LoadLedger, *, policy: Policy,
                 bet_ttl: BetTtl, max_inflight: int, breakers: Breakers, notes: Notes | None = None) -> None:
        self._table = table
        self._index = index
        self._ledger = ledger
        self._policy = policy
        self._bet_ttl = bet_ttl
        self._max_inflight = max_inflight
        self._breakers = breakers
        self._turns = itertools.count()
        self.learning = Learning()
        self._prefills = Prefills()
        self._standings = Standings()
        self._books = Books(table, index, breakers, self.learning, self._prefills)
        self._notes = notes
        if notes is not None:
            notes.on_bet = self._bet_was_placed

    def decide(self, prompt: RoutedPrompt, excluded: frozenset[str],
               record: RequestRecord | None = None) -> RoutingDecision | NoEndpoint:
        """The decision as of now; nothing is booked. `record` is told how long matching and picking took."""
        now, prepared, learning = time.monotonic(), prompt.prepared, self.learning
        self._prefills.tick(now)
        matches, chain = self._matches(prepared.hashes, now)
        matched_at = time.monotonic()
        loads = self._ledger.loads()
        # When nobody serves, the policy is shown the others too and says why none of them can.
        endpoints = self._table.serving(prompt.model) or tuple(self._table.joined(prompt.model))
        num_tokens, session = prompt.num_prompt_tokens, prompt.session
        given = PickInput(
            endpoints=learning.with_rates(self._table.views(endpoints, loads), num_tokens),
            session_endpoint_id=None if session is None else learning.endpoint_of(session),
            prompt_tokens=num_tokens, matches=matches if prepared.hashes else None,
            loads=loads, model=prompt.model,
            excluded=self._passed_over(excluded, endpoints, loads),
            context_tokens=num_tokens + (prompt.max_tokens or 1),
            expected_output_tokens=learning.outputs.expected(prompt.model, prompt.max_tokens),
            random_ratio=random.random(), turn=next(self._turns), now=now,
            shared_ratio=self._ledger.shared_ratio, stretch=learning.stretch.ratio,
            streams_of=self._ledger.streams, lengths=learning.outputs.profile(prompt.model),
            chain=chain, busy_step_of=learning.busy_steps.step_s, crowding=self._table.crowding(loads),
            tier_ratio_of=learning.tier_ratio, standings=self._standings,
            unseen_requests=self._table.unseen.requests(now))
        decision = self._policy(given)
        if isinstance(decision, NoEndpoint) and given.excluded > excluded:
            # A full or doubtful one is better than none.
            decision = self._policy(structs.replace(given, excluded=excluded))
        if record is not None:
            record.stages["match"] = matched_at - now
            record.stages["pick"] = time.monotonic() - matched_at
        return decision

    def _matches(self, hashes: Mapping[HashScheme, Sequence[int]],
                 now: float) -> tuple[dict[str, Match], Sequence[int]]:
        """Who holds how much of the prompt; and its chain, where all workers hash alike."""
        if len(hashes) == 1:
            [chain] = hashes.values()
            return self._index.match(chain, now), chain
        matches: dict[str, Match] = {}
        for chain in hashes.values():
            matches.update(self._index.match(chain, now))
        return matches, ()

    def predicted_ttft_s(self, prompt: RoutedPrompt) -> float | None:
        """Until the best worker would send the first byte; None when none can take it."""
        decision = self.decide(prompt, frozenset())
        return None if isinstance(decision, NoEndpoint) else _expected_prefill_s(decision)

    def _passed_over(self, excluded: frozenset[str], endpoints: Sequence[Endpoint],
                     loads: Mapping[str, LoadView]) -> frozenset[str]:
        """Those excluded, full or doubtful; mostly nobody."""
        full = [endpoint_id for endpoint_id, load in loads.items() if load.num_inflight >= self._max_inflight]
        blocked = self._breakers.blocked(endpoints) if self._breakers.may_be_open else ()
        return excluded.union(full, blocked) if full or blocked else excluded

    def book(self, prompt: RoutedPrompt, decision: RoutingDecision,
             address: Callable[[Endpoint], UpstreamRequest]) -> Placement:
        """Put the request on the chosen worker's account, even a full one's, and bet that it will have the blocks."""
        placement = self._book(prompt, decision, address, sys.maxsize)
        assert placement is not None, "more requests than can be counted"
        return placement

    def book_if_free(self, prompt: RoutedPrompt, decision: RoutingDecision,
                     address: Callable[[Endpoint], UpstreamRequest]) -> Placement | None:
        """As book(); None when another process of this gateway has booked the worker's last place."""
        return self._book(prompt, decision, address, self._max_inflight)

    def _book(self, prompt: RoutedPrompt, decision: RoutingDecision, address: Callable[[Endpoint], UpstreamRequest],
              limit: int) -> Placement | None:
        endpoint = self._table.get(decision.endpoint_id)
        assert endpoint is not None, "the policy chose an endpoint that it was not shown"
        upstream_request = address(endpoint)  # before anything is booked: it is the step that could fail
        scheme, prepared, now = endpoint.scheme, prompt.prepared, time.monotonic()
        chain, num_tokens = prepared.chain(scheme), prepared.num_tokens
        others = num_tokens - prompt.num_prompt_tokens
        matched_blocks = decision.matched_tokens // scheme.block_size if chain and scheme is not None else 0
        footprint = Footprint(chain, matched_blocks, decision.matched_tokens,
                              self._expected_output(prompt, decision), now)
        if not self._ledger.claim(decision.endpoint_id, decision.epoch, limit):
            return None
        booking = self._ledger.book(decision.endpoint_id, decision.epoch, context_tokens=num_tokens,
                                    prefill_tokens=decision.uncached_tokens + others, footprint=footprint)
        self._table.unseen.booked(now)
        self._table.tried(endpoint, now)
        prefill_s = _expected_prefill_s(decision)
        if prefill_s and not prompt.stream:
            self._prefills.expect(booking, now + prefill_s)
        return Placement(self._books, endpoint, decision, booking, model=prompt.model,
                         bet=self._bet(endpoint, chain, decision, now + prefill_s) if chain else None,
                         upstream_request=upstream_request, is_stream=prompt.stream)

    def _expected_output(self, prompt: RoutedPrompt, decision: RoutingDecision) -> int:
        if decision.considered is not None:
            return decision.considered[0].expected_output_tokens
        return self.learning.outputs.expected(prompt.model, prompt.max_tokens)

    def note_prefix(self, prompt: RoutedPrompt, endpoint: Endpoint, known_tokens: int) -> None:
        """So much of the prompt was known somewhere: it may be a prefix that many ask for."""
        scheme, salt = endpoint.scheme, prompt.prepared.salt
        chain = prompt.prepared.chain(scheme)
        if not chain or scheme is None:
            return
        for key in salt.extra_keys:
            if key.kind is not ExtraKeyKind.GATEWAY_SALT:
                return  # adapters and salts of bodies: a prewarm could not hash it alike
        depth, now = known_tokens // scheme.block_size, time.monotonic()
        if not self.learning.hot.hit(chain, depth, now):
            self.learning.hot.note(Sighting(prompt.model, chain, depth, prompt.prepared.placed_by,
                                            scheme.block_size, salt.internal, salt.salt_from), now)

    def _bet(self, endpoint: Endpoint, hashes: Sequence[int], decision: RoutingDecision,
             computed_at: float) -> Speculation | None:
        report, knowledge = endpoint.report, endpoint.knowledge
        if knowledge is Knowledge.NONE or report is None or report.kv_cache != KV_CACHE_FULL:
            return None  # nothing will be found there again, so nothing should be predicted
        # The time to live bridges the lag of events, which begins when the blocks have been computed: until the first
        # byte the bet is held. Without events, what we sent there lately is all that we know.
        has_events = knowledge is Knowledge.EXACT
        ttl_s = self._bet_ttl.with_events_s if has_events else self._bet_ttl.without_events_s
        expires_at = computed_at + ttl_s
        bet = self._index.speculate(endpoint.endpoint_id, hashes, expires_at,
                                    blocks_max=None if has_events else _history_blocks_max(endpoint),
                                    confirmed=_confirmed_blocks(decision))
        bet.hold(ttl_s)
        if self._notes is not None and endpoint.epoch is not None and bet.num_blocks >= TOLD_BET_MIN_BLOCKS:
            self._notes.tell_bet(SharedBet(endpoint.endpoint_id, endpoint.epoch, expires_at, hashes))
        return bet

    def _bet_was_placed(self, bet: SharedBet) -> None:
        """By another process of this gateway: a burst of siblings goes together, whichever processes it meets."""
        endpoint = self._table.get(bet.endpoint_id)
        if endpoint is not None and endpoint.epoch == bet.epoch and endpoint.knowledge is not Knowledge.NONE:
            self._index.speculate(bet.endpoint_id, bet.hashes, bet.expires_at,
                                  blocks_max=_history_blocks_max(endpoint))

    def explain(self, prompt: RoutedPrompt) -> dict[str, Any]:
        """The decision for POST /admin/explain, with every candidate's cost."""
        decision = self.decide(prompt, frozenset())
        if isinstance(decision, NoEndpoint):
            return {"decision": None, "reason": decision.reason, "detail": decision.message}
        return {"decision": {name: getattr(decision, name) for name in EXPLAINED},
                "prompt_tokens": prompt.num_prompt_tokens,
                "candidates": self._explained(decision)}

    def _explained(self, decision: RoutingDecision) -> list[dict[str, Any]]:
        """Every candidate's cost, with the rates it was reckoned with and those that the worker reports."""
        views = () if decision.considered is None else decision.considered[1]
        candidates = []
        for view, cost in zip(views, decision.candidates, strict=True):
            endpoint = self._table.get(view.endpoint_id)
            report = None if endpoint is None else endpoint.report
            candidates.append({
                **cost._asdict(), "first_token_s": cost.first_token_s,
                "prefill_tokens_per_s": view.prefill_tokens_per_s, "decode_step_s": view.decode_step_s,
                "reported_prefill_tokens_per_s": report.rates.prefill_tokens_per_s if report is not None else 0.0,
                "reported_decode_step_s": report.rates.decode_step_s if report is not None else 0.0})
        return candidates


class Choosing:
    """One request's walk from worker to worker: the `choose` of relay.retry.answer_from_any."""

    __slots__ = ("_address", "_dispatcher", "_prompt", "_record", "_suspect")

    def __init__(self, dispatcher: Dispatcher, prompt: RoutedPrompt, record: RequestRecord, *,
                 address: Callable[[Endpoint], UpstreamRequest], suspect: Callable[[str], None]) -> None:
        self._dispatcher = dispatcher
        self._prompt = prompt
        self._record = record
        self._address = address
        self._suspect = suspect

    def __call__(self, excluded: frozenset[str], last: AttemptFailed | None) -> Placement | None:
        """The next worker, booked. ApiError 503 when none could be chosen in the first place."""
        if last is not None and self._record.worker_id is not None:
            self._suspect(self._record.worker_id)
        placement, tried = None, list[str]()
        while placement is None:
            decision = self._dispatcher.decide(self._prompt, excluded, self._record)
            if isinstance(decision, NoEndpoint):
                if last is None:
                    raise errors.no_worker(f"No worker can take this request now: {decision.message}.")
                return None
            if len(tried) == TRIES_MAX or tried.count(decision.endpoint_id) == TRIES_AT_ONE_MAX:
                placement = self._dispatcher.book(self._prompt, decision, self._address)  # a full one is all there is
            else:
                placement = self._dispatcher.book_if_free(self._prompt, decision, self._address)
                tried.append(decision.endpoint_id)
        if last is not None:
            self._record.retries.append(last.reason)
        self.note(placement)
        return placement

    def another(self) -> Placement | None:
        """A second worker for the same request, booked beside the one that has it; None when there is none."""
        chosen = self._record.worker_id
        decision = self._dispatcher.decide(self._prompt, frozenset(() if chosen is None else (chosen,)))
        if isinstance(decision, NoEndpoint):
            return None
        return self._dispatcher.book(self._prompt, decision, self._address)

    def note(self, placement: Placement) -> None:
        """This one answers."""
        record, decision, endpoint = self._record, placement.decision, placement.endpoint
        knowledge, report = endpoint.knowledge, endpoint.report
        record.worker_id, record.reason, record.knowledge = decision.endpoint_id, decision.reason, knowledge
        rates = (0.0, 0.0) if report is None else (report.rates.prefill_tokens_per_s, report.rates.decode_step_s)
        self._dispatcher.learning.placed(record, decision, self._prompt.session, reported=rates)
        record.matched_tokens = decision.matched_tokens
        is_comparable = self._prompt.is_one_sequence and knowledge is not Knowledge.NONE
        record.cacheable_tokens = decision.most_matched_tokens if is_comparable else None
        record.confirmed_tokens = decision.match_confirmed_tokens if is_comparable else None
        if record.cacheable_tokens:
            self._dispatcher.note_prefix(self._prompt, endpoint, record.cacheable_tokens)


def _confirmed_blocks(decision: RoutingDecision) -> int | None:
    """What the index said of the chosen endpoint just now; None where it was not asked."""
    matches = None if decision.considered is None else decision.considered[0].matches
    return None if matches is None else matches.get(decision.endpoint_id, NO_MATCH).confirmed_blocks


def _expected_prefill_s(decision: RoutingDecision) -> float:
    """Until the chosen worker should have computed the prompt, behind what waits there; 0 without a computed cost."""
    return 0.0 if decision.cost is None else min(decision.cost.first_token_s, EXPECTED_PREFILL_MAX_S)


def is_plain(endpoint: Endpoint, worker_token: str) -> bool:
    """Whether the worker gets the client's JSON alone: without a shared token, or when its tokens are not ours."""
    if not worker_token or endpoint.token_refused:
        return True
    return not endpoint.compatible


def _history_blocks_max(endpoint: Endpoint) -> int | None:
    """How much of our own history counts as cached there; None where events tell."""
    if endpoint.knowledge is Knowledge.EXACT or endpoint.report is None:
        return None
    return endpoint.report.blocks.total or APPROXIMATE_BLOCKS_MAX
