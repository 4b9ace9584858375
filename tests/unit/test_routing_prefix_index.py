"""The prefix index by example; equality with a naive model is in tests/property/test_prefix_index_properties.py."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from gateway.routing.bets import VOID_BETS_MAX
from gateway.routing.block_tree import ROW_BYTES
from gateway.routing.holder_sets import SET_BYTES
from gateway.routing.lanes import LANES_MAX, REFERENCES_MAX
from gateway.routing.prefix_index import LEAF_BYTES, SPECULATION_BYTES, Match, PrefixIndex
from gateway.routing.roster import NAME_SETS_MAX

CHAIN = [11, 12, 13, 14, 15, 16]
ROOMY_BYTES = 1 << 40


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(ROOMY_BYTES)


def room_for(num_blocks: int) -> int:
    """Bytes that hold one chain of so many blocks, claimed once, and not one more."""
    return num_blocks * ROW_BYTES + LEAF_BYTES + 3 * SET_BYTES


class TestMatch:
    def test_nothing_known(self, index: PrefixIndex) -> None:
        assert index.match([], 0.0) == {}
        assert index.match(CHAIN, 0.0) == {}

    def test_an_empty_prompt_matches_nothing(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        assert index.match([], 0.0) == {}

    def test_each_endpoint_as_far_as_it_holds(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.store("b", CHAIN[:2])
        index.store("c", CHAIN[:1])
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0), "b": Match(2, 0), "c": Match(1, 0)}
        assert index.match(CHAIN[:1], 0.0) == {"a": Match(1, 0), "b": Match(1, 0), "c": Match(1, 0)}
        assert index.match([*CHAIN[:3], 99, 100], 0.0) == {"a": Match(3, 0), "b": Match(2, 0), "c": Match(1, 0)}

    def test_a_block_in_the_middle_is_no_prefix(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        assert index.match([99, *CHAIN[1:]], 0.0) == {}

    def test_a_removal_from_the_middle_ends_the_match_and_a_new_store_mends_it(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.store("b", CHAIN)
        assert index.remove("a", [13]) == 1
        assert index.match(CHAIN, 0.0) == {"a": Match(2, 0), "b": Match(6, 0)}
        index.store("a", [13], parent=12)
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0), "b": Match(6, 0)}

    def test_a_parent_that_nobody_holds_any_more_still_carries_its_children(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.remove("a", CHAIN[:5])
        assert index.match(CHAIN, 0.0) == {}
        assert index.num_blocks("a") == 1
        index.remove("a", CHAIN[5:])
        assert index.num_blocks() == 0

    def test_sixty_four_endpoints(self, index: PrefixIndex) -> None:
        for number in range(64):
            index.store(f"w{number}", CHAIN[:1 + number % 6])
        assert index.match(CHAIN, 0.0) == {f"w{number}": Match(1 + number % 6, 0) for number in range(64)}

    def test_sets_of_holders_are_remembered_up_to_a_limit(self, index: PrefixIndex) -> None:
        rng = random.Random(5)
        for block in range(NAME_SETS_MAX + 100):
            for number in rng.sample(range(20), 10):
                index.store(f"w{number}", [block])
            assert len(index.match([block], 0.0)) == 10
        assert len(index._roster._names) <= NAME_SETS_MAX


class TestReferences:
    def test_stores_are_counted_per_tier_and_group(self, index: PrefixIndex) -> None:
        for tier, group in (("gpu", 0), ("gpu", 0), ("cpu", 0), ("gpu", 1)):
            index.store("a", [11], tier, group=group)
        for tier, group in (("gpu", 0), ("gpu", 0), ("cpu", 0)):
            assert index.remove("a", [11], tier, group=group) == 1
            assert index.holds("a", 11)
        assert index.remove("a", [11], "cpu") == 0
        assert index.remove("a", [11], group=1) == 1
        assert not index.holds("a", 11)

    def test_removals_stop_at_zero(self, index: PrefixIndex) -> None:
        assert index.remove("nobody", [11]) == 0
        index.store("a", [11])
        assert index.remove("a", [11, 11, 99]) == 1
        assert index.remove("a", [11]) == 0
        index.store("a", [11])
        assert index.match([11], 0.0) == {"a": Match(1, 0)}

    def test_a_count_stays_within_its_bits(self, index: PrefixIndex) -> None:
        index.store("a", [11], "cpu")
        for _ in range(REFERENCES_MAX + 10):
            index.store("a", [11], "gpu")
        assert sum(index.remove("a", [11], "gpu") for _ in range(REFERENCES_MAX + 10)) == REFERENCES_MAX
        assert index.holds("a", 11)

    def test_tiers_beyond_the_limit_share_a_counter(self, index: PrefixIndex) -> None:
        for number in range(LANES_MAX + 5):
            index.store("a", [11], f"tier-{number}")
        for number in range(LANES_MAX + 5):
            assert index.remove("a", [11], f"tier-{number}") == 1
        assert not index.holds("a", 11)


class TestTiers:
    def test_what_must_be_loaded_first_counts_as_slow(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN[:2])
        index.store("a", CHAIN[2:4], "cpu", parent=CHAIN[1])
        index.store("a", CHAIN[4:], parent=CHAIN[3])
        index.speculate("a", [*CHAIN, 17], 5.0)
        assert index.match([*CHAIN, 17], 0.0) == {"a": Match(6, 1, 4)}
        index.store("a", CHAIN[:4])
        assert index.match([*CHAIN, 17], 0.0) == {"a": Match(6, 1, 0)}
        index.remove("a", CHAIN[3:4])
        assert index.match([*CHAIN, 17], 0.0) == {"a": Match(6, 1, 3)}
        index.check_invariants()


class TestSweep:
    def test_who_is_retired_matches_nothing_while_its_blocks_go_slice_by_slice(self, index: PrefixIndex) -> None:
        for number in range(300):
            index.store("a", [1000 + number, 2000 + number])
            index.store("b", [1000 + number])
        index.retire("a")
        assert index.match([1000, 2000], 0.0) == {"b": Match(1, 0)}
        assert index.num_blocks() == 600
        index.store("a", [1000, 2000])  # a new life, while the former one is swept away
        num_steps = 0
        while index.sweep(10):
            num_steps += 1
            index.check_invariants()
            assert index.match([1000, 2000], 0.0) == {"a": Match(2, 0), "b": Match(1, 0)}
        assert num_steps > 20
        assert index.num_blocks() == 301
        assert not index.sweep(1)

    def test_a_block_that_is_taken_up_again_stays(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.retire("a")
        index.store("b", CHAIN[:4])
        index.speculate("c", CHAIN[:5], 9.0)
        while index.sweep(1):
            index.check_invariants()
        assert index.match(CHAIN, 0.0) == {"b": Match(4, 0), "c": Match(0, 5)}
        assert index.num_blocks() == 5

    def test_an_endpoint_that_comes_and_goes_takes_no_more_bits_than_it_needs(self, index: PrefixIndex) -> None:
        for _ in range(20):
            index.store("a", CHAIN)
            index.retire("a")
            index.store("a", CHAIN)
            while index.sweep(100):
                pass
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0)}
        assert len(index._roster.slots) <= 2


class TestStore:
    def test_a_continuation_needs_a_known_parent(self, index: PrefixIndex) -> None:
        assert index.store("a", CHAIN[3:], parent=CHAIN[2]) == 0
        assert index.num_refused_blocks == 3
        index.store("a", CHAIN[:3])
        assert index.store("a", CHAIN[3:], parent=CHAIN[2]) == 3
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0)}

    def test_a_continuation_of_what_another_endpoint_holds_waits_for_its_beginning(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.store("b", CHAIN[3:], parent=CHAIN[2])
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0)}
        index.store("b", CHAIN[:3])
        assert index.match(CHAIN, 0.0) == {"a": Match(6, 0), "b": Match(6, 0)}

    @pytest.mark.parametrize("colliding", [[21, 12, 23], [21, 22, 11], [11, 13, 14], [12, 13]])
    def test_a_hash_known_under_another_parent_ends_the_store(self, index: PrefixIndex, colliding: list[int]) -> None:
        index.store("a", CHAIN)
        num_stored = index.store("b", colliding)
        assert num_stored < len(colliding)
        assert index.num_refused_blocks == len(colliding) - num_stored
        index.check_invariants()
        assert index.match(CHAIN, 0.0)["a"] == Match(6, 0)
        assert sum(index.match(colliding, 0.0).get("b", ())) == num_stored == index.num_blocks("b")

    def test_a_chain_that_repeats_a_hash_ends_there(self, index: PrefixIndex) -> None:
        assert index.store("a", [1, 2, 1, 3]) == 2
        index.check_invariants()

    def test_nothing_to_store(self, index: PrefixIndex) -> None:
        assert index.store("a", []) == 0
        assert index.match(CHAIN, 0.0) == {}
        index.check_invariants()

    def test_hashes_use_all_64_bits(self, index: PrefixIndex) -> None:
        index.store("a", [0, (1 << 64) - 1])
        assert index.match([0, (1 << 64) - 1], 0.0) == {"a": Match(2, 0)}


class TestSpeculation:
    def test_blocks_beyond_the_confirmed_run_count_apart(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN[:2])
        index.speculate("a", CHAIN, 5.0)
        index.speculate("b", CHAIN[:3], 5.0)
        assert index.match(CHAIN, 0.0) == {"a": Match(2, 4), "b": Match(0, 3)}
        assert index.num_blocks("a") == 2
        assert index.num_speculative_blocks("a") == 4

    def test_confirmed_blocks_behind_a_speculative_gap_count_with_it(self, index: PrefixIndex) -> None:
        index.store("a", CHAIN)
        index.remove("a", [13])
        index.speculate("a", CHAIN[:3], 5.0)
        assert index.match(CHAIN, 0.0) == {"a": Match(2, 4)}

    def test_it_expires(self, index: PrefixIndex) -> None:
        index.speculate("a", CHAIN, 5.0)
        assert index.match(CHAIN, 4.999) == {"a": Match(0, 6)}
        assert index.match(CHAIN, 5.0) == {}
        assert index.num_blocks() == 0

    def test_the_confirmation_replaces_it(self, index: PrefixIndex) -> None:
        speculation = index.speculate("a", CHAIN, 5.0)
        index.store("a", CHAIN[:4])
        assert index.match(CHAIN, 0.0) == {"a": Match(4, 2)}
        index.withdraw(speculation)
        assert index.match(CHAIN, 0.0) == {"a": Match(4, 0)}
        assert index.match(CHAIN, 9.0) == {"a": Match(4, 0)}

    def test_what_was_confirmed_and_removed_is_gone(self, index: PrefixIndex) -> None:
        index.speculate("a", CHAIN, 5.0)
        index.store("a", CHAIN)
        index.remove("a", CHAIN[3:])
        assert index.match(CHAIN, 0.0) == {"a": Match(3, 0)}

    def test_a_bet_that_was_settled_takes_nothing_from_a_later_one(self, index: PrefixIndex) -> None:
        old = index.speculate("a", CHAIN, 5.0)
        index.store("a", CHAIN)
        index.remove("a", CHAIN[3:])
        new = index.speculate("a", CHAIN, 9.0)
        index.withdraw(old)
        assert index.match(CHAIN, 0.0) == {"a": Match(3, 3)}
        index.withdraw(new)
        assert index.match(CHAIN, 0.0) == {"a": Match(3, 0)}
        index.check_invariants()

    def test_withdrawing_takes_back_only_what_that_booking_added(self, index: PrefixIndex) -> None:
        first = index.speculate("a", CHAIN[:4], 5.0)
        second = index.speculate("a", CHAIN, 9.0)
        index.withdraw(first)
        assert index.match(CHAIN, 0.0) == {"a": Match(0, 6)}
        index.withdraw(second)
        index.withdraw(second)
        assert index.match(CHAIN, 0.0) == {}
        index.check_invariants()

    def test_history_keeps_to_what_the_endpoint_can_hold_and_the_oldest_goes_first(self, index: PrefixIndex) -> None:
        for start in (10, 20, 30):
            index.speculate("a", range(start, start + 4), 99.0, blocks_max=9)
        index.speculate("a", range(10, 14), 99.0, blocks_max=9)
        assert index.num_speculative_blocks("a") == 8
        assert index.match([20, 21], 0.0) == {}
        assert index.match([10, 11, 12, 13], 0.0) == {"a": Match(0, 4)}
        index.check_invariants()

    def test_bets_that_were_taken_back_do_not_pile_up(self, index: PrefixIndex) -> None:
        for number in range(4 * VOID_BETS_MAX):
            index.withdraw(index.speculate("a", [number], 99.0 + number))
            index.expire(0.0)
        assert len(index._bets) <= 2 * VOID_BETS_MAX + 2
        index.check_invariants()

    def test_an_old_bet_does_not_touch_bets_on_blocks_that_took_its_place(self, index: PrefixIndex) -> None:
        old = index.speculate("a", CHAIN, 5.0)
        index.store("a", CHAIN)
        index.remove("a", CHAIN)
        index.speculate("a", [41, 42, 43], 5.0)
        index.withdraw(old)
        assert index.match([41, 42, 43], 0.0) == {"a": Match(0, 3)}
        index.check_invariants()

    def test_an_old_bet_does_not_touch_blocks_of_a_new_life(self, index: PrefixIndex) -> None:
        old = index.speculate("a", CHAIN, 5.0)
        index.purge("a")
        index.store("b", [31, 32, 33])
        index.speculate("a", [41, 42, 43], 5.0)
        index.withdraw(old)
        assert index.match([31, 32, 33], 0.0) == {"b": Match(3, 0)}
        assert index.match([41, 42, 43], 0.0) == {"a": Match(0, 3)}
        index.check_invariants()


class TestPurge:
    def test_all_of_one_and_nothing_of_others(self, index: PrefixIndex) -> None:
        for endpoint_id in ("a", "b"):
            index.store(endpoint_id, CHAIN)
            index.speculate(endpoint_id, [*CHAIN, 17], 5.0)
        index.purge("a")
        index.purge("a")
        assert index.match([*CHAIN, 17], 0.0) == {"b": Match(6, 1)}
        assert (index.num_blocks("a"), index.num_speculative_blocks("a")) == (0, 0)
        index.check_invariants()

    def test_a_place_is_used_again(self, index: PrefixIndex) -> None:
        for number in range(50):
            index.store(f"w{number}", CHAIN)
            index.store(f"w{number}", [100 + number])
            index.purge(f"w{number}")
        index.store("last", CHAIN)
        assert index.match(CHAIN, 0.0) == {"last": Match(6, 0)}
        assert len(index._roster.slots) == 1


class TestBound:
    def test_the_least_recently_used_tail_goes_first_and_from_its_end(self) -> None:
        index = PrefixIndex(room_for(12) + 3 * LEAF_BYTES)
        index.store("a", CHAIN)
        index.store("a", [21, 22, 23])
        index.store("a", [31, 32, 33])
        index.store("a", [41, 42])
        assert index.match(CHAIN, 0.0)["a"].confirmed_blocks < 6
        assert index.match(CHAIN, 0.0)["a"].confirmed_blocks > 0
        assert index.match([21, 22, 23], 0.0) == {"a": Match(3, 0)}
        assert index.match([41, 42], 0.0) == {"a": Match(2, 0)}
        assert index.num_evicted_blocks > 0

    def test_use_protects_a_tail(self) -> None:
        index = PrefixIndex(room_for(6) + LEAF_BYTES + SPECULATION_BYTES)
        index.store("a", [11, 12, 13])
        index.store("a", [21, 22, 23])
        index.withdraw(index.speculate("a", [11, 12, 13], 5.0))
        index.expire(5.0)
        index.store("a", range(31, 37))
        assert index.match([11, 12, 13], 6.0) == {"a": Match(3, 0)}
        assert index.match([21, 22, 23], 6.0)["a"].confirmed_blocks < 3

    def test_a_shared_beginning_outlives_the_ends_of_those_who_share_it(self) -> None:
        index = PrefixIndex(room_for(40))
        for number in range(200):
            index.store("a", [*CHAIN, 1000 + number, 2000 + number])
            assert index.match(CHAIN, 0.0) == {"a": Match(6, 0)}
        index.check_invariants()

    def test_a_beginning_that_is_asked_for_gets_a_second_chance(self) -> None:
        index = PrefixIndex(room_for(8) + LEAF_BYTES + SPECULATION_BYTES)
        index.store("a", CHAIN)
        index.speculate("a", CHAIN[:3], 0.5)
        index.expire(0.5)
        index.store("a", [21, 22])
        index.store("a", range(31, 41))
        assert index.match(CHAIN, 1.0)["a"].confirmed_blocks == 3

    def test_a_chain_larger_than_the_index_keeps_its_beginning(self) -> None:
        index = PrefixIndex(room_for(3))
        assert index.store("a", CHAIN) == 6
        assert index.match(CHAIN, 0.0) == {"a": Match(3, 0)}
        index.check_invariants()

    def test_no_room_at_all(self) -> None:
        index = PrefixIndex(0)
        index.store("a", CHAIN)
        index.speculate("a", CHAIN, 5.0)
        index.expire(5.0)
        assert index.match(CHAIN, 5.0) == {}
        index.check_invariants()

    @pytest.mark.parametrize(("num_chains", "length", "num_sharers"), [
        (50, 200, 1), (200, 200, 1), (5000, 2, 1), (50, 200, 8), (2000, 20, 1)])
    def test_the_estimate_is_honest(self, num_chains: int, length: int, num_sharers: int) -> None:
        rng = random.Random(3)
        tracemalloc.start()
        index = PrefixIndex(ROOMY_BYTES)
        for _ in range(num_chains):
            chain = [rng.getrandbits(64) for _ in range(length)]
            for number in range(num_sharers):
                index.store(f"w{number}", chain)
        del chain
        measured, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.8 < index.memory_bytes() / measured < 1.4
