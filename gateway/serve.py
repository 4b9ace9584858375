"""`headstart gateway`: flags, environment and file into a GatewayConfig, then the server."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import GatewayConfig
from worker.protocol.command_line import CommandParser, add_flags, read_config

PROG = "headstart gateway"


def main(argv: Sequence[str] | None = None) -> int:
    """Route until told to stop; the exit status (0 drained, 1 failed, 2 a user's mistake)."""
    parser = CommandParser(PROG, summary="Route each request to the worker that will answer it soonest.",
                           example="headstart gateway --port 8000 --worker http://127.0.0.1:8100")
    add_flags(parser, GatewayConfig)
    config = read_config(parser, GatewayConfig, argv, env_prefix="HEADSTART_GATEWAY_")
    from gateway.server.app import run  # after parsing: --help and mistakes should not wait for the server's imports

    return run(config)
