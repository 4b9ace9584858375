"""What is not HTTP is refused in the OpenAI error object, and neither the answer nor the log quotes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.local_stack import Child
from tests.support.not_http import CANARY, NOT_HTTP, WRONG_AFTER_A_CHUNK, check_refused, send_raw
from tests.support.tiny_worker import running_tiny_worker

LOG_CHARS = 1_000_000


@pytest.fixture(scope="module")
def talkative(tiny_model: Path) -> Iterator[Child]:
    with running_tiny_worker(tiny_model, "--log-level", "debug") as child:
        yield child


@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["at once", "body later"])
@pytest.mark.parametrize("name", NOT_HTTP)
async def test_what_is_not_http_is_refused_and_never_logged(talkative: Child, name: str, pause_s: float) -> None:
    check_refused(await send_raw(port_of(talkative), NOT_HTTP[name], pause_s=pause_s), name)
    log = talkative.log_tail(LOG_CHARS)
    assert "not_http" in log
    assert CANARY.decode() not in log
    assert "Traceback" not in log


@pytest.mark.parametrize("name", WRONG_AFTER_A_CHUNK)
async def test_a_body_that_goes_wrong_where_a_chunk_ends_is_not_waited_for(talkative: Child, name: str) -> None:
    first, rest = WRONG_AFTER_A_CHUNK[name]
    check_refused(await send_raw(port_of(talkative), first + rest, pause_s=0.2, pause_at=len(first)))
    assert CANARY.decode() not in talkative.log_tail(LOG_CHARS)


async def test_an_unknown_expectation_is_not_echoed(talkative: Child) -> None:
    answer = await send_raw(port_of(talkative), b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nExpect: "
                            + CANARY + b"\r\n\r\n")
    assert answer.status_line.startswith(b"HTTP/1.1 417")
    assert b'"code":"invalid_request"' in answer.body
    assert CANARY not in answer.body


def port_of(worker: Child) -> int:
    return int(worker.url.rpartition(":")[2])
