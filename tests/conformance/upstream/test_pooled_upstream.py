"""What our own pool promises beyond the interface: the one retry, its limits, and TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.relay.connection import MAX_BUFFERED_BYTES
from gateway.relay.connection_pool import PooledUpstream
from gateway.relay.upstream import FailureKind, Takers, UpstreamFailure, UpstreamRequest
from tests.conformance.upstream.test_every_upstream import SOON_S, answers, fetch, once, post
from tests.support.scripted_server import CHUNKED, OK, Peer, Script, scripted, sized


@asynccontextmanager
async def pool(**limits: Any) -> AsyncIterator[PooledUpstream]:
    upstream = PooledUpstream(connect_timeout_s=2.0, **limits)
    try:
        yield upstream
        upstream.check_invariants()
    finally:
        await upstream.close()
    assert upstream.num_open == 0


def hang_up_on_the_second(*said: bytes) -> Script:
    """One good answer; the next request gets `said` and the end of the connection."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sized(b"first"))
        await peer.request()
        await peer.send(*said)

    return script


async def test_a_kept_connection_that_dies_without_a_byte_is_replaced_unnoticed() -> None:
    async with scripted(hang_up_on_the_second(), answers(sized(b"second"))) as server, pool() as upstream:
        assert await fetch(upstream, server.url) == (200, b"first")
        assert await fetch(upstream, server.url) == (200, b"second")
        assert len(server.peers) == 2
        assert server.peers[0].requests[1] == server.peers[1].requests[0], "the same request, once more"


async def test_it_is_replaced_once_and_by_a_fresh_one() -> None:
    async with (scripted(hang_up_on_the_second(), hang_up_on_the_second(), once()) as server, pool() as upstream):
        responses = await asyncio.gather(*(fetch(upstream, server.url) for _ in range(2)))
        assert responses == [(200, b"first")] * 2
        with pytest.raises(UpstreamFailure) as failure:
            await fetch(upstream, server.url)
        assert failure.value.kind is FailureKind.RESET
        assert [len(peer.requests) for peer in server.peers] in ([2, 1, 1], [1, 2, 1])


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nC", b"garbage"])
async def test_after_one_byte_of_an_answer_nothing_is_sent_again(said: bytes) -> None:
    async with scripted(hang_up_on_the_second(said), answers(sized(b"again"))) as server, pool() as upstream:
        assert await fetch(upstream, server.url) == (200, b"first")
        with pytest.raises(UpstreamFailure):
            await fetch(upstream, server.url)
        assert len(server.peers) == 1


async def test_a_worker_that_is_gone_for_good_is_a_failure_to_connect() -> None:
    async with pool() as upstream:
        async with scripted(answers(sized(b"hi"))) as server:
            assert await fetch(upstream, server.url) == (200, b"hi")
        with pytest.raises(UpstreamFailure) as failure:
            await fetch(upstream, server.url)
        assert failure.value.kind is FailureKind.CONNECT


async def test_idle_connections_are_let_go_after_a_while() -> None:
    async with scripted(answers(sized(b"hi"))) as server, pool(idle_s=0.1) as upstream:
        await fetch(upstream, server.url)
        assert (upstream.num_open, upstream.num_idle) == (1, 1)
        await asyncio.wait_for(server.peers[0].is_gone.wait(), SOON_S)
        assert (upstream.num_open, upstream.num_idle) == (0, 0)
        assert await fetch(upstream, server.url) == (200, b"hi")


async def test_more_idle_connections_than_the_limit_are_closed() -> None:
    async with (scripted(answers(OK, b"Content-Length: 0\r\n\r\n", pause_s=0.02)) as server,
                pool(max_idle_per_worker=3) as upstream):
        await asyncio.gather(*(fetch(upstream, server.url) for _ in range(5)))
        assert (upstream.num_open, upstream.num_idle) == (3, 3)


async def test_connections_are_not_opened_beyond_the_limit() -> None:
    async with (scripted(answers(OK, b"Content-Length: 0\r\n\r\n", pause_s=0.05)) as server,
                pool(max_connections=3) as upstream):
        found = await asyncio.gather(*(fetch(upstream, server.url) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(one, UpstreamFailure) and one.kind is FailureKind.CONNECT for one in found) == 1
        assert found.count((200, b"")) == 3
        assert await fetch(upstream, server.url) == (200, b"")


async def test_buffered_bytes_have_a_limit() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"Content-Length: %d\r\n\r\n" % (64 << 20))
        await peer.send(b"x" * (64 << 20))

    async with scripted(script) as server, pool() as upstream:
        response = await upstream.open(post(server.url))
        await asyncio.sleep(0.1)
        one_read = 256 * 1024  # of asyncio and uvloop alike
        assert MAX_BUFFERED_BYTES < len(await response.read_chunk(SOON_S)) <= MAX_BUFFERED_BYTES + one_read
        response.close()


