"""The gateway in front of two real worker processes on a tiny model: what is predicted is what the worker finds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.local_stack import Child
from tests.support.gateway_in_process import ADMIN, Answer, GatewayUnderTest, running_gateway
from tests.support.tiny_tokenizer import TOOL_TEMPLATE
from tests.support.tiny_worker import WORKER_TOKEN, running_tiny_worker, write_tiny_model

TEXT = "a shared beginning that fills several blocks of the cache, again and again " * 3


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    model = write_tiny_model(Path(tmp_path_factory.mktemp("tiny-model")))
    template = model / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(running_tiny_worker(model, "--chat-template", str(template), wait=False))
                    for _ in range(2)]
        for child in children:
            child.wait_ready()
        yield children


@pytest.fixture
async def gateway(workers: list[Child]) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(*(child.url for child in workers), worker_token=WORKER_TOKEN) as running:
        await running.until_exact(num_workers=2)
        yield running


async def complete(gateway: GatewayUnderTest, prompt: str, **more: Any) -> tuple[Answer, int, int]:
    """(answer, predicted tokens, tokens that the worker found)."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    answer = await gateway.send("POST", "/v1/completions", payload=body)
    assert answer.status == 200, answer.body
    usage = orjson.loads(answer.body)["usage"]
    return (answer, int(answer.headers["x-headstart-matched-tokens"]),
            int(usage["prompt_tokens_details"]["cached_tokens"]))


async def test_the_second_request_lands_on_the_holder_and_predicted_is_reported(gateway: GatewayUnderTest) -> None:
    first, predicted, found = await complete(gateway, TEXT + "one")
    assert predicted == found == 0
    for end in ("two", "three", "one", ""):
        again, predicted, found = await complete(gateway, TEXT + end)
        assert again.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
        assert predicted == found > 0
    assert await gateway.metric('headstart_hit_error_tokens_count{direction="over"}') == 0
    assert await gateway.metric('headstart_hit_error_tokens_count{direction="under"}') == 0


async def test_a_new_gateway_knows_what_the_workers_hold(gateway: GatewayUnderTest, workers: list[Child]) -> None:
    first, _, _ = await complete(gateway, "known to the workers alone: " + TEXT)
    async with running_gateway(*(child.url for child in workers), worker_token=WORKER_TOKEN) as fresh:
        await fresh.until_exact(num_workers=2)
        again, predicted, found = await complete(fresh, "known to the workers alone: " + TEXT)
        assert again.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
        assert predicted == found > 0


async def test_salts_keep_caches_apart_in_prediction_and_in_fact(gateway: GatewayUnderTest) -> None:
    text = "salted: " + TEXT
    results = [await complete(gateway, text, cache_salt=salt) for salt in ("a", "b", "a")]
    assert [predicted for _, predicted, _ in results] == [found for _, _, found in results]
    assert [found > 0 for _, _, found in results] == [False, False, True]


async def test_without_a_shared_token_nothing_is_predicted_and_all_is_served(workers: list[Child]) -> None:
    """The worker keeps its seed to itself then, so nothing can be predicted; it serves all the same."""
    async with running_gateway(*(child.url for child in workers), worker_token="") as plain:
        await plain.until(lambda: _is_ready(plain), "ready")
        assert (await plain.worker())["knowledge"] == "none"
        _, predicted, _ = await complete(plain, "plain: " + TEXT)
        assert predicted == 0


async def _is_ready(gateway: GatewayUnderTest) -> bool:
    return bool((await gateway.send("GET", "/readyz")).status == 200)


