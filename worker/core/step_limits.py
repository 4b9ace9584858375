"""How large a step may be just now: the configured size, less after one that did not fit into memory.

Owns that limit and how it comes back. Halved at once, doubled again after RECOVERY_STEPS steps that fitted.
"""

from __future__ import annotations

RECOVERY_STEPS = 32


class StepLimits:
    """`max_tokens` positions and `max_running` sequences, for the next step."""

    def __init__(self, *, max_tokens: int, max_running: int) -> None:
        self.max_tokens = max_tokens
        self.max_running = max_running
        self._whole = max_tokens, max_running
        self._num_fitted = 0

    @property
    def shrunk(self) -> bool:
        return (self.max_tokens, self.max_running) != self._whole

    def shrink(self, *, num_tokens: int, num_sequences: int) -> None:
        """A step of this size did not fit."""
        self._num_fitted = 0
        self.max_tokens = max(1, num_tokens // 2)
        self.max_running = max(1, min(num_sequences // 2, self.max_tokens))

    def fitted(self) -> None:
        """A step was computed."""
        if not self.shrunk:
            return
        self._num_fitted += 1
        if self._num_fitted >= RECOVERY_STEPS:
            self._num_fitted = 0
            self.max_tokens = min(self._whole[0], 2 * self.max_tokens)
            self.max_running = min(self._whole[1], 2 * self.max_running)
