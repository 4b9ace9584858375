"""A model on disk in Hugging Face form: config.json, safetensors, tokenizer.json. No torch here.

Owns the answer to "which weights are these?" and where the cache lies. Never loads a tensor, never writes into a
folder that it did not make.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.model.model_error import ModelError

RECORD_NAME = "headstart.json"
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEADER_MAX_BYTES = 100 * 2**20     # safetensors' own limit


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model's files lie. `weights_revision` is a content digest: equal digests mean equal K/V."""

    path: Path
    name: str
    weights_revision: str
    chat_template: Path | None = None


def default_cache_dir() -> Path:
    """$HEADSTART_CACHE_DIR, or headstart's folder under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("HEADSTART_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headstart"


def cache_remedy(cache: Path) -> str:
    """What to do about a cache that cannot be written, by the name of what chose it."""
    own = os.environ.get("HEADSTART_CACHE_DIR")
    if own and Path(own).expanduser() == cache:
        return f"let HEADSTART_CACHE_DIR, which is set to {own} and cannot be written, name another folder"
    return "let HEADSTART_CACHE_DIR name a folder that can be written"


def open_folder(path: Path, *, name: str | None = None, chat_template: Path | None = None) -> ModelFolder:
    """The model in `path`. ModelError naming the missing file when it is not one."""
    read_config(path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json; save the tokenizer there with its save_pretrained()")
    return ModelFolder(path, name or path.resolve().name, weights_revision(path), chat_template)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder as a dict."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} has no config.json; --model wants a Hugging Face model folder, a .gguf file, "
                         "a hub id, smollm2 or gemma3") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object; download the model again")
    return config


def file_sha256(path: Path) -> str:
    """64 hex digits over the whole file, about a gigabyte a second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_revision(path: Path) -> str:
    """32 hex digits that name the weights by content, in milliseconds.

    A folder that we converted records the SHA-256 of its source, and that is the answer. Otherwise SHA-256 over
    config.json and, for each safetensors file by name: its header (names, shapes, offsets), its size, and 64 evenly
    spread samples of 4 KiB, first and last bytes included. Two fine-tunes of one model differ in every sample; a file
    edited in a few bytes between samples would go unnoticed.
    """
    record = path / RECORD_NAME
    if record.is_file():
        try:
            return str(json.loads(record.read_text(encoding="utf-8"))["weights_revision"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{record} is damaged; delete {path} and start again") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no .safetensors weights; save the model with transformers' save_pretrained()")
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in files:
        digest.update(file.name.encode() + b"\0")
        _add_samples(digest, file)
    return digest.hexdigest()[:32]


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_size > min(size - 8, _HEADER_MAX_BYTES):
            raise ModelError(f"{file} is not a safetensors file or is cut short; download it again")
        digest.update(stream.read(header_size))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            stream.seek(last * index // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
