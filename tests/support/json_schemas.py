"""Random small JSON schemas, and a validator for just what they use.

Everything in them is bounded, so that an answer that follows one ends.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "name", "città", "two words", 'quo"te', "n1"]
WORDS = ["red", "green", "", "blå", "a b", '"']


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object at the top; nested at most `depth` deep."""
    names = draw.sample(NAMES, draw.randint(0, 4))
    return {"type": "object", "properties": {name: _value(draw, depth - 1) for name in names},
            "required": [name for name in names if draw.random() < 0.7], "additionalProperties": False}


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["enum", "const", "integer", "string", "boolean", "null", "anyOf"] + ["object", "array"] * (depth > 0)
    match draw.choice(kinds):
        case "enum":
            return {"enum": draw.sample([*WORDS, 1, 2.5, None, True], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice([*WORDS, 7, False])}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 300)}
        case "string":
            low = draw.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 6)}
        case "anyOf":
            return {"anyOf": [_value(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case "array":
            low = draw.randint(0, 2)
            return {"type": "array", "items": _value(draw, depth - 1), "minItems": low,
                    "maxItems": low + draw.randint(0, 2)}
        case "object":
            return random_schema(draw, depth)
        case kind:
            return {"type": kind}


def validates(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` follows a schema that random_schema() made."""
    if "anyOf" in schema:
        return any(validates(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and bool(value == schema["const"])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
                    and all(validates(item, known[name]) for name, item in value.items()))
        case "array":
            return (isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
                    and all(validates(item, schema["items"]) for item in value))
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None
