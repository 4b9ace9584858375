"""GET /openapi.json: what this listener serves, as an OpenAPI 3.1 document.

Owns: the description of each route. Must never: list a route that is not served here; the routes themselves are
asked, so that a listener without the admin routes does not promise them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway import __version__
from gateway.server.admission import DEADLINE_MAX_MS
from gateway.server.client_headers import DEADLINE_HEADER, REQUEST_ID_HEADER
from gateway.server.http import REQUEST_ID_MAX_CHARS, Routes, Served, json_response
from gateway.server.openapi_schemas import Json, components, ref

OPENAPI_PATH = "/openapi.json"
_JSON, _STREAM, _TEXT = "application/json", "text/event-stream", "text/plain"
_STATUS_WORDS = {
    400: "The request is wrong; `param` says where.", 401: "No valid key.", 403: "Not allowed with this key.",
    404: "There is no such thing here.", 408: "The body did not arrive in time.", 409: "Not in this state.",
    413: "The body is too large.", 415: "The body's encoding is not accepted.",
    417: "`Expect` says something other than 100-continue.", 505: "Not HTTP/1.1 or HTTP/1.0.",
    429: "Not now: a limit or a full queue. Retry-After says when.",
    500: "Our bug; the log says which.", 502: "No worker answered well.", 503: "No worker is ready.",
    504: "The worker did not answer in time."}
_ANY_ROUTE = (400, 415, 417, 500, 505)
_BODY = (408, 413)
_GENERATE = (401, 403, 404, 429, 502, 503, 504)
_TENANT, _ADMIN = "tenant", "admin"


@dataclass(frozen=True, slots=True)
class Operation:
    """What is said of one route. `answer` and `bodies` name components; `path` names a prefix's rest."""

    summary: str
    answer: str = "AnyObject"
    bodies: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    key: str | None = None
    success: int = 200
    path: str | None = None
    content_type: str = _JSON
    streams: bool = False
    unready: bool = False
    parameters: tuple[Json, ...] = field(default=())


_DEADLINE: Json = {"name": DEADLINE_HEADER, "in": "header", "required": False, "description":
                   "Milliseconds by which the answer must begin.",
                   "schema": {"type": "integer", "minimum": 1, "maximum": DEADLINE_MAX_MS}}
_TENANT_QUERY: Json = {"name": "tenant", "in": "query", "required": False, "schema": {"type": "string"},
                       "description": "Whose decision; needed where there are tenants."}
_ANY_REQUEST: Json = {"name": REQUEST_ID_HEADER, "in": "header", "required": False,
                      "description": "Comes back in the answer and stands in the log, unless it is unusable.",
                      "schema": {"type": "string", "maxLength": REQUEST_ID_MAX_CHARS, "pattern": "^[!-~]+$"}}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Chat, whole or as a stream.", "ChatCompletion", ("ChatBody",), (*_BODY, *_GENERATE), _TENANT, streams=True,
        parameters=(_DEADLINE,)),
    ("POST", "/v1/completions"): Operation(
        "Completion, whole or as a stream.", "Completion", ("CompletionBody",), (*_BODY, *_GENERATE), _TENANT,
        streams=True, parameters=(_DEADLINE,)),
    ("POST", "/v1/messages"): Operation(
        "Anthropic's messages, whole or as a stream.", "AnthropicMessage", ("MessagesBody",), (*_BODY, *_GENERATE),
        _TENANT, streams=True, parameters=(_DEADLINE,)),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "How many tokens such a body would use.", "InputTokens", ("CountBody",), (*_BODY, 401, 403, 404, 429, 503),
        _TENANT),
    ("POST", "/v1/embeddings"): Operation(
        "Embeddings by the mean of the last hidden states.", "EmbeddingList", ("EmbeddingBody",),
        (*_BODY, *_GENERATE), _TENANT, streams=True, parameters=(_DEADLINE,)),
    ("POST", "/v1/responses"): Operation(
        "OpenAI's responses, statelessly, whole or as a stream.", "OpenAIResponse", ("ResponsesBody",),
        (*_BODY, *_GENERATE), _TENANT, streams=True, parameters=(_DEADLINE,)),
    ("GET", "/v1/models"): Operation("The models that are served.", "ModelList", errors=(401,), key=_TENANT),
    ("GET", "/v1/models/"): Operation("One model.", "Model", errors=(401, 403, 404, 503), key=_TENANT,
                                      path="/v1/models/{model}"),
    ("POST", "/tokenize"): Operation("Text or messages to token ids.", "Tokens", ("TokenizeBody",),
                                     (*_BODY, 401, 403, 404, 429, 503), _TENANT),
    ("POST", "/detokenize"): Operation("Token ids to text.", "Text", ("DetokenizeBody",),
                                       (*_BODY, 401, 403, 404, 429, 503), _TENANT),
    ("GET", "/livez"): Operation("Is the process alive?", "Status"),
    ("GET", "/readyz"): Operation("Should it get traffic?", "Status", unready=True),
    ("GET", "/metrics"): Operation("Prometheus metrics.", content_type=_TEXT),
    ("GET", OPENAPI_PATH): Operation("This document."),
    ("GET", "/admin/workers"): Operation("Every worker, and what is known about it.", "WorkerList", errors=(401,),
                                         key=_ADMIN),
    ("POST", "/admin/workers/*/drain"): Operation("No new work for this worker.", "WorkerState", errors=(401, 404),
                                                  key=_ADMIN, success=202, path="/admin/workers/{worker_id}/drain"),
    ("POST", "/admin/workers/*/undrain"): Operation("Work for this worker again.", "WorkerState", errors=(401, 404),
                                                    key=_ADMIN, path="/admin/workers/{worker_id}/undrain"),
    ("POST", "/admin/workers"): Operation("One more worker, until the next restart.", "WorkerState", ("WorkerBody",),
                                          (*_BODY, 401, 403, 409), _ADMIN, success=201),
    ("DELETE", "/admin/workers/"): Operation("A worker is forgotten; what runs there may end.", "WorkerState",
                                             errors=(401, 404, 409), key=_ADMIN, path="/admin/workers/{worker_id}"),
    ("POST", "/admin/explain"): Operation(
        "The routing decision for a request that is not sent.", "Explanation",
        ("ChatBody", "CompletionBody", "ResponsesBody"), (*_BODY, 401, 403, 404, 429, 503), _ADMIN,
        parameters=(_TENANT_QUERY,)),
    ("GET", "/admin/cache"): Operation("The hottest prefixes, by hash.", "HotPrefixes", errors=(401,), key=_ADMIN),
    ("POST", "/admin/prewarm"): Operation("Have a hot prefix computed on one more worker.", "Prewarmed", (
        "PrewarmBody",), (*_BODY, 401, 404, 409, 429, 502, 503), _ADMIN),
}


