"""Who cannot win, found for many endpoints at once where memory is short, so that memory_wait.py walks over few.

Owns a floor under what cost.py says of each, in numpy: the terms that need no walk, and the wait until streams that
hold what is missing may have ended. It must never decide: whoever may cost no more than the best is priced in full.
Tests hold the floor under the cost.

Under the floor all of the match is held by streams anyway, those that wait for their first token have it now, and
what only adds to a cost is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gateway.routing import cost
from gateway.routing.cost import Rates, Work
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import LoadView
from gateway.routing.memory_wait import Stream, Streams
from gateway.routing.prefix_index import Match

Row = tuple[EndpointView, LoadView, Match]
# They keep floors under costs where both are rounded.
_SLACK_S = 1e-6
_SLACK_TOKENS = 1e-3
HARDLY_LIKELY = 1e-6   # a wait that adds nothing, and is divided by


class _Known(NamedTuple):
    """A column each: what is read of a view, then its load, then its match."""

    prefill_tokens_per_s: np.ndarray
    decode_step_s: np.ndarray
    block_size: np.ndarray
    blocks_total: np.ndarray
    blocks_free: np.ndarray
    blocks_cached: np.ndarray
    num_running: np.ndarray
    num_waiting: np.ndarray
    waiting_prefill_tokens: np.ndarray
    running_prefill_tokens: np.ndarray
    held_tokens_at_report: np.ndarray
    num_inflight: np.ndarray
    queued_prefill_tokens: np.ndarray
    decode_context_tokens: np.ndarray
    num_decoding: np.ndarray
    held_tokens: np.ndarray
    confirmed_blocks: np.ndarray
    speculative_blocks: np.ndarray
    slow_blocks: np.ndarray


class _StreamTable(NamedTuple):
    """Streams of those `at` these positions, which begin at `starts` of the columns for all streams, `of_stream`
    telling whose each is: tokens `held`, and when each gives them back. `missing` tokens have to be given back, then
    `hidden_s` goes by beside the queue."""

    at: np.ndarray
    starts: np.ndarray
    of_stream: np.ndarray
    held: np.ndarray
    ends_s: np.ndarray
    missing: np.ndarray
    likely: np.ndarray
    hidden_s: np.ndarray


_of_view = attrgetter(*_Known._fields[:_Known._fields.index("num_inflight")])


class RoomFloors:
    """Of one pick, by position in `rows`."""

    def __init__(self, rows: Sequence[Row], work: Work, rates: Rates) -> None:
        self._rows, self._work = rows, work
        known = _known(rows)
        self._token_s = 1.0 / np.where(known.prefill_tokens_per_s > 0, known.prefill_tokens_per_s,
                                       rates.prefill_tokens_per_s)
        self._pace_s = work.stretch * np.where(known.decode_step_s > 0, known.decode_step_s, rates.decode_step_s)
        self._num_active = np.maximum(known.num_inflight, known.num_running + known.num_waiting)
        self._queue_s = self._token_s * np.maximum(known.queued_prefill_tokens,
                                                   known.waiting_prefill_tokens + known.running_prefill_tokens)
        self._pool = known.blocks_total * known.block_size
        free = known.blocks_free * known.block_size - known.held_tokens + known.held_tokens_at_report
        self._available = free + known.blocks_cached * known.block_size
        matched = np.minimum((known.confirmed_blocks + known.speculative_blocks) * known.block_size,
                             work.prompt_tokens)
        in_use = matched if work.chain else matched * work.shared_ratio
        self._needed = work.prompt_tokens + known.block_size - in_use
        self._base_s = self._unroomed_s(matched, free) - _SLACK_S
        self._find_short()
        self._streams: _StreamTable | None = None

    def likeliest(self) -> int:
        """Who is thought to be cheapest, if streams end one after the other in equal times."""
        return int(self._guess_s.argmin())

    def within(self, reach_s: float) -> list[int]:
        """Who may cost so much or less, the one that is thought to be cheapest first. Streams are looked at once, of
        those that may cost as much as the first time that somebody asks."""
        is_near = self._base_s <= reach_s
        if self._streams is None:
            self._streams = self._table_of((is_near & self._is_short).nonzero()[0])
        table = self._streams
        if len(table.at):
            allowed_s = (reach_s - self._base_s[table.at]) / table.likely + table.hidden_s
            ended = np.where(table.ends_s <= allowed_s[table.of_stream], table.held, 0.0)
            is_near[table.at] &= np.add.reduceat(ended, table.starts) >= table.missing
        near = is_near.nonzero()[0]
        nearest: list[int] = near[self._guess_s[near].argsort(kind="stable")].tolist()
        return nearest

    def _unroomed_s(self, matched: np.ndarray, free: np.ndarray) -> np.ndarray:
        """The cost without the wait for memory and what is only ever added; each might be the session's."""
        work, token_s = self._work, self._token_s
        prompt, output = work.prompt_tokens, work.expected_output_tokens
        uncached = prompt - matched
        prefill_s = uncached * token_s * (1.0 + (matched + prompt) / (2 * cost.ATTENTION_DOUBLING_TOKENS))
        others_s = self._num_active * (cost.STREAM_WEIGHT * output * token_s + cost.STALL_WEIGHT * prefill_s)
        evicted = np.maximum(uncached + output - np.maximum(free, 0.0), 0.0)
        evict_s = np.where(self._pool > 0, cost.EVICTED_REUSE_RATIO * evicted * token_s, 0.0)
        total_s: np.ndarray = (self._queue_s + prefill_s + others_s + evict_s
                               - cost.SESSION_BONUS_TOKENS * token_s)
        return total_s

    def _find_short(self) -> None:
        """Those that wait for memory while anybody runs there, how likely, and for about how long."""
        pool, available, needed = self._pool, self._available, self._needed
        short_by = needed + cost.ROOM_KEPT_RATIO * pool - available
        doubt = cost.ROOM_DOUBT_RATIO * pool
        self._likely = np.minimum(0.5 + 0.5 * short_by / np.where(pool > 0, doubt, 1.0), 1.0)
        self._is_short = ((pool > 0) & (self._likely > HARDLY_LIKELY)
                          & ((self._num_active > 0) | (available <= 0)))
        self._missing = np.maximum(short_by, cost.ROOM_KEPT_RATIO * pool)
        self._life_s = self._work.expected_output_tokens * self._pace_s
        wait_s = np.maximum(self._life_s * self._missing / np.maximum(pool - available, 1.0) - self._queue_s, 0.0)
        self._guess_s = self._base_s + np.where(self._is_short, self._likely * wait_s, 0.0)

    def _table_of(self, at: np.ndarray) -> _StreamTable:
        work = self._work
        all_streams = [work.streams_of(self._rows[row][0].endpoint_id) for row in at.tolist()]
        counts = [len(streams) for streams in all_streams]
        if not all(counts):
            at, all_streams = at[np.array(counts) > 0], [streams for streams in all_streams if streams]
            counts = [len(streams) for streams in all_streams]
        if not counts:
            return _StreamTable(at, *[np.empty(0)] * 7)
        starts, of_stream = np.cumsum([0, *counts[:-1]]), np.repeat(np.arange(len(counts)), counts)
        held, output, began_at, inherited = np.concatenate([_columns_of(streams) for streams in all_streams], axis=1)
        held = held * np.maximum(1.0, self._num_active[at] / counts)[of_stream] + inherited
        pace_s = self._pace_s[at][of_stream]
        left = work.lengths.all_left((work.now - began_at) / pace_s, output)
        ends_s = np.where(np.isnan(began_at), output, left) * pace_s
        held_by_all, missing, pool = np.add.reduceat(held, starts), self._missing[at], self._pool[at]
        # What is missing even when all have ended is waited for a part of a life longer; the queue goes on meanwhile.
        beyond = np.maximum(missing - cost.ROOM_KEPT_RATIO * pool - held_by_all, 0.0)
        hidden_s = self._queue_s[at] - self._life_s[at] * beyond / pool + _SLACK_S
        return _StreamTable(at, starts, of_stream, held, ends_s, np.minimum(missing, held_by_all) - _SLACK_TOKENS,
                            self._likely[at], hidden_s)


def _known(rows: Sequence[Row]) -> _Known:
    flat: list[float] = []
    for view, load, match in rows:
        flat += _of_view(view)
        flat += load
        flat += match
    return _Known(*np.ascontiguousarray(np.array(flat, float).reshape(len(rows), -1).T))


def _columns_of(streams: Sequence[Stream]) -> np.ndarray:
    """A ledger's own streams remember them."""
    return (streams if isinstance(streams, Streams) else Streams(streams)).columns
