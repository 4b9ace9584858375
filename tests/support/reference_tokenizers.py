"""transformers' tokenizer and ours over the same folder, loaded once per session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.npm_tokenizers import FAMILIES as NPM_FAMILIES
from tests.support.npm_tokenizers import npm_tokenizer
from worker.prompt.renderer import PromptRenderer
from worker.prompt.tokenizer import TokenizerBundle

FAMILIES = ("smollm2", *NPM_FAMILIES)


@dataclass(frozen=True)
class Reference:
    """`theirs` is transformers' tokenizer of the same folder that `renderer` reads."""

    folder: Path
    theirs: Any
    renderer: PromptRenderer


def reference(family: str) -> Reference:
    """Both tokenizers of one family; skips the running test when its files cannot be had."""
    return _load(_smollm2_folder() if family == "smollm2" else npm_tokenizer(family))


def renderer_of(family: str) -> PromptRenderer:
    """Our side alone, without importing transformers."""
    return _renderer(_smollm2_folder() if family == "smollm2" else npm_tokenizer(family))


@cache
def _load(folder: Path) -> Reference:
    from transformers import AutoTokenizer

    return Reference(folder, AutoTokenizer.from_pretrained(folder), _renderer(folder))


@cache
def _renderer(folder: Path) -> PromptRenderer:
    return PromptRenderer(TokenizerBundle.from_directory(folder))


@cache
def _smollm2_folder() -> Path:
    from worker.model.loader import resolve_model

    return resolve_model("smollm2").path
