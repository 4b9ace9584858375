"""How long one step of a worker takes: seconds from what the step computes.

Owns the formula and the presets, each with the source of its figures. It must never know a scheduler.

    step_s = floor_s + max(weights_s, rows * token_s) + pairs * pair_s + context * context_s + decode_rows * row_s

rows are all positions computed; pairs are query-key pairs of the prefill (so attention grows with what is attended
to); context is the tokens whose K/V the decoding sequences read. Reading the weights and computing overlap, hence the
larger of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CostModel:
    """One model on one device. `max_batch_tokens` and `max_running` are the scheduler's limits usual there."""

    name: str
    source: str
    floor_s: float
    weights_s: float
    token_s: float
    pair_s: float
    context_s: float
    row_s: float = 0.0
    max_batch_tokens: int = 8192
    max_running: int = 256

    def step_s(self, prefill_tokens: int, prefill_pairs: float, decode_rows: int, decode_context: int) -> float:
        linear_s = (prefill_tokens + decode_rows) * self.token_s
        return (self.floor_s + (linear_s if linear_s > self.weights_s else self.weights_s)
                + prefill_pairs * self.pair_s + decode_context * self.context_s + decode_rows * self.row_s)

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Alone, in one step."""
        computed = prompt_tokens - cached_tokens
        return self.step_s(computed, pairs_of(cached_tokens, computed), 0, 0)

    def decode_step_s(self, num_streams: int, context_tokens: int) -> float:
        """One step of `num_streams` streams with `context_tokens` each."""
        return self.step_s(0, 0.0, num_streams, num_streams * context_tokens)


def pairs_of(start: int, num_tokens: int) -> float:
    """Query-key pairs of `num_tokens` positions behind `start` earlier ones."""
    return num_tokens * (start + (num_tokens + 1) / 2)


_H100_FLOPS = 989e12      # dense bf16, NVIDIA's data sheet
_H100_BYTES_PER_S = 3.35e12
_FLOPS_SHARE = 0.51       # see h100-8b: what 1.6 s for 32k tokens means
_BANDWIDTH_SHARE = 0.8


def _accelerator(name: str, source: str, *, parameters: float, layers: int, width: int, kv_bytes: int,
                 devices: int) -> CostModel:
    """A dense bf16 transformer from its published shape and the data sheet."""
    flops = _H100_FLOPS * _FLOPS_SHARE * devices
    bandwidth = _H100_BYTES_PER_S * devices
    return CostModel(name, source, floor_s=0.002 if devices == 1 else 0.003,
                     weights_s=2 * parameters / bandwidth / _BANDWIDTH_SHARE, token_s=2 * parameters / flops,
                     pair_s=4 * layers * width / flops, context_s=kv_bytes / bandwidth / _BANDWIDTH_SHARE,
                     row_s=10e-6)


MODELS = {model.name: model for model in (
    CostModel("cpu-smollm2",
              "SmolLM2-135M-Instruct on one thread of a 2-core AVX-512 machine, float32, Hugging Face eager, "
              "2026-11-29: 338 tokens per CPU second at 1,024 and 214 at 4,096 (two threads: 427), 65 ms a token "
              "decoding at 1,024",
              floor_s=0.004, weights_s=0.045, token_s=2.38e-3, pair_s=1.1e-6, context_s=1.6e-5, row_s=0.0,
              max_batch_tokens=512, max_running=64),
    _accelerator("h100-8b",
                 "Llama 3.1 8B bf16 on one H100 SXM: published shape (32 layers, width 4,096, 128 KiB of K/V a token)"
                 " and data sheet (989 TFLOPS, 3.35 TB/s); 1.6 s for a 32k prompt, as published, is 51 % of the peak",
                 parameters=8.0e9, layers=32, width=4096, kv_bytes=131_072, devices=1),
    _accelerator("h100x4-70b",
                 "Llama 3.1 70B bf16 on four H100 SXM, tensor parallel: published shape (80 layers, width 8,192, "
                 "320 KiB of K/V a token) and data sheet, at the 51 % of the peak that the 8B reaches",
                 parameters=70.6e9, layers=80, width=8192, kv_bytes=327_680, devices=4),
)}
DEFAULT_MODEL = "h100-8b"


def from_rates(prefill_tokens_per_s: float, decode_step_s: float, *, like: str = "cpu-smollm2") -> CostModel:
    """A preset made to fit what a live worker reports at GET /kv: prefill rate, and seconds of a decode step."""
    if prefill_tokens_per_s <= 0 or decode_step_s <= 0:
        raise ValueError("the worker has not measured its rates yet: send it some requests first")
    shape = MODELS[like]
    factor = 1 / prefill_tokens_per_s / shape.token_s
    floor_s = min(shape.floor_s * factor, decode_step_s / 2)
    return replace(shape, name="measured", source=f"GET /kv: {prefill_tokens_per_s:.0f} tokens/s prefill, "
                   f"{decode_step_s * 1000:.1f} ms a decode step; growth with context as in {like}",
                   floor_s=floor_s, weights_s=decode_step_s - floor_s, token_s=1 / prefill_tokens_per_s,
                   pair_s=shape.pair_s * factor, context_s=shape.context_s * factor)
