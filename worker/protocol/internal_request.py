"""The internal request: a client's JSON with the prompt ids that the gateway already made (contract section 4).

Owns: its content type, header names and encoding. Must never: check the worker token (the worker's shell does, before
it reads anything else) or look inside the client's JSON.

Body: the JSON bytes, then every prompt's ids as little-endian u32, one prompt behind the other. Headers say where to
cut. The tenant is percent-encoded, since header values are ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.block_hash import TOKEN_BYTES, packed_view, unpack_tokens

CONTENT_TYPE = "application/vnd.headstart.v1"
WORKER_TOKEN_HEADER = "x-headstart-worker-token"
JSON_BYTES_HEADER = "x-headstart-json-bytes"
PROMPT_LENGTHS_HEADER = "x-headstart-prompt-lengths"
TENANT_HEADER = "x-headstart-tenant"
SALT_HEADER = "x-headstart-salt"
SALT_FROM_HEADER = "x-headstart-salt-from"
RESUME_HEADER = "x-headstart-resume"
CACHED_TOKENS_HEADER = "x-headstart-cached-tokens"
# Asked for and answered alike: a stream that tells its tokens in comments (told_tokens.py).
TOKEN_IDS_HEADER = "x-headstart-token-ids"
TOKEN_IDS_IN_COMMENTS = "comments"
RESUME_ID_MAX_CHARS = 512
PROMPTS_MAX = 1024
SALT_MAX_BYTES = 64
TENANT_MAX_CHARS = 256
TENANTS_REMEMBERED = 1024


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that another worker began: the last `generated` prompt ids are what it has generated of `choice`.

    `sent_chars` of its text have reached the client. `id` and `created` are those of the response object. Tool calls
    within what was generated have reached the client too: ids and calls travel in one chunk. `has_role`: so has the
    chunk that opens the choice, which may be all that came of it (`generated` 0).
    """

    generated: Annotated[int, msgspec.Meta(ge=0)]
    choice: Annotated[int, msgspec.Meta(ge=0)] = 0
    sent_chars: Annotated[int, msgspec.Meta(ge=0)]
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=RESUME_ID_MAX_CHARS)]
    created: Annotated[int, msgspec.Meta(ge=0)]
    has_role: bool = True


_resume_decoder = msgspec.json.Decoder(Resume)


@dataclass(frozen=True, slots=True)
class InternalRequest:
    """What the gateway sent. `salt` applies from token position `salt_from` on; tenants take turns.

    With `resume` there is one prompt, and at least one of its ids is no output. `tells_token_ids`: the sender wants
    the tokens of the answer too (told_tokens.py).
    """

    json_body: bytes
    prompts: list[list[int]]
    tenant: str | None = None
    salt: bytes | None = None
    salt_from: int = 0
    resume: Resume | None = None
    tells_token_ids: bool = False


def encode_internal(json_body: bytes, prompts: Sequence[Sequence[int]], *, tenant: str | None = None,
                    salt: bytes | None = None, salt_from: int = 0,
                    resume: Resume | None = None,
                    tells_token_ids: bool = False) -> tuple[dict[str, str], bytes]:
    """(headers, body). The sender adds WORKER_TOKEN_HEADER itself."""
    headers = {
        "content-type": CONTENT_TYPE,
        JSON_BYTES_HEADER: str(len(json_body)),
        PROMPT_LENGTHS_HEADER: ",".join([str(len(prompt)) for prompt in prompts]),
    }
    if tenant is not None:
        headers[TENANT_HEADER] = _quoted(tenant)
    if salt is not None:
        headers[SALT_HEADER] = salt.hex()
        headers[SALT_FROM_HEADER] = str(salt_from)
    if resume is not None:
        headers[RESUME_HEADER] = msgspec.json.encode(resume).decode()
    if tells_token_ids:
        headers[TOKEN_IDS_HEADER] = TOKEN_IDS_IN_COMMENTS
    return headers, b"".join([json_body, *map(packed_view, prompts)])


@lru_cache(TENANTS_REMEMBERED)
def _quoted(tenant: str) -> str:
    return quote(tenant, safe="")


