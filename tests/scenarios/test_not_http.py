"""What is not HTTP, sent to a gateway: refused in the OpenAI error object, quoted neither there nor in the log."""

from __future__ import annotations

import logging

import pytest

from tests.support.gateway_in_process import running_gateway
from tests.support.not_http import CANARY, NOT_HTTP, WRONG_AFTER_A_CHUNK, check_refused, send_raw


@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["at once", "body later"])
@pytest.mark.parametrize("name", NOT_HTTP)
async def test_what_is_not_http_is_refused_and_never_logged(name: str, pause_s: float,
                                                            caplog: pytest.LogCaptureFixture,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_gateway("http://127.0.0.1:9") as gateway:
        check_refused(await send_raw(gateway.gateway.port, NOT_HTTP[name], pause_s=pause_s), name)
    log = caplog.text + "".join(capfd.readouterr())
    assert CANARY.decode() not in log
    assert "Error handling request" not in log
    assert "Unhandled exception" not in log


@pytest.mark.parametrize("name", WRONG_AFTER_A_CHUNK)
async def test_a_body_that_goes_wrong_where_a_chunk_ends_is_not_waited_for(name: str) -> None:
    first, rest = WRONG_AFTER_A_CHUNK[name]
    async with running_gateway("http://127.0.0.1:9") as gateway:
        check_refused(await send_raw(gateway.gateway.port, first + rest, pause_s=0.2, pause_at=len(first)))
