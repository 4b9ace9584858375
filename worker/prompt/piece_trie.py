"""Texts seen before, as a trie of fixed-size pieces: how far a new text equals an old one, and the ids up to there.

Owns the memory and its bound. It knows nothing of tokenizers: whoever stores a piece vouches that the ids up to its
cut are the same for every text that begins with the pieces up to this one.

Pieces are compared, never only hashed, so a match is certain; the hash in between is Python's own, which is keyed per
process. Nodes are forgotten in the order of their last use. Every use touches a whole path, leaf first, so the node
that is forgotten next never has children.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

NODE_BYTES = 560    # a node's objects and its place in the table beside text and ids, as tracemalloc sees them

Key = tuple[int | str, str]     # the parent's serial, or of a first piece its scope; and the text


class PieceNode:
    """One piece of text behind its parent's. `cut` is an offset in the whole text, at or before the piece's end.

    `token_ids` are the ids between the parent's cut and this one, `num_bytes` what the node is charged.
    """

    __slots__ = ("cut", "key", "num_bytes", "serial", "token_ids")

    def __init__(self, key: Key, serial: int, cut: int, token_ids: array[int]) -> None:
        self.key = key
        self.serial = serial
        self.cut = cut
        self.token_ids = token_ids
        self.num_bytes = NODE_BYTES + sys.getsizeof(key[1]) + len(token_ids) * token_ids.itemsize


class PieceTrie:
    """At most `max_bytes` of pieces of `piece_chars` characters each. Safe to use from several threads."""

    def __init__(self, max_bytes: int, piece_chars: int) -> None:
        self.max_bytes = max_bytes
        self.piece_chars = piece_chars
        self.num_bytes = 0
        self._nodes: OrderedDict[Key, PieceNode] = OrderedDict()     # least recently used first
        self._last_serial = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, text: str, scope: str = "") -> list[PieceNode]:
        """The pieces remembered in `scope` that `text` begins with, from its start; the path counts as used."""
        path = []
        size = self.piece_chars
        parent: int | str = scope
        with self._lock:
            for end in range(size, len(text) + 1, size):
                node = self._nodes.get((parent, text[end - size:end]))
                if node is None:
                    break
                path.append(node)
                parent = node.serial
            self._touch(path)
        return path

    def extend(self, path: Sequence[PieceNode], pieces: Sequence[tuple[str, int, array[int]]],
               scope: str = "") -> None:
        """Remember (piece, cut, ids since the cut before) behind the last node of `path`, a result of find().

        Nothing is stored when the path was forgotten meanwhile. What another thread stored first is kept.
        """
        with self._lock:
            if any(self._nodes.get(node.key) is not node for node in path):
                return
            whole = list(path)
            parent: int | str = whole[-1].serial if whole else scope
            for piece, cut, token_ids in pieces:
                node = self._nodes.get((parent, piece)) or self._add((parent, piece), cut, token_ids)
                whole.append(node)
                parent = node.serial
            self._touch(whole)
            self._shrink()

    def check_invariants(self) -> None:
        """AssertionError when the charge is off, the bound broken, or a node cannot be reached."""
        assert self.num_bytes == sum(node.num_bytes for node in self._nodes.values()) <= self.max_bytes
        younger: set[int] = set()
        for key, node in reversed(self._nodes.items()):
            assert key is node.key
            assert isinstance(key[0], str) or key[0] in younger, "a node is used after its parent"
            younger.add(node.serial)

    def _add(self, key: Key, cut: int, token_ids: array[int]) -> PieceNode:
        self._last_serial += 1
        node = self._nodes[key] = PieceNode(key, self._last_serial, cut, token_ids)
        self.num_bytes += node.num_bytes
        return node

    def _touch(self, path: Sequence[PieceNode]) -> None:
        for node in reversed(path):
            self._nodes.move_to_end(node.key)

    def _shrink(self) -> None:
        while self.num_bytes > self.max_bytes:
            _, node = self._nodes.popitem(last=False)
            self.num_bytes -= node.num_bytes
