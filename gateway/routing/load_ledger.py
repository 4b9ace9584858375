"""The load ledger: work that was routed and has not ended yet, per endpoint.

Owns the counts of what this gateway sent. It must never be corrected by reports (cost.py joins ledger and report) and
never go negative. The rule that keeps it true sits inside: a booking is a guard that gives back exactly what it took,
once, to the account it took it from. When an endpoint restarts its account is replaced, not zeroed, so a guard of the
old epoch writes to an account that nobody reads.

Memory: a request holds the tokens it computes, half of the answer expected of it, and what it matched, unless another
request under way there holds that already; when the one that holds it ends, the duty passes to another sharer. Known
approximation: a match is held by another as a whole or not at all.

One writer (the event loop); pick and book happen with no await between them. With several gateway processes each has
a ledger of its own, and gateway.shared adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from gateway.routing.memory_wait import Stream, Streams

# What the newest match counts in `shared_ratio`.
SHARED_WEIGHT = 0.05


class LoadView(NamedTuple):
    """Work on one endpoint. A request counts in `num_inflight` until released, its prompt in `queued_prefill_tokens`
    until its first byte and in `decode_context_tokens` after it.

    `held_tokens` are tokens of KV memory in use.
    """

    num_inflight: int = 0
    queued_prefill_tokens: int = 0
    decode_context_tokens: int = 0
    num_decoding: int = 0
    held_tokens: int = 0


NO_LOAD = LoadView()
_new_tuple = tuple.__new__


class Footprint(Struct, frozen=True, gc=False):
    """What a request will keep in memory where it is booked: `chain` are its block hashes, of which the first
    `matched_blocks` (in all `matched_tokens`) are there already; `output_tokens` are expected of it; `at` is now."""

    chain: Sequence[int] = ()
    matched_blocks: int = 0
    matched_tokens: int = 0
    output_tokens: int = 0
    at: float = 0.0


NO_FOOTPRINT = Footprint()


class Account:
    """The sums of one endpoint in one epoch, and who is in flight there."""

    __slots__ = ("_seen", "_streams", "decode_context_tokens", "epoch", "held_tokens", "num_decoding",
                 "num_inflight", "open", "queued_prefill_tokens")

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.num_inflight = 0
        self.queued_prefill_tokens = 0
        self.decode_context_tokens = 0
        self.num_decoding = 0
        self.held_tokens = 0
        self.open: dict[Booking, None] = {}
        self._seen: LoadView | None = None  # what view() said last, while it holds
        self._streams: Streams | None = None  # likewise

    def changed(self) -> None:
        """A booking has taken something or given it back."""
        self._seen = self._streams = None

    def close(self) -> None:
        """Nobody reads it any more; open bookings may still give back."""

    def view(self) -> LoadView:
        if self._seen is None:
            self._seen = _new_tuple(LoadView, (self.num_inflight, self.queued_prefill_tokens,
                                               self.decode_context_tokens, self.num_decoding, self.held_tokens))
        return self._seen

    def streams(self) -> Sequence[Stream]:
        """Who is in flight, in the order of booking."""
        if self._streams is None:
            self._streams = Streams(booking.stream() for booking in self.open)
        return self._streams

    def sharer(self, block_hash: int, depth: int, *, beside: Booking | None = None) -> Booking | None:
        """Somebody in flight whose prompt goes through this block, the `depth`-th of the chain."""
        for booking in self.open:
            chain = booking.footprint.chain
            if len(chain) >= depth and chain[depth - 1] == block_hash and booking is not beside:
                return booking
        return None


class Booking:
    """One request's share of an endpoint's load. Both methods may be called any number of times, in any order.

    Also a context manager: `with ledger.book(...) as booking:` releases on every way out.
    """

    __slots__ = ("_account", "_began_at", "_context_tokens", "_held_tokens", "_pins", "_prefill_tokens", "_state",
                 "endpoint_id", "footprint", "found_held")

    def __init__(self, endpoint_id: str, account: Account, footprint: Footprint, *, prefill_tokens: int,
                 context_tokens: int) -> None:
        self.endpoint_id = endpoint_id
        self.footprint = footprint
        self._account = account
        self._prefill_tokens = prefill_tokens
        self._context_tokens = context_tokens
        self._state = "prefill"
        self._began_at: float | None = None
        # What it matched and keeps there: (hash of the last block, depth, tokens), own ones and inherited ones.
        self._pins: list[tuple[int, int, int]] = []
        self._held_tokens = prefill_tokens + footprint.output_tokens // 2
        depth = footprint.matched_blocks
        self.found_held = bool(depth) and account.sharer(footprint.chain[depth - 1], depth) is not None
        account.num_inflight += 1
        account.queued_prefill_tokens += prefill_tokens
        account.held_tokens += self._held_tokens
        if depth and not self.found_held:
            self._pin((footprint.chain[depth - 1], depth, footprint.matched_tokens))
        account.open[self] = None
        account.changed()

    def prefill_done(self, at: float | None = None) -> None:
        """At the first byte, on the clock of the footprint: the prompt is no longer queued work, it is context that
        decode steps read."""
        if self._state != "prefill":
            return
        self._state = "decode"
        self._began_at = self.footprint.at if at is None else at
        self._account.queued_prefill_tokens -= self._prefill_tokens
        self._account.decode_context_tokens += self._context_tokens
        self._account.num_decoding += 1
        self._account.changed()

    def release(self) -> None:
        """When the request has ended, however it ended."""
        if self._state == "released":
            return
        if self._state == "prefill":
            self.prefill_done()
        self._state = "released"
        account = self._account
        account.decode_context_tokens -= self._context_tokens
        account.num_decoding -= 1
        account.num_inflight -= 1
        account.held_tokens -= self._held_tokens
        del account.open[self]
        for pin in self._pins:
            account.held_tokens -= pin[2]
            heir = account.sharer(pin[0], pin[1])
            if heir is not None:
                heir._pin(pin)
        self._pins.clear()
        account.changed()

    @property
    def released(self) -> bool:
        return self._state == "released"

    def stream(self) -> Stream:
        """As memory_wait.py looks at it. What it keeps for others too goes on being kept when it ends."""
        alone = sum(tokens for block_hash, depth, tokens in self._pins
                    if self._account.sharer(block_hash, depth, beside=self) is None)
        return Stream(self._held_tokens + alone, self._prefill_tokens, self.footprint.output_tokens, self._began_at,
                      self.footprint.chain)

    def _pin(self, pin: tuple[int, int, int]) -> None:
        self._pins.append(pin)
        self._account.held_tokens += pin[2]

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LoadLedger:
    """Accounts by endpoint; as many as there are endpoints, so the endpoint table bounds it.

    `shared_ratio`: how many of the last matches another request under way held already; new ones then need no room.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.shared_ratio = 0.5

    def book(self, endpoint_id: str, epoch: str, *, prefill_tokens: int, context_tokens: int,
             footprint: Footprint = NO_FOOTPRINT) -> Booking:
        """Take the load of one request. `prefill_tokens` are those to compute (prompt less match), `context_tokens`
        those that each decode step will read (the prompt). A new epoch starts a new account."""
        if prefill_tokens < 0 or context_tokens < 0:
            raise ValueError(f"a booking cannot be negative: prefill_tokens={prefill_tokens}, "
                             f"context_tokens={context_tokens}")
        account = self._accounts.get(endpoint_id)
        if account is None or account.epoch != epoch:
            account = self.begin(endpoint_id, epoch)
        booking = Booking(endpoint_id, account, footprint, prefill_tokens=prefill_tokens,
                          context_tokens=context_tokens)
        if footprint.matched_blocks:
            self.shared_ratio += SHARED_WEIGHT * (booking.found_held - self.shared_ratio)
        return booking

    def begin(self, endpoint_id: str, epoch: str) -> Account:
        """The account of this incarnation: from now on the endpoint's only one."""
        account = self._accounts.get(endpoint_id)
        if account is None or account.epoch != epoch:
            if account is not None:
                account.close()
            account = self._accounts[endpoint_id] = self._open(endpoint_id, epoch)
        return account

    def forget(self, endpoint_id: str, epoch: str) -> None:
        """This incarnation is gone. Its open bookings become harmless; another epoch's account is left alone."""
        account = self._accounts.get(endpoint_id)
        if account is not None and account.epoch == epoch:
            account.close()
            del self._accounts[endpoint_id]

    def load(self, endpoint_id: str) -> LoadView:
        account = self._accounts.get(endpoint_id)
        return account.view() if account is not None else NO_LOAD

    def streams(self, endpoint_id: str) -> Sequence[Stream]:
        """This process's own requests there, in the order of booking."""
        account = self._accounts.get(endpoint_id)
        return account.streams() if account is not None else ()

    def is_over(self, endpoint_id: str, limit: int) -> bool:
        """Whether more than `limit` requests are under way there. Never, where booking follows counting at once; only
        ledgers of several processes can tell otherwise."""
        return False

    def loads(self) -> dict[str, LoadView]:
        """Every endpoint with an account; one that is absent has no load."""
        return {endpoint_id: account._seen or account.view() for endpoint_id, account in self._accounts.items()}

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        return Account(epoch)
