"""Which endpoint served a session last: a small bonus for it in the cost, so that equal choices do not wander.

Owns the memory of sessions, by a key that already holds whose session it is. Known approximation: only clients that
name their sessions (`prompt_cache_key`) have one; for the others the prefix index alone keeps turns together.
"""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_MAX = 16_384
IDLE_MAX_S = 600.0


class SessionAffinity:
    """The least recently used session goes first. Instants are of any one monotonic clock."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._last: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def served(self, session: str, endpoint_id: str, *, now: float) -> None:
        """It went there."""
        self._last[session] = endpoint_id, now
        self._last.move_to_end(session)
        if len(self._last) > self._max:
            self._last.popitem(last=False)

    def endpoint_of(self, session: str, *, now: float) -> str | None:
        """Who served it last; None when that is long ago."""
        last = self._last.get(session)
        return last[0] if last is not None and now - last[1] <= IDLE_MAX_S else None
