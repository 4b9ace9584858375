"""A first step, and some more, before the first user's: it pays for what libraries put off, and measures the machine.

Owns what is run and measured at start. Computes nothing for a user: its K/V lie in blocks that no block hash points
to. Known approximation: one sequence at a time is measured; what a batch adds shows in the running rates.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from worker.core.batch import ScheduledSequence, StepPlan
from worker.engine.model_runner import ModelRunner
from worker.engine.timings import EngineRates
from worker.model.sampler import SamplerRow
from worker.prompt.sampling_params import SamplingParams

MEASURED_PREFILL_TOKENS = 128
DECODE_STEPS = 3
# Every operator of the sampler runs once before the first user needs it.
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, logprobs=1)
GREEDY = SamplingParams(temperature=0.0)
SEQ_ID = -1     # never a real sequence's
READ_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
READ_PASSES = 3
RESET_PEAK = "5"        # what Linux wants written to forget VmHWM


class WarmUp:
    """`num_tokens_max` positions are run in one step at most, within a context of `context_max`."""

    def __init__(self, runner: ModelRunner, *, block_size: int, vocab_size: int, num_tokens_max: int,
                 context_max: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._vocab_size = vocab_size
        self.context_max = max(1, context_max)
        self.num_tokens_max = max(1, min(num_tokens_max, self.context_max))

    def run(self) -> None:
        """Unmeasured: a whole step of prompt and some decoding, at the shapes that a first request will have."""
        self.step(range(self.num_tokens_max), SAMPLING)
        for sampling in (*(SAMPLING,) * DECODE_STEPS, GREEDY):
            self.step(self._after(self.num_tokens_max), sampling)

    def measure_rates(self, rates: EngineRates) -> None:
        """A short prompt and a few decode steps."""
        length = min(self.num_tokens_max, MEASURED_PREFILL_TOKENS)
        prefill_s = self.step(range(length), GREEDY)
        decode_s = statistics.median(self.step(self._after(length), GREEDY) for _ in range(DECODE_STEPS))
        rates.observe(prefill_tokens=length, decode_rows=0, step_s=prefill_s)
        rates.observe(prefill_tokens=0, decode_rows=1, step_s=decode_s)

    def measure_activation_bytes(self, device: str) -> int:
        """What a whole step takes beside what is there already; 0 where nobody can say."""
        if device.startswith("cuda"):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step(range(self.num_tokens_max), GREEDY)
            return max(0, torch.cuda.max_memory_allocated() - before)
        before = _own_memory_bytes("VmRSS")
        with contextlib.suppress(OSError):      # or the peak of loading would be taken for ours
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self.step(range(self.num_tokens_max), GREEDY)
        return max(0, _own_memory_bytes("VmHWM") - before)

    def step(self, positions: range, sampling: SamplingParams = GREEDY) -> float:
        """Seconds to compute these positions of one sequence, and to choose the token behind them."""
        token_ids = [position % self._vocab_size for position in positions]
        num_blocks = -(-positions.stop // self._block_size)
        share = ScheduledSequence(seq_id=SEQ_ID, token_ids=token_ids, start=positions.start,
                                  block_table=list(range(num_blocks)), write_from=positions.start, samples=True)
        row = SamplerRow(sampling, choice=0, output_index=0, prompt_token_ids=token_ids, output_token_ids=())
        outcome = self._runner.run(StepPlan(0, (share,), num_tokens=len(positions)), {SEQ_ID: row})
        return outcome.forward_s + outcome.sample_s

    def _after(self, length: int) -> range:
        """The position that a decode step behind `length` others computes; the last one again in a full context."""
        start = min(length, self.context_max - 1)
        return range(start, start + 1)


def measure_read_speed(device: str, clock: Callable[[], float]) -> float:
    """Bytes a second that the device reads from its memory at best, one pass over a tensor after another."""
    kind = torch.device(device).type
    tensor = torch.ones(READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(READ_PASSES):
        started_at = clock()
        float(tensor.sum())     # the value is there only when all was read
        best_s = min(best_s, clock() - started_at)
    return READ_BYTES[kind] / max(best_s, 1e-9)


def other_memory_bytes(device: str, known_bytes: int) -> int:
    """What this process holds on the device beside `known_bytes`: libraries, code, buffers."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return max(0, int(total - free) - known_bytes)
    return max(0, _own_memory_bytes("VmRSS") - known_bytes)


def _own_memory_bytes(field: str) -> int:
    """From /proc/self/status, in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
