"""Tenants: who a key belongs to, what that tenant may ask for, and whom it shares a cache with.

Owns: the SHA-256 of every key and the look-up by it. Must never: hold a key in clear, or say why a key is wrong.

Keys are long random texts (`headstart key` makes them), so one SHA-256 is enough: there is nothing to guess. The
look-up goes by the first bytes of the digest, which nobody can steer towards a stored one, and the comparison of the
whole digest takes the same time whether it is right or wrong, or nothing was stored at all.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gateway import errors
from gateway.admission.budget import Budget

HASH_PREFIX = "sha256:"
KEY_MAX_CHARS = 512
SCOPES_REMEMBERED = 1024
_BUCKET_BYTES = 8
_NOBODY = b"\0" * hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use; None: no limit. `weight` is its share of a busy fleet, relative to the others';
    `min_priority` the most urgent priority it may ask for (a lower number goes first)."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None
    weight: float = 1.0
    min_priority: int | None = None
    budget: Budget | None = None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever shares an account. `sharing_group` decides whose cached prompts it may find; `models` None: all."""

    tenant_id: str
    sharing_group: bytes
    models: frozenset[str] | None = None
    limits: TenantLimits = NO_LIMITS

    @property
    def text_scope(self) -> str:
        """By what those are named who may notice that a text was tokenised before; a body's salt goes behind it."""
        return _text_scope(self.sharing_group)

    def may_use(self, model: str) -> bool:
        """Whether this model is allowed."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """ApiError 403 unless allowed, whether or not the model exists: what others may use is not told."""
        if not self.may_use(model):
            raise errors.model_forbidden(model)

    def priority_of(self, asked: int | None) -> int:
        """Of a request that asks for this one. None: for none, which gives 0, or the most urgent one it may have.
        ApiError 403 for a request that wants to go before what its tenant may."""
        least = self.limits.min_priority
        if asked is None:
            return max(0, least or 0)
        if least is not None and asked < least:
            raise errors.priority_forbidden(least)
        return asked


ANYONE = Tenant("", b"")
"""Everybody, when no keys are configured: one tenant, one cache."""


@lru_cache(SCOPES_REMEMBERED)
def _text_scope(sharing_group: bytes) -> str:
    return sharing_group.hex() + "/"


def own_group(tenant_id: str) -> bytes:
    """The sharing group of a tenant that shares with nobody. Its tag keeps it apart from every named group."""
    return b"tenant:" + tenant_id.encode()


def named_group(name: str) -> bytes:
    """The sharing group that several tenants name."""
    return b"group:" + name.encode()


def hash_key(key: str) -> str:
    """What is stored for a key: `sha256:` and 64 hex digits."""
    return HASH_PREFIX + _digest(key).hex()


@dataclass(frozen=True, slots=True)
class TenantDirectory:
    """Every tenant and the digests of its keys. Replaced as a whole when the configuration changes."""

    tenants: Mapping[str, Tenant]
    _by_digest: Mapping[bytes, tuple[bytes, Tenant]] = field(repr=False)

    @classmethod
    def of(cls, entries: Iterable[tuple[Tenant, bytes]], keyless: Iterable[Tenant] = ()) -> TenantDirectory:
        """From (tenant, SHA-256 of one of its keys), and tenants that may have none. ValueError when two tenants
        have the same key."""
        tenants = {tenant.tenant_id: tenant for tenant in keyless}
        by_digest: dict[bytes, tuple[bytes, Tenant]] = {}
        for tenant, digest in entries:
            tenants[tenant.tenant_id] = tenant
            _, owner = by_digest.setdefault(digest[:_BUCKET_BYTES], (digest, tenant))
            if owner is not tenant:
                raise ValueError(f"tenants {owner.tenant_id!r} and {tenant.tenant_id!r} have the same key")
        return cls(tenants, by_digest)

    @property
    def num_keys(self) -> int:
        """Keys that open something."""
        return len(self._by_digest)

    def authenticate(self, key: str) -> Tenant | None:
        """The tenant whose key this is."""
        digest = _digest(key)
        stored, tenant = self._by_digest.get(digest[:_BUCKET_BYTES], (_NOBODY, None))
        return tenant if hmac.compare_digest(stored, digest) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
