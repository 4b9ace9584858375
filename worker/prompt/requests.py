"""Request bodies to checked values: what POST /v1/chat/completions, /v1/completions, /tokenize and /detokenize accept.

Owns the wire schema: names, types, ranges, and which values go together. Every complaint is a 400 `invalid_request`
that names the field. Must never render, tokenise or look at the model: a request that leaves here may still be too
long or name a model that nobody serves.

Known fields are strict (`true` is not an int, "1" is not 1). Unknown fields are ignored and listed in `.unknown`, so
that a caller can log them. `null` means absent, as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from worker.prompt.json_body import Body, decode_body
from worker.prompt.messages import check_chat_template_kwargs, check_messages, check_tools
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.api_error import invalid_request

MAX_N = 128
MAX_PROMPTS = 512
MAX_SEQUENCES = 512
"""n times prompts: what one request may ask the engine to run."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_TOKEN_ID = 2**32 - 1
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LABEL_CHARS = 1024
"""cache_salt, user, prompt_cache_key and other short names."""
DEFAULT_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat runs to the context's end instead."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
Label = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions share, after validation.

    `max_tokens` None: up to the end of the context. `seed_given` False: the server draws `sampling.seed`.
    `sampling.logprobs` holds the normalised `logprobs`/`top_logprobs`. `unknown` are ignored top-level fields.
    """

    model: str
    sampling: SamplingParams
    seed_given: bool
    max_tokens: int | None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def ignore_eos(self) -> bool:
        return self.sampling.ignore_eos

    @property
    def min_tokens(self) -> int:
        return self.sampling.min_tokens


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A chat body. `messages` are plain dicts as templates want them (roles checked, text parts kept as sent)."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A plain completion body: each prompt is text to encode, or token ids taken as they are."""

    prompts: tuple[str | tuple[int, ...], ...]


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


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str


class _GenerationBody(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)] | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    response_format: _ResponseFormat | None = None


class _ChatBody(_GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class _CompletionBody(_GenerationBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None


class _TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class _DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


T = TypeVar("T")
GenerationBodyT = TypeVar("GenerationBodyT", bound=_GenerationBody)

_chat_decoder = msgspec.json.Decoder(_ChatBody)
_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_tokenize_decoder = msgspec.json.Decoder(_TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(_DetokenizeBody)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a POST /v1/chat/completions body; ApiError 400 with `param` on anything malformed."""
    raise AssertionError("being written")


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse a POST /v1/completions body; ApiError 400 with `param` on anything malformed."""
    raise AssertionError("being written")


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse a POST /tokenize body (vLLM's shape); ApiError 400 with `param` on anything malformed."""
    raise AssertionError("being written")


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse a POST /detokenize body; ApiError 400 with `param` on anything malformed."""
    raise AssertionError("being written")
