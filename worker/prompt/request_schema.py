"""The wire schema of request bodies: field names, types, ranges, and the limits behind them.

Owns what msgspec checks by itself. What holds between fields is checked in requests.py. Every field but the required
ones may be null, which means absent.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

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


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)] | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatBody(GenerationBody, kw_only=True):
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


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None


class EmbeddingBody(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
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


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
