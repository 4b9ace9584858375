"""Structured logs of worker and gateway: one JSON object a line (or a readable console form), on stderr.

Owns: the one configuration of structlog and of the standard library's loggers behind it. Must never: see prompt text;
callers log counts, ids and durations.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, TextIO

import orjson
import structlog

FORMATS = ("json", "console")
LEVELS = ("debug", "info", "warning", "error")
# Third-party loggers that tell a line per connection or request; theirs count from warnings on.
_CHATTY = ("aiohttp.access", "asyncio", "urllib3", "filelock", "httpx")

_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
]


class _Output(NamedTuple):
    format: str
    threshold: int
    stream: TextIO


_configured: dict[str, _Output] = {}  # at most one entry, written by configure_logging


def configure_logging(format: str = "json", level: str = "info", *, stream: TextIO | None = None) -> None:
    """Sets up structlog and the standard library alike, once per process. `format` and `level` as listed above."""
    assert format in FORMATS, format
    assert level in LEVELS, level
    out = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderers = _renderers(format, out)
    _configured["output"] = _Output(format, threshold, out)
    structlog.configure(
        processors=[*_SHARED, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, _add_source],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    ))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def log_many(name: str, event: str, lines: Sequence[tuple[float, Mapping[str, object]]]) -> None:
    """What get_logger(name).info(event, **fields) would have written for each (Unix time, fields), in one write.

    No field is called what every line has anyway. The console form, which people read, has the time of the call.
    """
    output = _configured.get("output")
    if output is None or output.format != "json":
        log = get_logger(name)
        for _, fields in lines:
            log.info(event, **fields)
        return
    if output.threshold <= logging.INFO:
        # All lines begin and end alike; only what is between is rendered for each.
        begin = _to_json({"source": name})[:-1]
        end = _to_json({"event": event, **structlog.contextvars.get_contextvars(), "level": "info"})[1:-1]
        output.stream.write("".join([
            f'{begin},{_to_json(fields)[1:-1]}{"," if fields else ""}{end},"at":"{_iso(at)}"}}\n'
            for at, fields in lines]))
        output.stream.flush()


def get_logger(name: str) -> Any:
    """A logger whose lines carry `source=name`: log.info("request_finished", request_id=..., cached_tokens=...)."""
    return structlog.get_logger(source=name)  # lazy: a module may ask before configure_logging() ran


def _iso(at: float) -> str:
    second, microsecond = divmod(round(at * 1e6), 1_000_000)
    return f"{_iso_second(second)}.{microsecond:06d}Z"


@lru_cache(4)
def _iso_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _add_source(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event["source"] = event["_record"].name
    return event


def _renderers(format: str, out: TextIO) -> list[structlog.typing.Processor]:
    if format == "console":
        # The default would print every frame's locals, and so prompt text.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]


def _to_json(event: Any, **_: object) -> str:
    """orjson, or the slower standard library for what orjson refuses (lone surrogates, integers over 64 bits)."""
    try:
        return orjson.dumps(event, default=repr).decode()
    except TypeError:  # as with keys that are no text, for which the option costs every line
        with contextlib.suppress(TypeError):
            return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
        return json.dumps(event, default=repr)
