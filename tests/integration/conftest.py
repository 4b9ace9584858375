"""One real stack for the whole session: `headstart up` with two workers on the packaged model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from loadtests.local_stack import Child, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Child]:
    """Gateway and two SmolLM2 workers, ready. Tests that kill or reconfigure processes start their own."""
    with running_stack(
        workers=2, model="smollm2", arguments=["--exactness", "fast", "--kv-memory", "512MiB"]
    ) as child:
        yield child


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        yield session
