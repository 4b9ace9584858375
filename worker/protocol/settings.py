"""Layered configuration of both commands: flags over environment over a TOML file over the dataclass's defaults.

Owns: turning those layers into one checked instance, with every problem reported at once; the printed outcome with
secrets masked. Must never: know a setting by name; dataclasses state them.

A field may say more than its type through `setting(...)`: its help, choices, bounds, an environment variable of its
own, the TOML table it belongs to. Types understood: str, int, float, bool, Path, X | None, tuple[X, ...] (with commas
in a variable) and tuples of dataclasses, where a bare string stands for the first field.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_SECRET_ENDINGS = ("token", "seed", "api_key", "api_keys", "secret")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# Kubernetes injects such variables for every Service; one called headstart-worker would look like our settings.
_SERVICE_LINK_NAME = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """Everything that is wrong with the configuration, one line each: where it was said, what is wrong."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class _BadValue(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class _Rule:
    help: str = ""
    choices: tuple[str, ...] = ()
    bounds: tuple[float | None, float | None] = (None, None)
    env: str | None = None
    table: str | None = None
    flag: str | None = None
    check: Callable[[Any], str | None] | None = None


def setting(default: Any = dataclasses.MISSING, *, help: str = "", choices: tuple[str, ...] = (),
            bounds: tuple[float | None, float | None] = (None, None), env: str | None = None,
            table: str | None = None, flag: str | None = None,
            check: Callable[[Any], str | None] | None = None) -> Any:
    """A dataclass field with rules.

    `bounds` are the least and the greatest value; `env`, `table` and `flag` stand in for the names that the field's
    own would give (a `flag` that differs is given once per item of a tuple); `check` returns what is wrong, or None.
    """
    rule = _Rule(help, choices, bounds, env, table, flag, check)
    return dataclasses.field(default=default, metadata={"setting": rule})


def load_settings(kind: type[T], *, flags: Mapping[str, Any], environ: Mapping[str, str], env_prefix: str,
                  toml_path: Path | None = None) -> T:
    """An instance of the dataclass `kind`. `flags` maps field names to what was given; None means not given.

    SettingsError lists every unknown key, wrong type and value out of bounds at once.
    """
    problems: list[str] = []
    given = {**_from_toml(kind, toml_path, problems),
             **_from_environ(kind, environ, env_prefix, problems),
             **{field.name: (flags[field.name], f"--{_flag(field)}") for field in _fields(kind)
                if flags.get(field.name) is not None}}
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in _fields(kind):
        if field.name not in given:
            continue
        raw, source = given[field.name]
        try:
            values[field.name] = _checked(_coerce(raw, hints[field.name]), _rule(field))
        except _BadValue as error:
            problems.append(f"{source}: {error}")
    if problems:
        raise SettingsError(problems)
    return kind(**values)


class FlagSpec(NamedTuple):
    """What a command line needs to offer a setting as a flag."""

    name: str
    flag: str
    help: str
    choices: tuple[str, ...]
    repeats: bool


def flag_specs(kind: type) -> list[FlagSpec]:
    """A flag for every field but the secrets: every user of the machine can read a command line."""
    specs = []
    for field in _fields(kind):
        rule = _rule(field)
        default = "" if field.default in (None, (), "", dataclasses.MISSING) else f" (default {field.default})"
        if not is_secret(field.name):
            specs.append(FlagSpec(field.name, "--" + _flag(field), (rule.help + default).strip(), rule.choices,
                                  repeats=rule.flag is not None))
    return specs


def render_settings(config: Any) -> str:
    """The outcome as TOML that load_settings reads back, secrets masked; unset ones as comments."""
    top: list[str] = []
    tables: dict[str, list[str]] = {}
    arrays: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for item in value:
                lines = [_toml_line(sub.name, getattr(item, sub.name)) for sub in dataclasses.fields(item)]
                arrays += ["", f"[[{field.name}]]", *lines]
            continue
        table = _rule(field).table
        lines = top if table is None else tables.setdefault(table, [])
        lines.append(_toml_line(field.name, value))
    for table, lines in tables.items():
        top += ["", f"[{table}]", *lines]
    return "\n".join(top + arrays) + "\n"


def is_secret(name: str) -> bool:
    """Whether a setting's value must not be shown or passed on a command line, by the ending of its name."""
    return name.endswith(_SECRET_ENDINGS)


def _rule(field: dataclasses.Field[Any]) -> _Rule:
    return typing.cast(_Rule, field.metadata.get("setting", _Rule()))


def _flag(field: dataclasses.Field[Any]) -> str:
    return _rule(field).flag or field.name.replace("_", "-")


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(typing.cast(Any, kind))


def _from_toml(kind: type, path: Path | None, problems: list[str]) -> dict[str, tuple[Any, str]]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        problems.append(f"{path}: no such file; name an existing one with --config")
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"{path}: cannot be read as TOML: {error}")
        return {}
    places = {(_rule(field).table, field.name) for field in _fields(kind)}
    known = [name if table is None else f"{table}.{name}" for table, name in places]
    tables = {table for table, _ in places if table is not None}
    found: dict[str, tuple[Any, str]] = {}
    for key, value in document.items():
        inside = key in tables and isinstance(value, dict)
        for name, item in (value.items() if inside else [(key, value)]):
            dotted = f"{key}.{name}" if inside else name
            if ((key if inside else None), name) in places:
                found[name] = (item, f"{path}: {dotted}")
            else:
                problems.append(f"{path}: unknown key {dotted!r}{_nearest(dotted, known)}")
    return found


