"""Shapes of OpenAI's objects, held against the official client's own strict types where it has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer
from worker.core.batch import TokenLogprobs
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle
from worker.server.generation import Account, ChoiceDelta
from worker.server.openai_format import ChatFormat, CompletionFormat, FullChoice, ResponseHead
from worker.server.token_text import TokenText

ACCOUNT = Account(prompt_tokens=10, cached_tokens=4, completion_tokens=3)


@pytest.fixture(scope="module")
def token_text(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(Path(folder))
    return TokenText(PromptTokenizer(TokenizerBundle.from_directory(Path(folder))))


def head(*, return_token_ids: bool = False, include_usage: bool = False) -> ResponseHead:
    return ResponseHead(request_id="r1", created=1, model="tiny", system_fingerprint="fp_0",
                        return_token_ids=return_token_ids, include_usage=include_usage)


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def test_chat_object_is_what_the_official_client_reads(token_text: TokenText) -> None:
    choice = FullChoice(text="hello", token_ids=ids("hello"), finish_reason="stop")
    body = ChatFormat(head(), token_text).full([choice], ACCOUNT)
    read = ChatCompletion.model_validate(body, strict=True)
    assert read.id == "chatcmpl-r1"
    assert read.choices[0].message.content == "hello"
    assert read.usage is not None
    assert read.usage.prompt_tokens_details is not None
    assert (read.usage.prompt_tokens_details.cached_tokens, read.usage.total_tokens) == (4, 13)


def test_completion_object_is_what_the_official_client_reads(token_text: TokenText) -> None:
    body = CompletionFormat(head(), token_text).full([FullChoice(text="x", finish_reason="length")], ACCOUNT)
    read = Completion.model_validate(body, strict=True)
    assert (read.id, read.choices[0].text, read.choices[0].finish_reason) == ("cmpl-r1", "x", "length")


def test_chat_stream_begins_each_choice_with_its_role(token_text: TokenText) -> None:
    layout = ChatFormat(head(), token_text)
    first = layout.chunks(ChoiceDelta(0, "he", ids("he")))
    other = layout.chunks(ChoiceDelta(1, "x", ids("x")))
    later = layout.chunks(ChoiceDelta(0, "y", ids("y"), None, "stop"))
    assert [chunk["choices"][0]["delta"] for chunk in first] == [{"role": "assistant", "content": ""},
                                                                 {"content": "he"}]
    assert other[0]["choices"][0] == {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                      "finish_reason": None}
    assert [chunk["choices"][0]["finish_reason"] for chunk in later] == ["stop"]
    for chunk in (*first, *other, *later):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_a_delta_that_says_nothing_makes_no_chunk_unless_ids_were_asked_for(token_text: TokenText) -> None:
    held_back = ChoiceDelta(0, "", ids("a"))
    assert CompletionFormat(head(), token_text).chunks(held_back) == []
    [chunk] = CompletionFormat(head(return_token_ids=True), token_text).chunks(held_back)
    assert chunk["choices"][0]["token_ids"] == ids("a")
    assert CompletionFormat(head(), token_text).chunks(ChoiceDelta(0, "", [], None, "length"))


def test_usage_is_null_in_every_chunk_but_the_last(token_text: TokenText) -> None:
    layout = CompletionFormat(head(include_usage=True), token_text)
    assert layout.chunks(ChoiceDelta(0, "a", ids("a")))[0]["usage"] is None
    [last] = layout.ending(ACCOUNT)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "usage" not in CompletionFormat(head(), token_text).chunks(ChoiceDelta(0, "a", ids("a")))[0]


def test_chat_logprobs_carry_bytes_also_of_half_a_character(token_text: TokenText) -> None:
    token_ids = ids("a€")        # the euro sign is three byte tokens here
    logprobs = [TokenLogprobs(-0.5, ((token_id, -0.5), (ids("b")[0], float("-inf")))) for token_id in token_ids]
    choice = FullChoice("a€", token_ids, logprobs, "stop")
    read = ChatCompletion.model_validate(ChatFormat(head(), token_text).full([choice], ACCOUNT), strict=True)
    assert read.choices[0].logprobs is not None
    content = read.choices[0].logprobs.content
    assert content is not None
    assert bytes(value for token in content for value in token.bytes or ()).decode() == "a€"
    assert content[1].token == "\ufffd"
    assert content[0].top_logprobs[1].logprob == -9999.0, "JSON has no minus infinity"


def test_completion_logprobs_have_offsets_that_go_on_over_chunks(token_text: TokenText) -> None:
    layout = CompletionFormat(head(), token_text)
    token_ids = ids("the cat")
    chunks = [layout.chunks(ChoiceDelta(0, "", [token_id], [TokenLogprobs(-1.0)]))[0] for token_id in token_ids]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    texts = [item["tokens"][0] for item in found]
    assert "".join(texts) == "the cat"
    expected = [sum(map(len, texts[:index])) for index in range(len(texts))]
    assert [item["text_offset"][0] for item in found] == expected


def test_completion_logprobs_escape_half_a_character(token_text: TokenText) -> None:
    token_ids = ids("€")
    choice = FullChoice("€", token_ids, [TokenLogprobs(-1.0)] * len(token_ids), "stop")
    logprobs = CompletionFormat(head(), token_text).full([choice], ACCOUNT)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_offsets_count_the_text_not_its_escaped_form(token_text: TokenText, in_chunks: bool) -> None:
    parts = [*ids("a"), *ids("€"), *ids("b"), 2, *ids("c")]
    logprobs, layout = [TokenLogprobs(-1.0)] * len(parts), CompletionFormat(head(), token_text)
    if in_chunks:
        chunks = [layout.chunks(ChoiceDelta(0, "", [part], logprobs[:1]))[0] for part in parts]
        offsets = [chunk["choices"][0]["logprobs"]["text_offset"][0] for chunk in chunks]
    else:
        choice = FullChoice("a€bc", parts, logprobs, "stop")
        offsets = layout.full([choice], ACCOUNT)["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3, 3], "a, three bytes of the euro sign, b, a special token, c"


def test_special_tokens_are_shown_by_name(token_text: TokenText) -> None:
    assert token_text.text_of(2) == "<|im_end|>"
