"""`python -m gateway.member SEAT FLAGS...`: one process of a gateway with several, started by their supervisor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.serve import read_command
from gateway.server.app import run
from gateway.shared.membership import Membership, Seat
from gateway.shared.segment import OtherVersion

EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """As `headstart gateway FLAGS...`, in the seat that the supervisor gave."""
    config = read_command(argv[1:])
    try:
        membership = Membership(Seat.from_text(argv[0]))
    except OtherVersion as error:
        print(f"headstart gateway: {error}: restart the gateway, SIGHUP is not enough", file=sys.stderr)
        return EXIT_FAILED
    return run(config, membership)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