async def test_what_arrives_while_one_waits_is_offered_and_only_what_is_not_taken_is_returned() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"2\r\nno\r\n")
        for text in (b"one", b"two", b"not", b"end"):
            await go_on.wait()
            go_on.clear()
            await peer.send(b"3\r\n%b\r\n" % text + (b"0\r\n\r\n" if text == b"end" else b""))

    offered: list[bytes] = []
    came: list[bytes] = []

    def take(chunk: bytes) -> bool:
        offered.append(chunk)
        go_on.set()
        return chunk != b"not"

    def take_framed(data: bytes) -> bool:
        came.append(data)
        return len(data) == len(b"3\r\none\r\n") and take(data[3:6])

    takers = Takers(take, take_framed)

    async with scripted(script) as server, pool() as upstream:
        response = await upstream.open(post(server.url))
        assert await response.read_chunk(SOON_S) == b"no", "nobody waited yet, or it could not be in order"
        go_on.set()
        assert await response.read_chunk(SOON_S, takers) == b"not"
        assert offered == [b"one", b"two", b"not", b"not"], "what one leaves is offered to the other"
        assert await response.read_chunk(SOON_S, takers) == b"", "the end is for the reader"
        assert offered[4:] == [b"end"]
        assert came == [b"3\r\n%b\r\n" % text for text in (b"one", b"two", b"not")] + [b"3\r\nend\r\n0\r\n\r\n"]
        response.close()
        assert upstream.num_idle == 1


async def test_closing_ends_what_is_under_way() -> None:
    is_asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        is_asked.set()
        await peer.until_gone()

    async with scripted(script) as server, pool() as upstream:
        waiting = asyncio.ensure_future(upstream.open(post(server.url)))
        await is_asked.wait()
        await upstream.close()
        with pytest.raises(UpstreamFailure):
            await asyncio.wait_for(waiting, SOON_S)
        with pytest.raises(UpstreamFailure):
            await upstream.open(post(server.url))


async def test_a_response_that_comes_while_the_connection_is_idle_poisons_nothing() -> None:
    """aiohttp's client hands it to the next request."""
    is_read = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sized(b"mine"))
        await is_read.wait()
        await peer.send(sized(b"poison"))
        await peer.until_gone()

    async with scripted(script) as server, pool() as upstream:
        for number in (1, 2):
            assert await fetch(upstream, server.url) == (200, b"mine")
            is_read.set()
            await asyncio.wait_for(server.peers[number - 1].is_gone.wait(), SOON_S)
            assert (upstream.num_open, len(server.peers)) == (0, number)


async def test_head_has_a_length_and_no_body() -> None:
    async with scripted(answers(OK + b"Content-Length: 5\r\n\r\n")) as server, pool() as upstream:
        for _ in range(2):
            response = await upstream.open(UpstreamRequest(server.url, {}, b"", method="HEAD"))
            assert (response.headers["content-length"], await response.read_chunk()) == ("5", b"")
            response.close()
        assert len(server.peers) == 1
        assert b"content-length" not in server.peers[0].requests[0].lower()


async def test_random_use_keeps_the_books() -> None:
    """Answers, broken answers and readers that leave, 400 at once, 16 at a time."""
    turn = 0

    async def script(peer: Peer) -> None:
        nonlocal turn
        while True:
            await peer.request()
            turn += 1
            if turn % 7 == 0:
                return peer.reset()
            if turn % 11 == 0:
                return await peer.send(OK + b"Content-Length: 9\r\n\r\nhalf")
            await peer.send(OK + b"Content-Length: 4\r\n\r\nwh", b"ole")

    async with scripted(script) as server, pool(max_connections=16) as upstream:
        at_once = asyncio.Semaphore(16)

        async def use(number: int) -> None:
            async with at_once:
                try:
                    async with asyncio.timeout(0.001 if number % 13 == 0 else SOON_S):
                        assert await fetch(upstream, server.url) == (200, b"whol")
                except (UpstreamFailure, TimeoutError):
                    pass
                upstream.check_invariants()

        await asyncio.gather(*(use(number) for number in range(400)))
        assert upstream.num_open == upstream.num_idle


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=worker",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    return both


async def test_tls_with_a_ca_of_its_own(certificate: Path) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=certificate)
    large = b"x" * (1 << 20)
    async with scripted(answers(sized(large)), tls=serving) as server, pool() as upstream:
        for _ in range(2):
            response = await upstream.open(UpstreamRequest(server.url, {}, large, trusting))
            body = b""
            while chunk := await response.read_chunk(SOON_S):
                body += chunk
            assert body == large
        assert len(server.peers) == 1
        with pytest.raises(UpstreamFailure) as failure:
            await upstream.open(UpstreamRequest(server.url, {}, b""))
        assert failure.value.kind is FailureKind.CONNECT
        assert "certificate" in failure.value.detail.lower()


async def test_plain_http_behind_an_https_url_is_a_failure_to_connect() -> None:
    async with scripted(answers(sized(b"hi"))) as server, pool() as upstream:
        with pytest.raises(UpstreamFailure) as failure:
            await upstream.open(post(server.url.replace("http:", "https:")))
        assert failure.value.kind is FailureKind.CONNECT
