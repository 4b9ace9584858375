"""transformers on the same model, as a yardstick: reads one JSON task a line, answers with CPU seconds.

    {"kind": "prefill", "tokens": [[ids]]}                      the whole prompt in one forward pass
    {"kind": "decode", "tokens": [[ids], ...], "steps": 32}     seconds a step, greedy, equal lengths, one batch

Run as a child by loadtests.bench.worker with the model's folder, a dtype and a number of threads. What users of
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
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        task = orjson.loads(line)
        with torch.inference_mode():
            seconds = _run(model, torch.tensor(task["tokens"]), task)
        print(seconds, flush=True)
    return 0


def _run(model: Any, token_ids: Any, task: dict[str, Any]) -> float:
    started_at = time.process_time()
    output = model(input_ids=token_ids, use_cache=True, logits_to_keep=1)
    if task["kind"] == "prefill":
        return time.process_time() - started_at
    steps = int(task["steps"])
    started_at = time.process_time()
    for _ in range(steps):
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
        output = model(input_ids=chosen, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
    return (time.process_time() - started_at) / steps


if __name__ == "__main__":
    raise SystemExit(main())
