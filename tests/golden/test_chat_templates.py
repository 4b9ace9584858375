"""Rendered text and token ids equal transformers' for five model families.

Each case is a request body as a client sends it. Where transformers cannot take the request as it is (a list of text
parts for a template that concatenates strings), `theirs` says what it must be equal to instead, and why.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from tests.support.reference_tokenizers import FAMILIES, Reference, reference
from worker.prompt.detokenizer import StreamDetokenizer
from worker.prompt.requests import ChatRequest, parse_chat
from worker.protocol.api_error import ApiError

QUESTION = {"role": "user", "content": "What is the tallest mountain?"}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather <now> & later, in \"any\" städtchen 🌦",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                       "required": ["city"]},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user only": [QUESTION],
    "system and user": [{"role": "system", "content": "Answer in one word."}, QUESTION],
    "multi-turn": [
        {"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "Mount Everest."},
        {"role": "user", "content": "How tall?"}, {"role": "assistant", "content": "8,849 m."},
        {"role": "user", "content": "And K2?"},
    ],
    "unicode": [
        {"role": "user", "content": "Grüße 👩‍👩‍👧‍👦 مرحبا 你好 नमस्ते\u200d\u0301 \U0001f1f3\U0001f1f4 e\u0301 \ufeff"},
        {"role": "assistant", "content": "👍🏽\n"},
        {"role": "user", "content": "ﬁn — \u00a0 «ß» 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \x00 \u2028 𓀀"},
    ],
    "white space": [
        {"role": "user", "content": "  two\n\n\nblank   lines\t\r\n "}, {"role": "assistant", "content": " \n x \n"},
        {"role": "user", "content": ""},
    ],
    "code and numbers": [{"role": "user", "content": "def f(x):\n    return {'a': x ** 2}  # 1234567890 3.14e-10\n"}],
    "control tokens in text": [{"role": "user", "content": "<|im_start|>system\n<bos><|eot_id|><｜User｜>"}],
    "names and unknown keys": [{"role": "user", "content": "hi", "name": "ada", "x_custom": {"a": [1, None]}}],
}


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": messages, **fields}
    return parse_chat(json.dumps(body, ensure_ascii=False).encode())


def assert_equal(pair: Reference, request: ChatRequest, theirs: list[dict[str, Any]] | None = None,
                 **options: Any) -> None:
    """Our text and ids for `request` equal transformers' for `theirs` (by default the same messages)."""
    messages = list(request.messages) if theirs is None else theirs
    options = {"add_generation_prompt": request.add_generation_prompt, **options}
    text = pair.theirs.apply_chat_template(messages, tokenize=False, **options)
    token_ids = pair.theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert pair.renderer.chat_text(request) == text
    assert pair.renderer.chat(request) == token_ids


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Reference:
    return reference(request.param)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversation(pair: Reference, name: str, add_generation_prompt: bool) -> None:
    assert_equal(pair, chat(CONVERSATIONS[name], add_generation_prompt=add_generation_prompt))


def test_text_parts(pair: Reference) -> None:
    """Passed on where the template loops over parts (Gemma 3), joined where it takes strings only."""
    texts = ["First part. ", "  second 🧩"]
    parts = [{"type": "text", "text": text} for text in texts]
    request = chat([{"role": "user", "content": parts}])
    reads_parts = "item['text']" in (pair.renderer.bundle.chat_template or "")
    content: Any = parts if reads_parts else "\n".join(texts)
    assert_equal(pair, request, [{"role": "user", "content": content}])


def test_text_parts_of_a_system_message_all_arrive(pair: Reference) -> None:
    """Gemma 3's template reads a user's parts but only the first of a system message's: those are joined too."""
    parts = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    request = chat([{"role": "system", "content": parts}, QUESTION])
    assert_equal(pair, request, [{"role": "system", "content": "Be kind.\nBe brief."}, QUESTION])


@pytest.mark.parametrize("content", ["The tallest mountain is", "The tallest mountain is ", "trailing\n\n"])
def test_continue_final_message(pair: Reference, content: str) -> None:
    request = chat([QUESTION, {"role": "assistant", "content": content}], continue_final_message=True)
    assert request.add_generation_prompt is False
    assert_equal(pair, request, continue_final_message=True)


def test_continue_final_message_of_parts() -> None:
    pair = reference("gemma3")
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "Mount"}]
    request = chat([QUESTION, {"role": "assistant", "content": parts}], continue_final_message=True)
    assert_equal(pair, request, continue_final_message=True)


def test_developer_is_the_system_role_by_another_name(pair: Reference) -> None:
    request = chat([{"role": "developer", "content": "Be brief."}, QUESTION])
    assert_equal(pair, request, [{"role": "system", "content": "Be brief."}, QUESTION])


def test_template_kwargs() -> None:
    pair = reference("qwen3")
    request = chat([QUESTION], chat_template_kwargs={"enable_thinking": False})
    assert_equal(pair, request, enable_thinking=False)
    assert pair.renderer.chat_text(request) != pair.renderer.chat_text(chat([QUESTION]))


def test_kwargs_win_over_special_tokens() -> None:
    pair = reference("llama3_1")
    assert_equal(pair, chat([QUESTION], chat_template_kwargs={"bos_token": "<x>"}), bos_token="<x>")


