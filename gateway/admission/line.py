"""One model's line: who waits, who holds a place at a worker, and who may take the next one.

Owns: the queue, the places, and how many of them each tenant holds. Must never: know the clock or a worker.

A place goes to the next in line whose tenant may hold another (places.py). So a flood leaves some places free, and
whoever is under its share finds one at once instead of waiting until one of the flood's answers has ended.
"""

from __future__ import annotations

from gateway.admission.places import Places, may_hold_another
from gateway.admission.queue import FairQueue, ServiceRate, Waiting


class Line:
    """`reserved_ratio`: the share of the places that a tenant alone leaves to others. `limit`: how many there are."""

    def __init__(self, queue: FairQueue, places: Places, *, reserved_ratio: float) -> None:
        self.queue = queue
        self.places = places
        self.rate = ServiceRate()
        self._reserved_ratio = reserved_ratio
        self._held: dict[str, int] = {}  # by tenants that hold any

    @property
    def num_holding(self) -> int:
        """Places that requests of this process hold."""
        return self.places.num_holding

    def take_at_once(self, entry: Waiting, limit: int) -> bool:
        """A place for a newcomer behind nobody of its own tenant, and behind no other that could have taken it."""
        may_pass = not len(self.queue) or not self.queue.waits(entry.tenant_id)
        if not may_pass or self.places.elsewhere().num_requests or not self.places.take(limit):
            return False
        if not self._may_hold_another(entry.tenant_id, limit):
            self.places.give_back()
            return False
        self._held[entry.tenant_id] = self._held.get(entry.tenant_id, 0) + 1
        self.queue.pass_by(entry)
        return True

    def take_next(self, limit: int) -> Waiting | None:
        """Whoever is next, with a place of its own; None without a place, or without anybody who may have it."""
        if not len(self.queue) or not self.places.take(limit):
            return None
        entry = self.queue.take(lambda tenant_id: self._may_hold_another(tenant_id, limit))
        if entry is None:
            self.places.give_back()
            return None
        self._held[entry.tenant_id] = self._held.get(entry.tenant_id, 0) + 1
        return entry

    def give_back(self, tenant_id: str) -> None:
        """A place of this tenant's is free again."""
        self.places.give_back()
        num_held = self._held.pop(tenant_id) - 1
        if num_held:
            self._held[tenant_id] = num_held

    def queue_changed(self) -> None:
        """Tell the other processes what waits here."""
        self.places.waits_here(len(self.queue), self.queue.num_bytes)

    def _may_hold_another(self, tenant_id: str, limit: int) -> bool:
        """Asked with the place already taken."""
        if not tenant_id:
            return True  # without keys there is nobody else to leave anything to
        return may_hold_another(self.places.estimated(self._held.get(tenant_id, 0)), self.places.num_free(limit) + 1,
                                self._reserved_ratio)
