"""The admin token: the configured one, or a random one that only this user's files can tell.

Owns: the token file (mode 0600, replaced whole, removed at the end). Must never: print or log a token, or write
the file before the port is ours: on a port that is taken it would be another gateway's file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from gateway.config import GatewayConfig

TOKEN_BYTES = 24


class AdminToken:
    """The token of one gateway. A random one that is never written is known to nobody: the routes are closed."""

    def __init__(self, config: GatewayConfig) -> None:
        self.is_random = not config.admin_token
        self.value = config.admin_token or secrets.token_urlsafe(TOKEN_BYTES)
        self._path = config.admin_token_file
        self._written: Path | None = None

    def write(self, port: int) -> Path | None:
        """Write a random token for whoever owns this user's files; the file. OSError when that cannot be done."""
        if not self.is_random:
            return None
        path = self._path or default_token_file(port)
        _write_private(path, self.value)
        self._written = path
        return path

    def remove(self) -> None:
        """Take the file away if it is still the one that was written here. Idempotent."""
        path, self._written = self._written, None
        if path is None:
            return
        with contextlib.suppress(OSError):
            if path.read_text().strip() == self.value:
                path.unlink()


def default_token_file(port: int) -> Path:
    """$XDG_STATE_HOME/headstart/admin-token-PORT, or the same under ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "headstart" / f"admin-token-{port}"


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
