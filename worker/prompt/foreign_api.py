"""What it takes to serve another API by ours: its body as a chat body, chat answers and errors in its shapes.

Owns the interface and what both translations share. Gateway and worker use the same ones, so a conversation has the
same ids, and the same blocks, whichever API it comes by. Pure: bytes and values in, bytes and values out. Must never
know a socket, or which engine answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from worker.prompt.request_schema import MAX_LABEL_CHARS
from worker.prompt.requests import ChatRequest, parse_chat
from worker.protocol.api_error import ApiError, invalid_request

Json = dict[str, Any]
MAX_BLOCKS = 16_384
"""Content blocks, or input items, of one body."""


class OwnFields(msgspec.Struct, kw_only=True):
    """Our own fields of a chat body, accepted under the same names. What each must be is the chat's to say."""

    cache_salt: Any = None
    priority: Any = None
    seed: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


EXTRAS = OwnFields.__struct_fields__


class ForeignBody(OwnFields, kw_only=True):
    """What every foreign body has."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
    stream: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None


class Event(NamedTuple):
    """One server-sent event of a foreign stream."""

    name: str
    data: Json


class PromptCount(NamedTuple):
    """What is known of the prompt when the first chunk comes; usage at the stream's end has the last word."""

    tokens: int = 0
    cached: int = 0


class ForeignStream(Protocol):
    """One chat stream on its way into the other API's events. Nothing may follow done() or failed()."""

    def chunk(self, chunk: Json) -> list[Event]:
        """Take one chat.completion.chunk."""
        ...

    def keep_alive(self) -> Event | None:
        """What says that the stream lives; None where only a comment does."""
        ...

    def done(self) -> list[Event]:
        """The stream is complete."""
        ...

    def failed(self, error: ApiError) -> list[Event]:
        """The stream ends with an error."""
        ...


class ForeignAnswer(Protocol):
    """How one request is answered."""

    def whole(self, chat: Json) -> Json:
        """A chat.completion as the other API's object."""
        ...

    def stream(self, prompt: PromptCount) -> ForeignStream:
        """The same in pieces."""
        ...


class Translated(NamedTuple):
    """A foreign body as a chat body, and the way back."""

    chat: Json
    answer: ForeignAnswer


class ForeignRequest(NamedTuple):
    """A foreign request, read and checked. `body` is the chat body it became."""

    body: bytes
    parsed: ChatRequest
    answer: ForeignAnswer


class ForeignError(ApiError):
    """An ApiError that renders in another API's shape."""

    def __init__(self, error: ApiError, shape: Callable[[ApiError], Json], param: str | None) -> None:
        super().__init__(error.status, error.code, error.message, param=param, headers=error.headers)
        self._shape = shape

    def body(self) -> dict[str, object]:
        """See ApiError."""
        return self._shape(self)


@dataclass(frozen=True, slots=True)
class ForeignApi:
    """`params`: what a chat body's fields are called in this API. `shape` writes an error."""

    path: str
    translate: Callable[[bytes], Translated]
    params: Mapping[str, str]
    shape: Callable[[ApiError], Json]

    def read(self, body: bytes) -> ForeignRequest:
        """ApiError 400 that names the field as this API calls it."""
        chat, answer = self.translate(body)
        chat_body = msgspec.json.encode(chat)
        try:
            return ForeignRequest(chat_body, parse_chat(chat_body), answer)
        except ApiError as error:
            raise self.error(error) from None

    def error(self, error: ApiError) -> ApiError:
        """The same error in this API's words and shape; one that has been through here already as it is."""
        return error if isinstance(error, ForeignError) else ForeignError(error, self.shape, self._param(error.param))

    def error_of(self, status: int, body: bytes) -> ApiError:
        """An error from the body that an engine answered with."""
        return self.error(read_error(status, body))

    def _param(self, param: str | None) -> str | None:
        if param is None:
            return None
        head = re.split(r"[.\[]", param, maxsplit=1)[0]
        renamed = self.params.get(head, head)
        # What is wrong inside a message or a format has another path there: the field is what can be named.
        return renamed if renamed != head else param.replace("].function.", "].")


def read_error(status: int, body: bytes) -> ApiError:
    """An OpenAI error object of whatever engine; anything else in a few words."""
    try:
        error = msgspec.json.decode(body)["error"]
        param = error.get("param")
        return ApiError(status, str(error.get("code") or "invalid_request"), str(error["message"]),
                        param=param if isinstance(param, str) else None)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ApiError(status, "worker_refused", f"The engine refused the request with status {status}.")


def encoded(answer: Json) -> bytes:
    """A whole answer as JSON. It repeats what the client sent, and that may hold integers of more than 64 bits."""
    return msgspec.json.encode(answer)


def given_extras(holder: OwnFields) -> Json:
    """Those of EXTRAS that a body sets."""
    return {name: value for name in EXTRAS if (value := getattr(holder, name)) is not None}


def text_of(holder: Mapping[str, Any], name: str, path: str) -> str:
    """A required string. ApiError 400 names it."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise invalid_request(f"{path}.{name} must be a string.", f"{path}.{name}")
    return value


def object_at(value: object, path: str) -> Mapping[str, Any]:
    """A required object. ApiError 400 names it."""
    if not isinstance(value, dict):
        raise invalid_request(f"{path} must be an object.", path)
    return value


def list_at(value: object, path: str) -> list[Any]:
    """A required list of bounded length. ApiError 400 names it."""
    if not isinstance(value, list):
        raise invalid_request(f"{path} must be a list.", path)
    if len(value) > MAX_BLOCKS:
        raise invalid_request(f"{path} holds {len(value)} items; at most {MAX_BLOCKS} are accepted.", path)
    return value


def content_of(texts: list[str]) -> str | list[Json]:
    """One text as a string, several as chat's text parts: templates are asked how they like them."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
