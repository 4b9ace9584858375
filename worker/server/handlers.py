"""The generating routes (chat, completions, messages, responses): admit, submit, answer, whole or streamed, leave.

Owns one request's path through the worker. Whatever happens to the handler (an error, a client that left: aiohttp
cancels it), `leave` runs, and the engine is told to stop what still runs. Headers are sent only when the first token
is there, so that until then every failure is a proper status.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import orjson
from aiohttp import web

from worker.engine.messages import SubmitSequence
from worker.prompt.detokenizer import PROMPT_TAIL_TOKENS, StreamDetokenizer
from worker.prompt.foreign_api import encoded
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import CompletionRequest, EmbeddingRequest
from worker.protocol.api_error import ApiError
from worker.protocol.internal_request import CACHED_TOKENS_HEADER, TOKEN_IDS_HEADER, TOKEN_IDS_IN_COMMENTS
from worker.protocol.logs import get_logger
from worker.protocol.told_tokens import tell_behind
from worker.server.answer_form import needs_special_tokens, tool_parser_of
from worker.server.error_middleware import REQUEST_ID, REQUEST_ID_HEADER, internal_error
from worker.server.generation import Generation
from worker.server.intake import CHAT, COMPLETIONS, EMBEDDINGS, FOREIGN, Admission, Route, admit
from worker.server.openai_format import (
    ChatFormat,
    CompletionFormat,
    FullChoice,
    ResponseFormat,
    ResponseHead,
    ScoredPrompt,
    best_choices,
    embedding_list,
)
from worker.server.shell import Shell, shell_of
from worker.server.sse import open_stream
from worker.server.wire import wire_of

_log = get_logger("worker.server.handlers")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, COMPLETIONS)


async def embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: the mean of each prompt's last hidden states, at length 1."""
    shell = shell_of(request)
    with shell.answering():
        admission = await admit(request, shell, EMBEDDINGS)
        async with _submitted(request, shell, admission, EMBEDDINGS) as generation:
            while await generation.next_deltas():
                continue
            return _embedded(shell, generation, admission)


