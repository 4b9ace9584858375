"""The admin token: the configured one, or a random one that only this user's files can tell.

Owns: the token file (mode 0600, replaced whole). Must never: print or log a token.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gateway.config import GatewayConfig

TOKEN_BYTES = 24


def admin_token_of(config: GatewayConfig) -> tuple[str, Path | None]:
    """(token, the file it was written to). OSError when the file cannot be written."""
    if config.admin_token:
        return config.admin_token, None
    path = config.admin_token_file or default_token_file(config.port)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    _write_private(path, token)
    return token, path


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
