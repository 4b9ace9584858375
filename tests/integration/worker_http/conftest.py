"""One tiny worker for the read-mostly tests of this folder; tests that stop or starve a worker start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from loadtests.local_stack import Child
from tests.support.tiny_tokenizer import TOOL_TEMPLATE
from tests.support.tiny_worker import running_tiny_worker, worker_client, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(Path(tmp_path_factory.mktemp("tiny-model")))


@pytest.fixture(scope="session")
def worker(tiny_model: Path) -> Iterator[Child]:
    """A strict worker: what is asked twice is equal, whatever else it computes."""
    with running_tiny_worker(tiny_model, "--exactness", "strict") as child:
        yield child


@pytest.fixture(scope="session")
def tool_worker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A strict worker whose template has a place for tools."""
    template = Path(tmp_path_factory.mktemp("template")) / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    with running_tiny_worker(tiny_model, "--chat-template", str(template), "--exactness", "strict") as child:
        yield child


@pytest.fixture
async def client(worker: Child) -> AsyncIterator[aiohttp.ClientSession]:
    async with worker_client(worker) as session:
        yield session
