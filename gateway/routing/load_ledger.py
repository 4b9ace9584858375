"""The load ledger: work that was routed and has not ended yet, per endpoint.

Owns the counts of what this gateway sent. It must never be corrected by reports (cost.py takes the larger of ledger
and report) and never go negative. The rule that keeps it true sits inside: a booking is a guard that gives back
exactly what it took, once, to the account it took it from. When an endpoint restarts its account is replaced, not
zeroed, so a guard of the old epoch writes to an account that nobody reads.

One writer (the event loop); pick and book happen with no await between them. With several gateway processes each has
a ledger of its own, and gateway.shared adds them up.
"""

from __future__ import annotations

from typing import NamedTuple


class LoadView(NamedTuple):
    """Work on one endpoint. A request counts in `num_inflight` until released, its prompt in `queued_prefill_tokens`
    until its first byte and in `decode_context_tokens` after it."""

    num_inflight: int = 0
    queued_prefill_tokens: int = 0
    decode_context_tokens: int = 0


NO_LOAD = LoadView()


class Account:
    """The sums of one endpoint in one epoch."""

    __slots__ = ("decode_context_tokens", "epoch", "num_inflight", "queued_prefill_tokens")

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.num_inflight = 0
        self.queued_prefill_tokens = 0
        self.decode_context_tokens = 0

    def changed(self) -> None:
        """A booking has taken something or given it back; for accounts that others read."""

    def close(self) -> None:
        """Nobody reads it any more; open bookings may still give back."""

    def view(self) -> LoadView:
        return LoadView(self.num_inflight, self.queued_prefill_tokens, self.decode_context_tokens)


class Booking:
    """One request's share of an endpoint's load. Both methods may be called any number of times, in any order.

    Also a context manager: `with ledger.book(...) as booking:` releases on every way out.
    """

    __slots__ = ("_account", "_context_tokens", "_prefill_tokens", "_state", "endpoint_id")

    def __init__(self, endpoint_id: str, account: Account, prefill_tokens: int, context_tokens: int) -> None:
        self.endpoint_id = endpoint_id
        self._account = account
        self._prefill_tokens = prefill_tokens
        self._context_tokens = context_tokens
        self._state = "prefill"
        account.num_inflight += 1
        account.queued_prefill_tokens += prefill_tokens
        account.changed()

    def prefill_done(self) -> None:
        """At the first byte: the prompt is no longer queued work, it is context that decode steps read."""
        if self._state != "prefill":
            return
        self._state = "decode"
        self._account.queued_prefill_tokens -= self._prefill_tokens
        self._account.decode_context_tokens += self._context_tokens
        self._account.changed()

    def release(self) -> None:
        """When the request has ended, however it ended."""
        if self._state == "released":
            return
        self.prefill_done()
        self._state = "released"
        self._account.decode_context_tokens -= self._context_tokens
        self._account.num_inflight -= 1
        self._account.changed()

    @property
    def released(self) -> bool:
        return self._state == "released"

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LoadLedger:
    """Accounts by endpoint; as many as there are endpoints, so the endpoint table bounds it."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def book(self, endpoint_id: str, epoch: str, *, prefill_tokens: int, context_tokens: int) -> Booking:
        """Take the load of one request. `prefill_tokens` are those to compute (prompt less match), `context_tokens`
        those that each decode step will read (the prompt). A new epoch starts a new account."""
        if prefill_tokens < 0 or context_tokens < 0:
            raise ValueError(f"a booking cannot be negative: prefill_tokens={prefill_tokens}, "
                             f"context_tokens={context_tokens}")
        return Booking(endpoint_id, self.begin(endpoint_id, epoch), prefill_tokens, context_tokens)

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

    def loads(self) -> dict[str, LoadView]:
        """Every endpoint with an account; one that is absent has no load."""
        return {endpoint_id: account.view() for endpoint_id, account in self._accounts.items()}

    def _open(self, endpoint_id: str, epoch: str) -> Account:
        return Account(epoch)
