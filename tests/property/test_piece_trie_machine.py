"""The memory of earlier texts against a naive one, ten thousand steps, always under its byte cap."""

from __future__ import annotations

import random
import threading
import tracemalloc
from array import array

import pytest

from worker.prompt.cut_rules import CutRule
from worker.prompt.piece_trie import PieceTrie
from worker.prompt.prefix_encoder import PrefixEncoder

NUM_STEPS = 10_000
PIECE_CHARS = 8
SCOPES = ("", "a", "b")
AFTER_A_SPACE = CutRule(["[a-z](?= )"])


def by_word(text: str) -> array[int]:
    """A toy tokenizer that may be cut before a space: an id a character, that depends on the whole word so far."""
    token_ids = array("I")
    state = 0
    for char in text:
        state = 0 if char == " " else state * 31 + ord(char)
        token_ids.append((state + ord(char)) % 100_000)
    return token_ids


def toy_encoder(max_bytes: int) -> PrefixEncoder:
    return PrefixEncoder(AFTER_A_SPACE, lambda texts: [by_word(text) for text in texts], max_bytes, PIECE_CHARS)


def grow(rng: random.Random, texts: list[str]) -> str:
    """A new text, or an old one cut anywhere and continued."""
    base = rng.choice(texts) if texts and rng.random() < 0.8 else ""
    tail = "".join(rng.choice("ab  é🙂\n") for _ in range(rng.randrange(40)))
    text = base[:rng.randrange(len(base) + 1)] + tail
    texts[rng.randrange(len(texts)) if len(texts) >= 50 else len(texts):] = [text]
    return text


@pytest.mark.parametrize("max_bytes", [0, 600, 5_000, 60_000])
def test_ten_thousand_steps(max_bytes: int) -> None:
    rng = random.Random(max_bytes)
    encoder = toy_encoder(max_bytes)
    texts: list[str] = []
    num_hits = 0
    for step in range(NUM_STEPS // 4):
        batch = [grow(rng, texts) for _ in range(rng.choice((1, 1, 1, 3)))]
        scope = rng.choice(SCOPES)
        num_hits += bool(encoder.trie.find(batch[0], scope))
        assert encoder.encode_many(batch, scope) == [by_word(text) for text in batch]
        assert encoder.trie.num_bytes <= max_bytes
        if step % 50 == 0:
            encoder.trie.check_invariants()
    assert (num_hits > NUM_STEPS // 20) == (max_bytes >= 60_000)


def test_found_is_what_was_stored_until_it_is_forgotten() -> None:
    """Every path that is found equals the text's own beginning, and the most recent text is always there."""
    rng = random.Random(1)
    trie = PieceTrie(20_000, PIECE_CHARS)
    texts: list[str] = []
    for _ in range(NUM_STEPS):
        text = grow(rng, texts)[:80]
        path = trie.find(text)
        assert "".join(node.key[1] for node in path) == text[:len(path) * PIECE_CHARS]
        pieces = [text[at:at + PIECE_CHARS] for at in range(0, len(text) - PIECE_CHARS + 1, PIECE_CHARS)]
        new = [(piece, (len(path) + index + 1) * PIECE_CHARS, array("I", map(ord, piece)))
               for index, piece in enumerate(pieces[len(path):])]
        trie.extend(path, new)
        assert [node.token_ids for node in trie.find(text)] == [array("I", map(ord, piece)) for piece in pieces]
    trie.check_invariants()


def test_a_scope_never_sees_another() -> None:
    encoder = toy_encoder(1 << 20)
    text = "ab ab ab " * 10
    encoder.encode_many([text], "one")
    assert encoder.trie.find(text, "one")
    assert not encoder.trie.find(text, "two")
    assert not encoder.trie.find(text)


def test_the_charge_covers_what_python_allocates() -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choice("abcdefg  ") for _ in range(8_000)) for _ in range(15)]
    encoder = PrefixEncoder(AFTER_A_SPACE, lambda parts: [by_word(part) for part in parts], 32 << 20)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for text in texts:
        encoder.encode_many([text])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.7 * encoder.trie.num_bytes < held < encoder.trie.num_bytes * 1.05


def test_threads_share_the_memory() -> None:
    encoder = toy_encoder(30_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng, texts = random.Random(seed % 2), list[str]()
        for _ in range(400):
            text = grow(rng, texts)
            if encoder.encode_many([text])[0] != by_word(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    encoder.trie.check_invariants()
