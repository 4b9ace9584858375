"""From a body to a request that is ready to be routed: read, parse, tokenise and hash.

Owns these three steps. At once, on the event loop, for what is short or was mostly seen before; by way of a prompt
thread for the rest. Must never: route, or keep prompt text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gateway import errors
from gateway.admission.body_field import with_field
from gateway.admission.tenants import Tenant
from gateway.knowledge.endpoint_table import ModelService
from gateway.knowledge.joining import ModelReference
from gateway.routing.output_length import DEFAULT_OUTPUT_TOKENS
from gateway.server.admission import Ask, Visit
from gateway.server.beginnings import BEGINNINGS_SHARE, BODY_MIN_BYTES, Beginnings
from gateway.server.dispatch import Dispatcher, RoutedPrompt
from gateway.server.foreign import Way
from gateway.server.generate_route import CHAT, GenerateRoute
from gateway.server.prompt_limit import PromptLimit
from gateway.server.prompt_work import PreparedPrompt, PromptRequest, PromptTask, PromptWork
from gateway.server.replies import Learn, Remembering
from gateway.server.request_record import RequestRecord
from gateway.server.state import GatewayState
from worker.prompt.requests import ChatRequest

# Parsing runs at some 300 MB/s; what takes longer than a millisecond is done in a prompt thread.
ON_LOOP_PARSE_BYTES = 256 * 1024


class Given(Struct, frozen=True):
    """A request as it came: by which route, whose it is, and what of its head a worker gets to see. `visit` None:
    nobody is asked whether there is room for it."""

    body: bytes
    route: GenerateRoute
    record: RequestRecord
    tenant: Tenant
    passed_on: Mapping[str, str]
    visit: Visit | None = None


class Intake(Struct, frozen=True):
    """A request that has been read and checked, ready to be routed."""

    route: GenerateRoute
    body: bytes
    parsed: PromptRequest
    routed: RoutedPrompt
    tenant: Tenant
    base_model: str
    passed_on: Mapping[str, str]
    way_back: Way | None = None
    learn: Learn | None = None


class Plan(Struct, frozen=True):
    """A parsed request, and what is to be made of its prompt."""

    body: bytes
    parsed: PromptRequest
    way: Way | None
    reference: ModelReference
    owner: str | None
    task: PromptTask


class Reading:
    """Lives on the event loop."""

    def __init__(self, state: GatewayState, dispatcher: Dispatcher, prompt_work: PromptWork) -> None:
        self._table = state.table
        self._joining = state.joining
        self._access = state.access
        self._dispatcher = dispatcher
        self._prompt_work = prompt_work
        self._remembering = Remembering(state.config, prompt_work)
        self.beginnings = Beginnings(state.config.text_memory_bytes // BEGINNINGS_SHARE)
        self.replies = self._remembering.memory

    async def take_in(self, given: Given) -> Intake:
        """Parse, check the model, tokenise and hash. ApiError for whatever is wrong with the request."""
        began_at, size = time.perf_counter(), len(given.body)
        read = await self._prompt_work.run(size if size > ON_LOOP_PARSE_BYTES else 0,
                                           lambda: given.route.read(given.body))
        plan = self._plan(given, read, began_at)
        return self._intake(given, plan, await self._prompt_work.prepare(plan.task))

    def plan_at_once(self, given: Given) -> Plan | None:
        """The first half of take_in(), or None where that is no work for the event loop."""
        if len(given.body) > ON_LOOP_PARSE_BYTES:
            return None
        began_at = time.perf_counter()
        if given.route is CHAT and len(given.body) >= BODY_MIN_BYTES:
            return self._plan_long_chat(given, began_at)
        return self._plan(given, given.route.read(given.body), began_at)

    def _plan_long_chat(self, given: Given, began_at: float) -> Plan:
        """With what is known of how its body begins, or has to be understood of that from now on."""
        body, scope, beginnings = given.body, given.tenant.text_scope, self.beginnings
        beginning, to_learn = beginnings.find(scope, body)
        request = None if beginning is None else beginnings.read(beginning, body)
        if request is None:
            plan = self._plan(given, given.route.read(body), began_at)
        else:
            plan = self._plan(given, (body, request, None), began_at)
            plan.task.beginning = beginning
        if to_learn is not None and isinstance(plan.parsed, ChatRequest):
            beginnings.learn(scope, body, to_learn, request=plan.parsed, renderer=plan.reference.renderer)
        return plan

    def take_in_at_once(self, given: Given, plan: Plan) -> Intake | None:
        """The second half of take_in(), or None where that is no work for the event loop."""
        prepared = self._prompt_work.at_once(plan.task)
        return None if prepared is None else self._intake(given, plan, prepared)

    def ask(self, intake: Intake) -> Ask:
        """What it wants of the queue and the tenant's limits."""
        prompt, parsed = intake.routed, intake.parsed
        output_tokens = min(parsed.max_tokens or DEFAULT_OUTPUT_TOKENS, DEFAULT_OUTPUT_TOKENS)
        num_tokens = prompt.prepared.num_tokens
        return Ask(intake.base_model, num_tokens, num_tokens + parsed.num_candidates * output_tokens,
                   len(intake.body), parsed.priority, lambda: self._dispatcher.predicted_ttft_s(prompt))

    def reference(self, model: str, tenant: Tenant) -> ModelReference:
        """How to tokenise for this model; 404 when no worker serves it, 503 while none has been heard of at all."""
        reference = self._joining.reference(model)
        if reference is not None:
            return reference
        known = self._table.models()
        if not known:
            raise errors.no_worker("No worker has answered yet; the gateway keeps trying.")
        raise errors.model_not_found(model, filter(tenant.may_use, known))

    def _plan(self, given: Given, read: tuple[bytes, PromptRequest, Way | None], began_at: float) -> Plan:
        record, tenant, (body, parsed, way) = given.record, given.tenant, read
        record.stages["parse"] = time.perf_counter() - began_at
        record.model, record.stream = parsed.model, parsed.stream
        tenant.check_model(parsed.model)
        body, parsed = _with_priority(body, parsed, tenant)
        reference, service = self.reference(parsed.model, tenant), self._table.service(parsed.model)
        base = service if reference.model == parsed.model else self._table.service(reference.model)
        if given.visit is not None:
            given.visit.refuse_early(reference.model, parsed.priority, len(body))
        schemes = () if parsed.is_uncached else service.schemes
        owner = self._remembering.owner(parsed, tenant, schemes)
        task = PromptTask(
            reference.renderer, parsed, len(body), schemes,
            salt_of=lambda prompts: self._access.salt(
                tenant, parsed.cache_salt, reference.renderer, prompts).beside(service.adapter_keys),
            scope=tenant.text_scope if parsed.cache_salt is None else tenant.text_scope + parsed.cache_salt,
            limit=_limit(base, reference, given.route),
            replies=None if owner is None else self.replies.of(owner))
        return Plan(body, parsed, way, reference, owner, task)

    def _intake(self, given: Given, plan: Plan, prepared: PreparedPrompt) -> Intake:
        record, parsed = given.record, plan.parsed
        record.stages["tokenize"], record.stages["hash"] = prepared.tokenize_s, prepared.hash_s
        record.prompt_tokens = prepared.num_tokens
        # A session is its tenant's: equal keys of two tenants are two sessions.
        session = f"{given.tenant.tenant_id}/{parsed.prompt_cache_key}" if parsed.prompt_cache_key else None
        routed = RoutedPrompt(parsed.model, prepared, parsed.max_tokens, parsed.num_candidates, parsed.stream,
                              session)
        return Intake(given.route, plan.body, parsed, routed, given.tenant, plan.reference.model, given.passed_on,
                      plan.way, self._remembering.learner(plan.owner, plan.reference.renderer, prepared,
                                                          plan.task.scope))


def _with_priority(body: bytes, parsed: PromptRequest, tenant: Tenant) -> tuple[bytes, PromptRequest]:
    """With the priority of a tenant whose requests have another than 0 when they name none: workers must see it."""
    priority = tenant.priority_of(parsed.priority if parsed.priority_given else None)
    if priority == parsed.priority:
        return body, parsed
    return with_field(body, "priority", priority), replace(parsed, priority=priority)


def _limit(service: ModelService, reference: ModelReference, route: GenerateRoute) -> PromptLimit | None:
    most = service.max_context
    return None if most is None else PromptLimit(most, reference.token_bound, route.prompt_param)
