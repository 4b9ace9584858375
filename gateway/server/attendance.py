"""Who accepts from which listening sockets: event loops that turn tell so, and those that do not are noticed.

Owns: this process's beat. `LATE_S` without one and a loop counts as busy; its clients are then accepted elsewhere.
"""

from __future__ import annotations

import asyncio
import time

from gateway.shared.segment import RowState, Segment

BEAT_S = 0.1
LATE_S = 0.3


class Attendance:
    """Of a process that is alone: its listening sockets are slot 0."""

    def __init__(self) -> None:
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """The event loop turns."""
        self._beat_at = time.monotonic()

    def late_s(self) -> float:
        """How long ago the event loop last turned."""
        return time.monotonic() - self._beat_at

    def unattended(self) -> list[int]:
        """Slots whose clients no event loop accepts now, as far as it is this process's business. Any thread."""
        return [0] if self.late_s() > LATE_S else []


class SharedAttendance(Attendance):
    """Of one process among several: it also sees to the slots of those that are busy, dead, or not there yet."""

    def __init__(self, segment: Segment, row: int) -> None:
        super().__init__()
        self._segment = segment
        self._row = row
        self._num_slots = segment.num_rows // 2

    def beat(self) -> None:
        """See Attendance."""
        super().beat()
        self._segment.beat(self._row)

    def unattended(self) -> list[int]:
        """See Attendance."""
        segment = self._segment
        if segment.state(self._row) is not RowState.SERVING:
            return []
        attended = {segment.slot(row) for row in range(segment.num_rows)
                    if segment.state(row) is RowState.SERVING and segment.beat_age_s(row) <= LATE_S}
        if attended and self.late_s() > LATE_S:
            return []  # a process whose loop turns sees to this one's clients as well
        return [slot for slot in range(self._num_slots) if slot not in attended]


async def beat_for_ever(attendance: Attendance) -> None:
    """As long as the event loop turns."""
    while True:
        attendance.beat()
        await asyncio.sleep(BEAT_S)
