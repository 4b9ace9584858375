"""The client's address: only what trusted proxies wrote counts."""

from __future__ import annotations

import pytest

from gateway.admission.forwarded import TrustedProxies, proxies_problem


@pytest.mark.parametrize(("trusted", "peer", "headers", "client"), [
    ((), "10.0.0.1", ["1.2.3.4"], "10.0.0.1"),
    (("10.0.0.0/8",), "192.0.2.1", ["1.2.3.4"], "192.0.2.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["1.2.3.4"], "1.2.3.4"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6, 1.2.3.4"], "1.2.3.4"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6", "1.2.3.4, 10.0.0.2"], "1.2.3.4"),
    (("10.0.0.0/8",), "10.0.0.1", ["10.0.0.3"], "10.0.0.3"),
    (("10.0.0.0/8",), "10.0.0.1", [], "10.0.0.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6, unknown"], "10.0.0.1"),
    (("10.0.0.0/8",), "::ffff:10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1"),
    (("10.0.0.1",), "10.0.0.1", ["1.2.3.4:55"], "1.2.3.4"),
    (("10.0.0.1",), None, ["1.2.3.4"], None),
])
def test_the_client_is_the_nearest_that_is_no_trusted_proxy(trusted: tuple[str, ...], peer: str | None,
                                                            headers: list[str], client: str | None) -> None:
    assert TrustedProxies(trusted).client_of(peer, headers) == client


def test_what_is_no_network_is_told() -> None:
    assert proxies_problem(["10.0.0.0/8", "::1"]) is None
    assert "10.0.0.0/8" in str(proxies_problem(["proxy.example"]))
