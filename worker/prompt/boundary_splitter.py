"""A text cut at its added tokens: stretches and boundaries in turn, a stretch at both ends.

Owns how they are found: what re.split() of any of them gives, sooner where it can be. A prompt has few of them, and
they begin with a character that prose hardly has: looking for that one goes at the speed of memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

FEW = 64    # places to look at one by one; with more of them an expression is the quicker


def boundary_splitter(boundaries: Sequence[str]) -> Callable[[str], list[str]]:
    """For texts with any of `boundaries`, of which none is empty and no two can share a character."""
    anywhere = re.compile(f"({_alternation(boundaries)})")
    beginnings = {content[0] for content in boundaries}
    if len(beginnings) > 1:
        return anywhere.split
    beginning, here = beginnings.pop(), re.compile("|".join(map(re.escape, boundaries))).match

    def split(text: str) -> list[str]:
        parts: list[str] = []
        start = 0
        at = text.find(beginning)
        for _ in range(FEW):
            if at < 0:
                parts.append(text[start:])
                return parts
            found = here(text, at)
            if found is None:
                at = text.find(beginning, at + 1)
                continue
            parts += (text[start:at], found[0])
            start = found.end()
            at = text.find(beginning, start)
        return parts + anywhere.split(text[start:])

    return split


def _alternation(boundaries: Sequence[str]) -> str:
    """An expression for any of them. A beginning that all share stands before the alternatives: a search then skips
    to it instead of trying each at every character."""
    contents = sorted(boundaries)
    shared = 0
    while all(len(content) > shared and content[shared] == contents[0][shared] for content in contents):
        shared += 1
    rest = "|".join(re.escape(content[shared:]) for content in contents)
    return f"{re.escape(contents[0][:shared])}(?:{rest})"
