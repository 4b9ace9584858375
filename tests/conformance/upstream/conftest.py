"""Every implementation of Upstream, on the event loops it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from gateway.relay.connection_pool import PooledUpstream
from gateway.relay.upstream import Upstream
from tests.support.aiohttp_upstream import AiohttpUpstream

CONNECT_TIMEOUT_S = 0.5
KINDS = {"ours": PooledUpstream, "aiohttp": AiohttpUpstream}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop is what a gateway runs on, asyncio what it falls back to: they differ in when they report what."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def upstream(kind: str) -> AsyncIterator[Upstream]:
    upstream = KINDS[kind](connect_timeout_s=CONNECT_TIMEOUT_S)
    try:
        yield upstream
        if isinstance(upstream, PooledUpstream):
            upstream.check_invariants()
            assert upstream.num_open == upstream.num_idle, "every exchange was ended"
    finally:
        await upstream.close()
    if isinstance(upstream, PooledUpstream):
        assert (upstream.num_open, upstream.num_idle) == (0, 0)
