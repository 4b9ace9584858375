"""From the word after `--model` to a model that can run."""

from __future__ import annotations

from pathlib import Path

from worker.model.kv_storage import KVStorage
from worker.model.model_error import ModelError
from worker.model.model_folder import ModelFolder
from worker.model.paged_model import PagedModel

__all__ = ["KVStorage", "ModelError", "ModelFolder", "PagedModel", "load_model", "resolve_model"]


def resolve_model(model: str, *, cache_dir: Path | None = None, chat_template: Path | None = None) -> ModelFolder:
    """Find (or make, once) the model's folder. Raises ModelError with a remedy."""
    raise ModelError(f"cannot resolve {model!r}")


def load_model(folder: ModelFolder, *, dtype: str = "auto", kv_dtype: str = "auto", device: str = "auto",
               exactness: str = "fast", block_size: int = 16) -> PagedModel:
    """Load the weights and wire our paged attention in. Raises ModelError with a remedy."""
    raise ModelError(f"cannot load {folder.path}")
