"""Tokenising: a prompt's first sight and a prompt whose beginning was seen before, against the libraries alone.

    python -m loadtests.bench.tokenize FOLDER [FOLDER ...] --text FILE [--out results.json]

A FOLDER holds a model's tokenizer.json. Every arm encodes the same texts in turn, round by round, each round
beginning with the next arm, and every id is compared with `tokenizers.encode`. Figures are CPU time of the whole
process, since batch calls use threads of their own: the fastest round, and the median. A first sight is a text with a
new first line; a warm one ends in about 400 new tokens behind a special token and has the rest in common with others.
The arms drive each other's tables out of the CPU's caches: one arm alone in a loop is up to twice as fast, so compare
within a run.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import orjson
from tokenizers import Tokenizer

from worker.prompt.cut_rules import read_rules
from worker.prompt.fast_bpe import fast_bpe
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle
from worker.protocol.block_hash import HashScheme, block_hashes

PROMPT_TOKENS = (1_000, 6_000, 32_000)
NEW_TOKENS = 400
CHARS_PER_TOKEN = 4
ROUNDS = 25
HASHED_BLOCKS = 2_000
SCHEME = HashScheme(block_size=16, seed=b"bench", model="m", weights="w", tokenizer="t", template="",
                    kv_dtype="bfloat16", exactness="fast")

Arm = Callable[[str], "list[int] | array[int]"]


class Figure(NamedTuple):
    """CPU milliseconds of one arm; `ratio` is how many times as fast as tokenizers.encode it is."""

    model: str
    num_tokens: int
    arm: str
    best_ms: float
    median_ms: float
    ratio: float


def tokenize_figures(folder: Path, text: str) -> Iterator[Figure]:
    bundle = TokenizerBundle.from_directory(folder)
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    ours = PromptTokenizer(bundle)
    rules = read_rules(bundle.tokenizer_json)
    fast = fast_bpe(rules, tokenizer) if rules is not None else None
    arms: dict[str, Arm] = {
        "tokenizers.encode": lambda prompt: tokenizer.encode(prompt, add_special_tokens=False).ids,
        "tokenizers.encode_batch_fast":
            lambda prompt: tokenizer.encode_batch_fast([prompt], add_special_tokens=False)[0].ids,
        "headstart, first sight": lambda prompt: ours.encode_packed(prompt, add_special_tokens=False),
        "headstart, seen but for 400 tokens": lambda prompt: ours.encode_packed(prompt, add_special_tokens=False),
    }
    if fast is not None:
        encoding = fast.encoding
        arms["tiktoken.encode_ordinary"] = lambda prompt: encoding.encode_ordinary(prompt)
    for num_tokens in PROMPT_TOKENS:
        seen = text[:(num_tokens - NEW_TOKENS) * CHARS_PER_TOKEN] + _border(tokenizer)
        yield from _figures(folder.name, arms, text, seen=seen)


def _border(tokenizer: Tokenizer) -> str:
    """A special token, as stands between messages; none where the tokenizer has none."""
    specials = (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    return next(specials, "")


def _figures(model: str, arms: dict[str, Arm], text: str, *, seen: str) -> Iterator[Figure]:
    new = NEW_TOKENS * CHARS_PER_TOKEN
    length = len(seen) + new
    assert len(text) > 2 * length, "the text is too short"
    times: dict[str, list[float]] = {name: [] for name in arms}
    count = 0
    for round_index in range(ROUNDS):
        cold = f"Request {length}.{round_index}\n{text[:length]}"
        at = length + (round_index * 131) % (len(text) - length - new)
        warm = seen + text[at:at + new]
        wanted = {prompt: arms["tokenizers.encode"](prompt) for prompt in (cold, warm)}
        names = list(arms)[round_index % len(arms):] + list(arms)[:round_index % len(arms)]
        for name in names:
            arm, prompt = arms[name], warm if "seen" in name else cold
            started = time.process_time_ns()
            token_ids = arm(prompt)
            times[name].append((time.process_time_ns() - started) / 1e6)
            assert list(token_ids) == wanted[prompt], f"{name} gave other ids"
        count = len(wanted[cold])
    base = min(times["tokenizers.encode"])
    for name, measured in times.items():
        measured = measured[1:]     # the first round fills memories
        yield Figure(model, count, name, min(measured), statistics.median(measured), base / min(measured))


def hash_figures() -> Iterator[Figure]:
    token_ids = [(index * 2_654_435_761) % 150_000 for index in range(HASHED_BLOCKS * SCHEME.block_size)]
    packed = array("I", token_ids)
    times: dict[str, list[float]] = {"block_hashes of a list": [], "block_hashes of an array": []}
    for _ in range(4 * ROUNDS):
        for name, ids in zip(times, (token_ids, packed), strict=True):
            started = time.process_time_ns()
            block_hashes(ids, SCHEME)
            times[name].append((time.process_time_ns() - started) / 1e6)
    base = min(times["block_hashes of a list"])
    for name, measured in times.items():
        yield Figure("", len(token_ids), name, min(measured), statistics.median(measured), base / min(measured))


def measure(folders: Sequence[Path], text: str) -> list[Figure]:
    """Of every folder's tokenizer, and of hashing."""
    return [*(figure for folder in folders for figure in tokenize_figures(folder, text)), *hash_figures()]


def as_line(figure: Figure) -> str:
    return (f"{figure.model:<32}{figure.num_tokens:>7} tokens  {figure.arm:<36}{figure.best_ms:>9.3f} ms"
            f"{figure.median_ms:>9.3f} median{figure.ratio:>8.1f}x")


def _about() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "cpu": cpu,
            "python": platform.python_version(), "tokenizers": version("tokenizers"), "tiktoken": version("tiktoken")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.tokenize",
                                     description="Tokenising and hashing of prompts, against the libraries alone.")
    parser.add_argument("folders", nargs="+", type=Path, help="model folders with a tokenizer.json")
    parser.add_argument("--text", type=Path, required=True, help="a text of at least 300,000 characters")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    measured = measure(arguments.folders, text)
    print("\n".join(map(as_line, measured)))
    if arguments.out is not None:
        report = {"about": {**_about(), "text": arguments.text.name}, "figures": [row._asdict() for row in measured]}
        arguments.out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
