"""`make bench-routing`: everything that routing and tokenising cost, in one run and one report.

    python -m loadtests.bench.routing_costs [--dynamo PYTHON] [--tokenizers DIR ...] [--text FILE] [--out FILE]

Owns what is measured where nothing is named: every tokenizer in headstart's cache folder (the packaged model's, once
it was served; those that the tests fetched), and as text the standard library's own source, which is everywhere.
What is not there is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from loadtests.bench import index, routing, tokenize
from loadtests.provenance import provenance

TEXT_CHARS_MIN = 2 * tokenize.CHARS_PER_TOKEN * max(tokenize.PROMPT_TOKENS) + 1


def cached_tokenizers() -> list[Path]:
    """Folders with a tokenizer.json below headstart's cache folder."""
    named = os.environ.get("HEADSTART_CACHE_DIR")
    cache = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headstart"
    return sorted(file.parent for file in cache.expanduser().glob("*/*/tokenizer.json"))


def standard_library_text() -> str:
    """As many modules, by name, as a long prompt needs."""
    pieces, num_chars = [], 0
    for file in sorted(Path(json.__file__).parents[1].glob("*.py")):
        if num_chars >= TEXT_CHARS_MIN:
            break
        pieces.append(file.read_text(encoding="utf-8"))
        num_chars += len(pieces[-1])
    return "".join(pieces)


def measure(dynamo_python: str | None, num_claims: int, folders: Sequence[Path],
            text_file: Path | None) -> dict[str, Any]:
    """The report."""
    about = provenance()
    text = standard_library_text() if text_file is None else text_file.read_text(encoding="utf-8")
    compared, dynamo = index.measure(dynamo_python, num_claims)
    left_out = [] if folders else ["tokenizers: none in the cache folder; serve a model once, or name folders"]
    return {**about, "dynamo": dynamo, "text": "standard library" if text_file is None else text_file.name,
            "left_out": left_out, "routing": [figure._asdict() for figure in routing.figures()],
            "index": [figure._asdict() for figure in compared],
            "tokenizing": [figure._asdict() for figure in tokenize.measure(folders, text)]}


def as_text(report: dict[str, Any]) -> str:
    """The tables of the three."""
    return "\n".join([
        *(f"{row['name']:<58}{row['value']:>10.2f} {row['unit']}" for row in report["routing"]),
        *(index.as_line(index.Figure(**row)) for row in report["index"]),
        *(tokenize.as_line(tokenize.Figure(**row)) for row in report["tokenizing"]),
        f"dynamo: {report['dynamo']}", *report["left_out"]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.routing_costs",
                                     description="What routing and tokenising cost, in one report.")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter that has ai-dynamo-runtime")
    parser.add_argument("--claims", type=int, default=1_000_000, help="size for our index alone; 0: not (1000000)")
    parser.add_argument("--tokenizers", type=Path, nargs="*", default=None, metavar="DIR",
                        help="folders with a tokenizer.json (default: all in the cache folder)")
    parser.add_argument("--text", type=Path, help="of at least 260,000 characters (default: the standard library)")
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    args = parser.parse_args()
    report = measure(args.dynamo, args.claims, cached_tokenizers() if args.tokenizers is None else args.tokenizers,
                     args.text)
    print(as_text(report))
    if args.out is not None:
        args.out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
