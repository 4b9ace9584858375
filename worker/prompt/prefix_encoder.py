"""Ids of a text from the ids of an earlier text that begins alike, and only what is new tokenised.

Owns when the memory of earlier texts is used and what is put into it. Must never give other ids than the tokenizer
gives for the whole text: cuts are made where cut_rules.py allows them, and behind what is remembered the rest is
tokenised from the last cut that lies in the common text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from worker.prompt.cut_rules import CutRule
from worker.prompt.piece_trie import PieceNode, PieceTrie

PIECE_CHARS = 1024

Encode = Callable[[Sequence[str]], "list[array[int]]"]     # quoted: Python 3.11 cannot subscript array


class _Plan(NamedTuple):
    """What is known of a text (`path`), and the offsets between which the rest is tokenised part by part."""

    text: str
    path: list[PieceNode]
    cuts: list[int]

    def parts(self) -> list[str]:
        """The stretches to tokenise, in order."""
        return [self.text[start:end] for start, end in zip(self.cuts, [*self.cuts[1:], len(self.text)], strict=True)]


class PrefixEncoder:
    """Remembers what it tokenised, in at most `max_bytes`. Safe to use from several threads.

    `encode` gives the ids of each of several texts, without special tokens around them. The memory is locked only
    while it is looked into or added to; tokenising happens outside, so two threads may tokenise the same new text.
    """

    def __init__(self, rule: CutRule, encode: Encode, max_bytes: int,
                 piece_chars: int = PIECE_CHARS) -> None:
        self.trie = PieceTrie(max_bytes, piece_chars)
        self._rule = rule
        self._encode = encode

    def encode_many(self, texts: Sequence[str], scope: str = "") -> list[array[int]]:
        """The ids of each text, all that is new in one call. What one scope remembers, no other can tell."""
        plans = [self._plan(text, scope) for text in texts]
        encoded = self._encode([part for plan in plans for part in plan.parts()])
        results = []
        at = 0
        for plan in plans:
            new = encoded[at:at + len(plan.cuts)]
            at += len(plan.cuts)
            self._remember(plan, new, scope)
            token_ids = array("I")
            for node in plan.path:
                token_ids += node.token_ids
            for part in new:
                token_ids += part
            results.append(token_ids)
        return results

    def _plan(self, text: str, scope: str) -> _Plan:
        path = self.trie.find(text, scope)
        cuts = [path[-1].cut if path else 0]
        size = self.trie.piece_chars
        for end in range((len(path) + 1) * size, len(text) + 1, size):
            # Looked for in one piece only: a long text without any cut must not be read again and again.
            start = max(cuts[-1], end - size)
            cut = self._rule.last(text, start, end)
            cuts.append(cut if cut > start else cuts[-1])
        return _Plan(text, path, cuts)

    def _remember(self, plan: _Plan, new: Sequence[array[int]], scope: str) -> None:
        size = self.trie.piece_chars
        first = len(plan.path)
        num_pieces = len(plan.cuts) - 1
        while num_pieces and plan.cuts[num_pieces] == plan.cuts[num_pieces - 1]:
            num_pieces -= 1     # a last piece without a cut would be of no use to anybody
        pieces = [(plan.text[(first + index) * size:(first + index + 1) * size], plan.cuts[index + 1], new[index])
                  for index in range(num_pieces)]
        if pieces:
            self.trie.extend(plan.path, pieces, scope)
