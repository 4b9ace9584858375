"""The fields of a trace's line, checked: what may stand in them, and the words for what may not.

Owns the limits of what one line can ask for. A ValueError names the field, what it should be, and what it is; the
reader adds file and line.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

PROMPT_TOKENS_MAX = 10_000_000
OUTPUT_TOKENS_MAX = 1_000_000
BLOCK_SIZE_MAX = 65_536
BLOCK_ID_MAX = (1 << 64) - 1
SPAN_S_MAX = 10 * 365 * 86_400.0
SUBAGENTS_DEEP_MAX = 16
SHOWN_CHARACTERS = 60


def whole(line: dict[str, Any], name: str, least: int, most: int) -> int:
    """A whole number from `least` to `most`."""
    value = line[name]
    if type(value) is not int or not least <= value <= most:
        refuse(name, f"a whole number from {least} to {most}", value)
    return value


def prompt_tokens(line: dict[str, Any], name: str) -> int:
    return whole(line, name, 1, PROMPT_TOKENS_MAX)


def output_tokens(line: dict[str, Any], name: str) -> int:
    """Of the answer. Traces have empty ones; the least that can be asked for is one token."""
    return max(1, whole(line, name, 0, OUTPUT_TOKENS_MAX))


def scaled_prompt(num_tokens: int, source_block: int, block_size: int) -> int:
    """With blocks of another size: the ids are kept and the prompt shrinks, for models with a shorter context."""
    scaled = num_tokens * block_size // source_block
    if scaled > PROMPT_TOKENS_MAX:
        raise ValueError(f"with --block-size {block_size} this prompt has {scaled} tokens, more than "
                         f"{PROMPT_TOKENS_MAX}")
    return max(1, scaled)


def number(line: dict[str, Any], name: str) -> float:
    """Any finite number."""
    value = line[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        refuse(name, "a finite number", value)
    return float(value)


def within_span(line: dict[str, Any], name: str, first_s: float | None, per_s: float) -> float:
    """An instant in seconds, at most SPAN_S_MAX from the first line's."""
    at_s = number(line, name) / per_s
    if first_s is not None and abs(at_s - first_s) > SPAN_S_MAX:
        refuse(name, f"within {SPAN_S_MAX / 86_400:.0f} days of the first line's, {first_s * per_s:g}", line[name])
    return at_s


def offset_s(line: dict[str, Any], name: str) -> float:
    """Seconds since a session, or a sub-agent, began."""
    value = number(line, name)
    if not 0 <= value <= SPAN_S_MAX:
        refuse(name, f"seconds from 0 to {SPAN_S_MAX:.0f}", value)
    return value


def block_ids(line: dict[str, Any], name: str, num_tokens: int, block_size: int) -> list[int]:
    """An id for each full block, and perhaps one for the block that is not full."""
    ids = listed(line, name)
    if not all(type(one) is int and 0 <= one <= BLOCK_ID_MAX for one in ids):
        refuse(name, f"a list of whole numbers from 0 to {BLOCK_ID_MAX}", ids)
    _check_count(name, len(ids), num_tokens, block_size)
    return ids


def block_runs(line: dict[str, Any], name: str, num_tokens: int, block_size: int) -> list[int]:
    """The same, as [first id, how many] pairs."""
    runs = listed(line, name)
    if not all(type(run) is list and len(run) == 2 and all(type(one) is int for one in run)
               and 0 <= run[0] <= BLOCK_ID_MAX - run[1] and run[1] > 0 for run in runs):
        refuse(name, f"a list of [first id, how many] pairs: ids from 0 to {BLOCK_ID_MAX}, at least one each", runs)
    _check_count(name, sum(count for _, count in runs), num_tokens, block_size)
    return [first + step for first, count in runs for step in range(count)]


def _check_count(name: str, count: int, num_tokens: int, block_size: int) -> None:
    full = num_tokens // block_size
    most = -(-num_tokens // block_size)
    if not full <= count <= most:
        wanted = f"{full}" if full == most else f"{full} or {most}"
        raise ValueError(f"{name} should have {wanted} ids, one for each {block_size} of {num_tokens} prompt tokens, "
                         f"has {count}")


def listed(line: dict[str, Any], name: str) -> list[Any]:
    value = line[name]
    if not isinstance(value, list):
        refuse(name, "a list", value)
    return value


def objects(line: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values = listed(line, name)
    for value in values:
        if not isinstance(value, dict):
            refuse(name, "a list of objects", value)
    return values


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        refuse(name, "text", value)
    return value


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    shown = repr(value)
    cut = "..." if len(shown) > SHOWN_CHARACTERS else ""
    raise ValueError(f"{name} should be {wanted}, is {shown[:SHOWN_CHARACTERS]}{cut}")