def _from_environ(kind: type, environ: Mapping[str, str], prefix: str,
                  problems: list[str]) -> dict[str, tuple[Any, str]]:
    names = {_rule(field).env or prefix + field.name.upper(): field.name for field in _fields(kind)}
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in environ.items():
        rest = variable.removeprefix(prefix)
        ours = variable in names or (rest != variable and rest != "CONFIG")
        if not ours or not text or _is_service_link(rest, text):
            continue  # an empty variable counts as unset
        if variable in names:
            found[names[variable]] = (text, variable)
        else:
            problems.append(f"{variable}: unknown setting{_nearest(variable, list(names))}")
    return found


def _is_service_link(rest: str, text: str) -> bool:
    return bool(_SERVICE_LINK_NAME.fullmatch(rest) or (rest == "PORT" and _SERVICE_LINK_VALUE.match(text)))


def _nearest(name: str, known: list[str]) -> str:
    # The last part alone finds a key that was written outside its table, or in the wrong one.
    by_leaf = {full.rpartition(".")[2]: full for full in known}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    leaf = difflib.get_close_matches(name.rpartition(".")[2], by_leaf, n=1, cutoff=0.8)
    if leaf:
        return f"; did you mean {by_leaf[leaf[0]]!r}?"
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _checked(value: Any, rule: _Rule) -> Any:
    if value is None:
        return value
    if rule.choices and value not in rule.choices:
        close = difflib.get_close_matches(str(value), rule.choices, n=1)
        raise _BadValue(f"{value!r} is not one of {', '.join(rule.choices)}"
                        + (f"; did you mean {close[0]!r}?" if close else ""))
    least, greatest = rule.bounds
    if least is not None and value < least:
        raise _BadValue(f"should be at least {least:g}, got {value}")
    if greatest is not None and value > greatest:
        raise _BadValue(f"should be at most {greatest:g}, got {value}")
    if rule.check is not None and (problem := rule.check(value)) is not None:
        raise _BadValue(problem)
    return value


def _coerce(raw: Any, hint: Any) -> Any:
    """`raw` as the annotated type; _BadValue says what was expected."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return None if raw is None else _coerce(raw, inner[0])
    if origin is tuple:
        items = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            raise _BadValue(f"should be a list, got {raw!r}")
        return _coerce_items([item for item in items if item != ""], typing.get_args(hint)[0])
    if dataclasses.is_dataclass(hint):
        return _coerce_dataclass(raw, typing.cast(type, hint))
    return _coerce_scalar(raw, hint)


def _coerce_items(items: list[Any], hint: Any) -> tuple[Any, ...]:
    values, problems = [], []
    for number, item in enumerate(items, 1):
        try:
            values.append(_coerce(item, hint))
        except _BadValue as error:
            problems.append(f"entry {number}: {error}")
    if problems:
        raise _BadValue("; ".join(problems))
    return tuple(values)


def _coerce_dataclass(raw: Any, kind: type) -> Any:
    if dataclasses.is_dataclass(raw) and isinstance(raw, kind):
        return raw
    fields = {field.name: field for field in _fields(kind)}
    table = {next(iter(fields)): raw} if isinstance(raw, str) else raw
    if not isinstance(table, dict):
        raise _BadValue(f"should be a table or text, got {raw!r}")
    hints = typing.get_type_hints(kind)
    values = {}
    problems = [f"unknown key {key!r}{_nearest(key, list(fields))}" for key in table if key not in fields]
    for name, field in fields.items():
        try:
            if name in table:
                values[name] = _checked(_coerce(table[name], hints[name]), _rule(field))
            elif field.default is dataclasses.MISSING:
                problems.append(f"{name} is missing")
        except _BadValue as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise _BadValue("; ".join(problems))
    return kind(**values)


def _coerce_scalar(raw: Any, hint: Any) -> Any:
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        text = str(raw).lower()
        if text in _TRUE + _FALSE:
            return text in _TRUE
        raise _BadValue(f"should be true or false, got {raw!r}")
    if hint in (int, float):
        return _coerce_number(raw, hint)
    if isinstance(raw, bool) or not isinstance(raw, str | int | float | Path):
        raise _BadValue(f"should be text, got {raw!r}")
    if hint is Path:
        return Path(raw).expanduser() if isinstance(raw, str | Path) and str(raw) else _refuse(raw, "a path")
    assert hint is str, f"a setting of type {hint} is not understood"
    return str(raw)  # `threads = 4` and `kv_memory = 0.9` are natural in TOML for fields that also take words


def _coerce_number(raw: Any, hint: type[int] | type[float]) -> float:
    noun = "a whole number" if hint is int else "a number"
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or (hint is int and isinstance(raw, float)):
        _refuse(raw, noun)
    try:
        value = hint(raw)
    except ValueError:
        _refuse(raw, noun)
    if value != value or value in (float("inf"), float("-inf")):
        _refuse(raw, "a finite number")
    return value


def _refuse(raw: Any, noun: str) -> typing.NoReturn:
    raise _BadValue(f"should be {noun}, got {raw!r}")


def _toml_line(name: str, value: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    if is_secret(name):
        return f'{name} = "***"' if value else f"# {name} is not set"
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str | Path):
        escaped = "".join(f"\\u{ord(c):04x}" if c in '"\\' or ord(c) < 32 or ord(c) == 127 else c for c in str(value))
        return f'"{escaped}"'
    return repr(value)
