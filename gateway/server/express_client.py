"""What the express lane needs of the connection that a request came by. Owns that interface, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from gateway.server.raw_response import ChunkSender

if TYPE_CHECKING:
    from gateway.server.express import Passenger


class Client(Protocol):
    """The connection that a request came by."""

    @property
    def client_address(self) -> str | None:
        """Where it comes from, as far as its own socket tells."""
        ...

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer."""
        ...

    def begin_stream(self, headers: Mapping[str, str], data: bytes) -> ChunkSender | None:
        """Send the beginning of a stream; None where that is not certain to be the client's next bytes."""
        ...

    def end_stream(self, data: bytes) -> None:
        """Send `data`, as it is, and the end of a stream."""
        ...

    def hand_over(self, passenger: Passenger) -> None:
        """Let the usual way go on with it."""
        ...
