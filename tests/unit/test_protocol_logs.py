"""Log lines are one JSON object each, whatever is logged, ours and the libraries' alike."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from worker.protocol.logs import configure_logging, get_logger, log_many


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_json_lines() -> None:
    out = io.StringIO()
    configure_logging("json", "info", stream=out)
    log = get_logger("engine")
    log.debug("hidden")
    log.info("odd", text="é\n", huge=2**70, raw=b"\x00", lone="\ud800", pair=(1, 2), key={1: 2})
    try:
        prompt = "secret words"
        raise ValueError(len(prompt))
    except ValueError:
        log.exception("broke")
    logging.getLogger("aiohttp.server").warning("theirs %d", 3)
    logging.getLogger("aiohttp.access").info("hidden")
    odd, broke, theirs = map(json.loads, out.getvalue().splitlines())
    assert (odd["event"], odd["level"], odd["source"], odd["text"]) == ("odd", "info", "engine", "é\n")
    assert odd["huge"] == 2**70
    assert "ValueError: 12" in broke["exception"]
    assert "secret words" not in broke["exception"].replace('prompt = "secret words"', "")
    assert (theirs["event"], theirs["source"], theirs["level"]) == ("theirs 3", "aiohttp.server", "warning")


@pytest.mark.usefixtures("restored")
def test_console_shows_no_locals() -> None:
    out = io.StringIO()
    configure_logging("console", "debug", stream=out)
    try:
        prompt = "".join(["sec", "ret"])
        raise ValueError(len(prompt))
    except ValueError:
        get_logger("engine").exception("broke")
    assert "ValueError: 6" in out.getvalue()
    assert "secret" not in out.getvalue()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("level", ["info", "warning"])
def test_many_lines_at_once_are_the_lines_one_by_one(level: str) -> None:
    fields = {"text": "é\n", "huge": 2**70, "duration_ms": 0.125, "retries": ["reset"]}
    out = io.StringIO()
    configure_logging("json", level, stream=out)
    log_many("gateway", "request", [(1_700_000_000.25, fields), (1_700_000_001.0, {})])
    get_logger("gateway").info("request", **fields)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    if level == "warning":
        assert lines == []
        return
    many, empty, single = lines
    assert (many.pop("at"), empty["at"]) == ("2023-11-14T22:13:20.250000Z", "2023-11-14T22:13:21.000000Z")
    assert len(single.pop("at")) == len(empty["at"])
    assert many == single
    assert list(many) == list(single)


@pytest.mark.usefixtures("restored")
def test_many_lines_for_people() -> None:
    out = io.StringIO()
    configure_logging("console", "info", stream=out)
    log_many("gateway", "request", [(1.0, {"status": 200}), (2.0, {"status": 404})])
    first, second = out.getvalue().splitlines()
    assert "request" in first
    assert "200" in first
    assert "404" in second
