"""Where workers may be that an operator adds while the gateway runs.

Owns: `worker_networks`. Must never: look a name up: what it leads to may be another address the next time.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

_SCHEMES = ("http", "https")


class WorkerNetworks:
    """Addresses by network, names by the letter. `configured`: URLs of workers that the configuration names."""

    def __init__(self, allowed: Sequence[str], configured: Iterable[str] = ()) -> None:
        self._networks = [network for text in allowed if (network := _network(text)) is not None]
        self._names = {text.lower() for text in allowed if _network(text) is None}
        for url in configured:
            host = urlsplit(url).hostname or ""
            network = _network(host)
            self._names |= {host.lower()} if network is None else set()
            self._networks += [] if network is None else [network]

    def problem(self, url: str) -> str | None:
        """Why this is no address for a worker; None when it may be one."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            return "it is no URL"
        if parts.scheme not in _SCHEMES or not host or port == 0:
            return "it should look like http://HOST:PORT"
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            return "it should hold nothing but scheme, host, port and path"
        if not self._allows(host):
            return "its host is not in worker_networks, and no configured worker is there"
        return None

    def _allows(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self._names
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)


def worker_networks_problem(allowed: Sequence[str]) -> str | None:
    """What is wrong with the setting, or None."""
    for text in allowed:
        if _network(text) is None and not (text.replace("-", "").replace(".", "").isalnum() and text.isascii()
                                           and not text[-1:].isdigit()):
            return f"should be networks such as 10.0.0.0/8 or names of hosts, got {text!r}"
    return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
