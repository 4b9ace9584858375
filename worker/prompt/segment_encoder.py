"""Ids of a text from those of its stretches between added tokens, each remembered by its content.

A tokenizer takes added tokens out of a text first and treats what lies between them one by one, so a stretch has the
same ids wherever it stands (cut_rules.py says for which tokenizers). A system prompt, a document or an earlier turn
is therefore tokenised once, in whatever order they come. Long stretches that are new as a whole may still begin like
old ones: those go on to the prefix memory.
Must never give other ids than the tokenizer gives for the whole text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from worker.prompt.boundary_splitter import boundary_splitter
from worker.prompt.cut_rules import never_overlap
from worker.prompt.prefix_encoder import PrefixEncoder
from worker.prompt.reply_stretches import StretchKey
from worker.prompt.segment_memory import SegmentMemory

LONG_CHARS = 2048    # below, to look for a known beginning costs more than it saves

Parts = Sequence["str | array[int]"]
Encode = Callable[[Sequence[str]], "list[array[int]]"]     # quoted: Python 3.11 cannot subscript array


class Replies(Protocol):
    """Stretches that are spelled in another way; false when there are none."""

    def __bool__(self) -> bool: ...

    def get(self, key: StretchKey) -> array[int] | None:
        """The ids of a stretch by what stands in front of it and its text."""
        ...


class KnownText(NamedTuple):
    """The beginning of a text, up to the end of an added token in it, and its ids, which nobody changes."""

    text: str
    token_ids: array[int]


class SegmentEncoder:
    """`boundaries` are the added tokens and their ids, `encode` gives the ids of stretches without any of them.

    Safe to use from several threads; two that meet the same new stretch may both tokenise it.
    """

    def __init__(self, boundaries: Mapping[str, int], encode: Encode, *, prefixes: PrefixEncoder | None = None,
                 max_bytes: int) -> None:
        self.memory = SegmentMemory(max_bytes)
        self._split = boundary_splitter(tuple(boundaries))
        self.contents = {token_id: content for content, token_id in boundaries.items()}
        self._ids = {content: array("I", [token_id]) for content, token_id in boundaries.items()}
        self._never_overlap = never_overlap(tuple(boundaries))
        self._encode = encode
        self._prefixes = prefixes

    def encode_many(self, texts: Sequence[str], scope: str = "",
                    replies: Replies | None = None) -> list[array[int]]:
        """The ids of each text, all that is new in one call. What one scope remembers, no other can tell.

        What `replies` knows takes the ids it has there (reply_stretches.py).
        """
        new: list[str] = []
        looked_up = [self._look_up(self._parts(text, replies), scope, new) for text in texts]
        known = self._add(new, scope) if new else {}
        return [_joined(pieces, known) for pieces in looked_up]

    def encode(self, text: str, scope: str = "", replies: Replies | None = None) -> array[int]:
        """encode_many() of one text."""
        new: list[str] = []
        pieces = self._look_up(self._parts(text, replies), scope, new)
        return _joined(pieces, self._add(new, scope) if new else {})

    def encode_if_known(self, text: str, scope: str, max_new_chars: int, replies: Replies | None = None, *,
                        begins: KnownText | None = None) -> array[int] | None:
        """The ids of a text of which no more than so many characters have to be tokenised; None when it is more.

        `begins`: a beginning() of it, in the same scope; not where there are replies, which may spell it otherwise.
        """
        new: list[str] = []
        rest = text if begins is None else text[len(begins.text):]
        pieces = self._look_up(self._parts(rest, replies), scope, new)
        if new and sum(map(len, new)) > max_new_chars:
            return None
        behind = _joined(pieces, self._add(new, scope) if new else {})
        return behind if begins is None else begins.token_ids + behind

    def beginning(self, text: str, scope: str) -> KnownText | None:
        """As much of a text as ends in an added token, if all of that is remembered. Texts that begin so have these
        ids there, and behind it those of what is behind: no added token can reach over the end of another."""
        if not self._never_overlap:
            return None
        begins = text[:len(text) - len(self._split(text)[-1])]
        token_ids = self.encode_if_known(begins, scope, 0)
        return KnownText(begins, token_ids) if begins and token_ids is not None else None

    def _parts(self, text: str, replies: Replies | None) -> Parts:
        """Stretches and boundaries in turn, a stretch at both ends; ids in place of the text of a known reply."""
        parts = self._split(text)
        if not replies:
            return parts
        known = {at: token_ids for at in range(4, len(parts), 2) if
                 (token_ids := replies.get((parts[at - 3] + parts[at - 2] + parts[at - 1], parts[at]))) is not None}
        return [known.get(at, part) for at, part in enumerate(parts)] if known else parts

    def _look_up(self, parts: Parts, scope: str, new: list[str]) -> Parts:
        """`parts` with ids in place of the texts, but of those stretches that have to be tokenised: they go to `new`
        as well."""
        ids, get = self._ids, self.memory.get
        pieces: list[str | array[int]] = []
        is_stretch = False
        for part in parts:
            is_stretch = not is_stretch
            if not isinstance(part, str):
                pieces.append(part)
            elif not is_stretch:
                pieces.append(ids[part])
            elif part:
                found = get((scope, part))
                if found is None:
                    new.append(part)
                    pieces.append(part)
                else:
                    pieces.append(found)
        return pieces

    def _add(self, new: Sequence[str], scope: str) -> dict[str, array[int]]:
        """Tokenise and remember these stretches; their ids."""
        prefixes = self._prefixes
        long = [stretch for stretch in new if len(stretch) >= LONG_CHARS] if prefixes is not None else []
        short = [stretch for stretch in new if len(stretch) < LONG_CHARS] if long else new
        encoded = dict(zip(short, self._encode(short), strict=True)) if short else {}
        if long and prefixes is not None:
            encoded.update(zip(long, prefixes.encode_many(long, scope), strict=True))
        for stretch, token_ids in encoded.items():
            self.memory.put((scope, stretch), token_ids)
        return encoded


def _joined(pieces: Parts, known: Mapping[str, array[int]]) -> array[int]:
    token_ids = array("I")
    for piece in pieces:
        token_ids += known[piece] if isinstance(piece, str) else piece
    return token_ids
