"""The client-facing routes besides generation: models, and how many tokens a text or conversation has.

Owns: these answers' shapes (OpenAI's and vLLM's). Must never: speak to a worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway import errors
from gateway.admission.tenants import Tenant
from gateway.knowledge.endpoint_table import Endpoint, EndpointTable
from gateway.server.access import Access
from gateway.server.foreign import COUNT_TOKENS, MESSAGES, RESPONSES, errors_of
from gateway.server.generate import Generate
from gateway.server.http import Routes, json_response, read_body
from gateway.server.prompt_work import PromptWork
from worker.prompt.requests import parse_detokenize, parse_tokenize

MODELS_PREFIX = "/v1/models/"
_STARTED_AT = int(time.time())


class ClientRoutes:
    """Adds its routes to a table."""

    def __init__(self, *, table: EndpointTable, access: Access, generate: Generate, prompt_work: PromptWork,
                 max_body_bytes: int) -> None:
        self._access = access
        self._table = table
        self._generate = generate
        self._prompt_work = prompt_work
        self._max_body_bytes = max_body_bytes

    def add_to(self, routes: Routes) -> None:
        """Serve everything that clients call."""
        self._routes = routes
        routes.add("POST", "/v1/chat/completions", lambda request: self._generate.chat(request, routes))
        routes.add("POST", "/v1/completions", lambda request: self._generate.completions(request, routes))
        routes.add("GET", "/v1/models", self._list_models)
        routes.add_prefix("GET", MODELS_PREFIX, self._get_model)
        routes.add("POST", "/tokenize", self._tokenize)
        routes.add("POST", "/detokenize", self._detokenize)
        routes.add("POST", "/v1/embeddings", lambda request: self._generate.embeddings(request, routes))
        for api in (MESSAGES, RESPONSES):
            routes.add("POST", api.path, partial(self._generate.foreign, routes=routes, api=api))
        routes.add("POST", COUNT_TOKENS.path, self._count_tokens)

    async def _list_models(self, request: BaseRequest) -> web.Response:
        tenant = self._access.tenant_of(request)
        served = {name: self._table.offering(name) for name in self._table.models() if tenant.may_use(name)}
        return json_response({"object": "list", "data": [_model(name, endpoints) for name, endpoints in served.items()
                                                         if endpoints]})

    async def _get_model(self, request: BaseRequest) -> web.Response:
        tenant = self._access.tenant_of(request)
        name = unquote(self._routes.path_of(request).removeprefix(MODELS_PREFIX))
        tenant.check_model(name)
        endpoints = self._table.offering(name)
        if endpoints:
            return json_response(_model(name, endpoints))
        if name in self._table.models():
            raise errors.no_worker(f"No worker that serves {name} is ready.")
        raise errors.model_not_found(name, filter(tenant.may_use, self._table.models()))

    async def _tokenize(self, request: BaseRequest) -> web.Response:
        tenant = self._access.tenant_of(request)
        body = await read_body(request, self._max_body_bytes)
        parsed = parse_tokenize(body)
        model = self._model_of(parsed.model, tenant)
        renderer = self._generate.reference(model, tenant).renderer
        tokens = await self._prompt_work.run(len(body), lambda: renderer.tokenize(parsed))
        texts = [renderer.tokenizer.token_text(token) for token in tokens] if parsed.return_token_strs else None
        return json_response({"count": len(tokens), "max_model_len": _max_context(self._table.offering(model)),
                              "tokens": tokens, "token_strs": texts})

    async def _detokenize(self, request: BaseRequest) -> web.Response:
        tenant = self._access.tenant_of(request)
        body = await read_body(request, self._max_body_bytes)
        parsed = parse_detokenize(body)
        renderer = self._generate.reference(self._model_of(parsed.model, tenant), tenant).renderer
        text = await self._prompt_work.run(len(body), lambda: renderer.detokenize(parsed))
        return json_response({"prompt": text})

    async def _count_tokens(self, request: BaseRequest) -> web.Response:
        """POST /v1/messages/count_tokens: what the same body would report as its input."""
        with errors_of(COUNT_TOKENS):
            tenant = self._access.tenant_of(request)
            body = await read_body(request, self._max_body_bytes)
            parsed = COUNT_TOKENS.read(body).parsed
            tenant.check_model(parsed.model)
            renderer = self._generate.reference(parsed.model, tenant).renderer
            num_tokens = await self._prompt_work.run(len(body), lambda: renderer.count(parsed))
            return json_response({"input_tokens": num_tokens})

    def _model_of(self, named: str | None, tenant: Tenant) -> str:
        """The model a helper route means: the named one, or the only one there is for this tenant."""
        if named is not None:
            tenant.check_model(named)
            return named
        known = list(filter(tenant.may_use, self._table.models()))
        if len(known) != 1:
            raise errors.model_not_named(known)
        return known[0]


def _model(name: str, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    base = endpoints[0].model
    return {"id": name, "object": "model", "created": _STARTED_AT, "owned_by": "headstart", "root": base,
            "parent": None if name == base else base,
            "max_model_len": _max_context(endpoints)}


def _max_context(endpoints: Sequence[Endpoint]) -> int | None:
    """The shortest context of those that serve: a prompt of that length fits wherever it is sent."""
    return min((endpoint.report.max_context for endpoint in endpoints if endpoint.report is not None), default=None)