def test_reasoning_under_any_name() -> None:
    pair = reference("qwen3")
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "K2", name: "Hmm, mountains."}
        request = chat([QUESTION, answer], add_generation_prompt=False)
        assert_equal(pair, request)
        assert "Hmm, mountains." in pair.renderer.chat_text(request)


def test_tools() -> None:
    pair = reference("qwen3")
    for conversation in CONVERSATIONS.values():
        assert_equal(pair, chat(conversation, tools=[WEATHER_TOOL]), tools=[WEATHER_TOOL])


@pytest.mark.parametrize("arguments", ['{"city": "Bergen", "days":2}', {"city": "Tromsø", "days": 2}, "{not json"])
def test_tool_calls_and_results(arguments: Any) -> None:
    """Qwen3 writes JSON text as it came and dumps objects itself; transformers gets the very same messages."""
    pair = reference("qwen3")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "{\"t\": 3}"},
    ]
    if isinstance(arguments, dict):  # our form for this template is text, which must read the same
        theirs_arguments = json.dumps(arguments, ensure_ascii=False)
        assert theirs_arguments in pair.renderer.chat_text(chat(messages, tools=[WEATHER_TOOL]))
    assert_equal(pair, chat(messages, tools=[WEATHER_TOOL]), tools=[WEATHER_TOOL])


def test_null_content_beside_tool_calls() -> None:
    """OpenAI's clients send content null; transformers drops the key, on which Qwen3's template fails."""
    pair = reference("qwen3")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    ours = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    theirs = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert_equal(pair, chat(ours), theirs)


def test_deepseek_tool_calls() -> None:
    """Its template asks whether content is none, which transformers 5 never passes: compared with its plain Jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template

    pair = reference("deepseek_v3")
    function = {"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"}
    messages: list[dict[str, Any]] = [
        QUESTION, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"}, {"role": "user", "content": "thanks"},
    ]
    theirs = [{"content": None, **message} for message in messages]
    texts, _ = render_jinja_template(conversations=[theirs], chat_template=pair.theirs.chat_template,
                                     add_generation_prompt=True, **pair.theirs.special_tokens_map)
    assert pair.renderer.chat_text(chat(messages)) == texts[0]
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    assert pair.renderer.chat_text(chat(messages)) == texts[0]


def test_roles_must_alternate_in_the_templates_words() -> None:
    pair = reference("gemma3")
    with pytest.raises(ApiError, match="roles must alternate") as raised:
        pair.renderer.chat(chat([QUESTION, QUESTION]))
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "invalid_request", "messages")


@pytest.mark.parametrize("family", ["smollm2", "llama3_1", "deepseek_v3", "gemma3"])
def test_tools_that_the_template_ignores(family: str) -> None:
    renderer = reference(family).renderer
    with pytest.raises(ApiError, match="no place for tools") as raised:
        renderer.chat(chat([QUESTION], tools=[WEATHER_TOOL]))
    assert (raised.value.status, raised.value.param) == (400, "tools")
    assert renderer.chat(chat([QUESTION], tools=[WEATHER_TOOL], tool_choice="none"))


PLAIN_TEXTS = ["", "Hello world", " leading", "a\n\nb  c", "Grüße 👩‍👩‍👧 1234567 مرحبا", "<bos>x<|im_end|>"]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_plain_text(pair: Reference, text: str) -> None:
    """With and without the special tokens that tokenizer.json adds."""
    for add_special_tokens in (True, False):
        ours = pair.renderer.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ours == pair.theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert pair.renderer.tokenizer.decode(ours, skip_special_tokens=skip) == pair.theirs.decode(
                ours, skip_special_tokens=skip)


@pytest.mark.parametrize(("family", "eos_token_ids", "vocab_size"), [
    ("smollm2", (2,), 49_152), ("qwen3", (151_645,), 151_669), ("llama3_1", (128_009,), 128_256),
    ("deepseek_v3", (1,), 128_815), ("gemma3", (106,), 262_145),
])
def test_eos_and_vocabulary(family: str, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
    pair = reference(family)
    bundle = pair.renderer.bundle
    assert bundle.eos_token_ids == eos_token_ids
    assert pair.theirs.eos_token_id in bundle.eos_token_ids
    assert pair.renderer.tokenizer.vocab_size == vocab_size == len(pair.theirs)


def test_special_tokens(pair: Reference) -> None:
    """Ours are those that the files name; transformers' classes add defaults of their own, such as Gemma's <mask>."""
    ours = pair.renderer.bundle.special_tokens
    assert ours.items() <= pair.theirs.special_tokens_map.items()
    assert set(pair.theirs.special_tokens_map) - set(ours) <= {"mask_token"}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streamed_text_of_random_ids(pair: Reference, skip_special_tokens: bool) -> None:
    """Any ids, one by one: the deltas are transformers' decode() of all. A fixed seed; the property tests vary it."""
    tokenizer = pair.renderer.tokenizer
    random = Random(20_261_129)
    byte_ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).isascii()]
    for _ in range(20):
        ids = random.choices(range(tokenizer.vocab_size), k=20) + random.choices(byte_ids, k=20)
        random.shuffle(ids)
        stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        text = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish()
        assert text == pair.theirs.decode(ids, skip_special_tokens=skip_special_tokens)


def test_tokens_spell_the_text(pair: Reference) -> None:
    text = "".join(str(message["content"]) for message in CONVERSATIONS["unicode"])
    tokenizer = pair.renderer.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)
