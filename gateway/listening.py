"""Listening sockets, opened once and before anything else, so that a port in use ends the start with one line.

Owns: how an address becomes sockets. With several processes each has sockets of its own on the same port
(SO_REUSEPORT), which the supervisor holds open: a connection that waits in one survives the process that was to take
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

BACKLOG = 1024


class ListenError(Exception):
    """Nothing can listen there. The message is one line with a remedy."""


def open_listeners(host: str, port: int, *, num_sets: int = 1) -> list[list[socket.socket]]:
    """`num_sets` times a socket for each address of `host`, all on one port. ListenError when that cannot be."""
    try:
        with ExitStack() as undo:
            addresses = _addresses(host, port)
            # Without SO_REUSEPORT first: another server of ours on this port must be an error, not a partner.
            probes = [undo.enter_context(_bound(address, shared=False)) for address in addresses]
            ports = {probe.getsockname()[1] for probe in probes}
            if num_sets == 1 and len(ports) == 1:
                undo.pop_all()
                return [_listening(probes)]
            port = probes[0].getsockname()[1]
        return [_listening([_bound((family, (address[0], port, *address[2:])), shared=True)
                            for family, address in addresses]) for _ in range(num_sets)]
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ListenError(f"cannot listen on {host}:{port} ({why}); choose another --host or --port, or stop what "
                          "uses it") from error


def port_of(listeners: Sequence[socket.socket]) -> int:
    """The port they share."""
    return int(listeners[0].getsockname()[1])


Address = tuple[int, tuple[object, ...]]


def _addresses(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), tuple(address)) for family, _, _, _, address in found))


def _bound(address: Address, *, shared: bool) -> socket.socket:
    family, where = address
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setblocking(False)
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound


def _listening(bound: list[socket.socket]) -> list[socket.socket]:
    for each in bound:
        each.listen(BACKLOG)
    return bound
