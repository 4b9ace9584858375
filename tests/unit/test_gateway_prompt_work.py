"""Token ids and hashes once per request; the limit on waiting prompts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.admission.cache_salt import NO_SALT, CacheSalt
from gateway.server import prompt_work
from gateway.server.prompt_work import PromptTask, PromptWork
from gateway.server.request_record import RequestRecord
from tests.support.stub_worker import BLOCK_SIZE, byte_bundle
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import HashScheme, block_hashes


def scheme(exactness: str = "fast") -> HashScheme:
    return HashScheme(block_size=BLOCK_SIZE, seed=b"", model="m", weights="w", tokenizer="t", template="c",
                      kv_dtype="float32", exactness=exactness)


def no_salt(prompts: list[list[int]]) -> CacheSalt:
    return NO_SALT


async def test_prompts_are_hashed_once_per_scheme_and_by_the_first() -> None:
    work, renderer = PromptWork(), PromptRenderer(byte_bundle())
    request = parse_completion(b'{"model":"m","prompt":["' + b"x" * 40 + b'","y"]}')
    schemes = [scheme("fast"), scheme("strict")]
    prepared = await work.prepare(PromptTask(renderer, request, 0, schemes, no_salt))
    assert [len(prompt) for prompt in prepared.prompts] == [40, 1]
    assert prepared.num_tokens == 41
    assert prepared.hashes == {one: block_hashes(prepared.prompts[0], one) for one in schemes}
    assert all(len(hashes) == 2 for hashes in prepared.hashes.values())
    work.close()


async def test_a_scope_keeps_the_memory_of_texts_apart() -> None:
    work, renderer = PromptWork(), PromptRenderer(byte_bundle())
    request = parse_completion(b'{"model":"m","prompt":"' + b"hello, world " * 200 + b'"}')
    sizes = []
    for scope in ("", "", "a", "a", "b"):
        await work.prepare(PromptTask(renderer, request, 0, [], no_salt, scope=scope))
        sizes.append(renderer.tokenizer.remembered_bytes)
    one = sizes[0]
    assert one > 0
    assert sizes == [one, one, 2 * one, 2 * one, 3 * one]
    work.close()


async def test_long_prompts_leave_the_event_loop_and_give_the_same_ids() -> None:
    work, renderer = PromptWork(), PromptRenderer(byte_bundle())
    request = parse_chat(b'{"model":"m","messages":[{"role":"user","content":"hello"}]}')
    here, there = [await work.prepare(PromptTask(renderer, request, size, [], no_salt))
                   for size in (prompt_work.ON_LOOP_BODY_BYTES, prompt_work.ON_LOOP_BODY_BYTES + 1)]
    assert here.prompts == there.prompts
    threads = [await work.run(size, threading.current_thread)
               for size in (prompt_work.ON_LOOP_BODY_BYTES, prompt_work.ON_LOOP_BODY_BYTES + 1)]
    again = await work.prepare(PromptTask(renderer, request, prompt_work.ON_LOOP_KNOWN_BYTES, [], no_salt))
    assert again.prompts == here.prompts
    assert threads[0] is threading.main_thread()
    assert threads[1].name.startswith("prompt")
    work.close()


async def test_the_queue_of_waiting_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_work, "MAX_WAITING_PROMPTS", 2)
    work, gate = PromptWork(), threading.Event()
    waiting = [asyncio.create_task(work.run(10_000, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await work.run(10_000, gate.wait)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert "Retry-After" in refused.value.headers
    gate.set()
    await asyncio.gather(*waiting)
    assert await work.run(10_000, lambda: 7) == 7
    work.close()


@pytest.mark.parametrize(("confirmed", "matched", "cached", "error"), [
    (32, 64, 32, 0), (32, 64, 48, 0), (32, 64, 64, 0), (32, 64, 16, 16), (32, 64, 80, -16), (0, 0, 0, 0),
    (None, 64, 16, None), (32, 64, None, None),
])
def test_the_hit_error_is_the_distance_from_the_predicted_range(
        confirmed: int | None, matched: int, cached: int | None, error: int | None) -> None:
    record = RequestRecord("id", "/r", confirmed_tokens=confirmed, matched_tokens=matched, cached_tokens=cached)
    assert record.hit_error_tokens() == error


def test_the_log_line_has_no_empty_fields_and_milliseconds() -> None:
    record = RequestRecord("id", "/r", model="m", status=200, outcome="ok", confirmed_tokens=16, matched_tokens=48)
    record.stages["parse"] = 0.0015
    fields = record.log_fields(0.25)
    assert (fields["confirmed_tokens"], fields["matched_tokens"]) == (16, 48)
    assert fields["parse_ms"] == 1.5
    assert fields["duration_ms"] == 250.0
    assert None not in fields.values()
    assert "ttft_ms" not in fields
