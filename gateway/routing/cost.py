"""The cost of serving one prompt on one endpoint, in seconds.

Owns the formula and its constants. It must never read a clock, the index or the ledger: everything comes in as
values.

    total_s = prefill_s + tier_s + queue_s + steps_s + room_s + doubt_s + others_s + evict_s + price_s - session_s

Until our first token:
    prefill_s  our own prompt: uncached tokens / rate, growing with the positions attended to
    tier_s     loading what lies in a slower tier: a part of what computing it would take, or a multiple, as seen
               there (tier_ratios.py)
    queue_s    prompts before ours: the larger of what we sent (ledger) and what the worker reports, never their sum
    steps_s    steps with the streams there: half of the one that runs, and one for each batch of prefill that the
               worker computes in a step beside them. What such steps took lately, streams and prompts together
               (busy_steps.py); a decode step until that is known
    room_s     waiting for memory beyond that, when the prompt does not fit beside what streams hold: until enough of
               them have ended and all that was sent there before has been let in (memory_wait.py)
    doubt_s    what other gateways may have sent there since its report, which we shall meet
Cost to others:
    others_s   our tokens lengthen every step of the streams there, our prefill holds them up. A second late in the
               middle of an answer counts a part of a second that the first token is late. Where it shares its
               cores with other endpoints and all are at work (shared_cores.py), our prefill holds up all who are
               there by a part of a core's share of it: prompts that wait for their first token, streams as above
    evict_s    cached blocks that go for ours, as far as they would have been asked for again
And:
    price_s    what an operator or a breaker adds, bounded
    session_s  a small bonus for the endpoint that served this session last

Our own decode time is left out: it moves no first token. What it does to others is in others_s and room_s.

Worked example. Rate 4,000 tokens/s, prompt 1,000 tokens of which 800 match here: 200 to compute, prefill_s = 0.053.
One prompt of 680 tokens is queued: queue_s = 0.17. Three streams run, 20 ms a step: steps_s = 0.012; 128 expected
tokens at 0.25 ms a stream and step: others_s = 0.25 * 0.096 + 3 * 0.1 * 0.053 = 0.040. Total 0.275. An idle endpoint
without a match costs 0.258 for all 1,000 tokens, so the request goes there: waiting would cost more than computing
again.

Known approximations: one rate for prefill whatever the batch; a stream's share of a decode step is taken as one token
of prefill work (true where the linear layers dominate: 2.7 ms a stream measured against 2.5 ms a prefilled token,
270M on two cores), with a floor for accelerators, where a step is bound by memory bandwidth instead. That floor takes
our prompt for the whole context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.memory_wait import Occupancy, Stream, begins_in_s, held_blocks
from gateway.routing.output_length import UNKNOWN_LENGTHS, LengthProfile
from gateway.routing.prefix_index import Match
from gateway.routing.shared_cores import Crowding

DEFAULT_PREFILL_TOKENS_PER_S = 4000.0
DEFAULT_DECODE_STEP_S = 0.02
EXPECTED_OUTPUT_TOKENS_MAX = 4096
# Positions over which attention costs as much again as the linear layers.
ATTENTION_DOUBLING_TOKENS = 16384
# Loading a token's K/V from host memory or disk, against computing it; until it was seen there.
SLOW_TIER_RATIO = 0.1
# Positions of prefill that share a step with the decoding streams, of a worker that does not say.
BATCH_TOKENS = 8192
# Of the step that runs when a prompt arrives, in the mean.
STEP_UNDER_WAY = 0.5
# One stream's least share of a decode step: a row of its own, and its context's part of all that a step reads (keys
# and values of a token are 8 millionths of an 8B model's weights), up to what a stream of 2,000 tokens has.
STREAM_STEP_SHARE = 0.005
STREAM_TOKEN_SHARE = 7.5e-6
STREAM_STEP_SHARE_MAX = 0.02
# A second of others' streams against a second until a first token.
STREAM_WEIGHT = 0.25
STALL_WEIGHT = 0.1
# Of a prompt computed on full cores, what those meet who wait there: some have begun before, some are ahead of it.
CROWD_WEIGHT = 0.5
# The share of its pool that a worker keeps for the growth of what runs.
ROOM_KEPT_RATIO = 0.01
# How far what is thought to be free may be off, as a share of the pool.
ROOM_DOUBT_RATIO = 0.05
# How likely an evicted block is to be asked for again.
EVICTED_REUSE_RATIO = 0.2
# What may be met of others' unseen work where all work is theirs, in lives of a stream.
OTHERS_DOUBT_RATIO = 0.2
# How likely others' streams hold what a prompt matches, where all work is theirs; 1 at most.
OTHERS_HOLD_RATIO = 2.0
PRICE_MAX_S = 1.0
SESSION_BONUS_TOKENS = 32
# Costs this close are a tie: the figures are not better than that, and equal choices by many requests are a herd.
TIE_RATIO = 0.01
TIE_S = 1e-6
# Keeps a least cost under the cost when both are rounded.
_ROUNDING_TOKENS = 1e-3
_new_tuple = tuple.__new__
StreamsOf = Callable[[str], Sequence[Stream]]
BusyStepOf = Callable[[str, int], float]
TierRatioOf = Callable[[str], float]


def nobody(endpoint_id: str) -> Sequence[Stream]:
    """No streams of ours anywhere."""
    return ()


def unseen(endpoint_id: str, num_active: int) -> float:
    """No step has been seen yet."""
    return 0.0


def usual_tier(endpoint_id: str) -> float:
    """No slower tier has been seen at work yet."""
    return SLOW_TIER_RATIO


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds to assume for an endpoint that has not measured its own."""

    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    decode_step_s: float = DEFAULT_DECODE_STEP_S


