"""The one writer of confirmed blocks into the prefix index.

Owns: an event applier per endpoint, and the order in which changes happen. Feeds hand changes in and wait for them:
each has at most one under way, and the sockets' own limits do the rest. A small change that finds nothing before it
is made in its feed's own turn: handing it to the task and back costs several times what it costs itself.
Must never: hold the loop for longer than a turn (TURN_S, and one piece of an event more), or judge sequence numbers
(feed_sequence does). Blocks of endpoints that are gone are swept away in the turns after.
Speculative entries are the dispatcher's: it bets when it books. This task only lets them expire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.routing.event_applier import BLOCKS_A_PIECE, AppliedCounts, EventApplier
from gateway.routing.prefix_index import PrefixIndex
from worker.protocol.block_hash import HashScheme
from worker.protocol.cache_events import AllBlocksCleared, BlockStored, EventBatch

MAX_QUEUED_CHANGES = 1024
TURN_S = 0.0005
SWEPT_BLOCKS_A_STEP = 128
EXPIRY_INTERVAL_S = 1.0


class NumberedBatch(NamedTuple):
    """A decoded batch and its sequence number."""

    seq: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class _Change:
    """With `batches`: apply them. Otherwise forget the endpoint and, with `restart`, begin anew from its blocks."""

    endpoint_id: str
    done: asyncio.Future[None]
    restart: tuple[HashScheme, str, Sequence[BlockStored]] | None = None
    batches: Sequence[NumberedBatch] = ()


class IndexWriter:
    """`run()` is the task; the other methods are for feeds and return once their change is in the index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._appliers: dict[str, EventApplier] = {}
        self._changes: asyncio.Queue[_Change] = asyncio.Queue(MAX_QUEUED_CHANGES)
        self._turn_ends_at = 0.0
        self._is_at_work = False
        self._guest_turn_ends_at: float | None = None   # of changes made in the turns of feeds

    async def restart(self, endpoint_id: str, scheme: HashScheme, epoch: str, blocks: Sequence[BlockStored]) -> None:
        """Forget all that this endpoint held and believe this snapshot instead."""
        await self._submit(_Change(endpoint_id, _new_future(), restart=(scheme, epoch, blocks)))

    async def apply(self, endpoint_id: str, batches: Sequence[NumberedBatch]) -> None:
        """Apply batches, in this order, to the life begun by restart()."""
        if not self.apply_at_once(endpoint_id, batches):
            await self._submit(_Change(endpoint_id, _new_future(), batches=batches))

    def apply_at_once(self, endpoint_id: str, batches: Sequence[NumberedBatch]) -> bool:
        """apply(), or False where that has to wait."""
        if not self._may_apply_now(batches):
            return False
        self._appliers[endpoint_id].apply_all(batches)
        return True

    async def forget(self, endpoint_id: str) -> None:
        """The endpoint holds nothing any more."""
        await self._submit(_Change(endpoint_id, _new_future()))

    def counts(self, endpoint_id: str) -> AppliedCounts:
        """What became of the blocks in this endpoint's events; zeros while it has none."""
        applier = self._appliers.get(endpoint_id)
        return applier.counts if applier is not None else AppliedCounts()

    async def run(self) -> None:
        """Apply changes one after another, let bets that are past due expire, and sweep when idle, for ever."""
        while True:
            change = await self._next_change()
            if change is None:
                continue
            self._is_at_work = True
            try:
                await self._perform(change)
            except Exception as error:
                # The feed that sent it starts over with a snapshot; the other feeds go on.
                if not change.done.done():
                    change.done.set_exception(error)
            else:
                if not change.done.done():  # the feed may have been cancelled meanwhile
                    change.done.set_result(None)
            finally:
                self._is_at_work = False

    def _may_apply_now(self, batches: Sequence[NumberedBatch]) -> bool:
        """Whether nothing is before them and they fit, a piece at most, into what this turn of the loop may take."""
        if self._is_at_work or not self._changes.empty():
            return False
        now = time.perf_counter()
        if self._guest_turn_ends_at is None:
            self._guest_turn_ends_at = now + TURN_S
            asyncio.get_running_loop().call_soon(self._end_guest_turn)
        return now < self._guest_turn_ends_at and _is_small(batches)

    def _end_guest_turn(self) -> None:
        self._guest_turn_ends_at = None

    async def _next_change(self) -> _Change | None:
        """The next change, at the latest when this turn has ended; None when there was other work or none at all."""
        if not self._changes.empty():
            if time.perf_counter() >= self._turn_ends_at:
                await self._breathe()
            return self._changes.get_nowait()
        if self._index.sweep(SWEPT_BLOCKS_A_STEP):
            await self._breathe()
            return None
        try:
            async with asyncio.timeout(EXPIRY_INTERVAL_S):
                return await self._changes.get()
        except TimeoutError:
            self._index.expire(time.monotonic())
            return None
        finally:
            self._turn_ends_at = time.perf_counter() + TURN_S

    async def _submit(self, change: _Change) -> None:
        await self._changes.put(change)
        await change.done

    async def _perform(self, change: _Change) -> None:
        if change.batches:
            await self._spread(self._appliers[change.endpoint_id].steps(change.batches))
            return
        self._appliers.pop(change.endpoint_id, None)
        self._index.retire(change.endpoint_id)
        if change.restart is not None:
            scheme, epoch, blocks = change.restart
            applier = EventApplier(self._index, change.endpoint_id, scheme, epoch)
            self._appliers[change.endpoint_id] = applier
            await self._spread(applier.event_steps(blocks))

    async def _spread(self, steps: Iterator[None]) -> None:
        """Take the steps, over as many turns of the loop as they need."""
        for _ in steps:
            if time.perf_counter() >= self._turn_ends_at:
                # Memory of the gone comes back at the pace at which new blocks come, also when the feeds never pause.
                self._index.sweep(SWEPT_BLOCKS_A_STEP)
                await self._breathe()

    async def _breathe(self) -> None:
        await asyncio.sleep(0)
        self._turn_ends_at = time.perf_counter() + TURN_S


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _is_small(batches: Sequence[NumberedBatch]) -> bool:
    """A piece at most, and nothing for the task to sweep away after it."""
    num_blocks = 0
    for numbered in batches:
        for event in numbered.batch.events:
            if isinstance(event, AllBlocksCleared):
                return False
            num_blocks += len(event.block_hashes)
    return num_blocks <= BLOCKS_A_PIECE
