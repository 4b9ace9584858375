"""A model on disk in Hugging Face form: config.json, safetensors, tokenizer.json. No torch here.

Owns the answer to "which weights are these?". Never loads a tensor, never writes into a folder it did not make.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model's files lie. `weights_revision` is a content digest: equal digests mean equal K/V."""

    path: Path
    name: str
    weights_revision: str
    chat_template: Path | None = None
