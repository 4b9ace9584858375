"""A request on its way to a worker and back, up to the first byte of an answer.

Owns: the time limits up to there, and whether a second worker is asked. Must never: send anything to the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.relay.hedging import Hedges, hedged
from gateway.relay.relay import Watch
from gateway.relay.retry import DEADLINE, TIMEOUT, Attempt, FirstAnswer, Walk, answer_from_any, first_answer
from gateway.relay.upstream import Upstream
from gateway.server.dispatch import Choosing
from gateway.server.placement import Placement
from gateway.server.request_record import RequestRecord

# A limit that has passed already still lets a worker be asked: its failure says what was too late.
LIMIT_MIN_S = 0.001


@dataclass(frozen=True, slots=True)
class Answering:
    """What goes with a request on its way to a worker and back. `headers` are for the client; `may_move`: it has not
    asked to stay at one worker."""

    record: RequestRecord
    headers: Mapping[str, str]
    first_byte_timeout_s: float
    may_move: bool
    watch: Watch


@dataclass(frozen=True, slots=True)
class Taken:
    """A worker has taken the request and begun to answer."""

    placement: Placement
    answer: FirstAnswer


class Beginning:
    """From a request to the first byte of its answer. `count_hedge` is told what became of each hedge."""

    def __init__(self, config: GatewayConfig, upstream: Upstream, *, count_hedge: Callable[[str], None]) -> None:
        self._upstream = upstream
        self._max_retries = config.max_retries
        self._first_byte_timeout_s = config.first_byte_timeout_s
        self._hedges = Hedges(config.hedge_after_s, config.max_hedges, count_hedge)

    async def begin(self, choosing: Choosing, answering: Answering, walk: Walk, *, is_stream: bool) -> Taken:
        """The worker that answers. AttemptFailed when none does, ApiError when there is none."""
        limit_s = max(LIMIT_MIN_S, min(answering.first_byte_timeout_s, answering.watch.left_s))
        reason = TIMEOUT if answering.first_byte_timeout_s >= self._first_byte_timeout_s else DEADLINE
        first = answer_from_any(self._upstream, choosing, max_retries=self._max_retries, walk=walk,
                                timeout_s=limit_s, timeout_reason=reason)
        # Unless it streams, a late first byte says nothing about a queue.
        if self._hedges.after_s is None or not is_stream:
            return Taken(*_placed(await first))
        placement, answer = _placed(await hedged(first, choosing.another, lambda attempt: first_answer(
            self._upstream, attempt, timeout_s=limit_s, timeout_reason=reason), self._hedges))
        choosing.note(placement)
        return Taken(placement, answer)


def _placed(answered: tuple[Attempt, FirstAnswer]) -> tuple[Placement, FirstAnswer]:
    attempt, answer = answered
    assert isinstance(attempt, Placement), "Choosing hands out placements only"
    return attempt, answer
