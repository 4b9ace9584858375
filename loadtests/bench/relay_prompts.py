"""What the gateway benchmarks ask: seeded chats of three shapes, and a small real tokenizer for them.

`SHORT` (1 KB) and `LONG` (32 KB) chats have a beginning that 16 groups of clients share and a last message that
nobody sent before, 256 and 1,024 bytes long: what an assistant's second user, or the next turn of a conversation,
looks like. `DISTINCT` chats (8 KB) share nothing with anybody.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.prompt.tokenizer import TokenizerBundle

MODEL = "bench"
SEED = 11
VOCAB_SIZE = 4096
NUM_GROUPS = 16
TURN_BYTES = 2048
_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
             "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
             "{% endif %}")
_SYLLABLES = ("ka", "to", "ri", "men", "sol", "va", "ne", "tur", "pi", "lo", "den", "as")


@dataclass(frozen=True, slots=True)
class Shape:
    """A body of `num_bytes` whose last `new_bytes` of text are new; all of it when `new_bytes` is None."""

    name: str
    num_bytes: int
    new_bytes: int | None


SHORT = Shape("1 KB", 1000, 256)
LONG = Shape("32 KB", 32_000, 1024)
DISTINCT = Shape("8 KB, all new", 8_000, None)


@lru_cache(1)
def _known_words() -> list[str]:
    rng = random.Random(SEED)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randrange(1, 4))) for _ in range(3000)]


def words(rng: random.Random, num_chars: int) -> str:
    """Made-up words, a few thousand of them, so that a small vocabulary covers them as a large one does prose."""
    return " ".join(rng.choices(_known_words(), k=num_chars // 3 + 1))[:num_chars]


def bench_bundle() -> TokenizerBundle:
    """A byte-level BPE trained on such words, three to four characters a token, with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([words(random.Random(SEED), 100_000)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token in ("<|im_start|>", "<|im_end|>")])
    return TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={"eos_token": "<|im_end|>"},
                           chat_templates={"default": _TEMPLATE},
                           eos_token_ids=(tokenizer.token_to_id("<|im_end|>") or 0,))


def bodies(shape: Shape, count: int, *, stream: bool = False, seed: int = SEED) -> list[bytes]:
    """`count` chats, no two alike; `seed` decides what is new in them, never what is shared."""
    rng = random.Random(f"{shape.name} {stream} {seed}")
    if shape.new_bytes is None:
        return [_body([("user", words(rng, shape.num_bytes - _overhead(stream)))], stream) for _ in range(count)]
    beginnings = [_beginning(shape, group, stream) for group in range(NUM_GROUPS)]
    return [_body([*beginnings[number % NUM_GROUPS], ("user", words(rng, shape.new_bytes))], stream)
            for number in range(count)]


def _beginning(shape: Shape, group: int, stream: bool) -> list[tuple[str, str]]:
    """A system prompt, and turns of TURN_BYTES behind it for as much as there is room."""
    assert shape.new_bytes is not None
    rng = random.Random(f"{shape.name} group {group}")
    room = shape.num_bytes - shape.new_bytes - _overhead(stream)
    turns: list[tuple[str, str]] = []
    while room > TURN_BYTES:
        role = ("user", "assistant")[len(turns) % 2]
        turns.append((role, words(rng, TURN_BYTES - 40)))
        room -= TURN_BYTES
    return [("system", words(rng, room)), *turns]


def _overhead(stream: bool) -> int:
    return len(_body([("system", ""), ("user", "")], stream))


def _body(messages: list[tuple[str, str]], stream: bool) -> bytes:
    return orjson.dumps({"model": MODEL, "stream": stream, "max_tokens": 64,
                         "messages": [{"role": role, "content": content} for role, content in messages]})
