"""Whose request it is when proxies stand in front: the client's address, as far as trusted proxies vouch for it.

Owns: `[server] trusted_proxies`. Must never: believe a header that anybody else may have written.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

HOPS_MAX = 32
# RFC 7239: for=192.0.2.1, for="[2001:db8::1]:47", for=_hidden; quotes may hold commas.
_FOR = re.compile(r'(?:^|[;,])\s*for\s*=\s*("[^"]*"|[^\s;,]*)', re.IGNORECASE)
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Addresses and networks. With none, nobody's headers count."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._networks: list[_Network] = [ipaddress.ip_network(text, strict=False) for text in trusted]

    def client_of(self, peer: str | None, forwarded_for: Sequence[str],
                  forwarded: Sequence[str] = ()) -> str | None:
        """The address nearest to us that is no trusted proxy. `forwarded_for`: the X-Forwarded-For headers;
        `forwarded`: the Forwarded headers, which count where there is none of those.

        Each proxy appends whom it heard from, so the list is read from its end, and only while its writer is trusted.
        """
        if not self._networks or not self._trusts(peer):
            return peer
        hops = [hop.strip() for line in forwarded_for for hop in line.split(",")] or [
            hop.strip('"') for hop in _FOR.findall(",".join(forwarded))]
        nearest = peer
        for hop in reversed(hops[-HOPS_MAX:]):
            address = _address(hop)
            if address is None:
                break
            nearest = str(address)
            if not self._trusts(nearest):
                break
        return nearest

    def _trusts(self, text: str | None) -> bool:
        address = _address(text or "")
        return address is not None and any(address in network for network in self._networks)


def proxies_problem(trusted: Sequence[str]) -> str | None:
    """What is wrong with the setting, or None."""
    try:
        TrustedProxies(trusted)
    except ValueError as error:
        return f"{error}; should be addresses or networks such as 10.0.0.0/8"
    return None


def _address(text: str) -> _Address | None:
    """An address, with or without a port."""
    host = text.partition("]")[0].removeprefix("[") if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
