"""The Jinja environment chat templates are written for: the one that transformers 5.24 builds.

Templates come from model repositories, so they are foreign code: they run sandboxed, on immutable values, and see
nothing but plain JSON data and the few names below. Must never gain a filter or a global that transformers lacks: a
template that works here has to work there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


def chat_template_environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """A fresh sandbox; `now` is the clock behind strftime_now()."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["dict"] = _DictFactory()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}: marks what the assistant wrote, for training masks. Here it only renders its body.

    A call block, as in transformers: names set inside stay inside.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return str(caller())


class _DictFactory:
    """dict() and dict.fromkeys() without the class, whose attributes would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """namespace() that stores no name beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from args so that namespace(self=...) stays possible, as in Jinja itself.
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}: names must not begin with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, *, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML and sorts keys; prompts want neither.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
