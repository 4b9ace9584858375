"""One request's deltas, account and ends, driven by the engine's messages as they really come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer
from worker.core.batch import TokenLogprobs
from worker.engine.messages import SequenceOutput, SequenceStats
from worker.prompt.detokenizer import StreamDetokenizer
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle
from worker.protocol.api_error import ApiError
from worker.server.generation import ChoiceDelta, Generation
from worker.server.request_table import RequestTable

EOS_ID = 2
STATS = SequenceStats(prompt_tokens=5, cached_tokens=0, computed_tokens=5, recomputed_tokens=0, output_tokens=1,
                      preemptions=0, phases={}, inter_token_p50_s=None, inter_token_max_s=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tiny_tokenizer(folder)
    return PromptTokenizer(TokenizerBundle.from_directory(folder))


@dataclass
class Case:
    generation: Generation
    aborts: list[int | None] = field(default_factory=list)

    def output(self, token_ids: list[int], **fields: object) -> None:
        defaults = {"request_id": "r", "choice": 0, "token_ids": token_ids}
        self.generation.deliver(SequenceOutput(**(defaults | fields)))  # type: ignore[arg-type]

    async def drain(self) -> list[ChoiceDelta]:
        deltas = []
        while some := await self.generation.next_deltas():
            deltas += some
        return deltas


@pytest.fixture
def make(tokenizer: PromptTokenizer) -> Callable[..., Case]:
    def build(*, n: int = 1, stop: tuple[str, ...] = (), prompts: int = 1) -> Case:
        aborts: list[int | None] = []
        generation = Generation(
            key="r", request_id="r", route="/v1/completions", model="tiny", prompt_lengths=[5] * prompts,
            num_choices_per_prompt=n, tokenize_s=0.0, abort=aborts.append,
            detokenizers=[StreamDetokenizer(tokenizer, stop=stop) for _ in range(n * prompts)])
        return Case(generation, aborts)
    return build


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


async def test_text_of_all_deltas_is_the_text_of_all_tokens(make: Callable[..., Case]) -> None:
    case = make()
    text = "naïve café 🦊 end"
    for token_id in ids(text):
        case.output([token_id])
    case.output([EOS_ID], finish_reason="stop", stats=STATS)
    deltas = await case.drain()
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas), "never half a character"
    assert deltas[-1].finish_reason == "stop"
    assert case.generation.account().completion_tokens == len(ids(text)) + 1, "the end token is counted"
    assert case.generation.released


async def test_stop_string_across_tokens_ends_the_choice_and_tells_the_engine(make: Callable[..., Case]) -> None:
    case = make(stop=("fox",))
    token_ids = ids("a quick fox jumps")
    for token_id in token_ids:
        case.output([token_id])
    deltas = await case.drain()
    assert "".join(delta.text for delta in deltas) == "a quick "
    assert deltas[-1].finish_reason == "stop"
    assert case.aborts == [0]
    assert case.generation.account().completion_tokens < len(token_ids), "what came after the stop is not counted"
    assert not case.generation.released, "the engine has not said that the blocks are free"
    case.output([], finish_reason="abort", stats=STATS)
    assert case.generation.released
    assert case.generation.finish_reasons == ["stop"]


async def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(make: Callable[..., Case]) -> None:
    case = make(stop=("fox jumps high",))
    token_ids = ids("the fox jumps")
    for token_id in token_ids[:-1]:
        case.output([token_id])
    case.output(token_ids[-1:], finish_reason="length", stats=STATS)
    deltas = await case.drain()
    assert "".join(delta.text for delta in deltas) == "the fox jumps"
    assert case.aborts == []


async def test_logprobs_after_the_stop_are_cut_with_their_tokens(make: Callable[..., Case]) -> None:
    case = make(stop=("x",))
    token_ids = ids("ab x y")
    case.output(token_ids, logprobs=[TokenLogprobs(-1.0)] * len(token_ids))
    [delta] = await case.drain()
    assert delta.logprobs is not None
    assert len(delta.logprobs) == len(delta.token_ids) == case.generation.account().completion_tokens < len(token_ids)


async def test_cached_tokens_count_each_prompt_once(make: Callable[..., Case]) -> None:
    case = make(n=2, prompts=2)
    for choice, cached in enumerate((0, 4, 2, 4)):      # the second choice of a prompt hits what the first computed
        case.output(ids("a"), choice=choice, cached_tokens=cached)
    account = case.generation.account()
    assert (account.prompt_tokens, account.cached_tokens) == (10, 2)


async def test_waiting_ends_when_something_comes(make: Callable[..., Case]) -> None:
    case = make()
    waiting = asyncio.ensure_future(case.generation.next_deltas())
    await asyncio.sleep(0)
    assert not waiting.done()
    case.output(ids("a"))
    assert [delta.text for delta in await waiting] == ["a"]


async def test_what_came_before_a_failure_is_handed_out_first(make: Callable[..., Case]) -> None:
    case = make()
    case.output(ids("a"))
    case.output([], finish_reason="error", error="no room", stats=STATS)
    assert [delta.text for delta in await case.generation.next_deltas()] == ["a"]
    with pytest.raises(ApiError, match="no room") as caught:
        await case.generation.next_deltas()
    assert (caught.value.status, caught.value.code) == (500, "worker_failed")


async def test_an_abandoned_request_is_aborted_once_and_gathers_nothing(make: Callable[..., Case]) -> None:
    case = make()
    case.output(ids("a"))
    case.generation.abandon()
    case.output(ids("b"))
    case.output([], finish_reason="abort", stats=STATS)
    assert case.aborts == [None]
    assert case.generation.abandoned
    assert case.generation.account().completion_tokens == 1
    assert case.generation.finish_reasons == ["abort"]


async def test_leaving_an_answered_request_is_no_disconnect(make: Callable[..., Case]) -> None:
    case = make()
    case.output([EOS_ID], finish_reason="stop", stats=STATS)
    await case.drain()
    case.generation.abandon()
    assert not case.generation.abandoned
    assert case.aborts == []


async def test_the_table_keeps_a_request_until_the_engine_lets_go(make: Callable[..., Case]) -> None:
    released: list[Generation] = []
    table = RequestTable(released.append)
    case = make(n=2)
    table.add(case.generation)
    table.deliver([SequenceOutput("r", 0, ids("a"), finish_reason="length", stats=STATS)])
    assert (len(table), released) == (1, [])
    table.deliver([SequenceOutput("r", 1, ids("a"), finish_reason="length", stats=STATS)])
    assert (len(table), released) == (0, [case.generation])
    table.deliver([SequenceOutput("r", 1, ids("a"))])       # a late answer to an abort: nobody is there any more


async def test_a_repeated_request_id_gets_its_own_key(make: Callable[..., Case]) -> None:
    table = RequestTable(lambda generation: None)
    assert table.free_key("r") == "r"
    table.add(make().generation)
    assert table.free_key("r") == "r~2"
    assert table.abort("r") == 1
    assert table.abort("s") == 0


async def test_failing_all_tells_every_client_and_empties_the_table(make: Callable[..., Case]) -> None:
    released: list[Generation] = []
    table = RequestTable(released.append)
    case = make()
    table.add(case.generation)
    table.fail_all(ApiError(500, "worker_failed", "gone"))
    assert (len(table), released) == (0, [case.generation])
    with pytest.raises(ApiError, match="gone"):
        await case.generation.next_deltas()