def is_internal(headers: Mapping[str, str]) -> bool:
    """Whether a request claims to be internal, by its content type; parameters and case do not matter."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == CONTENT_TYPE


def decode_internal(headers: Mapping[str, str], body: bytes) -> InternalRequest:
    """The reverse of encode_internal. `headers` must look names up as given here (lower case) or without case.

    ApiError 400 with the header's name as `param` when headers and body do not fit each other.
    """
    json_bytes = _number(headers, JSON_BYTES_HEADER)
    lengths = _prompt_lengths(headers)
    if json_bytes + sum(lengths) * TOKEN_BYTES != len(body):
        raise _nonsense(PROMPT_LENGTHS_HEADER, f"{json_bytes} bytes of JSON and {sum(lengths)} token ids do not make "
                                               f"a body of {len(body)} bytes")
    view = memoryview(body)
    prompts = []
    at = json_bytes
    for length in lengths:
        prompts.append(unpack_tokens(view[at:at + length * TOKEN_BYTES]))
        at += length * TOKEN_BYTES
    salt = _salt(headers)
    return InternalRequest(
        json_body=body[:json_bytes],
        prompts=prompts,
        tenant=_tenant(headers),
        salt=salt,
        salt_from=_number(headers, SALT_FROM_HEADER) if SALT_FROM_HEADER in headers else 0,
        resume=_resume(headers, lengths),
        tells_token_ids=headers.get(TOKEN_IDS_HEADER) == TOKEN_IDS_IN_COMMENTS,
    )


def _nonsense(header: str, why: str) -> ApiError:
    return invalid_request(f"{header}: {why}.", header)


def _number(headers: Mapping[str, str], name: str) -> int:
    return _parse_number(headers.get(name), name)


def _parse_number(text: str | None, name: str) -> int:
    # isdecimal alone would let other scripts' digits through; a length limit keeps int() cheap.
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise _nonsense(name, f"should be a number of 0 or more, got {text!r}")
    return int(text)


def _prompt_lengths(headers: Mapping[str, str]) -> list[int]:
    parts = headers.get(PROMPT_LENGTHS_HEADER, "").split(",")
    if len(parts) > PROMPTS_MAX:
        raise _nonsense(PROMPT_LENGTHS_HEADER, f"at most {PROMPTS_MAX} prompts in one request, got {len(parts)}")
    lengths = [_parse_number(part.strip(), PROMPT_LENGTHS_HEADER) for part in parts]
    if 0 in lengths:
        raise _nonsense(PROMPT_LENGTHS_HEADER, "a prompt without tokens cannot be continued")
    return lengths


def _resume(headers: Mapping[str, str], lengths: Sequence[int]) -> Resume | None:
    text = headers.get(RESUME_HEADER)
    if text is None:
        return None
    try:
        resume = _resume_decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise _nonsense(RESUME_HEADER, str(error)) from None
    if len(lengths) != 1 or resume.generated >= lengths[0]:
        raise _nonsense(RESUME_HEADER, f"one prompt longer than the {resume.generated} generated ids should come "
                        f"with it, got lengths {list(lengths)[:8]}")
    return resume


def _salt(headers: Mapping[str, str]) -> bytes | None:
    text = headers.get(SALT_HEADER)
    if text is None:
        return None
    try:
        salt = bytes.fromhex(text)
    except ValueError:
        raise _nonsense(SALT_HEADER, "should be hex") from None
    if not 1 <= len(salt) <= SALT_MAX_BYTES:
        raise _nonsense(SALT_HEADER, f"should be 1 to {SALT_MAX_BYTES} bytes, got {len(salt)}")
    return salt


def _tenant(headers: Mapping[str, str]) -> str | None:
    text = headers.get(TENANT_HEADER)
    if text is None:
        return None
    try:
        tenant = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _nonsense(TENANT_HEADER, "should be percent-encoded UTF-8") from None
    if len(tenant) > TENANT_MAX_CHARS:
        raise _nonsense(TENANT_HEADER, f"should have at most {TENANT_MAX_CHARS} characters, got {len(tenant)}")
    return tenant
