"""From an HTTP request to work for the engine: body, parsing, prompt ids, limits, extra keys.

Owns everything that can be refused before the engine hears of a request. A direct request is rendered and tokenised
here (off the event loop when it is long); an internal one (contract section 4) brings its prompt ids and a salt from
the gateway, and is honoured only with the worker's token. Whatever passes fits the context and can finish.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import hdrs, web

from worker.engine.messages import EngineReady
from worker.prompt.foreign_api import ForeignAnswer, ForeignApi
from worker.prompt.grammar_spec import GrammarSpec
from worker.prompt.messages_body import MESSAGES
from worker.prompt.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_embedding
from worker.prompt.responses_body import RESPONSES
from worker.prompt.sampling_params import SamplingParams
from worker.prompt.unsupported_fields import refuse_unsupported_fields
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind
from worker.protocol.body_encoding import (
    ENCODINGS_TEXT,
    TORN_TEXT,
    BadlyEncoded,
    GrownTooLarge,
    UnknownEncoding,
    decoded,
)
from worker.protocol.internal_request import (
    RESUME_HEADER,
    WORKER_TOKEN_HEADER,
    InternalRequest,
    Resume,
    decode_internal,
    is_internal,
)
from worker.protocol.logs import get_logger
from worker.server.answer_form import grammar_of
from worker.server.error_middleware import body_too_large
from worker.server.prompt_limit import check_texts, too_long
from worker.server.shell import Serving, Shell

SEED_BITS = 63
UNKNOWN_FIELDS_LOGGED_MAX = 16

_log = get_logger("worker.server.intake")
Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Route:
    """One generating route: how its body is read and where its prompt is named in errors."""

    name: str
    parse: Callable[[bytes], Body]
    render: Callable[[Serving, Body, str], list[list[int]]]
    prompt_param: str
    foreign: ForeignApi | None = None

    def read(self, raw: bytes) -> tuple[Body, ForeignAnswer | None]:
        """What a body asks, and how to answer it in another API's words."""
        if self.foreign is None:
            return self.parse(raw), None
        request = self.foreign.read(raw)
        return request.parsed, request.answer


def _render_chat(serving: Serving, body: Body, param: str) -> list[list[int]]:
    assert isinstance(body, ChatRequest)
    text = serving.renderer.chat_text(body)
    check_texts([text], serving, param)
    return [serving.renderer.chat_packed(body, scope=body.cache_salt or "", text=text).tolist()]


def _render_completion(serving: Serving, body: Body, param: str) -> list[list[int]]:
    assert isinstance(body, CompletionRequest)
    check_texts((prompt for prompt in body.prompts if isinstance(prompt, str)), serving, param)
    return serving.renderer.completion(body, scope=body.cache_salt or "")


CHAT = Route("/v1/chat/completions", parse_chat, _render_chat, "messages")
COMPLETIONS = Route("/v1/completions", parse_completion, _render_completion, "prompt")
EMBEDDINGS = Route("/v1/embeddings", parse_embedding, _render_completion, "input")
FOREIGN = {api.path: Route(api.path, parse_chat, _render_chat, "messages", api) for api in (MESSAGES, RESPONSES)}


@dataclass(frozen=True, slots=True)
class Admission:
    """A checked request: `prompts` fit the context, `max_new_tokens` (one per prompt) too.

    With `resume` there is one prompt and one choice, and the prompt's last ids are what was generated already.
    `tells_token_ids`: the gateway wants a stream's tokens in comments.
    """

    body: Body
    prompts: list[list[int]]
    max_new_tokens: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    extra_keys: tuple[ExtraKey, ...]
    tokenize_s: float
    grammar: GrammarSpec | None
    resume: Resume | None = None
    foreign: ForeignAnswer | None = None
    tells_token_ids: bool = False
    tenant: str | None = None

    def params_of(self, number: int) -> SamplingParams:
        """One of a prompt's choices': the first alone scores the prompt, which costs it the cache."""
        if number == 0 or self.params.prompt_logprobs is None:
            return self.params
        return msgspec.structs.replace(self.params, prompt_logprobs=None)

    @property
    def num_generated(self) -> int:
        return 0 if self.resume is None else self.resume.generated

    @property
    def generated_token_ids(self) -> list[int]:
        """What another worker has generated."""
        prompt = self.prompts[0]
        return prompt[len(prompt) - self.num_generated:]