async def test_streams_and_chat_pass_through(gateway: GatewayUnderTest) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True,
            "stream_options": {"include_usage": True}}
    answer = await gateway.send("POST", "/v1/chat/completions", payload=body)
    events = [line[6:] for line in answer.body.split(b"\n\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert orjson.loads(events[-2])["usage"]["completion_tokens"] >= 1
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


async def test_a_prompt_longer_than_the_context_is_the_workers_400(gateway: GatewayUnderTest) -> None:
    body = {"model": "tiny", "prompt": TEXT * 40, "max_tokens": 3}
    answer = await gateway.send("POST", "/v1/completions", payload=body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "prompt")
    assert [(await gateway.worker(index))["inflight"] for index in range(2)] == [0, 0]


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


async def test_tools_and_schemas_through_the_gateway(gateway: GatewayUnderTest) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "the weather?"}], "max_tokens": 200, "seed": 1}
    forced = await gateway.send("POST", "/v1/chat/completions", payload={
        **asked, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False})
    [choice] = orjson.loads(forced.body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], set(orjson.loads(call["function"]["arguments"]))) == ("weather", {"city"})
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    shaped = await gateway.send("POST", "/v1/chat/completions", payload={**asked, "response_format": schema})
    assert set(orjson.loads(orjson.loads(shaped.body)["choices"][0]["message"]["content"])) == {"city"}
    schema["json_schema"] = {"name": "x", "schema": {"type": "nothing"}}
    bad = await gateway.send("POST", "/v1/chat/completions", payload={**asked, "response_format": schema})
    assert (bad.status, bad.error["param"]) == (400, "response_format")


async def test_a_hot_prefix_is_listed_without_text_and_computed_elsewhere_ahead_of_need(
        gateway: GatewayUnderTest) -> None:
    text = "hot: " + TEXT
    for end in ("one", "two", "three", "four"):
        answer, _, _ = await complete(gateway, text + end)
    holder = answer.headers["x-headstart-worker"]
    listed = await gateway.send("GET", "/admin/cache", headers=ADMIN)
    assert b"shared beginning" not in listed.body
    hottest = orjson.loads(listed.body)["prefixes"][0]
    assert (hottest["model"], hottest["workers"]) == ("tiny", [holder])
    assert hottest["hits"] >= 2
    done = await gateway.send("POST", "/admin/prewarm", payload={"hash": hottest["hash"]}, headers=ADMIN)
    assert done.status == 200, done.body
    other = orjson.loads(done.body)["worker"]
    assert other not in (holder, None)
    again = await gateway.send("POST", "/admin/prewarm", payload={"hash": hottest["hash"], "worker": other},
                               headers=ADMIN)
    assert orjson.loads(again.body)["cached_tokens"] >= hottest["tokens"] - 1


async def test_what_many_ask_for_is_copied_to_a_spare_worker_by_itself(gateway: GatewayUnderTest) -> None:
    """One after the other, so that none of them has a reason to go elsewhere before the copy is there."""
    text = "asked for by many: " + TEXT * 4   # enough to be worth a copy
    answered: set[str] = set()
    for number in range(300):
        answer, _, _ = await complete(gateway, text + str(number), max_tokens=30, ignore_eos=True)
        listed = orjson.loads((await gateway.send("GET", "/admin/cache", headers=ADMIN)).body)["prefixes"]
        holders = max((prefix["workers"] for prefix in listed if prefix["tokens"] >= 512), key=len, default=[])
        if len(holders) == 2:
            break
        answered.add(answer.headers["x-headstart-worker"])
    assert len(holders) == 2
    assert len(answered) == 1
    _, predicted, found = await complete(gateway, text + "last")
    assert predicted == found >= 512


@pytest.mark.parametrize(("payload", "status", "param"), [
    ({"hash": "zz"}, 400, "hash"), ({"hash": "12"}, 404, "hash"), ({}, 400, "hash"), ({"hash": 1}, 400, "hash"),
    ({"hash": "12", "wroker": "w1"}, 400, "wroker")])
async def test_a_prewarm_of_nothing_says_so(gateway: GatewayUnderTest, payload: dict[str, Any], status: int,
                                            param: str) -> None:
    answer = await gateway.send("POST", "/admin/prewarm", payload=payload, headers=ADMIN)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert (await gateway.send("POST", "/admin/prewarm", payload=payload)).status == 401
    assert (await gateway.send("GET", "/admin/cache")).status == 401
