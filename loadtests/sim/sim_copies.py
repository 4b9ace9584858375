"""Copies of hot prefixes that one simulated gateway has made ahead of need: the server's plan on the virtual clock.

Owns the plan and what is booked for copies under way. It notes prefixes as gateway.server.dispatch does and books as
gateway.server.prewarm does. It must never decide: gateway.routing.copy_plan does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

from gateway.routing.copy_plan import Copy, CopyPlan, Sight
from gateway.routing.hot_prefixes import HotPrefix, HotPrefixes, Sighting
from gateway.routing.load_ledger import Booking, LoadLedger
from gateway.routing.prefix_index import PrefixIndex, Speculation
from loadtests.sim.sim_request import SimRequest
from loadtests.traces import TraceRequest

MODEL = "simulated"
LEAST_URGENT = 2**31 - 1   # as worker.server.prewarm_route has it


class _Tokens(Sequence[int]):
    """A request's prompt, made when somebody looks: few of the prompts that are noted ever are."""

    def __init__(self, request: SimRequest) -> None:
        self._request = request

    def __len__(self) -> int:
        return self._request.prompt_tokens

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._request.token_ids()[at]


class _UnderWay(NamedTuple):
    worker_id: str
    booking: Booking
    bet: Speculation


class SimCopies:
    """Of one gateway. Copies under way are known by the index of their request."""

    def __init__(self, block_size: int) -> None:
        self._plan = CopyPlan(HotPrefixes())
        self._block_size = block_size
        self._under_way: dict[int, _UnderWay] = {}

    def note(self, request: SimRequest, chain: Sequence[int], known_tokens: int, now: float) -> None:
        """So much of the prompt was known somewhere."""
        if known_tokens:
            self._plan.hot.note(Sighting(MODEL, chain, known_tokens // self._block_size, _Tokens(request),
                                         self._block_size), now)

    def next(self, sight: Sight, now: float) -> Copy | None:
        """The copy to make now; one at a time."""
        return None if self._under_way else self._plan.next(sight, now)

    def begin(self, index: int, worker_id: str, booking: Booking, bet: Speculation) -> None:
        """It is on its way there."""
        self._under_way[index] = _UnderWay(worker_id, booking, bet)

    def end(self, index: int, now: float) -> str:
        """It is there, or never will be; where that is."""
        copy = self._under_way.pop(index)
        copy.booking.release()
        copy.bet.settle(now)
        return copy.worker_id


def copy_request(prefix: HotPrefix, index: int, now: float) -> SimRequest:
    """The prompt that has a worker compute it."""
    block_ids = tuple(prefix.token_ids()[::prefix.block_size])
    return SimRequest(index, now, TraceRequest(now, prefix.num_tokens, 1, block_ids), prefix.block_size,
                      priority=LEAST_URGENT)


def whole_holders(index: PrefixIndex, prefix: HotPrefix, now: float) -> list[str]:
    """Who holds it whole, or will soon."""
    return [endpoint_id for endpoint_id, match in index.match(prefix.chain, now).items()
            if match.confirmed_blocks + match.speculative_blocks >= len(prefix.chain)]


def book_copy(ledger: LoadLedger, copy: Copy, epoch: str) -> Booking:
    """As a request's prompt is booked."""
    tokens = copy.prefix.num_tokens
    return ledger.book(copy.endpoint_id, epoch, prefill_tokens=tokens, context_tokens=tokens)
