"""The admin token: the configured one, the one that its file holds, or a random one that only this user's files tell.

Owns: the file of a random token (mode 0600, replaced whole, removed at the end). Must never: print or log a token,
write over one that it did not make, or write the file before the port is ours: on a port that is taken it would
be another gateway's file.
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
        self._path = config.admin_token_file
        self._unreadable: OSError | None = None
        given = config.admin_token or self._token_in_file()
        self.is_random = not given
        self.value = given or secrets.token_urlsafe(TOKEN_BYTES)
        self._written: Path | None = None

    def write(self, port: int) -> Path | None:
        """Write a random token for whoever owns this user's files; the file. OSError when that cannot be done."""
        if not self.is_random:
            return None
        if self._unreadable is not None:
            raise self._unreadable
        path = self._path or default_token_file(port)
        _write_private(path, self.value)
        self._written = path
        return path

    def _token_in_file(self) -> str:
        try:
            return "" if self._path is None else self._path.read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, UnicodeDecodeError) as error:
            self._unreadable = error if isinstance(error, OSError) else OSError(f"{self._path} holds no text")
            return ""

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
