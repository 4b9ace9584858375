"""Whether the engine's process still runs, by the beats it sends from a thread that no step holds up.

Owns the two paces and the count. No clock: the shell looks at its own pace, so that a shell that was itself held up
does not take the beats that wait for it to be read for a silence.
"""

from __future__ import annotations

BEAT_EVERY_S = 1.0
LOOK_EVERY_S = 0.5
SILENT_LOOKS = 8             # in a row: four beats have not come


class Heartbeat:
    """`heard` whenever anything came, `look` every LOOK_EVERY_S. Silent from the SILENT_LOOKS-th look since."""

    def __init__(self) -> None:
        self._looks_unheard = 0

    def heard(self) -> None:
        self._looks_unheard = 0

    def look(self) -> None:
        self._looks_unheard += 1

    @property
    def is_silent(self) -> bool:
        return self._looks_unheard >= SILENT_LOOKS
