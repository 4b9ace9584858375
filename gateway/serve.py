"""`headstart gateway`: flags, environment and file into a GatewayConfig, then the server, or several of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.config import GatewayConfig
from worker.protocol.command_line import CommandParser, add_flags, read_config

PROG = "headstart gateway"


def main(argv: Sequence[str] | None = None) -> int:
    """Route until told to stop; the exit status (0 drained, 1 failed, 2 a user's mistake)."""
    argv = sys.argv[1:] if argv is None else argv
    config = read_command(argv)
    # Imported after parsing: --help and mistakes should not wait for the server's imports.
    if config.processes > 1:
        from gateway.processes.group import run as run_group

        return run_group(config, lambda: read_command(argv), argv)
    from gateway.server.app import run

    return run(config)


def read_command(argv: Sequence[str]) -> GatewayConfig:
    """The configuration that this command line means now. SystemExit after --help or a mistake."""
    parser = CommandParser(PROG, summary="Route each request to the worker that will answer it soonest.",
                           example="headstart gateway --port 8000 --worker http://127.0.0.1:8100")
    add_flags(parser, GatewayConfig)
    return read_config(parser, GatewayConfig, argv, env_prefix="HEADSTART_GATEWAY_")
