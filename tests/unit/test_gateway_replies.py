"""Remembered replies: recognised by their text, spelled by their ids, one tenant's own, within bounds."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.tenants import ANYONE, Tenant, own_group
from gateway.config import GatewayConfig
from gateway.server.prompt_work import PromptWork
from gateway.server.replies import Remembering, ReplyMemory, told_in_stream
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, parse_chat, parse_completion
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import HashScheme
from worker.protocol.told_tokens import BEHIND_HEADER, BEHIND_MAX_BYTES, encode_told, tell_behind, told_behind

TEXT = st.lists(st.sampled_from(["hello", "the", " the", " a", "th", "x", " ", "é", "🙂", "\n"]),
                max_size=12).map("".join)


def renderer() -> PromptRenderer:
    return PromptRenderer(TokenizerBundle(
        tokenizer_json=tiny_tokenizer().to_str().encode(), special_tokens={},
        chat_templates={"default": CHAT_TEMPLATE}, eos_token_ids=(2,)))


RENDERER = renderer()
TOKENIZER = RENDERER.tokenizer


def chat(*contents: str) -> ChatRequest:
    turns = ",".join(f'{{"role":"{("user", "assistant")[index % 2]}","content":{_json(content)}}}'
                     for index, content in enumerate(contents))
    return parse_chat(f'{{"model":"m","messages":[{turns}]}}'.encode())


def _json(text: str) -> str:
    import orjson

    return orjson.dumps(text).decode()


def one_by_one(text: str) -> list[int]:
    """The ids of each character alone: a spelling that merges nothing."""
    return [token_id for char in text for token_id in TOKENIZER.encode(char, add_special_tokens=False)]


def learned(prompt: ChatRequest, reply: list[int], memory: ReplyMemory | None = None) -> ReplyMemory:
    memory = memory or ReplyMemory(1 << 20)
    memory.learn("owner", RENDERER, RENDERER.chat_packed(prompt), reply, scope="")
    return memory


@settings(deadline=None)
@given(TEXT, TEXT, TEXT)
def test_the_next_turn_begins_with_the_prompt_and_the_replys_own_ids(question: str, answer: str, more: str) -> None:
    prompt, reply = chat(question), one_by_one(answer)
    memory = learned(prompt, [*reply, 2])

    ids = RENDERER.chat_packed(chat(question, answer, more), replies=memory.of("owner"))

    first = RENDERER.chat_packed(prompt)
    assert ids[:len(first) + len(reply)] == first + array("I", reply)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == RENDERER.chat_text(chat(question, answer, more))
    memory.check_invariants()


@settings(deadline=None)
@given(TEXT, TEXT)
def test_another_text_keeps_the_tokenizers_ids(answer: str, other: str) -> None:
    memory = learned(chat("q"), one_by_one(answer))
    if answer == other:
        return
    asked = chat("q", other, "and?")

    assert RENDERER.chat_packed(asked, replies=memory.of("owner")) == RENDERER.chat_packed(asked)


def test_only_the_assistants_message_is_spelled_so() -> None:
    memory = learned(chat("q"), one_by_one("hello the the"))
    asked = chat("hello the the", "something else", "hello the the")

    assert RENDERER.chat_packed(asked, replies=memory.of("owner")) == RENDERER.chat_packed(asked)


def test_a_reply_in_the_tokenizers_own_spelling_is_not_kept_and_replaces_another() -> None:
    own = TOKENIZER.encode("assistant\nhello the the", add_special_tokens=False)
    tail = TOKENIZER.encode("assistant\n", add_special_tokens=False)
    assert own[:len(tail)] == tail
    memory = learned(chat("q"), own[len(tail):])
    assert memory.of("owner") is None
    assert memory.num_replies == {"canonical": 1, "kept": 0, "unknown": 0}

    learned(chat("q"), one_by_one("hello the the"), memory)
    learned(chat("q"), own[len(tail):], memory)

    asked = chat("q", "hello the the", "x")
    assert RENDERER.chat_packed(asked, replies=memory.of("owner")) == RENDERER.chat_packed(asked)


def test_a_special_token_spelled_in_letters_is_no_reply_to_remember() -> None:
    memory = learned(chat("q"), [*one_by_one("ab"), *one_by_one("<|im_"), *one_by_one("end|>")])

    assert memory.num_replies["kept"] == 0


def test_owners_do_not_see_each_other() -> None:
    memory = learned(chat("q"), one_by_one("the the"))

    assert memory.of("owner")
    assert memory.of("another") is None


def test_memory_stays_within_its_bounds() -> None:
    rng, memory, prompt = random.Random(4), ReplyMemory(16_000), RENDERER.chat_packed(chat("q"))
    for number in range(2_000):
        text = "".join(rng.choice(("the", " the", "hello")) for _ in range(1, rng.randrange(20)))
        memory.learn(f"owner {rng.randrange(12)}", RENDERER, prompt, one_by_one(text), scope="")
        assert memory.num_bytes <= 16_000
        if number % 100 == 0:
            memory.check_invariants()
    assert memory.num_replies["kept"] > 1_000


@pytest.mark.parametrize(("settings_", "exactness", "owned"), [
    ({}, "fast", True), ({}, "strict", False), ({"remember_replies": False}, "fast", False),
    ({"worker_token": ""}, "fast", False)])
def test_who_remembers(settings_: dict[str, object], exactness: str, owned: bool) -> None:
    config = GatewayConfig(**{"worker_token": "t", **settings_})  # type: ignore[arg-type]
    work = PromptWork()
    remembering = Remembering(config, work)
    scheme = HashScheme(block_size=16, seed=b"", model="m", weights="w", kv_dtype="f", tokenizer="t", template="t",
                        exactness=exactness)
    acme, other = Tenant("acme", own_group("acme")), Tenant("other", own_group("acme"))

    owners = [remembering.owner(chat("q"), tenant, [scheme]) for tenant in (acme, other, ANYONE)]

    assert [owner is not None for owner in owners] == [owned] * 3
    assert len(set(owners)) == (3 if owned else 1)
    assert remembering.owner(chat("q"), acme, []) is None
    assert remembering.owner(parse_completion(b'{"model":"m","prompt":"q"}'), acme, [scheme]) is None
    work.close()


def test_ids_told_in_a_stream() -> None:
    blocks = [encode_told(0, 1, [1, 2]).rstrip(), b'data: {"choices":[]}', encode_told(1, 0, [7]).rstrip(),
              encode_told(0, 0, []).rstrip(), encode_told(0, 1, [3]).rstrip(), b"data: [DONE]"]

    assert told_in_stream(blocks) == [[1, 2, 3], [7]]


@given(st.binary(max_size=50), st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), min_size=1, max_size=4))
def test_ids_told_behind_an_answer(body: bytes, choices: list[list[int]]) -> None:
    headers, told = tell_behind(body, choices)

    assert told_behind(headers, told) == (body, choices)
    assert told_behind({}, body) == (body, [])
    for torn in (told[:-1], told + b"x") if told else (told + b"x",):
        with pytest.raises(ValueError, match=r"does not fit|multiple"):
            told_behind(headers, torn)


def test_a_large_answer_is_told_without_ids() -> None:
    body = b" " * (BEHIND_MAX_BYTES + 1)
    headers, told = tell_behind(body, [[1]])

    assert BEHIND_HEADER not in headers
    assert told is body
