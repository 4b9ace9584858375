"""Structured logs of worker and gateway: one JSON object a line (or a readable console form), on stderr.

Owns: the one configuration of structlog and of the standard library's loggers behind it. Must never: see prompt text;
callers log counts, ids and durations.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, TextIO

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


def configure_logging(format: str = "json", level: str = "info", *, stream: TextIO | None = None) -> None:
    """Sets up structlog and the standard library alike, once per process. `format` and `level` as listed above."""
    assert format in FORMATS, format
    assert level in LEVELS, level
    out = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderers = _renderers(format, out)
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


def get_logger(name: str) -> Any:
    """A logger whose lines carry `source=name`: log.info("request_finished", request_id=..., cached_tokens=...)."""
    return structlog.get_logger(source=name)  # lazy: a module may ask before configure_logging() ran


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
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return json.dumps(event, default=repr)
