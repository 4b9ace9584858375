"""A seeded model of a chosen size as a Hugging Face folder: real code, no meaning, nothing to download."""

from __future__ import annotations

import json
import random
from pathlib import Path

from loadtests.bench.relay_prompts import words

SEED = 20
VOCAB_SIZE = 1024
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
             "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
             "{% endif %}")


def write_tiny_model(folder: Path, *, hidden: int = 32, layers: int = 2, max_context: int = 4096,
                     vocab_size: int = VOCAB_SIZE, text: str | None = None) -> Path:
    """A Llama with grouped heads, `hidden` wide and `layers` deep, with tokenizer and chat template. The tokenizer
    learns `text`, or made-up words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_context, tie_word_embeddings=True,
        initializer_range=0.3 if hidden <= 64 else 0.05, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder, vocab_size, words(random.Random(SEED), 50_000) if text is None else text)
    return folder


def _write_tokenizer(folder: Path, vocab_size: int, text: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = SPECIAL
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad,
        "clean_up_tokenization_spaces": False, "chat_template": _TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))