async def admit(request: web.Request, shell: Shell, route: Route) -> Admission:
    """Read and check a request; ApiError on everything that cannot run."""
    serving = shell.require_accepting()
    resume, foreign, tells_token_ids, tenant = None, None, False, None
    if is_internal(request.headers):
        require_worker_token(request, shell)
        raw = await read_body(request, shell.config.max_body_bytes)
        internal = decode_internal(request.headers, raw)
        prompts, resume, extra_keys, tokenize_s = internal.prompts, internal.resume, _gateway_salt(internal), 0.0
        tells_token_ids, tenant = internal.tells_token_ids, internal.tenant
        body = _body_of(internal, route)
        refuse_unsupported_fields(internal.json_body, body.unknown)
        _check_vocabulary(prompts, serving.ready, route)
        _check_number_of_choices(body, len(prompts), shell)
    else:
        raw = await read_body(request, shell.config.max_body_bytes)
        read, prompts, tokenize_s = await shell.prompt_threads.run(
            len(raw), lambda: _read_direct(raw, serving, route, shell))
        body, foreign = read
        extra_keys = _body_salt(body)
    if body.unknown:
        _log.debug("unknown_fields_ignored", fields=body.unknown[:UNKNOWN_FIELDS_LOGGED_MAX])
    require_model(body.model, serving)
    if (adapter := serving.adapters.get(body.model)) is not None:
        extra_keys = (*extra_keys, ExtraKey(ExtraKeyKind.LORA, adapter))
    max_new_tokens = _max_new_tokens(body, prompts, serving.ready, route, resume=resume)
    return Admission(
        body, prompts, max_new_tokens, params=_sampling(body), stop_token_ids=_stop_token_ids(body, serving.ready),
        extra_keys=extra_keys, tokenize_s=tokenize_s, grammar=grammar_of(body, serving.renderer), resume=resume,
        foreign=foreign, tells_token_ids=tells_token_ids, tenant=tenant)


def require_worker_token(request: web.Request, shell: Shell) -> None:
    """ApiError 403 unless the request carries this worker's token (an empty one admits nobody)."""
    if not has_worker_token(request, shell):
        raise ApiError(403, "forbidden", f"{WORKER_TOKEN_HEADER} is missing or is not this worker's token "
                       "(HEADSTART_WORKER_TOKEN must be the same at gateway and worker).")


