"""The load ledger: work that was routed and has not ended yet, per endpoint.

Owns the counts of what this gateway sent. It must never be corrected by reports (cost.py joins ledger and report) and
never go negative. The rule that keeps it true sits inside: a booking is a guard that gives back exactly what it took,
once, to the account it took it from. When an endpoint restarts its account is replaced, not zeroed, so a guard of the
old epoch writes to an account that nobody reads.

Memory: a request holds the tokens it computes, half of the answer expected of it, and what it matched beyond what
others under way there hold already. When it ends, what others still use of that stays held: the duty passes to the
one who uses most of it. Known approximation: what two compute at the same time counts twice.

One writer (the event loop); pick and book happen with no await between them. With several gateway processes each has
a ledger of its own, and gateway.shared adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from gateway.routing.memory_wait import Stream, Streams, shared_blocks

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


class Part(NamedTuple):
    """Blocks `start` to `end` of a chain, and how many tokens they hold."""

    start: int
    end: int
    tokens: int

    def up_to(self, end: int) -> Part:
        """Its beginning."""
        return self if end == self.end else Part(self.start, end,
                                                 self.tokens * (end - self.start) // (self.end - self.start))


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
        """Who is in flight, in the order of booking. What several use goes when the last of them ends, which is taken
        to be the one that was booked last."""
        if self._streams is None:
            lost: dict[Booking, int] = {}
            inherited: dict[Booking, int] = {}
            for booking in self.open:
                if booking.shares:
                    for heir, num_tokens in booking.outlived_by():
                        lost[booking] = lost.get(booking, 0) + num_tokens
                        inherited[heir] = inherited.get(heir, 0) + num_tokens
            self._streams = Streams([booking.stream(lost.get(booking, 0), inherited.get(booking, 0))
                                     for booking in self.open])
        return self._streams

    def borrow(self, chain: Sequence[int], depth: int) -> int:
        """How many of the first `depth` blocks somebody in flight holds; who does has a sharer from now on."""
        held = 0
        for booking in self.open:
            if held >= depth:
                break
            reach = shared_blocks(booking.footprint.chain, chain, held, depth)
            if reach > held:
                booking.lends, held = True, reach
        return held

    def sharer(self, part: Part, chain: Sequence[int]) -> tuple[Booking | None, int]:
        """Who in flight goes furthest through this part of a chain, and as far as which block."""
        found, furthest = None, part.start
        for booking in self.open:
            reach = shared_blocks(booking.footprint.chain, chain, part.start, part.end)
            if reach > furthest:
                found, furthest = booking, reach
                if furthest == part.end:
                    break
        return found, furthest


class Booking:
    """One request's share of an endpoint's load. Both methods may be called any number of times, in any order.

    Also a context manager: `with ledger.book(...) as booking:` releases on every way out.
    """

    __slots__ = ("_account", "_began_at", "_context_tokens", "_held_tokens", "_pins", "_prefill_tokens", "_state",
                 "endpoint_id", "footprint", "found_held", "lends")

    def __init__(self, endpoint_id: str, account: Account, footprint: Footprint, *, prefill_tokens: int,
                 context_tokens: int) -> None:
        self.endpoint_id = endpoint_id
        self.footprint = footprint
        self._account = account
        self._prefill_tokens = prefill_tokens
        self._context_tokens = context_tokens
        self._state = "prefill"
        self._began_at: float | None = None
        self.lends = False   # of what it computes
        # What it did not compute and keeps there: its own match, and what it inherited.
        self._pins: list[Part] = []
        self._held_tokens = prefill_tokens + footprint.output_tokens // 2
        depth = footprint.matched_blocks
        held = account.borrow(footprint.chain, depth) if depth else 0
        self.found_held = 0 < depth == held
        account.num_inflight += 1
        account.queued_prefill_tokens += prefill_tokens
        account.held_tokens += self._held_tokens
        if held < depth:
            self._pin(Part(held, depth, footprint.matched_tokens - footprint.matched_tokens * held // depth))
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
        if self.shares:
            self._hand_on()
        account.changed()

    @property
    def released(self) -> bool:
        return self._state == "released"

    @property
    def shares(self) -> bool:
        """Whether others may use what it keeps."""
        return self.lends or bool(self._pins)

    def stream(self, lost_tokens: int, inherited_tokens: int) -> Stream:
        """As memory_wait.py looks at it: of what it keeps, others use so much longer, and it so much of theirs."""
        held = self._held_tokens - lost_tokens
        if self._pins:
            held += sum([pin.tokens for pin in self._pins])
        return Stream(held, self._prefill_tokens, self.footprint.output_tokens, self._began_at, self.footprint.chain,
                      inherited_tokens)

    def outlived_by(self) -> Iterator[tuple[Booking, int]]:
        """Who of those that were booked later use what it keeps, the last of them for each block; and how much."""
        chain = self.footprint.chain
        for part in self._parts():
            reached, num_tokens = part.start, 0
            for booking in reversed(self._account.open):
                if booking is self or reached == part.end:
                    break
                end = shared_blocks(booking.footprint.chain, chain, reached, part.end)
                if end > reached:
                    before, num_tokens = num_tokens, part.up_to(end).tokens
                    reached = end
                    yield booking, num_tokens - before

    def _parts(self) -> list[Part]:
        """What it keeps and others may use too."""
        start, end = self.footprint.matched_blocks, len(self.footprint.chain)
        return [*self._pins, Part(start, end, self._prefill_tokens)] if self.lends and start < end else self._pins

    def _hand_on(self) -> None:
        account = self._account
        account.held_tokens -= sum([pin.tokens for pin in self._pins])
        for part in self._parts():
            heir, end = account.sharer(part, self.footprint.chain)
            if heir is not None:
                heir._pin(part.up_to(end))
        self._pins.clear()

    def _pin(self, pin: Part) -> None:
        self._pins.append(pin)
        self._account.held_tokens += pin.tokens

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

    def claim(self, endpoint_id: str, epoch: str, limit: int) -> bool:
        """Whether one more request would be at most `limit` there; if so the caller books it next, and nothing else
        before. Always, where booking follows counting at once: only ledgers of several processes can tell otherwise,
        and they count it from now on."""
        return True

    def loads(self) -> dict[str, LoadView]:
        """Every endpoint with an account; one that is absent has no load."""
        return {endpoint_id: account._seen or account.view() for endpoint_id, account in self._accounts.items()}

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        return Account(epoch)
