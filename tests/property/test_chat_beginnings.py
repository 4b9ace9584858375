"""Chats that begin like earlier ones: by the memory of beginnings and without it the same requests, ids, hashes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission.cache_salt import CacheSalt
from gateway.server import prompt_work
from gateway.server.beginnings import BODY_MIN_BYTES, SEEN_MAX, Beginnings
from gateway.server.prompt_work import PromptTask, PromptWork
from tests.property.test_prefix_encoder_properties import NAMES, added_tokens, tokenizer_named
from tests.property.test_usual_chat_properties import PAIRS, outcome
from tests.support.hard_texts import families_of_texts
from worker.prompt.chat_beginning import beginning_of, ends_before, last_end, parse_behind
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import ChatRequest, parse_chat
from worker.prompt.tokenizer import TokenizerBundle
from worker.prompt.usual_chat import parse_usual_chat
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind, HashScheme, block_hashes

MESSAGES = ['{"role":"user","content":"a"}', '{"role":"system","content":"},{\\"role\\":"}', '{"role":"user"}',
            '{"role":"assistant","content":"\u00e9\U0001f600"}', '{"role":"user","content":"\\ud83d\\ude00]}"}',
            '{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"}]"}]}',
            '{"role":"assistant","content":"c","x":[{"a":1},{"role":"user"}]}', '{"content":"d","role":"user"}',
            '{"role":"user","content":"\\ud800"}', '{"role":"user","content": "e"}', "{}", "7", ""]
FIRST = st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=5)
# A template that tells of every message, one whose beginning depends on the end, and one that refuses to end early.
TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "last": "{% for m in messages %}<|im_start|>{{ m.role }}{{ '!' if loop.index == messages | length - 1 }}\n"
            "{{ m.content }}<|im_end|>\n{% endfor %}",
    "even": "{% if messages | length % 2 %}{{ raise_exception('odd') }}{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
}


def body_of(messages: Sequence[str], front: Sequence[tuple[str, str]], behind: Sequence[tuple[str, str]]) -> bytes:
    fields = [("model", '"m"'), *front, ("messages", f"[{','.join(messages)}]"), *behind]
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}").encode()


FIELDS = st.lists(PAIRS, max_size=2)


@settings(max_examples=200, deadline=None)
@given(FIRST, st.lists(FIRST, min_size=1, max_size=4), FIELDS, FIELDS, st.sampled_from(["", "]", "x"]))
def test_what_goes_on_from_a_beginning_is_what_the_parser_says(
        first: list[str], others: list[list[str]], front: list[tuple[str, str]], behind: list[tuple[str, str]],
        torn: str) -> None:
    body = body_of(first, front, behind)
    if not isinstance(outcome(parse_usual_chat, body), ChatRequest):
        return
    ends = [last_end(body), *ends_before(body, last_end(body))]
    begins = [begin for end in ends if (begin := beginning_of(body, end)) is not None]
    for other in others:
        going_on = [body_of(messages, front, behind + fields)
                    for messages in (first + other, first, first[:1] + other)
                    for fields in ([], front[:1], [("messages", "[]")])]
        going_on += [one.replace(b"]", torn.encode(), 1) for one in going_on[:1]]
        for begin in begins:
            for one in going_on:
                outcome(parse_usual_chat, one)      # so that it remembers what stands beside messages
                found = parse_behind(begin, one) if one.startswith(begin.body) else None
                assert found is None or found == parse_chat(one)


def test_a_beginning_is_found_where_messages_end_and_nowhere_else() -> None:
    body = body_of(MESSAGES[:2] + MESSAGES[3:7], [("seed", "1")], [("stop", '["}]"]')])
    parse_usual_chat(body)
    ends = [last_end(body), *ends_before(body, last_end(body))]
    found = [len(begin.messages) for end in ends if (begin := beginning_of(body, end)) is not None]
    assert found == [5, 4, 3, 2, 1], "of the places looked at, one is in the stop string and one inside of a message"
    begin = beginning_of(body, list(ends_before(body, last_end(body)))[-1])
    assert begin is not None
    assert parse_behind(begin, body) == parse_chat(body)


# ---- with ids and hashes ------------------------------------------------------------------------------------------


@cache
def renderer(name: str, template: str) -> PromptRenderer:
    bundle = tokenizer_named(name).bundle
    return PromptRenderer(TokenizerBundle(tokenizer_json=bundle.tokenizer_json, special_tokens={}, eos_token_ids=(),
                                          chat_templates={"default": template_for(name, template)}))


def template_for(name: str, template: str) -> str:
    """With two added tokens of this tokenizer in place of ChatML's."""
    start, end = (added_tokens(name) * 2)[:2]
    return TEMPLATES[template].replace("<|im_start|>", start).replace("<|im_end|>", end)


def scheme(block_size: int) -> HashScheme:
    return HashScheme(block_size=block_size, seed=b"", model="m", weights="w", tokenizer="t", template="c",
                      kv_dtype="float32", exactness="fast")


SCHEME = scheme(16)


