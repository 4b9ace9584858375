"""--report DIR: whether a report can be written there, found out before the run and not after it.

Owns the folder's making and the words for what is wrong with it. It must never write a report.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentTypeError
from pathlib import Path


def folder_name(text: str) -> Path:
    """argparse's type of --report."""
    if not text.strip():
        raise ArgumentTypeError("should name a folder, is empty")
    return Path(text)


def made_ready(folder: Path) -> None:
    """Make it if need be, and try it out. ValueError when no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--report {folder}: {error.strerror}: name a folder that can be written to") from None
