"""The console script `headstart`: a table of commands, each imported only when it is asked for.

The one place that may name any package of the project: the table is text, so a gateway-only install never imports
torch, and `headstart --help` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from gateway import __version__

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """`target` is 'module:function': it takes the arguments behind the command's name and returns an exit status."""

    target: str
    summary: str
    example: str
    needs: str | None = None


COMMANDS = {
    "up": Command("gateway.up:main", "a gateway and its workers on this machine, supervised",
                  "headstart up --workers 2 --model smollm2 --port 8000", "torch"),
    "gateway": Command("gateway.serve:main", "the router alone",
                       "headstart gateway --worker http://127.0.0.1:8100"),
    "worker": Command("worker.cli:main", "one model server", "headstart worker --model smollm2 --port 8100", "torch"),
    "key": Command("gateway.new_key:main", "an API key for a tenant, and the hash to store",
                   "headstart key --tenant acme"),
    "check": Command("gateway.check:main", "does the prefix cache behind an address work?",
                     "headstart check http://127.0.0.1:8000"),
    "replay": Command("loadtests.live.command:main", "a trace's requests, sent to a live server",
                      "headstart replay traces/tau_airline.jsonl.gz --url http://127.0.0.1:8000 --speed 60"),
    "simulate": Command("loadtests.sim.command:main", "routing policies on a trace, in virtual time",
                        "headstart simulate llm_d --workers 8 --policy all"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status (0, 1 failed, 2 bad usage, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        print(_help())
        return EXIT_OK if arguments else EXIT_USAGE
    if first == "--version":
        print(f"headstart {__version__}")
        return EXIT_OK
    command = COMMANDS.get(first)
    if command is None:
        return _mistake(f"no command {first!r}{_did_you_mean(first)}")
    # find_spec does not import: the worker's HTTP process stays free of torch.
    if command.needs and importlib.util.find_spec(command.needs) is None and not {"-h", "--help"} & set(arguments):
        return _mistake(f"`headstart {first}` needs the worker's packages; install them with: "
                        "pip install '.[worker]' in a clone of the project")
    module, _, function = command.target.partition(":")
    try:
        status = getattr(importlib.import_module(module), function)(arguments[1:])
    except KeyboardInterrupt:   # while its modules are still being read, or from a command that leaves it to us
        return EXIT_INTERRUPTED
    assert isinstance(status, int)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}\n  {'':<{width}}    {command.example}"
            for name, command in COMMANDS.items()]
    return ("usage: headstart COMMAND ...   (headstart COMMAND --help says more)\n\n"
            "A prefix-caching gateway for LLM inference, and the worker behind it.\n\n" + "\n".join(rows))


def _did_you_mean(name: str) -> str:
    close = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(COMMANDS)}"


def _mistake(line: str) -> int:
    print(f"headstart: {line}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