class Work(Struct, frozen=True, gc=False):
    """What the request needs, the same on every endpoint. `now` is on the clock of the ledger's bookings;
    `shared_ratio`: how likely it is that what the prompt matches is in use there anyway. `streams_of` tells our own
    requests on an endpoint, and is asked only where memory is short; a stream's token takes `stretch` decode steps;
    `lengths` are those of answers; `chain` are the prompt's block hashes, empty where several kinds are in use;
    `busy_step_of` tells what a step takes on an endpoint with so many requests, 0.0 where nobody knows. `crowding` is
    of endpoints that share their cores with others. `tier_ratio_of` tells what loading from an endpoint's slower tier
    takes for a second of computing, and is asked only where there is something to load."""

    prompt_tokens: int
    expected_output_tokens: int
    now: float = 0.0
    shared_ratio: float = 1.0
    stretch: float = 1.0
    streams_of: StreamsOf = nobody
    lengths: LengthProfile = UNKNOWN_LENGTHS
    chain: Sequence[int] = ()
    busy_step_of: BusyStepOf = unseen
    crowding: Mapping[str, Crowding] = {}
    tier_ratio_of: TierRatioOf = usual_tier


class CandidateCost(NamedTuple):
    """One endpoint's cost, term by term, in seconds; tokens are what the terms were computed from.
    `spared_s`: what computing would take that is loaded instead."""

    endpoint_id: str
    total_s: float
    prefill_s: float
    queue_s: float
    steps_s: float
    room_s: float
    doubt_s: float
    others_s: float
    evict_s: float
    price_s: float
    session_s: float
    matched_tokens: int
    uncached_tokens: int
    queued_tokens: int
    num_active: int
    num_steps: float
    tier_s: float = 0.0
    spared_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """The predicted time to first token."""
        return self.prefill_s + self.tier_s + self.queue_s + self.steps_s + self.room_s


def assumed_rates(views: Iterable[EndpointView]) -> Rates:
    """What to assume for an endpoint without figures of its own.

    The mean of its peers, so that a worker that has just started looks neither faster nor slower than they are;
    constants when nobody has measured anything.
    """
    prefill = [view.prefill_tokens_per_s for view in views if view.prefill_tokens_per_s > 0]
    steps = [view.decode_step_s for view in views if view.decode_step_s > 0]
    return Rates(sum(prefill) / len(prefill) if prefill else DEFAULT_PREFILL_TOKENS_PER_S,
                 sum(steps) / len(steps) if steps else DEFAULT_DECODE_STEP_S)


def matched_tokens(view: EndpointView, match: Match, prompt_tokens: int) -> int:
    """Prompt tokens predicted to be cached there. A full hit leaves one to compute: its logits start the answer."""
    held = (match[0] + match[1]) * view.block_size
    if held < prompt_tokens:
        return held
    return prompt_tokens - 1 if prompt_tokens else 0


