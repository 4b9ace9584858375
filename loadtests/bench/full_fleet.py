"""A fleet without room: every endpoint's memory is in use, so that the wait for room decides where a prompt goes.

Owns a seeded PickInput on a real ledger, for the micro-benchmark and for tests. It must never time anything.
"""

from __future__ import annotations

import random

from gateway.routing.busy_steps import BusySteps
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import Footprint, LoadLedger
from gateway.routing.output_length import PROFILE_RENEWED_EVERY, OutputLength
from gateway.routing.picker import PickInput
from gateway.routing.prefix_index import Match

MODEL = "m"
BLOCK_SIZE = 16
PROMPT_BLOCKS = 375
SHARED_BLOCKS = 200     # the beginning that prompts of one family have in common
NUM_FAMILIES = 16
STREAMS_EACH = 12
WAITING_RATIO = 0.05    # of the streams, those that have no first token yet
POOL_BLOCKS = 5000
NOW = 100.0


def full_fleet(rng: random.Random, num_endpoints: int) -> PickInput:
    """What a pick is given there: STREAMS_EACH on each endpoint, next to nothing free, 256 answers' lengths known."""
    families = [_hashes(rng, SHARED_BLOCKS) for _ in range(NUM_FAMILIES)]
    ledger, outputs = LoadLedger(), OutputLength()
    for _ in range(32 * PROFILE_RENEWED_EVERY):
        outputs.observe(MODEL, round(rng.lognormvariate(4.8, 0.6)))
    views, matches = [], {}
    for number in range(num_endpoints):
        name = f"worker-{number}"
        for _ in range(STREAMS_EACH):
            _book(rng, ledger, name, rng.choice(families), output_tokens=outputs.expected(MODEL))
        load = ledger.load(name)
        views.append(EndpointView(
            name, "1", prefill_tokens_per_s=rng.uniform(3500.0, 4500.0), decode_step_s=rng.uniform(0.018, 0.022),
            blocks_total=POOL_BLOCKS, blocks_free=rng.randrange(60), blocks_cached=rng.randrange(240),
            num_running=load.num_decoding, num_waiting=load.num_inflight - load.num_decoding,
            held_tokens_at_report=load.held_tokens - rng.randrange(800)))
        matches[name] = Match(rng.choice((0, SHARED_BLOCKS, rng.randrange(PROMPT_BLOCKS))), 0)
    chain = [*rng.choice(families), *_hashes(rng, PROMPT_BLOCKS - SHARED_BLOCKS)]
    return PickInput(views, PROMPT_BLOCKS * BLOCK_SIZE, matches=matches, loads=ledger.loads(), random_ratio=0.5,
                     expected_output_tokens=outputs.expected(MODEL), now=NOW, stretch=1.5, streams_of=ledger.streams,
                     lengths=outputs.profile(MODEL), chain=chain, busy_step_of=BusySteps().step_s)


def _book(rng: random.Random, ledger: LoadLedger, name: str, family: list[int], *, output_tokens: int) -> None:
    chain = [*family, *_hashes(rng, rng.randrange(PROMPT_BLOCKS - SHARED_BLOCKS))]
    matched = rng.choice((0, SHARED_BLOCKS))
    booking = ledger.book(name, "1", prefill_tokens=(len(chain) - matched) * BLOCK_SIZE + 1,
                          context_tokens=len(chain) * BLOCK_SIZE,
                          footprint=Footprint(chain, matched, matched * BLOCK_SIZE, output_tokens, NOW - 5.0))
    if rng.random() > WAITING_RATIO:
        booking.prefill_done(NOW - rng.uniform(0.0, 4.0))


def _hashes(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]
