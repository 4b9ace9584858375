"""What the relay benchmark asks: seeded chats of about 1 KB, and a small real tokenizer for them."""

from __future__ import annotations

import random

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.prompt.tokenizer import TokenizerBundle

MODEL = "bench"
SEED = 11
VOCAB_SIZE = 2048
BODY_BYTES = 1000  # up to 1,024 bytes a gateway tokenises on its loop
NUM_PROMPTS = 64
_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
_SYLLABLES = ("ka", "to", "ri", "men", "sol", "va", "ne", "tur", "pi", "lo", "den", "as")


def words(rng: random.Random, count: int) -> str:
    """Made-up words, a few hundred of them, so that a small vocabulary covers them as a large one does prose."""
    known = ["".join(rng.choices(_SYLLABLES, k=rng.randrange(1, 4))) for _ in range(400)]
    return " ".join(rng.choices(known, k=count))


def bench_bundle() -> TokenizerBundle:
    """A byte-level BPE trained on such words: about four characters a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([words(random.Random(SEED), 20_000)], trainer)
    return TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={},
                           chat_templates={"default": _TEMPLATE}, eos_token_ids=(0,))


def bodies(*, stream: bool) -> list[bytes]:
    """Chat requests of BODY_BYTES; groups of four share their first three quarters."""
    rng = random.Random(SEED)
    shared = [words(rng, 400)[:BODY_BYTES * 3 // 4] for _ in range(NUM_PROMPTS // 4)]
    return [_body(shared[number // 4] + words(rng, 400), stream) for number in range(NUM_PROMPTS)]


def _body(text: str, stream: bool) -> bytes:
    def body(content: str) -> bytes:
        return orjson.dumps({"model": MODEL, "stream": stream, "max_tokens": 64,
                             "messages": [{"role": "user", "content": content}]})

    return body(text[:BODY_BYTES - len(body(""))])
