"""transformers on the same model, as a yardstick: reads one JSON task a line, answers a JSON line.

    {"tokens": [[ids], ...], "steps": 32}    that many greedy tokens from prompts of equal length, as one batch

Run as a child by loadtests.bench.engines with the model's folder, a dtype and a number of threads. What users of
transformers get by default: sdpa attention, a dynamic cache, logits of the last position only.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import orjson


def main() -> int:
    folder, dtype, threads = sys.argv[1:4]
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    _say({"version": transformers.__version__})
    for line in sys.stdin.buffer:
        task = orjson.loads(line)
        with torch.inference_mode():
            _say(_run(model, torch.tensor(task["tokens"]), int(task["steps"])))
    return 0


def _run(model: Any, token_ids: Any, steps: int) -> dict[str, float]:
    cpu_before, started_at = time.process_time(), time.perf_counter()
    output = model(input_ids=token_ids, use_cache=True, logits_to_keep=1)
    chosen = output.logits[:, -1].argmax(-1, keepdim=True)
    ttft_s = time.perf_counter() - started_at
    for _ in range(steps - 1):
        output = model(input_ids=chosen, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
    return {"ttft_s": ttft_s, "total_s": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_before}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
