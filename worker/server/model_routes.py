"""What the worker serves and how it reads text: /v1/models, /tokenize, /detokenize, /tokenizer."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from worker.prompt.messages_body import COUNT_TOKENS
from worker.prompt.requests import parse_detokenize, parse_tokenize
from worker.protocol.api_error import ApiError
from worker.server.intake import read_body, require_model
from worker.server.shell import Serving, shell_of

_STARTED_AT = int(time.time())


async def list_models(request: web.Request) -> web.Response:
    serving = shell_of(request).require_serving()
    names = (serving.ready.model, *serving.adapters)
    return json_response({"object": "list", "data": [_model(serving, name) for name in names]})


async def get_model(request: web.Request) -> web.Response:
    serving = shell_of(request).require_serving()
    name = request.match_info["model"]
    require_model(name, serving)
    return json_response(_model(serving, serving.shown_name(name)))


async def tokenize(request: web.Request) -> web.Response:
    """vLLM's shape: {count, max_model_len, tokens, token_strs}."""
    shell = shell_of(request)
    serving = shell.require_serving()
    raw = await read_body(request, shell.config.max_body_bytes)
    return json_response(await shell.prompt_threads.run(len(raw), lambda: _tokenize(raw, serving)))


async def detokenize(request: web.Request) -> web.Response:
    """vLLM's shape: {prompt}."""
    shell = shell_of(request)
    serving = shell.require_serving()
    raw = await read_body(request, shell.config.max_body_bytes)
    return json_response(await shell.prompt_threads.run(len(raw), lambda: _detokenize(raw, serving)))


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: {input_tokens} as POST /v1/messages would report it."""
    shell = shell_of(request)
    try:
        serving = shell.require_serving()
        raw = await read_body(request, shell.config.max_body_bytes)
        return json_response(await shell.prompt_threads.run(len(raw), lambda: _count_tokens(raw, serving)))
    except ApiError as error:
        raise COUNT_TOKENS.error(error) from None


async def tokenizer(request: web.Request) -> web.Response:
    """Everything a gateway needs to render and tokenise for this model; 304 when it has it already."""
    bundle = shell_of(request).require_serving().bundle
    etag = f'"{bundle.digest}"'
    known = {item.value for item in request.if_none_match or ()}
    if bundle.digest in known or "*" in known:
        return web.Response(status=304, headers={"ETag": etag})
    return web.Response(body=bundle.to_wire(), content_type="application/json", headers={"ETag": etag})


def json_response(payload: object) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json")


def _model(serving: Serving, name: str) -> dict[str, Any]:
    base = serving.ready.model
    return {"id": name, "object": "model", "created": _STARTED_AT, "owned_by": "headstart", "root": base,
            "parent": None if name == base else base, "max_model_len": serving.ready.max_context,
            "weight_dtype": serving.ready.weight_dtype}


def _tokenize(raw: bytes, serving: Serving) -> dict[str, Any]:
    body = parse_tokenize(raw)
    require_model(body.model, serving)
    tokens = serving.renderer.tokenize(body)
    texts = [serving.token_text.text_of(token) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": serving.ready.max_context, "tokens": tokens, "token_strs": texts}


def _count_tokens(raw: bytes, serving: Serving) -> dict[str, Any]:
    body = COUNT_TOKENS.read(raw).parsed
    require_model(body.model, serving)
    return {"input_tokens": serving.renderer.count(body)}


def _detokenize(raw: bytes, serving: Serving) -> dict[str, Any]:
    body = parse_detokenize(raw)
    require_model(body.model, serving)
    return {"prompt": serving.renderer.detokenize(body)}
