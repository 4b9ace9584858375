"""POST /kv/prewarm: compute a prompt's K/V ahead of need, behind every request that somebody waits for.

Owns the body's form and its limits. Always behind the worker token: the salt in it says whose cache is filled. The
answer tells counts, never a token: what is sampled to end the sequence is thrown away. A caller that leaves stops it.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from aiohttp import web

from worker.engine.messages import SubmitSequence
from worker.prompt.detokenizer import StreamDetokenizer
from worker.prompt.json_body import decode_body
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind
from worker.protocol.internal_request import SALT_MAX_BYTES
from worker.server.error_middleware import REQUEST_ID
from worker.server.generation import Generation
from worker.server.intake import read_body, require_worker_token
from worker.server.model_routes import json_response
from worker.server.shell import Serving, Shell, shell_of

ROUTE = "/kv/prewarm"
# The largest number is the least urgent; a client's may be as low as this, so nobody waits behind a prewarm.
LEAST_URGENT = 2**31 - 1
PREWARMS_MAX = 4
RETRY_AFTER_S = 1
_Token = Annotated[int, msgspec.Meta(ge=0)]


class _PrewarmBody(msgspec.Struct):
    """`salt` in hex, as the gateway's header has it; it applies from position `salt_from` on."""

    token_ids: Annotated[list[_Token], msgspec.Meta(min_length=1)]
    salt: Annotated[str, msgspec.Meta(max_length=2 * SALT_MAX_BYTES)] | None = None
    salt_from: _Token = 0


_decoder = msgspec.json.Decoder(_PrewarmBody)


async def prewarm(request: web.Request) -> web.Response:
    """200 with `token_ids` (how many) and `cached_tokens` (found already) once the blocks are there."""
    shell = shell_of(request)
    require_worker_token(request, shell)
    serving = shell.require_accepting()
    body = decode_body(await read_body(request, shell.config.max_body_bytes), _decoder).value
    _check(body, serving)
    if sum(generation.route == ROUTE for generation in shell.requests) >= PREWARMS_MAX:
        raise ApiError(429, "queue_full", f"{PREWARMS_MAX} prewarms are under way; this worker takes no more now.",
                       headers={"Retry-After": str(RETRY_AFTER_S)})
    with shell.answering():
        generation = _submit(request, shell, serving, body)
        try:
            while await generation.next_deltas():
                pass
        finally:
            generation.abandon()
    return json_response({"token_ids": len(body.token_ids), "cached_tokens": generation.account().cached_tokens})


def _check(body: _PrewarmBody, serving: Serving) -> None:
    ready = serving.ready
    if len(body.token_ids) >= ready.max_context:
        raise invalid_request(f"token_ids has {len(body.token_ids)} entries; this worker's context of "
                              f"{ready.max_context} holds {ready.max_context - 1} and one that follows.", "token_ids")
    if max(body.token_ids) >= ready.vocab_size:
        raise invalid_request(f"Token id {max(body.token_ids)} is outside this model's vocabulary of "
                              f"{ready.vocab_size}.", "token_ids")


def _submit(request: web.Request, shell: Shell, serving: Serving, body: _PrewarmBody) -> Generation:
    extra_keys = _extra_keys(body)
    key = shell.requests.free_key(request[REQUEST_ID])
    generation = Generation(
        key=key, request_id=request[REQUEST_ID], route=ROUTE, model=serving.ready.model,
        prompt_lengths=[len(body.token_ids)], num_choices_per_prompt=1, tokenize_s=0.0,
        detokenizers=[StreamDetokenizer(serving.renderer.tokenizer)],
        abort=lambda choice: shell.engine.abort(key, choice))
    shell.requests.add(generation)
    try:
        shell.engine.submit(SubmitSequence(
            request_id=key, choice=0, token_ids=body.token_ids, params=SamplingParams(temperature=0.0),
            max_new_tokens=1, stop_token_ids=frozenset(), extra_keys=extra_keys, priority=LEAST_URGENT,
            arrived_at=time.monotonic()))
    except ApiError:
        shell.requests.discard(generation)
        raise
    return generation


def _extra_keys(body: _PrewarmBody) -> tuple[ExtraKey, ...]:
    if body.salt is None:
        return ()
    try:
        salt = bytes.fromhex(body.salt)
    except ValueError:
        salt = b""
    if not salt:
        raise invalid_request(f"salt should be 1 to {SALT_MAX_BYTES} bytes in hex digits, or absent.", "salt")
    return (ExtraKey(ExtraKeyKind.GATEWAY_SALT, salt, body.salt_from),)
