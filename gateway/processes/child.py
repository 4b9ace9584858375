"""One process of a gateway as its supervisor sees it: started, heard, ended.

Owns: the operating system's process and the line to it. Must never: decide whether it is started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

from gateway.processes.member_line import Answers, MemberLine
from gateway.shared.membership import Seat
from gateway.supervisor import dying_with_parent, python_command

MODULE = "gateway.member"


class Child:
    """`leaving`: it was told to finish, so its end is no accident."""

    def __init__(self, seat: Seat, process: Process, line: MemberLine) -> None:
        self.seat = seat
        self.process = process
        self.line = line
        self.started_at = time.monotonic()
        self.leaving = False

    @property
    def lived_s(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started_at

    def signal(self, signum: signal.Signals) -> None:
        """Tell it, if it still is."""
        if self.process.returncode is None:
            self.process.send_signal(signum)


async def start_child(seat_with: Callable[[int], Seat], argv: Sequence[str], environ: Mapping[str, str],
                      answers: Answers) -> Child:
    """Start a process in the seat that `seat_with` makes around its end of the line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    seat = seat_with(theirs.fileno())
    try:
        process = await asyncio.create_subprocess_exec(
            *python_command(), MODULE, seat.to_text(), *argv, env=dict(environ), stdin=asyncio.subprocess.DEVNULL,
            pass_fds=seat.descriptors(), start_new_session=True, preexec_fn=dying_with_parent())
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(seat, process, MemberLine(ours, answers))


def child_environ(admin_token: str) -> dict[str, str]:
    """The supervisor's, with the token that all processes share."""
    return {**os.environ, "HEADSTART_ADMIN_TOKEN": admin_token}
