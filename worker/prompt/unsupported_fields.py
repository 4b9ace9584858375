"""Fields of other engines that would change the answer and that this worker cannot honour: an error, not silence.

Owns their names. All other unknown fields are ignored. A value that asks for what happens anyway is no offence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from worker.protocol.api_error import invalid_request

_USE_RESPONSE_FORMAT = "use response_format with a JSON schema"
_REMEDIES: dict[str, str] = {
    **dict.fromkeys(("guided_json", "structured_outputs", "json_schema"), _USE_RESPONSE_FORMAT),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "grammar"),
                    f"{_USE_RESPONSE_FORMAT}, whose `pattern` and `enum` can say it"),
    **dict.fromkeys(("stop_token_ids", "include_stop_str_in_output"), "use stop"),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "use logit_bias"),
    "truncate_prompt_tokens": "send a shorter prompt",
    "skip_special_tokens": "ask for return_token_ids",
    "use_beam_search": "use best_of on /v1/completions",
    "best_of": "use n, or best_of on /v1/completions",
    "echo": "use echo on /v1/completions",
    "documents": "put them into a message",
    "modalities": "this model writes text",
    "audio": "this model writes text",
}
_HAPPENS_ANYWAY: dict[str, Sequence[Any]] = {
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "use_beam_search": (False,),
    "best_of": (1,), "echo": (False,), "modalities": (["text"],), "stop_token_ids": ([],), "bad_words": ([],),
    "documents": ([],),
}
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def refuse_unsupported_fields(json_body: bytes, unknown: Sequence[str]) -> None:
    """ApiError 400 naming the first of a body's `unknown` fields that this worker cannot honour.

    `json_body` has been parsed before: it is an object.
    """
    suspects = [name for name in unknown if name in _REMEDIES]
    if not suspects:
        return
    values = _raw_decoder.decode(json_body)
    for name in suspects:
        value = msgspec.json.decode(values[name])
        if value is not None and not any(value == usual and type(value) is type(usual)
                                         for usual in _HAPPENS_ANYWAY.get(name, ())):
            raise invalid_request(f"{name} is not supported: {_REMEDIES[name]}.", name)
