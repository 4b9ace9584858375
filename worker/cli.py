"""`headstart worker`: flags, environment and file into a WorkerConfig, then the server. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from worker.config import WorkerConfig
from worker.protocol.command_line import CommandParser, add_flags, read_config

PROG = "headstart worker"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one model until told to stop; the exit status (0 stopped, 1 failed, 2 a user's mistake)."""
    parser = CommandParser(PROG, summary="Serve one model with a verified prefix cache behind OpenAI's routes.",
                           example="headstart worker --model smollm2 --port 8100 --kv-memory 2GiB")
    add_flags(parser, WorkerConfig)
    config = read_config(parser, WorkerConfig, argv, env_prefix="HEADSTART_WORKER_")
    from worker.server.app import run  # after parsing: --help and mistakes should not wait for the server's imports

    return run(config)
