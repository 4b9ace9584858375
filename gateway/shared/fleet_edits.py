"""Workers that operators added and removed while the gateway runs: the same for all its processes.

Owns: what was asked last for each id, and the first answer to two who want the same id. Must never: know a worker's
state, or outlive the supervisor: the configuration is what lasts.
"""

from __future__ import annotations

import msgspec

EDITS_MAX = 4096
WORKER_EXISTS, TOO_MANY = b"worker_exists", b"too_many_workers"


class AddedWorker(msgspec.Struct, frozen=True):
    """As POST /admin/workers named it."""

    url: str
    api_key: str | None = None


class Edit(msgspec.Struct, frozen=True):
    """`added` None: this worker is removed."""

    worker_id: str
    added: AddedWorker | None


class FleetEdits:
    """The last edit for each id."""

    def __init__(self) -> None:
        self._added: dict[str, AddedWorker | None] = {}

    def take(self, edit: bytes) -> bytes:
        """Take in one more; what is wrong with it, or nothing."""
        asked = msgspec.json.decode(edit, type=Edit)
        if asked.added is not None and self._added.get(asked.worker_id) is not None:
            return WORKER_EXISTS  # two processes were asked at once
        if asked.worker_id not in self._added and len(self._added) >= EDITS_MAX:
            return TOO_MANY
        self._added[asked.worker_id] = asked.added
        return b""

    def to_bytes(self) -> bytes:
        """All of them, for a process."""
        return msgspec.json.encode(self._added)


def edits_from(payload: bytes) -> dict[str, AddedWorker | None]:
    """See to_bytes()."""
    return msgspec.json.decode(payload, type=dict[str, AddedWorker | None])


def encode_edit(worker_id: str, added: AddedWorker | None) -> bytes:
    """For FleetEdits.take()."""
    return msgspec.json.encode(Edit(worker_id, added))
