"""What an answer's text must match, as a value that travels from the HTTP shell to the engine.

Owns the ways to say it and their limits. Must never import the grammar engine: that lives with the model, in the
engine process. Whether a schema makes sense is found out there; here it is only a bounded text.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from worker.protocol.api_error import invalid_request

MAX_GRAMMAR_BYTES = 256 * 1024
"""Of one request's grammar, which is its schema or the schemas of all its tools."""
MAX_OPTIONAL_PROPERTIES = 1000
"""Of one schema. Compiling takes their square: a tenth of a second for so many, minutes for ten times as many."""
ANY_OBJECT = '{"type":"object"}'
"""What `response_format` json_object stands for."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


class GrammarSpec(msgspec.Struct, frozen=True):
    """`text` is a JSON schema or a Lark grammar; `param` is the request's field that complaints name."""

    kind: GrammarKind
    text: str
    param: str


def grammar_spec(kind: GrammarKind, text: str, param: str) -> GrammarSpec:
    """ApiError 400 naming `param` when the text is longer than any grammar may be."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid_request(f"{param} makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR_BYTES} are "
                              "accepted.", param)
    return GrammarSpec(kind, text, param)


def check_schema(schema: object, param: str) -> None:
    """ApiError 400 naming `param` when the schema has more optional properties than any schema may have."""
    num_optional = _num_optional(schema)
    if num_optional > MAX_OPTIONAL_PROPERTIES:
        raise invalid_request(f"The schema in {param} has {num_optional} properties that are not required; at most "
                              f"{MAX_OPTIONAL_PROPERTIES} are accepted.", param)


def _num_optional(schema: object) -> int:
    if isinstance(schema, list):
        return sum(map(_num_optional, schema))
    if not isinstance(schema, dict):
        return 0
    properties, required = schema.get("properties"), schema.get("required")
    own = 0
    if isinstance(properties, dict):
        own = len(properties.keys() - set(filter(_is_text, required if isinstance(required, list) else [])))
    return own + sum(map(_num_optional, schema.values()))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