def _embedded(shell: Shell, generation: Generation, admission: Admission) -> web.Response:
    body, account = admission.body, generation.account()
    assert isinstance(body, EmbeddingRequest), "its route parses nothing else"
    vectors = embedding_list(generation.embeddings(), as_base64=body.as_base64)
    answer = {"object": "list", "data": vectors, "model": shell.require_serving().shown_name(body.model),
              "usage": {"prompt_tokens": account.prompt_tokens, "total_tokens": account.prompt_tokens}}
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def foreign(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages and /v1/responses, by the request's path."""
    route = FOREIGN[request.path]
    assert route.foreign is not None, "its table holds foreign routes"
    try:
        return await _answer(request, route)
    except ApiError as error:
        raise route.foreign.error(error) from None


async def _answer(request: web.Request, route: Route) -> web.StreamResponse:
    shell = shell_of(request)
    with shell.answering():
        admission = await admit(request, shell, route)
        async with _submitted(request, shell, admission, route) as generation:
            layout = _format(shell, generation, admission, route)
            if admission.body.stream:
                return await _stream(request, generation, layout, admission)
            return await _whole(generation, layout, admission)


@asynccontextmanager
async def _submitted(request: web.Request, shell: Shell, admission: Admission,
                     route: Route) -> AsyncIterator[Generation]:
    """The generation while its handler lives: with table and engine before, stopped after."""
    # A client that left while its prompt was being tokenised must not cost the engine anything.
    if request.transport is None or request.transport.is_closing():
        raise ApiError(499, "client_closed_request", "The client left before its request was taken up.")
    generation = _generation(request, shell, admission, route)
    shell.requests.add(generation)
    try:
        shell.engine.submit(*_sequences(generation, admission))
    except ApiError:
        shell.requests.discard(generation)
        raise
    shell.metrics.observe_tokenize(admission.tokenize_s)
    try:
        yield generation
    finally:
        generation.abandon()
        if generation.abandoned:
            shell.metrics.observe_disconnect()
            _log.info("client_left", request_id=generation.request_id)    # the engine has been told


def _generation(request: web.Request, shell: Shell, admission: Admission, route: Route) -> Generation:
    serving, body = shell.require_serving(), admission.body
    key, resume = shell.requests.free_key(request[REQUEST_ID]), admission.resume
    given = [prompt[:len(prompt) - admission.num_generated] for prompt in admission.prompts]
    detokenizers = [
        StreamDetokenizer(serving.renderer.tokenizer, prompt_tail_ids=prompt[-PROMPT_TAIL_TOKENS:], stop=body.stop,
                          min_tokens=body.sampling.min_tokens,
                          skip_special_tokens=not needs_special_tokens(body, serving.renderer))
        for prompt in given for _ in range(body.num_candidates)
    ]
    generation = Generation(
        key=key, request_id=request[REQUEST_ID], route=route.name, model=serving.shown_name(admission.body.model),
        prompt_lengths=[len(prompt) for prompt in given], num_choices_per_prompt=body.num_candidates,
        tokenize_s=admission.tokenize_s, detokenizers=detokenizers,
        tool_parsers=[tool_parser_of(body, serving.renderer) for _ in detokenizers],
        first_choice=0 if resume is None else resume.choice, abort=lambda choice: shell.engine.abort(key, choice))
    if isinstance(body, CompletionRequest) and body.echo:
        generation.echo([_prompt_text(prompt, serving.renderer) for prompt in body.prompts])
    if resume is not None:
        generation.replay(admission.generated_token_ids, sent_chars=resume.sent_chars)
    return generation


def _prompt_text(prompt: str | Sequence[int], renderer: PromptRenderer) -> str:
    return prompt if isinstance(prompt, str) else renderer.tokenizer.decode(prompt, skip_special_tokens=False)


def _sequences(generation: Generation, admission: Admission) -> list[SubmitSequence]:
    body = admission.body
    return [
        SubmitSequence(
            request_id=generation.key, choice=generation.first_choice + index * body.num_candidates + number,
            token_ids=prompt,
            params=admission.params_of(number), max_new_tokens=admission.max_new_tokens[index],
            stop_token_ids=admission.stop_token_ids, extra_keys=admission.extra_keys, priority=body.priority,
            tenant=admission.tenant, arrived_at=generation.arrived_at, grammar=admission.grammar,
            num_generated=admission.num_generated)
        for index, prompt in enumerate(admission.prompts) for number in range(body.num_candidates)
    ]


def _format(shell: Shell, generation: Generation, admission: Admission, route: Route) -> ResponseFormat:
    serving = shell.require_serving()
    resume = admission.resume
    head = ResponseHead(request_id=generation.request_id, response_id=None if resume is None else resume.id,
                        created=int(time.time()) if resume is None else resume.created,
                        model=serving.shown_name(admission.body.model),
                        system_fingerprint=serving.system_fingerprint, include_usage=admission.body.include_usage,
                        return_token_ids=admission.body.return_token_ids, tool_style=serving.renderer.tool_style)
    layout = (CompletionFormat if route is COMPLETIONS else ChatFormat)(head, serving.token_text)
    if resume is not None:
        layout.resumed(resume.choice, admission.generated_token_ids, has_role=resume.has_role)
    return layout


async def _whole(generation: Generation, layout: ResponseFormat, admission: Admission) -> web.Response:
    body = admission.body
    choices = [FullChoice() for _ in generation.detokenizers]
    while deltas := await generation.next_deltas():
        for delta in deltas:
            choices[delta.choice].add(delta)
    if body.scores_prompt:
        _add_prompts(choices, generation, admission)
    if body.num_candidates > body.n:
        choices = best_choices(choices, body.num_candidates, body.n, keep_logprobs=body.sampling.logprobs is not None)
    account = generation.account()
    answer = layout.full(choices, account)
    whole = orjson.dumps(answer) if admission.foreign is None else encoded(admission.foreign.whole(answer))
    headers = {CACHED_TOKENS_HEADER: str(account.cached_tokens)}
    if admission.tells_token_ids:
        told, whole = tell_behind(whole, [choice.token_ids for choice in choices])
        headers |= told
    return web.Response(body=whole, content_type="application/json", headers=headers)


def _add_prompts(choices: list[FullChoice], generation: Generation, admission: Admission) -> None:
    body = admission.body
    num_echoed = body.sampling.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    for index, choice in enumerate(choices):
        choice.prompt = ScoredPrompt(admission.prompts[index // body.num_candidates], generation.prompt_scores(index),
                                     body.prompt_logprobs, num_echoed)


async def _stream(request: web.Request, generation: Generation, layout: ResponseFormat,
                  admission: Admission) -> web.StreamResponse:
    deltas = await generation.next_deltas()      # an ApiError up to here is a status, not an event
    wire = wire_of(admission, generation)
    response = await open_stream(request, {
        REQUEST_ID_HEADER: generation.request_id,
        CACHED_TOKENS_HEADER: str(generation.account().cached_tokens),
        **({TOKEN_IDS_HEADER: TOKEN_IDS_IN_COMMENTS} if admission.tells_token_ids else {}),
    })
    # A client that leaves between two writes shows as a ConnectionError; the caller's `finally` stops the engine.
    with suppress(ConnectionError):
        try:
            while deltas:
                if chunk_bytes := b"".join(wire.told(delta, layout.chunks(delta)) for delta in deltas):
                    await response.write(chunk_bytes)
                deltas = await generation.next_deltas()
            await response.write(wire.done(layout.ending(generation.account())))
        except ApiError as refusal:
            await response.write(wire.failed(refusal))
        except ConnectionError:
            raise
        except Exception:
            _log.exception("internal_error", request_id=generation.request_id, path=request.path)
            await response.write(wire.failed(internal_error(generation.request_id)))
        await response.write_eof()
    return response
