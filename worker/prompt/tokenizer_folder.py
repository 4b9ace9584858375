"""Reads a Hugging Face model folder into the parts of a TokenizerBundle.

Owns the precedence among the files in which a model states its special tokens, templates and end-of-sequence ids,
which is the one of transformers 5.24. Must never import transformers: tokenizer.json alone decides ids, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
from tokenizers import AddedToken, Tokenizer

from worker.prompt.chat_template import ChatTemplate


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; the message names the file and the remedy."""


class KnownToken(msgspec.Struct):
    """An entry of tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[KnownToken] = []


_tokenizer_json_decoder = msgspec.json.Decoder(_TokenizerJson)  # skips the vocabulary, which is megabytes


def read_tokenizer(folder: Path, config: dict[str, Any]) -> bytes:
    """tokenizer.json, completed with the special tokens that only tokenizer_config.json knows.

    Byte for byte the file when nothing is missing, which is nearly always.
    """
    path = folder / "tokenizer.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror}). A model folder needs tokenizer.json: load "
                             "it once with transformers' AutoTokenizer and call save_pretrained().") from error
    known = {token.content: token.special for token in added_tokens(raw)}
    missing = [token for token in _configured_tokens(config) if known.get(token.content) is not token.special]
    if not missing:
        return raw
    tokenizer = Tokenizer.from_buffer(raw)
    tokenizer.add_special_tokens([token for token in missing if token.special])
    tokenizer.add_tokens([token for token in missing if not token.special and token.content not in known])
    return tokenizer.to_str().encode()


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over special_tokens_map.json where an old model states its tokens only there."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_json(folder / "special_tokens_map.json")}


def named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...}: every named token, as templates read them."""
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    named.update(extra if isinstance(extra, dict) else {})
    texts = {name: _token_text(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def read_chat_templates(folder: Path, config: dict[str, Any], override: Path | None) -> dict[str, str]:
    """Jinja sources by name: `override` alone, else *.jinja files, else tokenizer_config, else chat_template.json."""
    if override is not None:
        return {"default": _read_template(override)}
    templates = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_template(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    if templates:
        return templates
    stated = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {item["name"]: item["template"] for item in stated}
    return dict(stated) if isinstance(stated, dict) else {}


def stated_eos_token_ids(folder: Path, special_tokens: dict[str, str], added: list[KnownToken]) -> set[int]:
    """The ids that the model's files call end of sequence: `eos_token_id` of both configs, and `eos_token`."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        stated = _read_json(folder / name)
        for holder in (stated, stated.get("text_config") or {}):
            value = holder.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    ids.update(token.id for token in added if token.content == special_tokens.get("eos_token"))
    return ids


def turn_end_token_ids(chat_template: str, special_tokens: dict[str, str], added: list[KnownToken]) -> set[int]:
    """The special token that a chat template writes after an assistant's turn; empty when it writes none.

    Some models (Gemma 3's base files) end turns with a token that they do not call EOS, and would talk on behind it.
    """
    try:
        text = ChatTemplate(chat_template, special_tokens).turn_end_text().lstrip()
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    candidates = [token for token in added if token.special and token.content and text.startswith(token.content)]
    return {max(candidates, key=lambda token: len(token.content)).id} if candidates else set()


def read_model_vocab_size(folder: Path) -> int | None:
    """The rows of the model's embedding; a tokenizer may know more tokens than that, or fewer."""
    config = _read_json(folder / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size) if size else None


def added_tokens(tokenizer_json: bytes) -> list[KnownToken]:
    """The `added_tokens` of a tokenizer.json."""
    try:
        return _tokenizer_json_decoder.decode(tokenizer_json).added_tokens
    except msgspec.MsgspecError as error:
        raise TokenizerError(f"tokenizer.json is not a tokenizer: {error}") from error


def _configured_tokens(config: dict[str, Any]) -> Iterator[AddedToken]:
    seen = set()
    for value in (config.get("added_tokens_decoder") or {}).values():
        if isinstance(value, dict):
            seen.add(value["content"])
            yield _added_token(value)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = list(named_special_tokens(config).values())
    for value in [*named, *(extra if isinstance(extra, list) else ())]:
        text = _token_text(value)
        if text is not None and text not in seen:
            seen.add(text)
            yield AddedToken(text, special=True, normalized=False)


def _added_token(value: dict[str, Any]) -> AddedToken:
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
             if name in value}
    return AddedToken(value["content"], **flags)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"The chat template {path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        stated = _read_json(path).get("chat_template")
        if not isinstance(stated, str):
            raise TokenizerError(f"{path} holds no \"chat_template\" string.")
        return stated
    return text


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object.")
    return value
