"""A chat stream as Anthropic's and as OpenAI's events: their exact order, and that they add up to the whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from worker.prompt.foreign_api import ForeignAnswer, PromptCount
from worker.prompt.foreign_stream import MAX_EVENT_BYTES, StreamTranslation
from worker.prompt.messages_body import MESSAGES
from worker.prompt.responses_body import RESPONSES
from worker.protocol.api_error import ApiError

Events = list[tuple[str, dict[str, Any]]]
USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25,
         "prompt_tokens_details": {"cached_tokens": 16}}
MESSAGES_BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
RESPONSES_BODY = {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}


def answer_by(api: str) -> ForeignAnswer:
    if api == "messages":
        return MESSAGES.read(json.dumps(MESSAGES_BODY).encode()).answer
    return RESPONSES.read(json.dumps(RESPONSES_BODY).encode()).answer


def chunk(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-7", "created": 99, "model": "m", "choices": [
        {"index": 0, "delta": delta, "finish_reason": reason}]}


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function",
                            "function": {"name": name, "arguments": arguments}}]}


TEXT_THEN_CALLS = [chunk(role="assistant", content=""), chunk(content="Let "), chunk(content="me"),
                   chunk(**call(0, "f", '{"a": 1}')), chunk(**call(1, "g", "{}")), chunk("tool_calls"),
                   {"id": "chatcmpl-7", "choices": [], "usage": USAGE}]


def wire(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in chunks) + b"data: [DONE]\n\n"


def events_in(data: bytes) -> Events:
    events = []
    for block in data.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, payload = block.split("\n")
            events.append((name.removeprefix("event: "), json.loads(payload.removeprefix("data: "))))
    return events


def translated(api: str, data: bytes) -> Events:
    return events_in(StreamTranslation(answer_by(api).stream(PromptCount(20, 16))).feed(data))


def test_messages_events() -> None:
    events = translated("messages", wire(TEXT_THEN_CALLS))
    assert [name for name, _ in events] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    for _, data in events:
        if data["type"] != "ping":
            TypeAdapter(RawMessageStreamEvent).validate_python(data)
    start, end = events[0][1]["message"], events[-2][1]
    assert start["usage"] == {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16,
                              "output_tokens": 0}
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 5
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2]


def test_responses_events() -> None:
    events = translated("responses", wire(TEXT_THEN_CALLS))
    called = ["response.output_item.added", "response.function_call_arguments.delta",
              "response.function_call_arguments.done", "response.output_item.done"]
    assert [name for name, _ in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", *called, *called, "response.completed"]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    for name, data in events:
        assert name == data["type"]
        TypeAdapter(ResponseStreamEvent).validate_python(data)
    last = events[-1][1]["response"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 16
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
    assert events[0][1]["response"]["output"] == []


def whole_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion that says what these chunks say."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    item: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None}
    for part in chunks:
        for choice in part["choices"]:
            if choice["delta"].get("content"):
                message["content"] = (message["content"] or "") + choice["delta"]["content"]
            message.setdefault("tool_calls", []).extend(choice["delta"].get("tool_calls", []))
            item["finish_reason"] = choice["finish_reason"] or item["finish_reason"]
            item |= {name: choice[name] for name in ("stop_reason",) if name in choice}
    return {"id": "chatcmpl-7", "created": 99, "choices": [item], "usage": USAGE}


def added_up(events: Events) -> dict[str, Any]:
    """What Anthropic's client makes of the events."""
    message = events[0][1]["message"]
    for name, data in events:
        if name == "content_block_start":
            message["content"].append(dict(data["content_block"]))
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["json"] = block.get("json", "") + delta["partial_json"]
        elif name == "message_delta":
            message |= {**data["delta"], "usage": data["usage"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json", "") or "{}")
    return dict(message)


deltas = st.lists(st.one_of(st.text(max_size=4).map(lambda text: chunk(content=text)),
                            st.sampled_from(["f", "g"]).map(lambda name: name)), max_size=8)


@given(deltas, st.sampled_from(["stop", "length", "tool_calls", "abort"]), st.lists(st.integers(1, 400), max_size=12),
       st.sampled_from(["\n", "\r\n"]))
def test_however_it_is_cut_the_stream_adds_up_to_the_whole(parts: list[Any], reason: str, cuts: list[int],
                                                          line_end: str) -> None:
    num_calls = 0
    chunks = [chunk(role="assistant", content="")]
    for part in parts:
        if isinstance(part, str):
            part = chunk(**call(num_calls, part, json.dumps({"n": num_calls})))
            num_calls += 1
        chunks.append(part)
    chunks += [chunk(reason), {"id": "chatcmpl-7", "choices": [], "usage": USAGE}]
    data = wire(chunks).replace(b"\n", line_end.encode())
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in itertools.pairwise(borders)]
    for api in ("messages", "responses"):
        translation = StreamTranslation(answer_by(api).stream(PromptCount()))
        events = events_in(b"".join(map(translation.feed, pieces)))
        whole = answer_by(api).whole(whole_of(chunks))
        if api == "messages":
            # A chat message has its text first, whatever the order in the stream.
            told = added_up(events)
            assert text_of(told) == text_of(whole)
            assert calls_of(told) == calls_of(whole)
            assert {**told, "content": None} == {**whole, "content": None}
            Message.model_validate(told)
        else:
            told = events[-1][1]["response"]
            assert [item["status"] for item in told["output"][:-1]] == ["completed"] * (len(told["output"]) - 1)
            status = "incomplete" if reason in ("length", "abort") else "completed"
            assert told["status"] == whole["status"] == status
            assert openai_text(told) == openai_text(whole)
            Response.model_validate(told)


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in message["content"] if block["type"] == "tool_use"]


