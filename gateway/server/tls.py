"""TLS of the listener for clients: certificate and key from files, read again when told to.

Owns: the server's SSL context. Must never: let a wrong file end what works: it is tried on a context of its own.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from gateway.config import GatewayConfig
from worker.protocol.logs import get_logger

_log = get_logger(__name__)


class TlsError(ValueError):
    """What is wrong with the files; one line."""


class ServerTls:
    """New connections get the certificate that was last read; those that are open keep theirs."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._files = cert_file, key_file
        self.context = _context(cert_file, key_file)

    @classmethod
    def of(cls, config: GatewayConfig) -> ServerTls | None:
        """None where the listener speaks plain HTTP. TlsError for half of it, or a file that is no good."""
        if config.tls_cert is None and config.tls_key is None:
            return None
        if config.tls_cert is None or config.tls_key is None:
            raise TlsError("tls_cert and tls_key go together: give both, or neither")
        return cls(config.tls_cert, config.tls_key)

    def reload(self) -> None:
        """Read both files now; what is wrong with them is logged and changes nothing."""
        try:
            _context(*self._files)
            self.context.load_cert_chain(*self._files)
        except (TlsError, OSError) as error:
            _log.error("certificate_not_reloaded", reason=str(error),
                       remedy="mend the files; until then the certificate known before is shown")
            return
        _log.info("certificate_read", file=str(self._files[0]))


def _context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except OSError as error:  # ssl.SSLError is one too
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise TlsError(f"cannot use tls_cert {cert_file} with tls_key {key_file}: {reason}") from None
    return context


def _no_password() -> str:
    """Asked for an encrypted key only, for which OpenSSL would otherwise ask the terminal."""
    raise TlsError("the key in tls_key is encrypted; store it without a passphrase, readable by this user alone")
