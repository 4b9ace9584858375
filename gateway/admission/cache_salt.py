"""The cache salt: what keeps one tenant's cached prompts from another's (contract section 7).

Owns: how sharing group and body salt become one salt under the deployment's secret, and how it travels to workers
that read the client's JSON. Must never: let a body widen what its tenant may find.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace
from functools import lru_cache

from gateway.admission.body_field import with_field
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind

BODY_FIELD = "cache_salt"
SALTS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """`internal` is the salt header's value, None when the worker salts by itself.

    `in_body` is what a worker that reads the client's JSON must find there; None: whatever the client said.
    """

    extra_keys: tuple[ExtraKey, ...]
    internal: bytes | None
    salt_from: int = 0
    in_body: str | None = None

    def beside(self, others: tuple[ExtraKey, ...]) -> CacheSalt:
        """The same with what else stands in the block hashes."""
        return replace(self, extra_keys=(*self.extra_keys, *others)) if others else self


NO_SALT = CacheSalt((), None)


@lru_cache(SALTS_REMEMBERED)
def cache_salt_of(body_salt: str | None, secret: str, *, sharing_group: bytes = b"", is_internal: bool = True,
                  salt_from: int = 0) -> CacheSalt:
    """The salt of one request. An empty `sharing_group` means that there is one tenant: then nothing is salted unless
    the body asks for it. `is_internal`: workers trust our header; without it the salt travels in the body.
    `salt_from` is the number of tokens that are public.
    """
    if not sharing_group and body_salt is None:
        return NO_SALT
    if not sharing_group and not (secret and is_internal):
        assert body_salt is not None
        return CacheSalt((ExtraKey(ExtraKeyKind.BODY_SALT, body_salt.encode()),), None)
    assert secret, "tenants without a deployment secret"
    parts = [sharing_group] if body_salt is None else [sharing_group, body_salt.encode()]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    salt = hmac.digest(secret.encode(), message, hashlib.sha256)
    in_body = salt.hex() if sharing_group else None
    if not is_internal:
        # Workers that read the body salt from block 0, so nothing is public there.
        return CacheSalt((ExtraKey(ExtraKeyKind.BODY_SALT, salt.hex().encode()),), None, in_body=in_body)
    return CacheSalt((ExtraKey(ExtraKeyKind.GATEWAY_SALT, salt, salt_from),), salt, salt_from, in_body)


def with_cache_salt(body: bytes, salt: str) -> bytes:
    """The body with this `cache_salt` instead of its own."""
    return with_field(body, BODY_FIELD, salt)