def has_worker_token(request: web.Request, shell: Shell) -> bool:
    expected = shell.config.worker_token.encode()
    given = request.headers.get(WORKER_TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
    return bool(expected) and hmac.compare_digest(given, expected)


def require_model(model: str | None, serving: Serving) -> None:
    """ApiError 404 `model_not_found` for another model; None means the one that is served."""
    if model is not None and model not in serving.model_names:
        raise ApiError(404, "model_not_found", f"The model {model!r} is not served here; this worker serves "
                       f"{', '.join(map(repr, (serving.ready.model, *serving.adapters)))}.", param="model")


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body; ApiError 413 as soon as it is known to be too large, 400 when it does not arrive whole, 415 for
    an encoding that is not read here."""
    if (request.content_length or 0) > limit_bytes:
        raise body_too_large(limit_bytes)
    try:
        return await decoded(await request.read(), request.headers.get(hdrs.CONTENT_ENCODING), limit_bytes)
    except (web.HTTPRequestEntityTooLarge, GrownTooLarge):
        raise body_too_large(limit_bytes) from None
    except (web.RequestPayloadError, BadlyEncoded):
        raise invalid_request(TORN_TEXT, None) from None
    except UnknownEncoding:
        raise ApiError(415, "encoding_not_supported", ENCODINGS_TEXT) from None


def _read_direct(raw: bytes, serving: Serving, route: Route,
                 shell: Shell) -> tuple[tuple[Body, ForeignAnswer | None], list[list[int]], float]:
    body, foreign = route.read(raw)
    if foreign is None:
        refuse_unsupported_fields(raw, body.unknown)
    require_model(body.model, serving)      # before the work of rendering for somebody else's model
    _check_number_of_choices(body, len(body.prompts) if isinstance(body, CompletionRequest) else 1, shell)
    started = time.perf_counter()
    prompts = route.render(serving, body, route.prompt_param)
    return (body, foreign), prompts, time.perf_counter() - started


def _body_of(internal: InternalRequest, route: Route) -> Body:
    body = route.parse(internal.json_body)
    if internal.resume is None:
        return body
    if not body.stream:
        raise invalid_request("Only a stream can be resumed.", RESUME_HEADER)
    # Each unfinished choice is resumed by a request of its own, with its own prompt.
    if isinstance(body, CompletionRequest):
        number = internal.resume.choice // body.num_candidates
        if number >= len(body.prompts):
            raise invalid_request(f"{RESUME_HEADER}: there is no choice {internal.resume.choice}.", RESUME_HEADER)
        return msgspec.structs.replace(body, n=1, prompts=[body.prompts[number]])
    return msgspec.structs.replace(body, n=1)


def _gateway_salt(internal: InternalRequest) -> tuple[ExtraKey, ...]:
    if internal.salt is None:
        return ()
    # The gateway has folded the body's own cache_salt into this one: it alone speaks for tenants.
    return (ExtraKey(ExtraKeyKind.GATEWAY_SALT, internal.salt, internal.salt_from),)


def _body_salt(body: Body) -> tuple[ExtraKey, ...]:
    return () if body.cache_salt is None else (ExtraKey(ExtraKeyKind.BODY_SALT, body.cache_salt.encode()),)


def _check_vocabulary(prompts: list[list[int]], ready: EngineReady, route: Route) -> None:
    highest = max((max(prompt, default=0) for prompt in prompts), default=0)
    if highest >= ready.vocab_size:
        raise invalid_request(f"Token id {highest} is outside this model's vocabulary of {ready.vocab_size}.",
                              route.prompt_param)


def _check_number_of_choices(body: Body, num_prompts: int, shell: Shell) -> None:
    num_choices, limit = num_prompts * body.num_candidates, shell.config.max_running + shell.config.max_waiting
    if num_choices > limit:
        raise invalid_request(f"{num_prompts} prompts times n or best_of = {body.num_candidates} is {num_choices} "
                              f"sequences; this worker "
                              f"holds at most {limit}.", "n")


def _max_new_tokens(body: Body, prompts: list[list[int]], ready: EngineReady, route: Route, *,
                    resume: Resume | None) -> list[int]:
    """Per prompt: what was asked for, or the rest of the context. More than fits is refused; a default shrinks."""
    num_generated = 0 if resume is None else resume.generated
    rests = []
    for length in (len(prompt) - num_generated for prompt in prompts):
        rest = ready.max_context - length
        if not length:
            raise invalid_request("The prompt has no tokens.", route.prompt_param)
        if rest < 1:
            raise too_long(str(length), ready.max_context, route.prompt_param)
        if body.max_tokens is not None and body.max_tokens > rest and not body.max_tokens_is_default:
            raise invalid_request(f"max_tokens is {body.max_tokens}, but the prompt takes {length} of this "
                                  f"worker's context of {ready.max_context} tokens and leaves {rest}.", "max_tokens")
        rests.append(rest if body.max_tokens is None else min(body.max_tokens, rest))
        if num_generated >= rests[-1]:
            raise invalid_request(f"{num_generated} tokens are generated already, of {rests[-1]} at most: there is "
                                  "nothing to resume.", RESUME_HEADER)
    return rests


def _sampling(body: Body) -> SamplingParams:
    """With a seed drawn where none was given, and the log-probabilities that the best candidates are chosen by."""
    params = body.sampling
    if body.num_candidates > body.n and params.logprobs is None:
        params = msgspec.structs.replace(params, logprobs=0)
    return params if body.seed_given else msgspec.structs.replace(params, seed=secrets.randbits(SEED_BITS))


def _stop_token_ids(body: Body, ready: EngineReady) -> frozenset[int]:
    return frozenset() if body.sampling.ignore_eos else frozenset(ready.eos_token_ids)
