"""The cost of serving one prompt on one endpoint, in seconds.

Owns the formula and its constants. It must never read a clock, the index or the ledger: everything comes in as
values.

    total_s = prefill_s + queue_s + decode_s + stall_s + memory_s + price_s - session_s

    prefill_s  our own prompt: uncached tokens / rate, growing with the positions attended to
    queue_s    prompts before ours: the larger of what we sent (ledger) and what the worker reports, never their sum
    decode_s   streams that share each decode step with ours, over the tokens we expect to generate
    stall_s    what our prefill costs the streams that run there: a share of prefill_s for each
    memory_s   blocks that must be evicted for us and may be computed again; blocks that are not there at all
    price_s    what an operator or a breaker adds, bounded
    session_s  a small bonus for the endpoint that served this session last

Worked example. Rate 4,000 tokens/s, prompt 1,000 tokens of which 800 match here: 200 to compute, prefill_s = 0.053.
One prompt of 400 tokens is queued: queue_s = 0.1. Three streams, 128 expected tokens, 0.4 ms a stream and step:
decode_s = 0.154, stall_s = 3 * 0.1 * 0.053 = 0.016. Total 0.322. An idle endpoint without a match costs 0.258 for
all 1,000 tokens, so the request goes there: waiting would cost more than computing again.

Known approximations: one rate for prefill whatever the batch; a stream's share of a decode step is taken as one token
of prefill work (true where the linear layers dominate: 2.7 ms a stream measured against 2.5 ms a prefilled token,
270M on two cores), with a floor for accelerators, where a step is bound by memory bandwidth instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.prefix_index import Match

DEFAULT_PREFILL_TOKENS_PER_S = 4000.0
DEFAULT_DECODE_STEP_S = 0.02
EXPECTED_OUTPUT_TOKENS_MAX = 4096
# Positions over which attention costs as much again as the linear layers.
ATTENTION_DOUBLING_TOKENS = 16384
# One stream's least share of a decode step.
STREAM_STEP_SHARE = 0.02
STALL_WEIGHT = 0.1
# How likely an evicted block is to be asked for again.
EVICTED_REUSE_RATIO = 0.2
PRICE_MAX_S = 1.0
SESSION_BONUS_TOKENS = 32
_new_tuple = tuple.__new__


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds to assume for an endpoint that has not measured its own."""

    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    decode_step_s: float = DEFAULT_DECODE_STEP_S


class Work(NamedTuple):
    """What the request needs, the same on every endpoint."""

    prompt_tokens: int
    expected_output_tokens: int


class CandidateCost(NamedTuple):
    """One endpoint's cost, term by term, in seconds; tokens are what the terms were computed from."""

    endpoint_id: str
    total_s: float
    prefill_s: float
    queue_s: float
    decode_s: float
    stall_s: float
    memory_s: float
    price_s: float
    session_s: float
    matched_tokens: int
    uncached_tokens: int
    queued_tokens: int
    num_active: int


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


def candidate_cost(view: EndpointView, match: Match, load: LoadView, work: Work, *,
                   rates: Rates, in_session: bool = False) -> CandidateCost:
    """The cost of `work` on one endpoint; see the top of this file for the terms.

    It runs for every endpoint and request, hence comparisons in place of max(), which costs a call each.
    """
    prompt, output = work
    num_active, queued, context = load
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
    queue_s = queued * token_s
    stream_step_s = STREAM_STEP_SHARE * step_s
    stream_step_s = stream_step_s if stream_step_s > token_s else token_s
    decode_s = output * stream_step_s * (num_active + context / ATTENTION_DOUBLING_TOKENS)
    stall_s = STALL_WEIGHT * num_active * prefill_s
    memory_s = _memory_s(view, uncached + output + queued, token_s) if view.blocks_total else 0.0
    price_s = min(max(view.price_s, 0.0), PRICE_MAX_S) if view.price_s else 0.0
    session_s = SESSION_BONUS_TOKENS * token_s if in_session else 0.0
    total_s = prefill_s + queue_s + decode_s + stall_s + memory_s + price_s - session_s
    # As CandidateCost(...), in a sixth of the time.
    return _new_tuple(CandidateCost, (view.endpoint_id, total_s, prefill_s, queue_s, decode_s, stall_s, memory_s,
                                      price_s, session_s, matched, uncached, queued, num_active))


def _memory_s(view: EndpointView, new_tokens: int, token_s: float) -> float:
    """Blocks beyond the free ones push out cached ones, some of which will be computed again; blocks beyond those too
    are in use, and we wait about as long as it takes to fill them."""
    missing = -(-new_tokens // view.block_size) - view.blocks_free
    if missing <= 0:
        return 0.0
    evicted = min(missing, view.blocks_cached)
    block_s = view.block_size * token_s
    return EVICTED_REUSE_RATIO * evicted * block_s + (missing - evicted) * block_s
