"""Request bodies to checked values: chat completions, plain completions, /tokenize and /detokenize.

Owns which values go together and what absent ones mean; request_schema.py has names, types and ranges. Every
complaint is a 400 `invalid_request` that names the field. Must never render, tokenise or look at the model: a request
that leaves here may still be too long or name a model that nobody serves.

Known fields are strict (`true` is not an int, "1" is not 1). Unknown fields are ignored and listed in `.unknown`, so
that a caller can log them. `null` means absent, as OpenAI's clients send it.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from worker.prompt.json_body import decode_body
from worker.prompt.messages import check_chat_template_kwargs, check_messages, check_tools
from worker.prompt.output_shape import FORCED, ToolChoice, check_tool_schemas, response_schema, tool_choice
from worker.prompt.request_schema import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    TokenizeBody,
)
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.api_error import ApiError, invalid_request


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions share, after validation.

    `max_tokens` None: up to the end of the context; a default one shrinks to what is left. `seed_given` False: the
    server draws `sampling.seed`. `priority_given` False: it is 0 by default.
    `sampling.logprobs` holds the normalised `logprobs`/`top_logprobs`. `unknown` are ignored top-level fields.
    `response_schema`: the JSON schema that `response_format` asks for, as JSON text. `prompt_logprobs`: how many
    alternatives to show for each token of the prompt; `sampling`'s covers `echo` with `logprobs` too.
    """

    model: str
    sampling: SamplingParams
    seed_given: bool
    max_tokens: int | None
    max_tokens_is_default: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    priority_given: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    response_schema: str | None = None
    prompt_logprobs: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are wanted: then nothing of it comes from a cache."""
        return self.sampling.prompt_logprobs is not None

    @property
    def is_uncached(self) -> bool:
        """Whether every position of the prompt must be computed, so that nothing of it comes from a cache."""
        return self.scores_prompt or self.sampling.pools

    @property
    def num_candidates(self) -> int:
        """Sequences per prompt, of which `n` are answered with."""
        return self.n

    @property
    def ignore_eos(self) -> bool:
        return self.sampling.ignore_eos

    @property
    def min_tokens(self) -> int:
        return self.sampling.min_tokens


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A chat body. `messages` are plain dicts as templates want them (roles checked, text parts kept as sent).

    `forced_tool` is the one tool that a `tool_choice` of "named" allows.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def may_call_tools(self) -> bool:
        return self.tools is not None and self.tool_choice is not ToolChoice.NONE


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A plain completion body: each prompt is text to encode, or token ids taken as they are.

    `echo`: the prompt's text goes before the answer's. `best_of` (more than `n`, or None): generate so many, and
    answer with the likeliest.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    best_of: int | None = None

    @property
    def num_candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of


class EmbeddingRequest(CompletionRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings: a completion of one token, of which only the prompts' embeddings are told."""

    as_base64: bool = False


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: exactly one of `prompt` and `messages` is set.

    `add_special_tokens` defaults to True for a prompt and False for messages, whose template writes them already.
    """

    model: str | None
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    add_special_tokens: bool
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: tuple[dict[str, Any], ...] | None = None
    return_token_strs: bool = False
    unknown: tuple[str, ...] = ()


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None
    tokens: tuple[int, ...]
    unknown: tuple[str, ...] = ()


SAMPLINGS_REMEMBERED = 1024
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_embedding_decoder = msgspec.json.Decoder(EmbeddingBody)
_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a POST /v1/chat/completions body; ApiError 400 with `param` on anything malformed."""
    given, unknown = decode_body(body, _chat_decoder)
    check_messages(given.messages)
    _refuse_unsupported_chat(given)
    tools = _checked_tools(given.tools)
    choice, forced_tool = tool_choice(given.tool_choice, tools)
    shared = _shared(given, unknown, logprobs=_chat_logprobs(given),
                     max_tokens=given.max_completion_tokens or given.max_tokens)
    if choice in FORCED or (choice is ToolChoice.AUTO and shared["response_schema"] is not None):
        check_tool_schemas(tools or ())
    return ChatRequest(
        **shared, messages=tuple(given.messages), tools=tools, tool_choice=choice, forced_tool=forced_tool,
        parallel_tool_calls=given.parallel_tool_calls is not False, **_template_options(given))


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse a POST /v1/completions body; ApiError 400 with `param` on anything malformed."""
    given, unknown = decode_body(body, _completion_decoder)
    prompts = _prompts(given.prompt)
    echoed_logprobs = given.logprobs if given.echo else None
    if echoed_logprobs is not None and given.stream:
        raise invalid_request("echo with logprobs cannot be streamed.", "echo")
    if given.suffix:
        raise invalid_request("suffix is not supported: this model completes from the left only.", "suffix")
    best_of = _best_of(given)
    if len(prompts) * (best_of or given.n or 1) > MAX_SEQUENCES:
        raise invalid_request(f"n or best_of times the number of prompts may be at most {MAX_SEQUENCES}.",
                              "n" if best_of is None else "best_of")
    shared = _shared(given, unknown, logprobs=given.logprobs,
                     max_tokens=given.max_tokens or DEFAULT_COMPLETION_MAX_TOKENS, echoed_logprobs=echoed_logprobs)
    return CompletionRequest(**shared, prompts=prompts, echo=bool(given.echo), best_of=best_of,
                             max_tokens_is_default=given.max_tokens is None)


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Parse a POST /v1/embeddings body; ApiError 400 with `param` on anything malformed."""
    given, unknown = decode_body(body, _embedding_decoder)
    if given.encoding_format not in (None, "float", "base64"):
        raise invalid_request("encoding_format must be 'float' or 'base64'.", "encoding_format")
    if given.dimensions is not None:
        raise invalid_request("dimensions is not supported: this model was not trained for shorter embeddings.",
                              "dimensions")
    try:
        prompts = _prompts(given.input)
    except ApiError as error:
        raise invalid_request(error.message.replace("prompt", "input"),
                              (error.param or "input").replace("prompt", "input")) from None
    return EmbeddingRequest(
        model=given.model, prompts=prompts, max_tokens=1, seed_given=True, user=given.user,
        priority=given.priority or 0, priority_given=given.priority is not None,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, pools=True),
        as_base64=given.encoding_format == "base64", unknown=unknown)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse a POST /tokenize body (vLLM's shape); ApiError 400 with `param` on anything malformed."""
    given, unknown = decode_body(body, _tokenize_decoder)
    if (given.prompt is None) == (given.messages is None):
        raise invalid_request("Give exactly one of prompt and messages.", "prompt")
    _refuse_chat_template(given.chat_template)
    messages = None
    if given.messages is not None:
        check_messages(given.messages)
        messages = tuple(given.messages)
    add_special_tokens = messages is None if given.add_special_tokens is None else given.add_special_tokens
    return TokenizeRequest(
        model=given.model, prompt=given.prompt, messages=messages, add_special_tokens=add_special_tokens,
        tools=_checked_tools(given.tools), return_token_strs=bool(given.return_token_strs), unknown=unknown,
        **_template_options(given))


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse a POST /detokenize body; ApiError 400 with `param` on anything malformed."""
    given, unknown = decode_body(body, _detokenize_decoder)
    return DetokenizeRequest(model=given.model, tokens=tuple(given.tokens), unknown=unknown)


def _shared(given: GenerationBody, unknown: tuple[str, ...], *, logprobs: int | None,
            max_tokens: int | None, echoed_logprobs: int | None = None) -> dict[str, Any]:
    """The fields of GenerationRequest, with everything that holds for both routes checked."""
    if given.stream_options is not None and not given.stream:
        raise invalid_request("stream_options is only allowed when stream is true.", "stream_options")
    if max_tokens is not None and (given.min_tokens or 0) > max_tokens:
        raise invalid_request(f"min_tokens ({given.min_tokens}) is larger than max_tokens ({max_tokens}).",
                              "min_tokens")
    if given.prompt_logprobs is not None and given.stream:
        raise invalid_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    options = given.stream_options
    of_prompt = [wanted for wanted in (given.prompt_logprobs, echoed_logprobs) if wanted is not None]
    sampling = _sampling(given, logprobs, max(of_prompt, default=None))
    return {
        "model": given.model, "sampling": sampling, "prompt_logprobs": given.prompt_logprobs,
        "seed_given": given.seed is not None,
        "max_tokens": max_tokens, "n": given.n or 1, "stop": _stops(given.stop), "stream": bool(given.stream),
        "include_usage": bool(options and options.include_usage), "return_token_ids": bool(given.return_token_ids),
        "cache_salt": given.cache_salt, "user": given.user,
        "priority": given.priority or 0, "priority_given": given.priority is not None,
        "prompt_cache_key": given.prompt_cache_key, "prompt_cache_retention": given.prompt_cache_retention,
        "response_schema": response_schema(given.response_format), "unknown": unknown,
    }


_ASKED = ("temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
          "min_tokens", "ignore_eos")
_asked_of = attrgetter(*_ASKED)


def _sampling(given: GenerationBody, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    # vLLM's clients turn top_k off with -1 or 0.
    top_k = given.top_k if given.top_k is not None and given.top_k > 0 else None
    usual = _usual_sampling(_asked_of(given), top_k, logprobs, prompt_logprobs)
    bias = given.logit_bias
    return usual if not bias else msgspec.structs.replace(usual, logit_bias=_logit_bias(bias))


@lru_cache(SAMPLINGS_REMEMBERED, typed=True)
def _usual_sampling(asked: tuple[float | None, ...], top_k: int | None, logprobs: int | None,
                    prompt_logprobs: int | None) -> SamplingParams:
    """Without a bias. Clients ask for the same again and again, and nobody changes what is frozen."""
    given = {name: value for name, value in zip(_ASKED, asked, strict=True) if value is not None}
    return SamplingParams(**given, top_k=top_k, logprobs=logprobs,  # type: ignore[arg-type]
                          prompt_logprobs=prompt_logprobs)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise invalid_request(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are accepted.", "stop")
    for index, text in enumerate(stops):
        path = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise invalid_request("A stop string may not be empty.", path)
        if len(text) > MAX_STOP_CHARS:
            raise invalid_request(f"A stop string may have at most {MAX_STOP_CHARS} characters.", path)
    return tuple(stops)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIAS_TOKENS:
        raise invalid_request(f"logit_bias names {len(biases)} tokens; at most {MAX_LOGIT_BIAS_TOKENS} are accepted.",
                              "logit_bias")
    result: dict[int, float] = {}
    for key, bias in biases.items():
        # isdecimal() also holds for other scripts' digits, which int() reads: two keys could then mean one token.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise invalid_request(f"logit_bias keys must be token ids written as decimal strings, not {key[:64]!r}.",
                                  "logit_bias")
        result[int(key)] = bias
    return result


def _chat_logprobs(given: ChatBody) -> int | None:
    if given.logprobs:
        return given.top_logprobs or 0
    if given.top_logprobs:
        raise invalid_request("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    return None


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid_request("prompt must not be an empty list.", "prompt")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise invalid_request("prompt must be one kind of list: strings, token ids, or lists of token ids.",
                                  f"prompt[{index}]")
    if kind is int:
        return (tuple(prompt),)  # type: ignore[arg-type]
    if len(prompt) > MAX_PROMPTS:
        raise invalid_request(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are accepted.", "prompt")
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)  # type: ignore[arg-type]


def _best_of(given: CompletionBody) -> int | None:
    """How many candidates to choose from; None where there is nothing to choose."""
    n = given.n or 1
    if given.best_of is None or given.best_of == n:
        return None
    if given.best_of < n:
        raise invalid_request(f"best_of ({given.best_of}) is less than n ({n}).", "best_of")
    if given.stream:
        raise invalid_request("best_of more than n cannot be streamed: the best is known at the end.", "best_of")
    return given.best_of


def _refuse_unsupported_chat(given: ChatBody) -> None:
    if given.chat_template is None and given.functions is None and given.function_call is None:
        return
    _refuse_chat_template(given.chat_template)
    for name, remedy in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(given, name) is not None:
            raise invalid_request(f"{name} is deprecated and not supported: use {remedy}.", name)


def _refuse_chat_template(template: object) -> None:
    if template is not None:
        raise invalid_request("chat_template is not accepted from a request: the operator sets it with "
                              "--chat-template.", "chat_template")


def _checked_tools(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...] | None:
    if tools is None:
        return None
    check_tools(tools)
    return tuple(tools)


def _template_options(given: ChatBody | TokenizeBody) -> dict[str, Any]:
    kwargs = given.chat_template_kwargs or {}
    check_chat_template_kwargs(kwargs)
    continue_final = bool(given.continue_final_message)
    if continue_final and given.add_generation_prompt:
        raise invalid_request("continue_final_message and add_generation_prompt exclude each other: send "
                              "add_generation_prompt false.", "continue_final_message")
    add_prompt = not continue_final if given.add_generation_prompt is None else given.add_generation_prompt
    return {"chat_template_kwargs": kwargs, "add_generation_prompt": add_prompt,
            "continue_final_message": continue_final}
