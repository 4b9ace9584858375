"""Do worker and gateway turn the same conversation into the same tokens? Asked once whenever a worker joins.

Owns: the fixed conversation, and the comparison. Must never: do I/O.
A worker that differs would be credited with blocks that it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Several turns, scripts, an emoji of several code points, a combining accent, digits, code, runs of blanks and an
# empty line: what templates trim and tokenizers split differently. No system turn: some templates refuse one.
PROBE_MESSAGES: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "Grüße aus Zürich: naïve cafe\u0301, 東京は晴れ, привет, 👩‍🚀 and 1234567.89?"},
    {"role": "assistant", "content": "def f(x):\n    return {'a': [x, None]}\n\nDone; it's ready."},
    {"role": "user", "content": "Now   with  blanks\tand tabs, please.\n\nThanks!"},
)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """`position` is the first token that differs, with the token ids on both sides (None: that side has ended)."""

    ok: bool
    position: int | None = None
    gateway_token: int | None = None
    worker_token: int | None = None
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """The `parity` object of GET /admin/workers."""
        return asdict(self)


def compare(gateway_ids: Sequence[int], worker_ids: Sequence[int]) -> ParityReport:
    """Equal, or where the first difference is."""
    for position, (ours, theirs) in enumerate(zip(gateway_ids, worker_ids, strict=False)):
        if ours != theirs:
            return _differs(position, ours, theirs)
    shorter = min(len(gateway_ids), len(worker_ids))
    if len(gateway_ids) == len(worker_ids):
        return ParityReport(ok=True, detail=f"{shorter} tokens equal")
    return _differs(shorter, *(ids[shorter] if len(ids) > shorter else None for ids in (gateway_ids, worker_ids)))


def _differs(position: int, ours: int | None, theirs: int | None) -> ParityReport:
    return ParityReport(ok=False, position=position, gateway_token=ours, worker_token=theirs,
                        detail="start every worker of a model with the same tokenizer and --chat-template")
