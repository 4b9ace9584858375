"""The whole engine in one process, over a tiny seeded model in strict mode: reuse, modes, room, accounts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.tiny_engine import EngineDriver, config_for, tokens
from worker.engine.engine_config import EngineSetupError
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.cache_events import AllBlocksCleared, BlockStored

# -- reuse -------------------------------------------------------------------------------------------------------


def test_cold_warm_and_batched_give_the_same_greedy_text(driver: EngineDriver) -> None:
    prompt = tokens(1, 100)
    cold = driver.generate(prompt, 24)
    warm = driver.generate(prompt, 24)
    for index in range(7):
        driver.submit(f"other-{index}", tokens(10 + index, 30 + 17 * index), 24)
    driver.submit("batched", prompt[:70] + tokens(2, 30), 24)
    driver.run()
    alone = driver.generate(prompt[:70] + tokens(2, 30), 24)
    assert len(cold.token_ids) == 24
    assert len(set(cold.token_ids)) > 3, "a model that repeats itself proves nothing"
    assert warm.token_ids == cold.token_ids
    assert driver.results["batched", 0].token_ids == alone.token_ids
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
    assert driver.results["batched", 0].cached_tokens == 64


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (15, 0), (16, 15), (17, 16), (32, 31), (33, 32)])
def test_a_repeated_prompt_hits_its_full_blocks_less_one_position(driver: EngineDriver, length: int,
                                                                      cached: int) -> None:
    prompt = tokens(3, length)
    cold = driver.generate(prompt, 4)
    warm = driver.generate(prompt, 4)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, cached)
    assert warm.token_ids == cold.token_ids
    assert warm.stats is not None
    assert warm.stats.cached_tokens + warm.stats.computed_tokens == length


def test_an_answer_is_reused_as_the_next_turns_prefix(driver: EngineDriver) -> None:
    prompt = tokens(4, 40)
    first = driver.generate(prompt, 40)
    second = driver.generate(prompt + first.token_ids + tokens(5, 9), 4)
    assert second.cached_tokens == 64       # 79 positions have K/V: the last output token was never computed


def test_twins_share_one_prefill(tiny_llama: Path) -> None:
    driver = EngineDriver(config_for(tiny_llama, max_running=16, max_waiting=16, max_batch_tokens=512,
                                     kv_memory="16MiB"))
    prompt = tokens(6, 2000)
    for index in range(16):
        driver.submit(f"twin-{index}", prompt, 1)
    driver.run()
    assert len({tuple(result.token_ids) for result in driver.results.values()}) == 1
    assert driver.stats.computed_positions_total <= 1.1 * 2000
    assert sum(result.cached_tokens or 0 for result in driver.results.values()) >= 15 * 1984


def test_reset_forgets_and_says_so(driver: EngineDriver) -> None:
    prompt = tokens(7, 64)
    driver.generate(prompt, 2)
    driver.engine.scheduler.reset_cache()
    driver.step()
    assert any(isinstance(event, AllBlocksCleared) for event in driver.events)
    assert driver.stats.blocks_free == driver.stats.blocks_total
    assert driver.generate(prompt, 2).cached_tokens == 0


def test_stored_blocks_are_told_in_order(driver: EngineDriver) -> None:
    prompt = tokens(8, 50)
    driver.generate(prompt, 16)
    stored = [event for event in driver.events if isinstance(event, BlockStored)]
    known: set[int] = set()
    for event in stored:
        assert event.parent_block_hash is None or event.parent_block_hash in known
        known.update(event.block_hashes)
    assert [token for event in stored for token in event.token_ids][:48] == prompt[:48]


# -- the oracles -------------------------------------------------------------------------------------------------


def test_cache_modes_give_the_same_text_and_count_their_positions(tiny_llama: Path) -> None:
    prompt = tokens(9, 500)
    results, positions = {}, {}
    for mode in ("off", "decode", "full"):
        driver = EngineDriver(config_for(tiny_llama, kv_cache=mode))
        results[mode] = driver.generate(prompt, 200).token_ids
        positions[mode] = driver.stats.computed_positions_total
    assert len(results["full"]) == 200
    assert results["off"] == results["full"]
    assert results["decode"] == results["full"]
    assert positions == {"off": sum(range(500, 700)), "decode": 699, "full": 699}
    assert positions["off"] == 119_900


def test_decode_mode_shares_nothing(tiny_llama: Path) -> None:
    driver = EngineDriver(config_for(tiny_llama, kv_cache="decode"))
    prompt = tokens(10, 64)
    assert driver.generate(prompt, 4).cached_tokens == 0
    assert driver.generate(prompt, 4).cached_tokens == 0
    assert driver.events == []


# -- room --------------------------------------------------------------------------------------------------------


def test_a_preempted_sequence_ends_with_the_same_text(tiny_llama: Path) -> None:
    """Room for one and a half answers: the second has to give way, and be computed again."""
    roomy = EngineDriver(config_for(tiny_llama))
    expected = {seed: roomy.generate(tokens(seed, 64), 100).token_ids for seed in (20, 21)}
    block_bytes = roomy.ready.kv_bytes_per_token * 16
    tight = EngineDriver(config_for(tiny_llama, kv_memory=f"{15 * block_bytes}B"))
    for seed in expected:
        tight.submit(f"r{seed}", tokens(seed, 64), 100)
    tight.run()
    assert {seed: tight.results[f"r{seed}", 0].token_ids for seed in expected} == expected
    assert tight.preemptions
    note = tight.preemptions[0]
    assert note.request_id == "r21", "the last admitted gives way"
    assert note.num_blocks > 0
    assert note.recompute_tokens > 64
    victim = tight.results[note.request_id, 0].stats
    assert victim is not None
    assert victim.preemptions >= 1
    assert victim.recomputed_tokens > 0
    assert tight.stats.preemptions_total == len(tight.preemptions)
    assert tight.stats.recomputed_preempted_total == sum(
        result.stats.recomputed_tokens for result in tight.results.values() if result.stats)


def test_the_context_is_capped_to_the_pool_and_too_long_is_refused(tiny_llama: Path) -> None:
    block_bytes = EngineDriver(config_for(tiny_llama)).ready.kv_bytes_per_token * 16
    driver = EngineDriver(config_for(tiny_llama, kv_memory=f"{4 * block_bytes}B"))
    assert driver.ready.max_context <= 64
    assert any("capped" in note for note in driver.ready.notes)
    driver.submit("longest", tokens(11, driver.ready.max_context - 10), 10)
    driver.submit("too long", tokens(11, driver.ready.max_context - 9), 10)
    driver.submit("empty", [], 10)
    driver.run()
    assert driver.results["longest", 0].finish_reason == "length"
    assert len(driver.results["longest", 0].token_ids) == 10
    assert driver.results["too long", 0].finish_reason == "error"
    assert driver.results["empty", 0].finish_reason == "error"


def test_eviction_names_who_needed_the_room(tiny_llama: Path) -> None:
    block_bytes = EngineDriver(config_for(tiny_llama)).ready.kv_bytes_per_token * 16
    driver = EngineDriver(config_for(tiny_llama, kv_memory=f"{8 * block_bytes}B"))
    driver.generate(tokens(12, 90), 2)
    driver.submit("pushes", tokens(13, 90), 2)
    driver.run()
    bursts = [report for report in driver.reports if report.evicted_blocks]
    assert {report.evicted_for for report in bursts} == {"pushes"}
    assert sum(report.evicted_blocks for report in bursts) == driver.stats.evictions_total > 0


def test_abort_frees_blocks_by_the_end_of_the_step(driver: EngineDriver) -> None:
    driver.submit("kept", tokens(14, 40), 200)
    driver.submit("left", tokens(15, 40), 200)
    for _ in range(3):
        driver.step()
    used = driver.stats.blocks_used
    driver.abort("left")
    driver.step()
    assert driver.results["left", 0].finish_reason == "abort"
    assert driver.stats.blocks_used < used
    assert driver.stats.num_running == 1
    driver.abort("kept")
    driver.step()
    assert driver.stats.blocks_used == 0
    assert driver.engine.idle


def test_abort_of_one_choice_leaves_the_others(driver: EngineDriver) -> None:
    from worker.engine.messages import AbortRequest

    for choice in range(3):
        driver.submit("n", tokens(16, 40), 8, choice=choice)
    driver.step()
    driver.engine.abort(AbortRequest("n", choice=1))
    driver.run()
    assert [driver.results["n", choice].finish_reason for choice in range(3)] == ["length", "abort", "length"]


def test_soak_with_aborts_returns_to_baseline(tiny_llama: Path) -> None:
    driver = EngineDriver(config_for(tiny_llama, kv_memory="1MiB", max_running=8, max_waiting=400))
    draw = random.Random(17)
    limit = driver.ready.max_context
    for index in range(300):
        length = draw.randint(1, min(200, limit - 20))
        driver.submit(f"r{index}", tokens(draw.randrange(6), length), draw.randint(1, 12))
        if draw.random() < 0.3:
            driver.abort(f"r{draw.randrange(index + 1)}")
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.run()
    driver.engine.scheduler.check_invariants()
    assert all(result.finish_reason in ("length", "abort") for result in driver.results.values())
    stats = driver.stats
    assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert (stats.waiting_prefill_tokens, stats.running_prefill_tokens, stats.decode_context_tokens) == (0, 0, 0)


# -- accounts ----------------------------------------------------------------------------------------------------


def test_a_finished_sequence_has_an_account(driver: EngineDriver) -> None:
    driver.generate(tokens(27, 64), 5)
    stats = driver.generate(tokens(27, 64)[:48] + tokens(28, 10), 5).stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens, stats.output_tokens) == (58, 48, 10, 5)
    assert (stats.recomputed_tokens, stats.preemptions) == (0, 0)
    assert set(stats.phases) == {"queue", "allocate", "prefill", "recompute", "sample"}
    assert all(seconds >= 0 for seconds in stats.phases.values())
    assert stats.phases["prefill"] > 0
    assert stats.inter_token_p50_s is not None
    assert stats.inter_token_max_s is not None
    assert 0 < stats.inter_token_p50_s <= stats.inter_token_max_s


def test_prompt_tokens_are_counted_once(driver: EngineDriver) -> None:
    for length in (10, 40, 40):
        driver.generate(tokens(29, length), 3)
    assert driver.stats.queried_tokens_total == 90
    assert driver.stats.hit_tokens_total == 32


def test_step_kinds_and_rates(driver: EngineDriver) -> None:
    driver.submit("a", tokens(30, 40), 6)
    kinds = [driver.step().step_kind, driver.step().step_kind]
    driver.submit("b", tokens(31, 40), 6)
    kinds.append(driver.step().step_kind)
    driver.run()
    kinds.append(driver.step().step_kind)
    assert kinds == ["prefill", "decode", "mixed", "idle"]
    assert driver.stats.prefill_tokens_per_s > 0
    assert driver.stats.decode_step_s > 0
    assert driver.ready.prefill_tokens_per_s > 0


def test_sampling_depends_on_seed_choice_and_index_alone(driver: EngineDriver) -> None:
    params = SamplingParams(temperature=1.0, seed=7, ignore_eos=True, logprobs=2)
    for request_id in ("first", "second"):
        for choice in range(2):
            driver.submit(request_id, tokens(32, 40), 10, choice=choice, params=params)
        driver.run()
    results = driver.results
    assert results["first", 0].token_ids == results["second", 0].token_ids
    assert results["first", 1].token_ids == results["second", 1].token_ids
    assert results["first", 0].token_ids != results["first", 1].token_ids
    logprobs = [entry for report in driver.reports for output in report.outputs for entry in output.logprobs or []]
    assert len(logprobs) == 40
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in logprobs)


def test_stop_tokens_and_min_tokens(driver: EngineDriver) -> None:
    free = driver.generate(tokens(33, 30), 20).token_ids
    stop = free[5]
    driver.submit("stopped", tokens(33, 30), 20, stop_token_ids=[stop])
    driver.submit("later", tokens(33, 30), 20, stop_token_ids=[stop],
                  params=SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=15))
    driver.run()
    stopped, later = driver.results["stopped", 0], driver.results["later", 0]
    assert stopped.token_ids == free[:free.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert stop not in later.token_ids[:15]
    assert len(later.token_ids) >= 15


# -- start-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"kv_cache": "half"}, "half"), ({"max_running": 0}, "max_running"),
    ({"kv_memory": "64B"}, "kv_memory"), ({"kv_memory": "lots"}, "kv_memory"),
    ({"max_context": 10**9}, "max_context"), ({"model": "no/such/model/here"}, "no/such/model/here")])
def test_what_the_operator_can_mend_is_one_line(tiny_llama: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineSetupError) as error:
        EngineDriver(config_for(tiny_llama, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_warm_up_leaves_nothing_behind(driver: EngineDriver) -> None:
    report = driver.step()
    assert report.stats.blocks_free == report.stats.blocks_total == driver.ready.num_blocks
    assert report.stats.computed_positions_total == 0
    assert report.events == []
