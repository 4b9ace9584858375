"""A reply cut into stretches that a later prompt can be recognised by: what it becomes when its text is sent back.

A model may spell a text with other tokens than the tokenizer would. The next turn repeats the text, and finds the
reply in the cache only with the reply's own ids. So each stretch of the reply is named by what stands in front of it
up to the last two added tokens (in ChatML "<|im_end|>", "\\n", "<|im_start|>") and its text, its role included.
Must never name a stretch whose ids do not decode to its text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

StretchKey = tuple[str, str]
"""What stands in front (an added token, a stretch, an added token), and the stretch."""
Decode = Callable[[Sequence[int]], str]


def reply_stretches(prompt: Sequence[int], reply: Sequence[int], *, boundaries: Mapping[int, str],
                    decode: Decode) -> list[tuple[StretchKey, array[int]]]:
    """The stretches that `reply` fills or goes on with, and their ids. `boundaries`: added tokens by id.

    A reply that ends in an added token ends there: whether the next prompt repeats that is the template's affair.
    """
    places = _last_boundaries(prompt, boundaries)
    if places is None:
        return []
    before, last = places
    found: list[tuple[StretchKey, array[int]]] = []
    front = (boundaries[prompt[before]], decode(prompt[before + 1:last]), boundaries[prompt[last]])
    stretch = array("I", prompt[last + 1:])
    for token_id in [*reply, None]:
        if token_id is not None and token_id not in boundaries:
            stretch.append(token_id)
            continue
        text = decode(stretch)
        if any(content in text for content in boundaries.values()):
            break  # spelled out of ordinary tokens: sent back, it would be the added token
        if stretch:
            found.append((("".join(front), text), stretch))
        if token_id is None:
            break
        front, stretch = (front[2], text, boundaries[token_id]), array("I")
    return found


def _last_boundaries(prompt: Sequence[int], boundaries: Mapping[int, str]) -> tuple[int, int] | None:
    """The places of the last two added tokens of a prompt."""
    last = None
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place] in boundaries:
            if last is not None:
                return place, last
            last = place
    return None