def stream_step_share(prompt_tokens: int) -> float:
    """Of a decode step, what a stream with this prompt takes at least."""
    share = STREAM_STEP_SHARE + STREAM_TOKEN_SHARE * prompt_tokens
    return share if share < STREAM_STEP_SHARE_MAX else STREAM_STEP_SHARE_MAX


def candidate_cost(view: EndpointView, match: Match, load: LoadView, work: Work, *,
                   rates: Rates, in_session: bool = False) -> CandidateCost:
    """The cost of `work` on one endpoint; see the top of this file for the terms.

    It runs for every endpoint and request, hence comparisons in place of max(), which costs a call each.
    """
    prompt, output = work.prompt_tokens, work.expected_output_tokens
    num_active, queued, context, _, held_tokens = load
    token_s = 1.0 / (view.prefill_tokens_per_s if view.prefill_tokens_per_s > 0 else rates.prefill_tokens_per_s)
    step_s = view.decode_step_s if view.decode_step_s > 0 else rates.decode_step_s
    matched = matched_tokens(view, match, prompt)
    uncached = prompt - matched or 1
    # The worker's report and our ledger look at the same work: the larger one, not both.
    reported = view.waiting_prefill_tokens + view.running_prefill_tokens
    queued = queued if queued > reported else reported
    reported = view.num_running + view.num_waiting
    num_active = num_active if num_active > reported else reported
    reported = view.decode_context_tokens
    context = context if context > reported else reported

    prefill_s = uncached * token_s * (1.0 + (matched + prompt) / (2 * ATTENTION_DOUBLING_TOKENS))
    tier_s = spared_s = 0.0
    if match[2]:
        spared_s = _slow_tokens(view, match, matched) * token_s
        tier_s = work.tier_ratio_of(view.endpoint_id) * spared_s
    queue_s = queued * token_s
    steps_s = num_steps = 0.0
    if num_active:
        num_steps = STEP_UNDER_WAY + (queued + uncached) / (view.step_tokens or BATCH_TOKENS)
        steps_s = num_steps * (work.busy_step_of(view.endpoint_id, num_active) or step_s)
    stream_step_s = stream_step_share(prompt) * step_s
    stream_step_s = stream_step_s if stream_step_s > token_s else token_s
    others_s = (STREAM_WEIGHT * output * stream_step_s * (num_active + context / ATTENTION_DOUBLING_TOKENS)
                + STALL_WEIGHT * num_active * prefill_s)
    crowding = work.crowding.get(view.endpoint_id) if work.crowding else None
    if crowding is not None and crowding.is_full:
        others_s += _crowd_s(crowding, prefill_s)
    room_s = evict_s = 0.0
    if view.blocks_total:
        # Free in the report, less what has been taken since then.
        free = view.blocks_free * view.block_size - held_tokens + view.held_tokens_at_report
        available = free + view.blocks_cached * view.block_size
        pool = view.blocks_total * view.block_size
        if (uncached + matched + (ROOM_KEPT_RATIO + ROOM_DOUBT_RATIO) * pool > available
                and (num_active or available <= 0)):
            room_s = _room_s(view, work, _Figures(token_s, step_s, queue_s, num_active), matched_tokens=matched,
                             free_tokens=available)
        evicted = uncached + output - (free if free > 0 else 0)
        evict_s = EVICTED_REUSE_RATIO * evicted * token_s if evicted > 0 else 0.0
    doubt_s = OTHERS_DOUBT_RATIO * view.others_ratio * output * step_s * work.stretch if view.others_ratio else 0.0
    price_s = min(max(view.price_s, 0.0), PRICE_MAX_S) if view.price_s else 0.0
    session_s = SESSION_BONUS_TOKENS * token_s if in_session else 0.0
    total_s = prefill_s + tier_s + queue_s + steps_s + room_s + doubt_s + others_s + evict_s + price_s - session_s
    # As CandidateCost(...), in a sixth of the time.
    return _new_tuple(CandidateCost, (view.endpoint_id, total_s, prefill_s, queue_s, steps_s, room_s, doubt_s,
                                      others_s, evict_s, price_s, session_s, matched, uncached, queued, num_active,
                                      num_steps, tier_s, spared_s))


