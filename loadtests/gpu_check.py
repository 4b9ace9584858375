"""Two minutes on a GPU: is a warm answer the cold one, was the prefix hit, and was the pool sized from free memory?

Drives one `headstart worker` from outside, so what it checks is what users run. `python -m loadtests.gpu_check`
(on a machine without CUDA it says so and exits 0; `--device cpu` runs the same checks there).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from loadtests.local_stack import Child, StackError, running_worker
from loadtests.plain_http import fetch

PROMPT_TOKENS = 1600
OUTPUT_TOKENS = 16
KV_SHARE = 0.5
POOL_TOLERANCE = 0.1  # the pool against its share of the memory that was free
LOGPROB_TOLERANCE = 0.25  # nats, bfloat16: other kernels run for a whole prompt than for its last token
MEMORY_PROBE = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.gpu_check",
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m loadtests.gpu_check --json",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    free_bytes = int(subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True).stdout or 0)
    if args.device == "cuda" and not free_bytes:
        print("skipped: torch sees no CUDA device here")
        return 0
    memory = str(KV_SHARE) if args.device == "cuda" else "256MiB"
    try:
        with running_worker(model=args.model, arguments=["--device", args.device, "--kv-memory", memory]) as worker:
            checks = _checks(worker, args.model, free_bytes if args.device == "cuda" else None)
    except StackError as error:
        print(f"the worker did not start: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(orjson.dumps([asdict(check) for check in checks], option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}" for check in checks))
    return 0 if all(check.ok for check in checks) else 1


def _checks(worker: Child, model: str, free_bytes: int | None) -> list[Check]:
    state = fetch(f"{worker.url}/kv")
    prompt = [1000 + (7 * index) % 40_000 for index in range(PROMPT_TOKENS)]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    _timed(worker, {**body, "prompt": prompt[::-1]})  # pays for compilation and lazy set-up
    cold, cold_s = _timed(worker, body)
    warm, warm_s = _timed(worker, body)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    largest = max(abs(a - b) for a, b in zip(_logprobs(cold), _logprobs(warm), strict=True))
    checks = [
        Check("prefix hit", cached == PROMPT_TOKENS - 1, f"{cached} of {PROMPT_TOKENS} prompt tokens were cached"),
        Check(
            "warm = cold",
            largest <= LOGPROB_TOLERANCE,
            f"largest difference of a chosen token's logprob {largest:.4f}",
        ),
        Check(
            "warm is sooner",
            warm_s < cold_s,
            f"cold {1000 * cold_s:.1f} ms, warm {1000 * warm_s:.1f} ms, whole answer",
        ),
    ]
    if free_bytes is not None:
        checks.append(_pool_check(state, free_bytes))
    return checks


def _pool_check(state: dict[str, Any], free_bytes: int) -> Check:
    pool_bytes = int(state["blocks"]["total"]) * int(state["block_size"]) * int(state["kv_bytes_per_token"])
    # The weights are taken before the share is: the pool may be smaller than its share of what was free, not larger.
    ok = pool_bytes <= KV_SHARE * free_bytes and pool_bytes >= (KV_SHARE - POOL_TOLERANCE) * free_bytes
    return Check(
        "pool size", ok, f"{pool_bytes / 2**30:.2f} GiB of {free_bytes / 2**30:.2f} GiB free, asked for {KV_SHARE}"
    )


def _timed(worker: Child, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    started = time.perf_counter()
    answer = fetch(f"{worker.url}/v1/completions", body)
    return answer, time.perf_counter() - started


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return [float(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"]]


if __name__ == "__main__":
    sys.exit(main())
