"""The gateway process: listeners, signals, drain (interface first; the body is being written)."""

from __future__ import annotations

from gateway.config import GatewayConfig


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit status (0 drained, 1 could not listen)."""
    raise AssertionError(f"being written: {config.host}:{config.port}")
