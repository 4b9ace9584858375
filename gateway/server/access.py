"""Who is asking: API keys to tenants, read again whenever the keys file changes.

Owns: the current keys, and when they are read. Must never: write a key, or its hash, anywhere.
A file that is wrong at a reload changes nothing: the keys known before stay valid, and the log says what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from aiohttp.web_request import BaseRequest
from multidict import CIMultiDictProxy

from gateway import errors
from gateway.admission.cache_salt import CacheSalt, cache_salt_of
from gateway.admission.forwarded import TrustedProxies
from gateway.admission.keys_file import KeysError, read_keys
from gateway.admission.public_prefixes import PublicPrefixes
from gateway.admission.tenants import ANYONE, Tenant, TenantDirectory
from gateway.config import GatewayConfig
from gateway.server.jwt_verifier import JwtVerifier
from worker.prompt.renderer import PromptRenderer
from worker.protocol.logs import get_logger

KEYS_FILE_MAX_BYTES = 32 * 1024 * 1024
_log = get_logger(__name__)


class Access:
    """Knows every tenant. KeysError at the start when the keys cannot be used; later that is a line in the log."""

    def __init__(self, config: GatewayConfig) -> None:
        self._file = config.keys_file
        self._jwt_file = config.jwt_keys_file
        self._api_keys = config.api_keys
        self._reload_s = config.keys_reload_s
        self._secret = config.salt_secret or config.worker_token
        self._is_internal = bool(config.worker_token)
        self._proxies = TrustedProxies(config.trusted_proxies)
        self._directory: TenantDirectory | None = None
        self._jwt = JwtVerifier.of(config)
        self._public = PublicPrefixes()
        self._seen = self._stamps()
        if self._jwt is not None and not self.has_tenants:
            raise KeysError("jwt_keys_file needs tenants that its tokens name: give a keys_file")
        if self.has_tenants:
            if not self._secret:
                raise KeysError("tenants need HEADSTART_SALT_SECRET or HEADSTART_WORKER_TOKEN, to keep their caches "
                                "apart; set one, the same at every gateway")
            self._read()

    @property
    def has_tenants(self) -> bool:
        """Whether keys are asked for at all."""
        return self._file is not None or bool(self._api_keys)

    def tenant_of(self, request: BaseRequest) -> Tenant:
        """The tenant of this request's key. ApiError 401 without one, with a wrong one, or with two."""
        if self._directory is None:
            return ANYONE
        key = _key_of(request.headers)
        tenant = None if key is None else self._directory.authenticate(key)
        if tenant is None and key is not None and self._jwt is not None:
            tenant = self._directory.tenants.get(self._jwt.tenant_id(key) or "")
        if tenant is None:
            raise errors.no_api_key()
        return tenant

    @property
    def directory(self) -> TenantDirectory | None:
        """Another one as soon as the keys have changed."""
        return self._directory

    def lasting_tenant_of(self, headers: CIMultiDictProxy[str]) -> Tenant | None:
        """The tenant whose key this is for as long as the directory is the same one; None for what may expire."""
        if self._directory is None:
            return ANYONE
        key = _key_of(headers)
        return None if key is None else self._directory.authenticate(key)

    def client_of(self, request: BaseRequest) -> str | None:
        """The client's address, for the log."""
        return self.client_at(request.remote, request.headers.getall("X-Forwarded-For", []),
                              request.headers.getall("Forwarded", []))

    def client_at(self, peer: str | None, forwarded_for: Sequence[str], forwarded: Sequence[str]) -> str | None:
        """See TrustedProxies.client_of()."""
        return self._proxies.client_of(peer, forwarded_for, forwarded)

    def named(self, tenant_id: str | None) -> Tenant:
        """A tenant by its id, for operators; without one, a tenant that nobody else is."""
        if self._directory is None:
            return ANYONE
        if tenant_id is None or (tenant := self._directory.tenants.get(tenant_id)) is None:
            raise errors.tenant_not_found(tenant_id)
        return tenant

    def salt(self, tenant: Tenant, body_salt: str | None, renderer: PromptRenderer,
             prompts: Sequence[Sequence[int]]) -> CacheSalt:
        """What keeps this request's prompts apart from those that its tenant may not find."""
        public = self._public.public_length(renderer, prompts) if tenant.sharing_group and body_salt is None else 0
        return cache_salt_of(body_salt, self._secret, sharing_group=tenant.sharing_group,
                             is_internal=self._is_internal, salt_from=public)

    async def watch(self) -> None:
        """Read the file again whenever it changes. Runs for ever."""
        while True:
            await asyncio.sleep(self._reload_s)
            if self._stamps() != self._seen:
                self.reload()

    def _stamps(self) -> tuple[object, ...]:
        return _stamp(self._file), _stamp(self._jwt_file)

    def reload(self) -> None:
        """Read the keys now; what is wrong with them is logged and changes nothing."""
        if not self.has_tenants:
            return
        self._seen = self._stamps()
        try:
            self._read()
            if self._jwt is not None:
                self._jwt.read()
        except KeysError as error:
            _log.error("keys_not_reloaded", reason=str(error),
                       remedy="mend the file; until then the keys known before still hold")

    def _read(self) -> None:
        text = "" if self._file is None else _text_of(self._file)
        try:
            keys = read_keys(text, self._api_keys, needs_keys=self._jwt is None)
        except KeysError as error:
            raise KeysError(f"{self._file or 'HEADSTART_API_KEYS'}: {error}") from None
        self._directory, self._public = keys.directory, PublicPrefixes(keys.public_prefixes)
        _log.info("keys_read", file=str(self._file) if self._file else None, tenants=len(keys.directory.tenants),
                  keys=keys.directory.num_keys, public_prefixes=len(keys.public_prefixes))


def _key_of(headers: CIMultiDictProxy[str]) -> str | None:
    """OpenAI's header or Anthropic's. Two keys are none: which one was meant could be read in two ways."""
    given = headers.getall("Authorization", [])
    bearer = [value.strip() for scheme, _, value in (text.partition(" ") for text in given)
              if scheme.lower() == "bearer"]
    keys = {*bearer, *(text.strip() for text in headers.getall("x-api-key", []))}
    return keys.pop() if len(keys) == 1 and len(given) == len(bearer) <= 1 else None


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text_of(file: Path) -> str:
    try:
        if file.stat().st_size > KEYS_FILE_MAX_BYTES:
            raise KeysError(f"{file}: is larger than {KEYS_FILE_MAX_BYTES} bytes")
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KeysError(f"{file}: cannot be read: {reason}") from None