def openai_text(response: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    read = Response.model_validate(response)
    return read.output_text, [(item.call_id, item.arguments) for item in read.output if item.type == "function_call"]


def test_stop_sequences_and_reasons() -> None:
    for reason, stop, expected in [("stop", None, ("end_turn", None)), ("stop", "END", ("stop_sequence", "END")),
                                   ("length", None, ("max_tokens", None)),
                                   ("content_filter", None, ("refusal", None))]:
        last = chunk(reason)
        last["choices"][0]["stop_reason"] = stop
        events = translated("messages", wire([chunk(content="x"), last]))
        assert tuple(events[-2][1]["delta"].values()) == expected
    assert translated("responses", wire([chunk("length")]))[-1][1]["response"]["incomplete_details"] == {
        "reason": "max_output_tokens"}


def test_logprobs_in_a_response() -> None:
    said = chunk(content="hi")
    told = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
    said["choices"][0]["logprobs"] = {"content": [told]}
    part = translated("responses", wire([said, said, chunk("stop")]))[-1][1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == [told, told]
    assert part["text"] == "hihi"


@pytest.mark.parametrize("broken", [
    b"data: " + json.dumps(ApiError(500, "worker_failed", "it broke").body()).encode() + b"\n\n",
    b"\n\nevent: error\ndata: " + json.dumps(ApiError(502, "worker_failed", "it broke").body()).encode() + b"\n\n"])
def test_an_error_ends_the_stream_in_its_own_shape(broken: bytes) -> None:
    begun = wire([chunk(content="x")]).removesuffix(b"data: [DONE]\n\n")
    again = b"\n\nevent: error\ndata: {}\n\ndata: [DONE]\n\n"
    events = translated("messages", begun + broken + again)
    assert events[-1][0] == "error"
    assert events[-1][1]["type"] == "error"
    assert (events[-1][1]["error"]["type"], events[-1][1]["error"]["message"]) == ("api_error", "it broke")
    assert [name for name, _ in events].count("error") == 1
    names = [(name, data) for name, data in translated("responses", begun + broken + again)][-2:]
    assert [name for name, _ in names] == ["error", "response.failed"]
    assert (names[0][1]["code"], names[0][1]["message"]) == ("worker_failed", "it broke")
    assert names[1][1]["response"]["error"]["message"] == "it broke"
    assert openai.types.responses.ResponseFailedEvent.model_validate(names[1][1])


def test_keep_alive_is_a_ping_once_a_message_began() -> None:
    translation = StreamTranslation(answer_by("messages").stream(PromptCount()))
    assert translation.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    translation.feed(wire([chunk(content="x")]).removesuffix(b"data: [DONE]\n\n"))
    assert events_in(translation.feed(b": keep-alive\n\n")) == [("ping", {"type": "ping"})]
    assert StreamTranslation(answer_by("responses").stream(PromptCount())).feed(b": x\n\n") == b": keep-alive\n\n"


def test_an_event_without_an_end_is_given_up_at_the_limit() -> None:
    translation = StreamTranslation(answer_by("messages").stream(PromptCount()))
    assert translation.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 6)) == b""
    assert [name for name, _ in events_in(translation.feed(b"x"))] == ["error"]
    assert translation.feed(wire([chunk(content="x")])) == b""


def test_arguments_that_are_no_object_are_shown_as_they_came() -> None:
    answer = whole_of([chunk(**call(0, "f", "not json"))])
    assert answer_by("messages").whole(answer)["content"][0]["input"] == {"raw_arguments": "not json"}
