"""Tokens of an identity provider (JWT, OIDC) as keys: signed by a known key, for this audience, not expired.

Owns: the provider's public keys, from a file: PEM, or a JWKS. Must never: fetch anything, accept an algorithm outside
the list, or say why a token was refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from gateway.admission.keys_file import KeysError
from gateway.config import GatewayConfig
from worker.protocol.logs import get_logger

FILE_MAX_BYTES = 1024 * 1024
KEYS_MAX = 64
LEEWAY_S = 30.0
_REQUIRED = ["exp", "iss", "aud"]
_log = get_logger(__name__)


class JwtVerifier:
    """From a token to the tenant it names. KeysError at the start when it cannot work."""

    def __init__(self, file: Path, config: GatewayConfig) -> None:
        try:
            import jwt
        except ImportError:
            raise KeysError("jwt_keys_file needs the extra: pip install '.[jwt]' in a clone of the project") from None
        if not config.jwt_issuer or not config.jwt_audience:
            raise KeysError("jwt_keys_file needs jwt_issuer and jwt_audience: whose tokens, and for whom")
        self._jwt = jwt
        self._file = file
        self._algorithms = list(config.jwt_algorithms)
        self._issuer, self._audience = config.jwt_issuer, config.jwt_audience
        self._claim = config.jwt_tenant_claim.split(".")
        self._keys: dict[str | None, Any] = {}
        self.read()

    @classmethod
    def of(cls, config: GatewayConfig) -> JwtVerifier | None:
        """None unless it is configured."""
        return None if config.jwt_keys_file is None else cls(config.jwt_keys_file, config)

    def read(self) -> None:
        """Read the keys now. KeysError when the file is no good; the keys known before then stay."""
        try:
            with self._file.open("rb") as file:
                data = file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise KeysError(f"{self._file}: cannot be read: {error.strerror}") from None
        if len(data) > FILE_MAX_BYTES:
            raise KeysError(f"{self._file}: is larger than {FILE_MAX_BYTES} bytes")
        self._keys = self._jwks(data) if data.lstrip().startswith(b"{") else {None: self._pem(data)}

    def tenant_id(self, token: str) -> str | None:
        """The tenant that a token names; None for one that is not good."""
        try:
            key = self._key_of(self._jwt.get_unverified_header(token))
            claims = self._jwt.decode(token, key, algorithms=self._algorithms, audience=self._audience,
                                      issuer=self._issuer, leeway=LEEWAY_S, options={"require": _REQUIRED})
        except (self._jwt.PyJWTError, LookupError, ValueError, TypeError) as error:
            _log.debug("jwt_refused", kind=type(error).__name__)
            return None
        return claim_of(claims, self._claim)

    def _key_of(self, header: Mapping[str, Any]) -> Any:
        """The key that the token names; the only one there is when it names none."""
        named = header.get("kid")
        if named in self._keys:
            return self._keys[named]
        if len(self._keys) == 1 and (named is None or None in self._keys):
            return next(iter(self._keys.values()))
        raise LookupError("no such key")

    def _jwks(self, data: bytes) -> dict[str | None, Any]:
        try:
            entries = orjson.loads(data)["keys"]
            keys = {entry.get("kid"): self._jwt.PyJWK(entry) for entry in entries
                    if entry.get("use", "sig") == "sig" and entry["kty"] != "oct"}
        except (self._jwt.PyJWTError, orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise KeysError(f"{self._file}: is no set of JSON web keys ({type(error).__name__})") from None
        if not 1 <= len(keys) <= KEYS_MAX:
            raise KeysError(f"{self._file}: should hold 1 to {KEYS_MAX} public keys for signatures")
        return keys

    def _pem(self, data: bytes) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            return load_pem_public_key(data)
        except ValueError:
            raise KeysError(f"{self._file}: is neither a public key as PEM nor a set of JSON web keys") from None


def claim_of(claims: Mapping[str, Any], path: list[str]) -> str | None:
    """A claim by its path, `a.b` being what lies in `a`; None unless it is a text."""
    found: Any = claims
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None
