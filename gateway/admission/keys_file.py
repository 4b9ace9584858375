"""The keys file: tenants, the hashes of their keys, their limits, and the texts that all of them share.

Owns: the file's format and every complaint about it. Must never: repeat a key in a complaint.

    [[tenants]]
    id = "acme"
    keys = ["sha256:..."]             # from `headstart key`
    group = "research"                # shares its cache with others that name it; left out: with nobody
    models = ["smollm2"]              # left out: all
    weight = 2.0
    requests_per_minute = 600
    tokens_per_minute = 200_000       # prompt tokens and generated ones
    max_concurrent = 32
    budget_tokens = 5_000_000         # of prompts and answers in each window
    budget_window = "day"             # hour, day, week or month, by the calendar of UTC
    min_priority = 0                  # a lower `priority` goes first, before other tenants' at the worker too; above
                                      # 0 it is also that of requests that name none

    [[public_prefixes]]
    name = "support"
    system = "You are the support agent of ..."       # a system prompt; or text = "..." for /v1/completions
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.admission.budget import Budget, Window
from gateway.admission.public_prefixes import PublicPrefix
from gateway.admission.tenants import (
    HASH_PREFIX,
    KEY_MAX_CHARS,
    Tenant,
    TenantDirectory,
    TenantLimits,
    hash_key,
    named_group,
    own_group,
)

KEY_MIN_CHARS = 16
TENANTS_MAX = 100_000
PUBLIC_PREFIXES_MAX = 64
_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-fA-F]{{64}}\Z")
_Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.@/-]+\Z")]
_Limit = Annotated[float, Meta(gt=0, le=1e15)]     # what adds up to more loses tokens to rounding; inf is no limit


class KeysError(Exception):
    """What is wrong with the keys; one line, without a key in it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Everything that the keys file and the environment say."""

    directory: TenantDirectory
    public_prefixes: tuple[PublicPrefix, ...] = ()


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: _Name
    keys: list[str] = []
    group: _Name | None = None
    models: list[str] | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None
    min_priority: Annotated[int, Meta(ge=-2**31, le=2**31 - 1)] = 0
    budget_tokens: _Limit | None = None
    budget_window: Window = Window.DAY

    def as_tenant(self) -> Tenant:
        budget = None if self.budget_tokens is None else Budget(self.budget_tokens, self.budget_window)
        limits = TenantLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent, self.weight,
                              self.min_priority, budget)
        return Tenant(self.id, own_group(self.id) if self.group is None else named_group(self.group),
                      None if self.models is None else frozenset(self.models), limits)


class _PublicPrefix(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    system: Annotated[str, Meta(min_length=1)] | None = None
    text: Annotated[str, Meta(min_length=1)] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: Annotated[list[_Tenant], Meta(max_length=TENANTS_MAX)] = []
    public_prefixes: Annotated[list[_PublicPrefix], Meta(max_length=PUBLIC_PREFIXES_MAX)] = []


def read_keys(text: str, api_keys: Sequence[str] = (), *, needs_keys: bool = True) -> Keys:
    """From the file's text and `tenant=key` entries of the environment. KeysError for whatever is wrong.

    Without `needs_keys` tenants may have none: there is another way in.
    """
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise KeysError(str(error)) from None
    tenants = {entry.id: entry.as_tenant() for entry in file.tenants}
    if len(tenants) < len(file.tenants):
        raise KeysError("two tenants have the same id")
    entries = [(tenants[entry.id], _stored(key, f"tenant {entry.id!r}, key {number}", hashed_only=True))
               for entry in file.tenants for number, key in enumerate(entry.keys, 1)]
    entries += list(_from_environment(api_keys, tenants))
    if not entries and (needs_keys or not tenants):
        raise KeysError("there is no key in it, so nobody could enter; make one with `headstart key`")
    try:
        directory = TenantDirectory.of(entries, tenants.values())
    except ValueError as error:
        raise KeysError(str(error)) from None
    return Keys(directory, tuple(map(_public_prefix, file.public_prefixes)))


def tenant_problem(tenant_id: str) -> str | None:
    """Why no tenant can have this id; None when one can."""
    try:
        msgspec.convert(tenant_id, _Name)
    except msgspec.ValidationError:
        return "a tenant's id has 1 to 64 letters, digits and characters of _.@/-"
    return None


def api_keys_problem(api_keys: Sequence[str]) -> str | None:
    """What is wrong with the environment's entries alone, or None."""
    try:
        read_keys("", api_keys)
    except KeysError as error:
        return str(error) if api_keys else None
    return None


def _from_environment(api_keys: Sequence[str], tenants: dict[str, Tenant]) -> Iterable[tuple[Tenant, bytes]]:
    for number, entry in enumerate(api_keys, 1):
        tenant_id, equals, key = entry.partition("=")
        if not equals or tenant_problem(tenant_id) is not None:
            raise KeysError(f"entry {number} should look like tenant=key")
        tenant = tenants.setdefault(tenant_id, _Tenant(tenant_id).as_tenant())
        yield tenant, _stored(key, f"entry {number}", hashed_only=False)


def _stored(key: str, where: str, *, hashed_only: bool) -> bytes:
    if key.startswith(HASH_PREFIX):
        if not _HASH.match(key):
            raise KeysError(f"{where}: {HASH_PREFIX} should be followed by 64 hex digits")
    elif hashed_only:
        raise KeysError(f"{where} is in clear; store what `headstart key` prints as its hash")
    elif not KEY_MIN_CHARS <= len(key) <= KEY_MAX_CHARS:
        raise KeysError(f"{where}: a key should have {KEY_MIN_CHARS} to {KEY_MAX_CHARS} characters")
    else:
        key = hash_key(key)
    return bytes.fromhex(key.removeprefix(HASH_PREFIX))


def _public_prefix(entry: _PublicPrefix) -> PublicPrefix:
    if (entry.system is None) == (entry.text is None):
        raise KeysError(f"public prefix {entry.name!r}: say either `system` or `text`")
    return PublicPrefix(entry.name, system=entry.system, text=entry.text)