def least_costs(views: Sequence[EndpointView], matches: Mapping[str, Match], loads: Mapping[str, LoadView],
                work: Work, *, rates: Rates, session: str | None = None) -> tuple[list[float], int]:
    """For each endpoint a cost that candidate_cost() never falls below, in a third of the time: prefill without the
    growth of attention, and the queue. And the longest match of all, in tokens."""
    prompt = work.prompt_tokens
    least: list[float] = []
    most = 0
    for view in views:
        endpoint_id = view.endpoint_id
        match, load = matches.get(endpoint_id), loads.get(endpoint_id)
        held = 0 if match is None else (match[0] + match[1]) * view.block_size
        if held >= prompt:
            held = prompt - 1 if prompt else 0
        if held > most:
            most = held
        queued = view.waiting_prefill_tokens + view.running_prefill_tokens
        if load is not None and load[1] > queued:
            queued = load[1]
        tokens = prompt - held + queued
        if endpoint_id == session:
            tokens -= SESSION_BONUS_TOKENS
        rate = view.prefill_tokens_per_s
        least.append((tokens - _ROUNDING_TOKENS) / (rate if rate > 0 else rates.prefill_tokens_per_s))
    return least, most


def _crowd_s(crowding: Crowding, prefill_s: float) -> float:
    """What computing a prompt takes from all who share full cores, wherever on them it is computed: so what counts
    is tokens that are computed twice. Our answer takes as well, but prompts that wait now have begun by then; with
    it counted, idle endpoints were not woken even for memory that others lack."""
    waiting = crowding.num_prompts + STALL_WEIGHT * crowding.num_streams
    return CROWD_WEIGHT * prefill_s * waiting / crowding.num_cores


def _slow_tokens(view: EndpointView, match: Match, matched: int) -> int:
    """Those of the matched tokens that have to be loaded: none beyond them, where nothing is spared."""
    fast, confirmed = (match[0] - match[2]) * view.block_size, match[0] * view.block_size
    return min(confirmed, matched) - min(fast, matched)


class _Figures(NamedTuple):
    """What candidate_cost() has found of an endpoint by the time that memory is looked at."""

    token_s: float
    step_s: float
    queue_s: float
    num_active: int


def _room_s(view: EndpointView, work: Work, figures: _Figures, *, matched_tokens: int, free_tokens: float) -> float:
    """What waiting for memory adds to the queue.

    What is free is known to ROOM_DOUBT_RATIO of the pool either way, so a prompt that just fits is taken to wait as
    often as one that just does not.

    Without streams of our own to reckon with, a pool is given back once in a life of a stream, and nothing before the
    first of those that run has ended. What is missing beyond our own streams is waited for in the same way.
    """
    pool = view.blocks_total * view.block_size
    streams = work.streams_of(view.endpoint_id)
    needed = work.prompt_tokens + view.block_size - _held_tokens(view, work, streams, matched_tokens)
    missing = needed + ROOM_KEPT_RATIO * pool - free_tokens
    doubt = ROOM_DOUBT_RATIO * pool
    likely = 0.5 + 0.5 * missing / doubt
    if likely <= 0.0:
        return 0.0
    likely = min(likely, 1.0)
    needed = max(needed, free_tokens)   # when it waits, it waits for somebody
    pace_s = figures.step_s * work.stretch
    life_s = work.expected_output_tokens * pace_s
    if not streams:
        return likely * life_s * max(missing / pool, 1.0 / max(view.num_running, 1))
    begins_s, missing = begins_in_s(
        Occupancy(streams, free_tokens, ROOM_KEPT_RATIO * pool, figures.token_s, pace_s, work.now, work.lengths,
                max(1.0, figures.num_active / len(streams))), needed)
    begins_s += life_s * missing / pool
    return likely * max(0.0, begins_s - figures.queue_s)


def _held_tokens(view: EndpointView, work: Work, streams: Sequence[Stream], matched_tokens: int) -> float:
    """How much of the match is in use there anyway, and needs no room. Others' streams are not known: the more of
    them there are, the likelier it is theirs."""
    depth = matched_tokens // view.block_size
    if not work.chain or len(work.chain) < depth:
        return matched_tokens * work.shared_ratio
    held = held_blocks(streams, work.chain, depth) * view.block_size
    if not view.others_ratio:
        return held
    return max(held, matched_tokens * min(1.0, OTHERS_HOLD_RATIO * view.others_ratio))
