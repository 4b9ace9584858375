"""The tokenizer bundle: what it reads from a model folder, its digests, and its way over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle
from worker.prompt.tokenizer_folder import TokenizerError

Write = Callable[..., None]
TURNS = "{% for m in messages %}{{ m.content }}<|pad|>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def edit(folder: Path, name: str, **changes: Any) -> None:
    value = {**json.loads((folder / name).read_text()), **changes}
    write(folder, name, {key: item for key, item in value.items() if item is not ...})


def load(folder: Path, **options: Any) -> TokenizerBundle:
    return TokenizerBundle.from_directory(folder, **options)


def test_reads_a_folder(folder: Path) -> None:
    bundle = load(folder)
    assert bundle.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert bundle.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert bundle.chat_template == CHAT_TEMPLATE
    assert (bundle.eos_token_ids, bundle.model_vocab_size) == ((2,), None)


def test_over_the_wire_and_back(folder: Path) -> None:
    bundle = msgspec.structs.replace(load(folder), model_vocab_size=300, eos_token_ids=(2, 7))
    back = TokenizerBundle.from_wire(bundle.to_wire())
    assert back == bundle
    assert back.digest == bundle.digest


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"version":1}'])
def test_not_a_bundle(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a tokenizer bundle"):
        TokenizerBundle.from_wire(body)


def test_a_changed_or_newer_bundle_is_refused(folder: Path) -> None:
    wire = json.loads(load(folder).to_wire())
    for change in ({"chat_templates": {}}, {"tokenizer_json": wire["tokenizer_json"] + " "}, {"special_tokens": {}}):
        with pytest.raises(ValueError, match="digests"):
            TokenizerBundle.from_wire(json.dumps({**wire, **change}).encode())
    with pytest.raises(ValueError, match="version 2"):
        TokenizerBundle.from_wire(json.dumps({**wire, "version": 2}).encode())


def test_digests_change_with_what_they_cover(folder: Path) -> None:
    bundle = load(folder)
    changed = {
        "tokenizer_json": bundle.tokenizer_json + b" ", "special_tokens": {"bos_token": "x"},
        "chat_templates": {"default": "x"}, "eos_token_ids": (9,), "model_vocab_size": 5,
    }
    moved = {field: msgspec.structs.replace(bundle, **{field: value}) for field, value in changed.items()}
    assert len({bundle.digest, *(other.digest for other in moved.values())}) == 6
    assert {field for field, other in moved.items() if other.tokenizer_digest != bundle.tokenizer_digest} == {
        "tokenizer_json"}
    assert {field for field, other in moved.items() if other.template_digest != bundle.template_digest} == {
        "special_tokens", "chat_templates"}


def test_digests_do_not_depend_on_order(folder: Path) -> None:
    bundle = load(folder)
    turned = msgspec.structs.replace(bundle, special_tokens=dict(reversed(bundle.special_tokens.items())))
    assert list(turned.special_tokens) != list(bundle.special_tokens)
    assert turned.digest == bundle.digest


@pytest.mark.parametrize(("files", "expected"), [
    ({}, {"default": CHAT_TEMPLATE}),
    ({"chat_template.jinja": "file"}, {"default": "file"}),
    ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
     {"default": "file", "tool_use": "tools"}),
    ({"chat_template.json": {"chat_template": "old"}}, {"default": CHAT_TEMPLATE}),
])
def test_template_files_win_over_the_config(folder: Path, files: dict[str, Any], expected: dict[str, str]) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, value in files.items():
        write(folder, name, value)
    assert load(folder).chat_templates == expected


@pytest.mark.parametrize(("stated", "expected"), [
    (..., {}), (None, {}), ("one", {"default": "one"}), ({"default": "a", "rag": "b"}, {"default": "a", "rag": "b"}),
    ([{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}], {"default": "a", "rag": "b"}),
])
def test_templates_in_the_config(folder: Path, stated: Any, expected: dict[str, str]) -> None:
    edit(folder, "tokenizer_config.json", chat_template=stated)
    assert load(folder).chat_templates == expected


def test_a_processors_template_is_the_last_resort(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", chat_template=...)
    write(folder, "chat_template.json", {"chat_template": "old"})
    assert load(folder).chat_template == "old"


def test_the_operators_template_replaces_all(folder: Path, tmp_path: Path) -> None:
    write(folder, "chat_template.jinja", "file")
    write(tmp_path, "mine.jinja", "mine é")
    assert load(folder, chat_template=tmp_path / "mine.jinja").chat_templates == {"default": "mine é"}
    write(tmp_path, "mine.json", {"chat_template": "from json"})
    assert load(folder, chat_template=tmp_path / "mine.json").chat_template == "from json"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, (2,)), ({"config.json": {"eos_token_id": 7}}, (2, 7)),
    ({"config.json": {"eos_token_id": [9, 7]}}, (2, 7, 9)),
    ({"config.json": {"text_config": {"eos_token_id": 5, "vocab_size": 12}}}, (2, 5)),
    ({"config.json": {"eos_token_id": None}}, (2,)),
    ({"generation_config.json": {"eos_token_id": [1, 106]}}, (1, 2, 106)),
])
def test_eos_ids_are_united(folder: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    for name, value in files.items():
        write(folder, name, value)
    assert load(folder).eos_token_ids == expected


def test_the_token_that_ends_a_turn_is_an_eos_too(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", chat_template=TURNS)
    assert load(folder).eos_token_ids == (0, 2)
    edit(folder, "tokenizer_config.json", chat_template=TURNS.replace("<|pad|>", "\n\n<|pad|>"))
    assert load(folder).eos_token_ids == (0, 2)
    edit(folder, "tokenizer_config.json", chat_template=TURNS.replace("<|pad|>", " the end<|pad|>"))
    assert load(folder).eos_token_ids == (2,)


def test_special_tokens_of_old_and_new_files(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", bos_token={"content": "<b>", "lstrip": False}, unk_token=None,
         extra_special_tokens={"image_token": "<img>"}, add_bos_token=True)
    write(folder, "special_tokens_map.json", {"pad_token": "<p>", "sep_token": {"content": "<sep>"}})
    tokens = load(folder).special_tokens
    assert tokens == {"bos_token": "<b>", "eos_token": "<|im_end|>", "image_token": "<img>", "pad_token": "<p>",
                      "sep_token": "<sep>"}
    edit(folder, "tokenizer_config.json", added_tokens_decoder={})
    assert "sep_token" not in load(folder).special_tokens  # as transformers: the newer file is complete


def test_special_tokens_that_only_the_config_knows_are_added(folder: Path) -> None:
    plain = load(folder)
    edit(folder, "tokenizer_config.json", cls_token="<|cls|>", additional_special_tokens=["<|extra|>"],
         added_tokens_decoder={"400": {"content": "<|note|>", "special": False, "normalized": False}})
    tokenizer = PromptTokenizer(load(folder))
    start = PromptTokenizer(plain).vocab_size
    assert tokenizer.vocab_size == start + 3
    ids = tokenizer.encode("a<|cls|><|extra|><|note|>", add_special_tokens=False)
    assert sorted(ids[1:]) == [start, start + 1, start + 2]
    assert tokenizer.decode(ids) == "a<|note|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|cls|><|extra|><|note|>"


def test_the_vocabulary_ends_where_the_models_rows_end(folder: Path) -> None:
    whole = PromptTokenizer(load(folder)).vocab_size
    for rows, expected in ((whole + 100, whole), (whole - 1, whole - 1)):
        write(folder, "config.json", {"vocab_size": rows})
        assert PromptTokenizer(load(folder)).vocab_size == expected
    write(folder, "config.json", {"text_config": {"vocab_size": 17}})
    assert load(folder).model_vocab_size == 17


def test_padding_and_truncation_of_a_saved_tokenizer_are_off(folder: Path) -> None:
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(3)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    tokenizer = PromptTokenizer(load(folder))
    assert len(tokenizer.encode("abcdefgh ijkl", add_special_tokens=False)) > 8
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_encoding_many_is_encoding_each(folder: Path) -> None:
    tokenizer = PromptTokenizer(load(folder))
    texts = ["the cat", "", "🌦 é", "x" * 50]
    assert tokenizer.encode_many(texts, add_special_tokens=True) == [
        tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert tokenizer.encode_many([], add_special_tokens=True) == []


def test_token_bytes(folder: Path) -> None:
    tokenizer = PromptTokenizer(load(folder))
    text = "the é🌦 x\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert (tokenizer.token_bytes(10**6), tokenizer.token_text(10**6)) == (b"", None)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("tokenizer.json", None, "save_pretrained"), ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
    ("tokenizer_config.json", "[]", "JSON object"), ("config.json", "{", "config.json cannot be read"),
    ("chat_template.jinja", "{% if %}", "not valid Jinja"),
])
def test_what_is_wrong_with_a_folder(folder: Path, name: str, content: str | None, says: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        write(folder, name, content)
    with pytest.raises(TokenizerError, match=says):
        load(folder)


def test_a_missing_template_file(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"none\.jinja cannot be read"):
        load(folder, chat_template=folder / "none.jinja")


def test_a_tokenizer_that_does_not_load(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        PromptTokenizer(msgspec.structs.replace(load(folder), tokenizer_json=b"{}"))
