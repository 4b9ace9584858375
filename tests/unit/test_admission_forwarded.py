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


@pytest.mark.parametrize(("headers", "client"), [
    (["for=1.2.3.4"], "1.2.3.4"), (["for=6.6.6.6, for=1.2.3.4;proto=https;by=10.0.0.2"], "1.2.3.4"),
    (["proto=https;For=\"[2001:db8::1]:4711\""], "2001:db8::1"), (["for=6.6.6.6", "for=1.2.3.4"], "1.2.3.4"),
    (["for=6.6.6.6, for=_hidden"], "10.0.0.1"), (["for=unknown"], "10.0.0.1"), (["host=for.example"], "10.0.0.1"),
    (["for=\"6.6.6.6, for=7.7.7.7\""], "10.0.0.1"), (["by=1.2.3.4"], "10.0.0.1"),
])
def test_the_standard_header_is_read_where_the_usual_one_is_missing(headers: list[str], client: str) -> None:
    proxies = TrustedProxies(("10.0.0.0/8",))
    assert proxies.client_of("10.0.0.1", [], headers) == client
    assert proxies.client_of("10.0.0.1", ["9.9.9.9"], headers) == "9.9.9.9"
    assert proxies.client_of("192.0.2.1", [], headers) == "192.0.2.1"
