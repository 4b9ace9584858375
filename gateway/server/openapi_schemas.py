"""The shapes in /openapi.json: request bodies from the very structs that read them, and what comes back.

Owns: components of the document. Must never: describe a field that the parser does not know, or a stricter answer
than the worker gives: other engines' answers pass unchanged, so what they may add is left open.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.server.prewarm import PrewarmBody
from gateway.server.worker_admin import WorkerBody
from worker.prompt.messages import MAX_MESSAGES, MAX_TOOLS, ROLES
from worker.prompt.messages_body import CountBody, MessagesBody
from worker.prompt.request_schema import (
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from worker.prompt.responses_body import ResponsesBody

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
# Read only to be refused, with the name of what to use instead.
_REFUSED_FIELDS = ("functions", "function_call", "chat_template")
_TEXT, _COUNT, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_INTEGERS: Json = {"type": "array", "items": {"type": "integer"}}


def ref(name: str) -> Json:
    """A reference to a component."""
    return {"$ref": _REF.format(name=name)}


def _object(required: Json, **optional: Json) -> Json:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def components() -> Json:
    """Every schema, by name."""
    return {**_requests(), **_ANSWERS}


def _requests() -> Json:
    _, found = msgspec.json.schema_components((
        ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, MessagesBody, CountBody, ResponsesBody,
        EmbeddingBody, WorkerBody, PrewarmBody),
        ref_template=_REF)
    for name in ("ChatBody", "CompletionBody", "TokenizeBody"):
        fields = found[name]["properties"]
        for refused in _REFUSED_FIELDS:
            fields.pop(refused, None)
        for whole, (schema, most) in {"messages": (ref("Message"), MAX_MESSAGES),
                                      "tools": (ref("Tool"), MAX_TOOLS)}.items():
            if whole in fields:
                _lists_in(fields[whole]).update(items=schema, minItems=1, maxItems=most)
        if "stop" in fields:
            _lists_in(fields["stop"]).update(maxItems=MAX_STOPS, items={**_TEXT, "minLength": 1,
                                                                       "maxLength": MAX_STOP_CHARS})
    found["CompletionBody"]["properties"]["prompt"] = _PROMPT
    found["EmbeddingBody"]["properties"]["input"] = _PROMPT
    found["TokenizeBody"]["oneOf"] = [{"required": [name], "properties": {name: {"type": kind}}}
                                      for name, kind in (("prompt", "string"), ("messages", "array"))]
    return {**found, "Message": _MESSAGE, "Tool": _TOOL}


def _lists_in(field: Json) -> Json:
    """The array among what a field may be."""
    return next((kind for kind in field.get("anyOf", ()) if kind.get("type") == "array"), field)


_CONTENT: Json = {"anyOf": [_TEXT, {**_list_of(_object({"type": {"const": "text"}, "text": _TEXT})), "minItems": 1}]}
_CALLS: Json = {**_list_of(_object(
    {"function": _object({"name": {**_TEXT, "minLength": 1}, "arguments": _TEXT})}, id=_nullable(_TEXT),
    type={"const": "function"})), "minItems": 1}
_MESSAGE: Json = {"anyOf": [
    _object({"role": {"type": "string", "enum": list(ROLES)}, "content": _CONTENT}, name=_nullable(_TEXT),
            tool_call_id=_nullable(_TEXT)),
    _object({"role": {"const": "assistant"}, "tool_calls": _CALLS}, content=_nullable(_CONTENT),
            name=_nullable(_TEXT))]}
_TOOL = _object({"type": {"const": "function"}, "function": _object(
    {"name": {**_TEXT, "minLength": 1}}, description=_nullable(_TEXT), parameters=_nullable({"type": "object"}))})
_IDS: Json = _list_of({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})
_SEVERAL: Json = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT: Json = {"anyOf": [_TEXT, {**_IDS, "minItems": 1}, {**_SEVERAL, "items": _TEXT}, {**_SEVERAL, "items": _IDS}]}

_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT}, total_tokens=_COUNT,
                 prompt_tokens_details=_nullable(_object({}, cached_tokens=_COUNT)))
_HEAD = {"id": _TEXT, "object": _TEXT, "choices": _list_of(_object({"index": _COUNT}))}
_MODEL = _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT},
                 root=_TEXT, parent=_nullable(_TEXT), max_model_len=_nullable(_COUNT))
_WORKER = _object({"id": _TEXT, "url": _TEXT, "models": _list_of(_TEXT), "state": _TEXT, "knowledge": _TEXT},
                  epoch=_nullable(_TEXT), pid=_nullable(_COUNT), blocks=_COUNT)
_ANSWERS: Json = {
    "Error": _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _nullable(_TEXT),
                                        "code": _nullable(_TEXT)})}),
    "Usage": _USAGE,
    "ChatCompletion": _object(_HEAD, created=_COUNT, model=_TEXT, usage=_nullable(ref("Usage"))),
    "Completion": _object(_HEAD, created=_COUNT, model=_TEXT, usage=_nullable(ref("Usage"))),
    "AnthropicMessage": _object({"id": _TEXT, "type": {"const": "message"}, "role": {"const": "assistant"},
                                 "content": _list_of({"type": "object"}), "usage": {"type": "object"}},
                                model=_TEXT, stop_reason=_nullable(_TEXT), stop_sequence=_nullable(_TEXT)),
    "EmbeddingList": _object({"object": {"const": "list"}, "data": _list_of({"type": "object"})}, model=_TEXT,
                             usage={"type": "object"}),
    "InputTokens": _object({"input_tokens": _COUNT}),
    "OpenAIResponse": _object({"id": _TEXT, "object": {"const": "response"}, "status": _TEXT,
                               "output": _list_of({"type": "object"})}, usage=_nullable({"type": "object"})),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list_of(ref("Model"))}),
    "Tokens": _object({"count": _COUNT, "tokens": _INTEGERS, "max_model_len": _nullable(_COUNT)},
                      token_strs=_nullable(_list_of(_TEXT))),
    "Text": _object({"prompt": _TEXT}),
    "Status": _object({"status": _TEXT}),
    "Worker": _WORKER,
    "WorkerList": _object({"workers": _list_of(ref("Worker"))}),
    "HotPrefixes": _object({"prefixes": _list_of(_object({"hash": _TEXT, "model": _TEXT, "tokens": _COUNT}))}),
    "Prewarmed": _object({"hash": _TEXT, "worker": _nullable(_TEXT)}),
    "WorkerState": _object({"id": _TEXT, "state": _TEXT}),
    "Explanation": _object({"decision": _nullable({"type": "object"})}, reason=_TEXT, detail=_TEXT,
                           prompt_tokens=_COUNT, candidates=_list_of({"type": "object"}),
                           would_be_refused=_nullable({"type": "object"})),
    # One server-sent event. `data` is a chunk as JSON, or [DONE]; the event `error` carries an Error.
    "Event": _object({"data": _TEXT}, event=_TEXT, id=_TEXT),
    "AnyObject": {"type": "object"},
}
