"""Every request that the engine works on, by the name the engine knows it under.

Owns the entry of a request from its submission until the engine has released its last choice, and takes each step's
outputs to the right one. An entry leaves exactly once, and then `on_released` is told (that is where the log line and
the histograms come from).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from worker.engine.messages import SequenceOutput
from worker.protocol.api_error import ApiError
from worker.protocol.logs import get_logger
from worker.server.error_middleware import internal_error
from worker.server.generation import Generation

_log = get_logger("worker.server.request_table")
OnReleased = Callable[[Generation], None]


class RequestTable:
    """Bounded by the engine's own limit on open sequences: nothing enters without having been submitted."""

    def __init__(self, on_released: OnReleased) -> None:
        self._entries: dict[str, Generation] = {}
        self._on_released = on_released

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._entries.values()))

    def free_key(self, request_id: str) -> str:
        """The request id itself, or with a number when a living request already uses it (a client's retry)."""
        key, number = request_id, 2
        while key in self._entries:
            key, number = f"{request_id}~{number}", number + 1
        return key

    def add(self, generation: Generation) -> None:
        assert generation.key not in self._entries, "two living requests under one key"
        self._entries[generation.key] = generation

    def discard(self, generation: Generation) -> None:
        """Take back an entry whose submission was refused. Not logged: it never ran."""
        self._entries.pop(generation.key, None)

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hand a step's outputs on. Outputs of requests that are gone are late answers to an abort: dropped."""
        for output in outputs:
            generation = self._entries.get(output.request_id)
            if generation is None:
                continue
            self._deliver_one(generation, output)
            if generation.released:
                del self._entries[generation.key]
                self._on_released(generation)

    def _deliver_one(self, generation: Generation, output: SequenceOutput) -> None:
        """One request's trouble (a detokeniser that trips over a token) must not lose the others their outputs."""
        try:
            generation.deliver(output)
        except Exception:
            _log.exception("internal_error", request_id=generation.request_id)
            generation.fail(internal_error(generation.request_id))

    def abort(self, request_id: str) -> int:
        """Stop every living request a client calls by this id. Returns how many there were."""
        found = [generation for generation in self if generation.request_id == request_id]
        for generation in found:
            generation.abort(None)
        return len(found)

    def fail_all(self, error: ApiError) -> None:
        """The engine is gone: every client gets this error, and nothing is waited for any more."""
        for generation in self:
            generation.fail(error)
            del self._entries[generation.key]
            self._on_released(generation)