class Reader:
    """The gateway's way from a body to ids and hashes, beside the plain one."""

    def __init__(self, renderer: PromptRenderer, max_bytes: int) -> None:
        self.renderer = renderer
        self.beginnings = Beginnings(max_bytes)
        self.work = PromptWork()
        self.num_begun = 0

    def check(self, scope: str, body: bytes, keys: tuple[ExtraKey, ...] = (), *,
              schemes: Sequence[HashScheme] = (SCHEME,)) -> None:
        parsed = outcome(parse_usual_chat, body)
        begin, to_learn = self.beginnings.find(scope, body)
        request = None if begin is None else self.beginnings.read(begin, body)
        assert request is None or request == parsed
        if not isinstance(parsed, ChatRequest):
            return
        salt = CacheSalt(keys, None)
        task = PromptTask(self.renderer, parsed, prompt_work.ON_LOOP_BODY_BYTES + 1, schemes, lambda _: salt, scope)
        if request is not None:
            task.beginning, self.num_begun = begin, self.num_begun + 1
        expected = outcome(lambda _: self.renderer.chat(parsed), body)
        found = outcome(lambda _: self.work.at_once(task), body)
        if isinstance(expected, tuple) or found is None:
            assert found is None or found == expected
            if found is None:
                self.renderer.chat_packed(parsed, scope=scope)  # as a prompt thread would
        else:
            assert list(found.prompts[0]) == expected  # type: ignore[union-attr]
            assert found.hashes == {one: block_hashes(expected, one, keys) for one in schemes}  # type: ignore[union-attr,arg-type]
        if to_learn is not None:
            self.beginnings.learn(scope, body, to_learn, request=parsed, renderer=self.renderer)
        self.beginnings.check_invariants()


@pytest.mark.parametrize(("name", "template"), [
    *(("tiny", template) for template in TEMPLATES),
    *(pytest.param(name, template, marks=pytest.mark.slow) for name in NAMES[1:] for template in TEMPLATES)])
def test_ids_and_hashes_are_those_of_the_whole(name: str, template: str) -> None:
    rng, num_begun = random.Random(f"{name} {template}"), 0

    @settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(families_of_texts(added_tokens(name)), st.sampled_from([1 << 22, 100_000, 0]))
    def check(texts: list[str], max_bytes: int) -> None:
        nonlocal num_begun
        reader = Reader(renderer(name, template), max_bytes)
        chats: list[list[tuple[str, str]]] = [[("system", rng.choice(texts) * rng.choice((1, 40)))]]
        for _ in range(20):
            chat = rng.choice(chats)[:rng.randrange(1, 8)]
            chat = chat + [(rng.choice(("user", "assistant")), rng.choice(texts)) for _ in range(rng.randrange(3))]
            chats.append(chat)
            body = orjson.dumps({"model": "m", "messages": [{"role": role, "content": text} for role, text in chat],
                                 "seed": rng.randrange(2)} | ({"cache_salt": "s"} if rng.random() < 0.1 else {}))
            keys = (ExtraKey(ExtraKeyKind.GATEWAY_SALT, b"x", rng.choice((0, 3, 500))),) if rng.random() < 0.5 else ()
            schemes = [scheme(size) for size in rng.sample((4, 8, 16), rng.randrange(3))]
            reader.check(rng.choice(("", "a")), body, keys, schemes=schemes)
        reader.work.close()
        num_begun += reader.num_begun

    check()
    assert num_begun, "beginnings were found"


def long_body(question: str, front: str = "x", **more: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "system", "content": front * BODY_MIN_BYTES},
                                                    {"role": "user", "content": question}], **more})


def test_what_comes_for_the_second_time_is_known_from_then_on_in_its_scope_alone() -> None:
    reader = Reader(renderer("tiny", "plain"), 1 << 20)
    for question in ("one", "two"):
        reader.check("", long_body(question))
    assert reader.num_begun == 0
    for number, scope in enumerate(("", "", "another", "another")):
        reader.check(scope, long_body(f"question {number}"))
    assert reader.num_begun == 2
    reader.check("", long_body("salted", cache_salt="mine"))
    assert reader.num_begun == 2
    reader.work.close()


def test_a_conversation_goes_on_from_its_earlier_turns() -> None:
    reader = Reader(renderer("tiny", "plain"), 1 << 22)
    turns = [{"role": "system", "content": "x" * 2 * BODY_MIN_BYTES}]
    for number in range(12):
        turns += [{"role": "user", "content": f"question {number}"}]
        reader.check("", orjson.dumps({"model": "m", "messages": turns}))
        turns += [{"role": "assistant", "content": f"answer {number}"}]
    assert reader.num_begun >= 6
    reader.work.close()


def test_beginnings_are_bounded_and_the_least_recently_used_go() -> None:
    room = 1 << 20
    reader = Reader(renderer("tiny", "plain"), room)
    for number in range(40):
        for question in ("one", "two", "three"):
            reader.check("", long_body(question, front=f"{number % 10}."))
        reader.check("", long_body(f"again {number}", front="0."))
    assert reader.num_begun > 40, "the one that is asked for all the time stays"
    assert room // 2 < reader.beginnings.num_bytes <= room
    for number in range(SEEN_MAX + 10):
        reader.beginnings.find("", long_body("x", front=str(number)))
    reader.beginnings.check_invariants()
    reader.work.close()


