"""What weights in 8 bits cost and gain, against bf16 in one process: ms a decode step, perplexity, agreement, memory.

    python -m tests.support.int8_figures smollm2 --text FILE --out loadtests/results/int8-smollm2.json

Steps of the two are interleaved, one thread, its CPU time. Perplexity is of decode steps: five stretches of the text
at once, each fed its own next token. Agreement: how often both would choose the same token greedily.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.loader import load_model, resolve_model
from worker.model.paged_model import PagedModel

DTYPES = ("auto", "int8")
PREFIX, COMMON, STREAMS_MAX = 850, 800, 16
STRETCHES, PROMPT = 5, 100
BLOCK_SIZE = 16


class _Run:
    """One model over its own storage."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model
        self._num_blocks = 0
        self._storage = model.make_storage(400)

    def table(self, num_tokens: int, common: list[int]) -> list[int]:
        first, count = self._num_blocks, -(-num_tokens // BLOCK_SIZE) - len(common)
        self._num_blocks += count
        return [*common, *range(first, first + count)]

    def step(self, *shares: SequenceRows) -> torch.Tensor:
        return self.model.forward(ForwardBatch(shares), self._storage)


def step_times(models: dict[str, PagedModel], rounds: int) -> dict[str, Any]:
    cases: dict[str, dict[str, tuple[_Run, list[SequenceRows]]]] = {}
    for dtype, model in models.items():
        run = _Run(model)
        first = run.table(COMMON, [])
        run.step(SequenceRows([5 + index % 900 for index in range(COMMON)], 0, first, 0, False))
        rows = [SequenceRows([5 + row], PREFIX, run.table(PREFIX + 1, first), PREFIX + 1, True)
                for row in range(STREAMS_MAX)]
        cases.setdefault("1 on 256", {})[dtype] = run, [SequenceRows([5], 256, first[:17], 257, True)]
        for count in (1, 4, 5, 16):
            cases.setdefault(f"{count} on {PREFIX}", {})[dtype] = run, rows[:count]
    taken: dict[str, dict[str, list[float]]] = {case: {dtype: [] for dtype in DTYPES} for case in cases}
    for _ in range(rounds):
        for case, ways in cases.items():
            for dtype, (run, shares) in ways.items():
                start = time.thread_time()
                run.step(*shares)
                taken[case][dtype].append((time.thread_time() - start) * 1e3)
    medians = {case: {dtype: statistics.median(times[2:]) for dtype, times in ways.items()}
               for case, ways in taken.items()}
    return {case: {**{dtype: round(ms, 2) for dtype, ms in ways.items()},
                   "ratio": round(ways["int8"] / ways["auto"], 3)} for case, ways in medians.items()}


def choices_and_loss(model: PagedModel, stretches: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy choices and the text's negative log-likelihood, [positions, stretches] each."""
    run = _Run(model)
    tables = [run.table(len(tokens), []) for tokens in stretches]
    for tokens, table in zip(stretches, tables, strict=True):
        run.step(SequenceRows(tokens[:PROMPT], 0, table, 0, False))
    choices, losses = [], []
    for position in range(PROMPT, len(stretches[0]) - 1):
        logits = run.step(*(SequenceRows([tokens[position]], position, table, position, True)
                            for tokens, table in zip(stretches, tables, strict=True)))
        choices.append(logits.argmax(-1))
        wanted = torch.tensor([tokens[position + 1] for tokens in stretches])
        losses.append(functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.stack(choices), torch.stack(losses)


def quality(models: dict[str, PagedModel], tokens: list[int], positions: int) -> dict[str, Any]:
    length = PROMPT + positions + 1
    stretches = [tokens[first:first + length] for first in range(0, STRETCHES * length, length)]
    (plain, plain_loss), (narrow, loss) = (choices_and_loss(models[dtype], stretches) for dtype in DTYPES)
    change = (loss - plain_loss).flatten()
    return {"positions": change.numel(), "perplexity": {"auto": round(float(plain_loss.mean().exp()), 3),
                                                        "int8": round(float(loss.mean().exp()), 3)},
            "perplexity_ratio": round(float(change.mean().exp()), 5),
            "standard_error": round(float(change.std() / change.numel() ** 0.5), 5),
            "greedy_agreement": round(float((plain == narrow).float().mean()), 4)}


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, one thread"
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--positions", type=int, default=600)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(given.model)
    models = {dtype: load_model(folder, dtype=dtype, device="cpu") for dtype in DTYPES}
    tokens = Tokenizer.from_file(str(folder.path / "tokenizer.json")).encode(given.text.read_text()[5_000:]).ids
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    result = {
        "model": given.model, "date": datetime.date.today().isoformat(), "machine": _machine(),
        "commit": commit.stdout.strip(), "text": given.text.name,
        "weights_bytes": {dtype: model.spec.weights_bytes for dtype, model in models.items()},
        "int8_bytes": models["int8"].spec.int8_bytes,
        "step_ms": step_times(models, given.rounds), "quality": quality(models, tokens, given.positions)}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
