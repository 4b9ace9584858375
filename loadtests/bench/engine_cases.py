"""What is asked of every engine, and which figure comes out: the worker speed table of this project's goals.

Prompts are random token ids that no earlier case has used, so that nothing is warm unless the case warms it. What can
be read off one request is read off one: prefill of 6,000 tokens is what a run spends its time on.
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
    """One measurement: `value` in `unit`, `cpu_s` of the engine's processes meanwhile. `more_is_better`: tokens a
    second, not milliseconds."""

    name: str
    value: float
    cpu_s: float
    unit: str = "ms"
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """`names` of the figures that `run` may give; warm ones come from engines that reuse prefixes alone."""

    names: tuple[str, ...]
    run: Callable[[Engine, random.Random], list[Figure]]


def all_cases() -> list[Case]:
    """Every case, the cheap ones first."""
    return [
        _one_prompt(256, num_tokens=DECODE_TOKENS, again=False),
        _one_prompt(1200, num_tokens=1, again=True),
        _one_prompt(2048, num_tokens=1, again=False),
        _one_prompt(6000, num_tokens=DECODE_TOKENS, again=True),
        _shared(800, 400),
        _shared(6000, 50),
        *(_streams(count) for count in (1, 4, 16)),
    ]


def _ids(rng: random.Random, count: int) -> Ids:
    return rng.choices(ORDINARY_TOKENS, k=count)


def _one_prompt(length: int, *, num_tokens: int, again: bool) -> Case:
    """A new prompt; with several tokens, milliseconds a token once the first is out (CPU is the prefill's too); with
    `again`, the same prompt once more."""
    cold, token, warm = f"cold TTFT {length}", f"a token at context {length}", f"same again TTFT {length}"

    def run(engine: Engine, rng: random.Random) -> list[Figure]:
        prompt = _ids(rng, length)
        timing = engine.generate([prompt], num_tokens)
        figures = [Figure(cold, timing.ttft_s[0] * 1000, timing.cpu_s)]
        if num_tokens > 1:
            figures.append(Figure(token, (timing.total_s - timing.ttft_s[0]) * 1000 / (num_tokens - 1), timing.cpu_s))
        if again and engine.reuses_prefixes:
            timing = engine.generate([prompt], 1)
            figures.append(Figure(warm, timing.ttft_s[0] * 1000, timing.cpu_s))
        return figures

    return Case((cold, *((token,) if num_tokens > 1 else ()), *((warm,) if again else ())), run)


def _shared(shared: int, own: int) -> Case:
    """The second request over a shared prefix: the first is the one that fills the cache."""
    name = f"{shared} shared + {own} new TTFT"

    def run(engine: Engine, rng: random.Random) -> list[Figure]:
        if not engine.reuses_prefixes:
            return []
        prefix = _ids(rng, shared)
        engine.generate([prefix + _ids(rng, own)], 1)
        timing = engine.generate([prefix + _ids(rng, own)], 1)
        return [Figure(name, timing.ttft_s[0] * 1000, timing.cpu_s)]

    return Case((name,), run)


def _streams(count: int) -> Case:
    """Tokens a second over all streams, from the first request to the last token. Engines that reuse prefixes have
    seen the common one twice; for the others prefill is not counted, and there is no server in between."""
    name = f"{count} streams on an {SHARED_TOKENS} prefix"

    def run(engine: Engine, rng: random.Random) -> list[Figure]:
        prefix = _ids(rng, SHARED_TOKENS)
        if engine.reuses_prefixes:
            for _ in range(2):
                engine.generate([prefix + _ids(rng, OWN_TOKENS)], 1)
        timing = engine.generate([prefix + _ids(rng, OWN_TOKENS) for _ in range(count)], STREAM_TOKENS)
        seconds = timing.total_s if engine.reuses_prefixes else timing.total_s - timing.ttft_s[0]
        return [Figure(name, timing.num_tokens / seconds, timing.cpu_s, "tok/s", more_is_better=True)]

    return Case((name,), run)
