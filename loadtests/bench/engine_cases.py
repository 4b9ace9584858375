"""What is asked of every engine, and which figure comes out: the worker speed table of this project's goals.

Prompts are random token ids that no earlier case has used, so that nothing is warm unless the case warms it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from loadtests.bench.engines import Engine

ORDINARY_TOKENS = range(1000, 40_000)
SHARED_TOKENS, OWN_TOKENS = 800, 50
STREAM_TOKENS = 64
DECODE_TOKENS = 33

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. `value` in the case's unit, `cpu_s` of the engine's processes while it was measured."""

    value: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """`is_warm`: needs an engine that reuses prefixes. `more_is_better`: tokens a second, not milliseconds."""

    name: str
    unit: str
    run: Callable[[Engine, random.Random], Figure]
    is_warm: bool = False
    more_is_better: bool = False


def all_cases() -> list[Case]:
    """Every case, the cheap ones first."""
    return [
        *(Case(f"cold TTFT {n}", "ms", _cold(n)) for n in (256, 1200, 2048, 6000)),
        *(Case(f"same again TTFT {n}", "ms", _again(n), is_warm=True) for n in (1200, 6000)),
        Case("800 shared + 400 new TTFT", "ms", _shared(800, 400), is_warm=True),
        Case("6000 shared + 50 new TTFT", "ms", _shared(6000, 50), is_warm=True),
        *(Case(f"a token at context {n}", "ms", _token_at(n)) for n in (256, 6000)),
        *(Case(f"{n} streams on an 800 prefix", "tok/s", _streams(n), more_is_better=True) for n in (1, 4, 16)),
    ]


def _ids(rng: random.Random, count: int) -> Ids:
    return rng.choices(ORDINARY_TOKENS, k=count)


def _cold(length: int) -> Callable[[Engine, random.Random], Figure]:
    def run(engine: Engine, rng: random.Random) -> Figure:
        timing = engine.generate([_ids(rng, length)], 1)
        return Figure(timing.ttft_s[0] * 1000, timing.cpu_s)
    return run


def _again(length: int) -> Callable[[Engine, random.Random], Figure]:
    def run(engine: Engine, rng: random.Random) -> Figure:
        prompt = _ids(rng, length)
        engine.generate([prompt], 1)
        timing = engine.generate([prompt], 1)
        return Figure(timing.ttft_s[0] * 1000, timing.cpu_s)
    return run


def _shared(shared: int, own: int) -> Callable[[Engine, random.Random], Figure]:
    """The second request over a shared prefix: the first is the one that fills the cache."""
    def run(engine: Engine, rng: random.Random) -> Figure:
        prefix = _ids(rng, shared)
        engine.generate([prefix + _ids(rng, own)], 1)
        timing = engine.generate([prefix + _ids(rng, own)], 1)
        return Figure(timing.ttft_s[0] * 1000, timing.cpu_s)
    return run


def _token_at(length: int) -> Callable[[Engine, random.Random], Figure]:
    """Milliseconds a token once the first is out; CPU is the prefill's too."""
    def run(engine: Engine, rng: random.Random) -> Figure:
        timing = engine.generate([_ids(rng, length)], DECODE_TOKENS)
        return Figure((timing.total_s - timing.ttft_s[0]) * 1000 / (DECODE_TOKENS - 1), timing.cpu_s)
    return run


def _streams(count: int) -> Callable[[Engine, random.Random], Figure]:
    """Tokens a second over all streams, from the first request to the last token. Engines that reuse prefixes have
    seen the common one twice; for the others prefill is not counted, and there is no server in between."""
    def run(engine: Engine, rng: random.Random) -> Figure:
        prefix = _ids(rng, SHARED_TOKENS)
        if engine.reuses_prefixes:
            for _ in range(2):
                engine.generate([prefix + _ids(rng, OWN_TOKENS)], 1)
        timing = engine.generate([prefix + _ids(rng, OWN_TOKENS) for _ in range(count)], STREAM_TOKENS)
        seconds = timing.total_s if engine.reuses_prefixes else timing.total_s - timing.ttft_s[0]
        return Figure(timing.num_tokens / seconds, timing.cpu_s)
    return run