class OpenApiRoute:
    """Adds itself to a table of routes and describes that table."""

    def __init__(self, *, has_tenants: bool, root_path: str) -> None:
        self._has_tenants = has_tenants
        self._root_path = root_path

    def add_to(self, routes: Routes) -> None:
        """Serve the document."""
        @cache
        def whole() -> Json:
            return document(routes.served(), has_tenants=self._has_tenants, root_path=self._root_path)

        async def answer(_: BaseRequest) -> web.Response:
            return json_response(whole())

        routes.add("GET", OPENAPI_PATH, answer)


def document(served: Iterable[Served], *, has_tenants: bool, root_path: str = "") -> Json:
    """The OpenAPI document of these routes."""
    paths: dict[str, Json] = {}
    for route in served:
        if not route.is_offered:
            continue
        known = OPERATIONS.get((route.method, route.path), Operation(f"{route.method} {route.path}."))
        path = known.path or (route.path + "{rest}" if route.is_prefix else route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(known, path, has_tenants=has_tenants)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headstart gateway", "version": __version__,
                 "description": "OpenAI's API in front of workers that share prefixes. Unknown fields are ignored "
                                "or passed to engines that may know them; null means absent; integers have no "
                                "fraction, not even .0."},
        "servers": [{"url": root_path.rstrip("/") or "/"}],
        "paths": paths,
        "components": {"schemas": components(), "securitySchemes": {
            _TENANT: {"type": "http", "scheme": "bearer", "description": "A tenant's API key; also as x-api-key."},
            _ADMIN: {"type": "http", "scheme": "bearer", "description": "The admin token."}}},
    }


def _operation(known: Operation, path: str, *, has_tenants: bool) -> Json:
    names = [piece[1:-1] for piece in path.split("/") if piece.startswith("{")]
    inside: list[Json] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                          for name in names]
    said: Json = {"summary": known.summary, "parameters": [*inside, *known.parameters, _ANY_REQUEST],
                  "responses": _responses(known, has_tenants=has_tenants)}
    if known.bodies:
        kinds = [ref(name) for name in known.bodies]
        said["requestBody"] = {"required": True, "content": {_JSON: {
            "schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}}
    if known.key == _ADMIN or (known.key == _TENANT and has_tenants):
        said["security"] = [{known.key: []}]
    return said


def _responses(known: Operation, *, has_tenants: bool) -> Json:
    content: Json = {known.content_type: {"schema": ref(known.answer) if known.content_type == _JSON
                                          else {"type": "string"}}}
    headers = _headers(known)
    if known.streams:
        content[_STREAM] = {"schema": ref("Event")}
    found: Json = {str(known.success): {"description": known.summary, "content": content, "headers": headers}}
    unless_tenants = () if known.key == _ADMIN or has_tenants else (401, 403)
    for status in sorted({*_ANY_ROUTE, *known.errors} - set(unless_tenants)):
        found[str(status)] = {"description": _STATUS_WORDS.get(status, "Not possible here."),
                              "headers": {**_REQUEST_ID, **(_RETRY_AFTER if status in (429, 503) else {})},
                              "content": {_JSON: {"schema": ref("Error")}}}
    if known.unready:
        found["503"] = {"description": "Not ready; `status` says why.", "headers": _REQUEST_ID,
                        "content": {_JSON: {"schema": ref("Status")}}}
    if known.streams:
        found["4XX"] = {"description": "A worker's own refusal, as it came.", "headers": _REQUEST_ID, "content": {
            _JSON: {"schema": {"type": "object"}}}}
    return found


def _header(description: str, schema: Json, *, required: bool = False) -> Json:
    return {"description": description, "required": required, "schema": schema}


_REQUEST_ID: Json = {REQUEST_ID_HEADER: _header("The client's id or a new one.", {"type": "string"}, required=True)}
_RETRY_AFTER: Json = {"Retry-After": _header("Seconds.", {"type": "integer", "minimum": 1})}


def _headers(known: Operation) -> dict[str, Any]:
    if not known.streams:
        return _REQUEST_ID
    return {**_REQUEST_ID, "x-headstart-worker": _header("Who answers.", {"type": "string"}),
            "x-headstart-matched-tokens": _header("Prompt tokens that were expected in its cache.",
                                                  {"type": "integer", "minimum": 0})}
