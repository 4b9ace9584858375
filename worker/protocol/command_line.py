"""The command line that headstart's commands share: flags from a settings dataclass, one-line mistakes, exit codes.

Owns: parsing, --config, --print-config, --version, and how a user's mistake is told (one line and exit 2, never a
traceback). Must never: know a command by name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from worker import __version__
from worker.protocol.settings import SettingsError, flag_specs, load_settings, render_settings

T = TypeVar("T")
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line with a remedy."""

    def __init__(self, prog: str, *, summary: str, example: str) -> None:
        super().__init__(prog=prog, description=summary, epilog=f"example:\n  {example}", allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--version", action="version", version=f"headstart {__version__}")

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}{self._hint(message)}\n")

    def _hint(self, message: str) -> str:
        known = list(self._option_string_actions)
        for flag in re.findall(r"--[\w-]+", message):
            if flag not in known and (close := difflib.get_close_matches(flag, known, n=1)):
                return f"; did you mean {close[0]}?"
        return f"; see {self.prog} --help"


def add_flags(parser: argparse.ArgumentParser, kind: type, *, skip: Collection[str] = ()) -> None:
    """A flag per field of the settings dataclass `kind`, except `skip` and those that the parser has already.

    Values stay text, so that load_settings tells every problem of every layer at once.
    """
    taken = {*skip, *(action.dest for action in parser._actions)}
    for spec in flag_specs(kind):
        if spec.name not in taken:
            metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.flag[2:].upper()
            parser.add_argument(spec.flag, dest=spec.name, action="append" if spec.repeats else "store",
                                metavar=metavar, help=spec.help.replace("%", "%%"))


def read_config(parser: CommandParser, kind: type[T], argv: Sequence[str] | None, *, env_prefix: str) -> T:
    """Parse `argv` and load `kind`. Exits (SystemExit) after --help, --version, --print-config or a mistake."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these settings")
    parser.add_argument("--print-config", action="store_true", help="show the outcome, secrets masked, and stop")
    flags = vars(parser.parse_args(argv))
    path = flags.pop("config")
    if path is None and os.environ.get(env_prefix + "CONFIG"):
        path = Path(os.environ[env_prefix + "CONFIG"])
    print_config = flags.pop("print_config")
    try:
        config = load_settings(kind, flags=flags, environ=os.environ, env_prefix=env_prefix, toml_path=path)
    except SettingsError as error:
        exit_with_problems(parser.prog, error.lines)
    if print_config:
        sys.stdout.write(render_settings(config))
        raise SystemExit(EXIT_OK)
    return config


def exit_with_problems(prog: str, lines: Sequence[str]) -> NoReturn:
    """Each problem on its own line, exit 2."""
    sys.stderr.write("".join(f"{prog}: {line}\n" for line in lines))
    raise SystemExit(EXIT_USAGE)


def print_result(prog: str, text: str) -> int:
    """A command's result to stdout: 0, or 1 and one line where it cannot be written."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What could not be written is still in the buffer, and would be a traceback at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"{prog}: cannot write the result to stdout: {error.strerror}\n")
        return EXIT_FAILED
    return EXIT_OK


def one_line(error: BaseException) -> str:
    """What an error says, or its kind where it says nothing. Never its repr: that of an HTTP client's error holds the
    request's headers, and so a key."""
    return " ".join(str(error).split()) or type(error).__name__
