"""Drives engines in tests: submit prompts, step until all is done, keep what came out, by request.

The model is tiny and seeded: real transformers code and a real tokenizer, with weights large enough that its greedy
text wanders instead of repeating one token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tiny_tokenizer import TINY_VOCAB_SIZE, write_tiny_tokenizer
from worker.engine.engine import Engine
from worker.engine.engine_config import EngineConfig
from worker.engine.messages import (
    AbortRequest,
    EngineReady,
    EngineStats,
    PreemptionNote,
    SequenceStats,
    StepReport,
    SubmitSequence,
)
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.block_hash import ExtraKey
from worker.protocol.cache_events import CacheEvent

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
STEPS_MAX = 20_000
DRAWN_VOCAB = range(3, 300)    # ordinary tokens of the tiny vocabulary


def config_for(checkpoint: Path, **changes: object) -> EngineConfig:
    """A small strict engine on the CPU, with `changes`."""
    settings: dict[str, object] = {"model": str(checkpoint), "kv_memory": "8MiB", "exactness": "strict",
                                   "device": "cpu"}
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def tokens(seed: int, length: int) -> list[int]:
    """A prompt that is the same for equal arguments and shares nothing with another seed's."""
    return random.Random(seed).choices(DRAWN_VOCAB, k=length)


def write_tiny_llama(folder: Path) -> Path:
    """A seeded Llama checkpoint of two layers with grouped heads and a context of 4,096 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=TINY_VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                         initializer_range=0.3, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


@dataclass
class Finished:
    """One sequence's whole outcome."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stats: SequenceStats | None = None
    error: str | None = None


class EngineDriver:
    """An engine in this process, loaded, and everything it has reported."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config, clock=time.monotonic)
        self.ready: EngineReady = self.engine.load()
        self.results: dict[tuple[str, int], Finished] = {}
        self.reports: list[StepReport] = []

    def submit(self, request_id: str, token_ids: Sequence[int], max_new_tokens: int, *, choice: int = 0,
               params: SamplingParams = GREEDY, stop_token_ids: Iterable[int] = (),
               extra_keys: tuple[ExtraKey, ...] = ()) -> None:
        self.results[request_id, choice] = Finished()
        self.engine.submit(SubmitSequence(
            request_id, choice, list(token_ids), params, max_new_tokens, frozenset(stop_token_ids),
            extra_keys=extra_keys, arrived_at=time.monotonic()))

    def abort(self, request_id: str) -> None:
        self.engine.abort(AbortRequest(request_id))

    def step(self) -> StepReport:
        report = self.engine.step()
        self.reports.append(report)
        for output in report.outputs:
            result = self.results[output.request_id, output.choice]
            result.token_ids += output.token_ids
            if output.cached_tokens is not None:
                assert result.cached_tokens is None, "cached_tokens is reported once"
                result.cached_tokens = output.cached_tokens
            result.finish_reason, result.stats, result.error = output.finish_reason, output.stats, output.error
        return report

    def run(self) -> None:
        for _ in range(STEPS_MAX):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> Finished:
        """One greedy request, alone."""
        request_id = f"single-{len(self.results)}"
        self.submit(request_id, token_ids, max_new_tokens)
        self.run()
        return self.results[request_id, 0]

    @property
    def stats(self) -> EngineStats:
        return self.reports[-1].stats if self.reports else EngineStats()

    @property
    def events(self) -> list[CacheEvent]:
        return [event for report in self.reports for event in report.events]

    @property
    def preemptions(self) -> list[PreemptionNote]:
        return [note for report in self.reports for note in report.preemptions]
