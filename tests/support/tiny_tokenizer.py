"""A small byte-level BPE tokenizer with a chat template, trained on the spot: every Unicode text round-trips.

Deterministic: the same folder content every time, so that two workers of one test share a hash scheme.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TINY_VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{{ 'Write <tool_call>{...}</tool_call>: ' + tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat",
    "system user assistant you are a helpful assistant that answers questions about the weather",
    "hello world, this is a tiny tokenizer with few merges; numbers 0 1 2 3 4 5 6 7 8 9",
]


@lru_cache(1)
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer itself; ids 0, 1, 2 are PAD, BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE, special_tokens=[PAD, BOS, EOS], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_tiny_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json, as a Hugging Face folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
              "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tiny_tokenizer()
    generation = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS),
                  "pad_token_id": tokenizer.token_to_id(PAD)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
