"""`python -m gateway.member SEAT FLAGS...`: one process of a gateway with several, started by their supervisor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.serve import read_command
from gateway.server.app import run
from gateway.shared.membership import Membership, Seat


def main(argv: Sequence[str]) -> int:
    """As `headstart gateway FLAGS...`, in the seat that the supervisor gave."""
    return run(read_command(argv[1:]), Membership(Seat.from_text(argv[0])))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
