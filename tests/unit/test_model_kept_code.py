"""Compiled code that was kept for the next start, and cannot be read there."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest

from worker.model.compiled_loading import FOLDERS_MAX, and_without_kept_code, place_for_code, say_what_is_kept


class Code:
    """As numba: read where it is kept, else made and kept."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "step_1a2b" / "step.nbc"
        self.num_made = 0

    def look(self) -> str:
        if not self.file.exists():
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_bytes(pickle.dumps("code"))
            self.num_made += 1
        return str(pickle.loads(self.file.read_bytes()))


def test_a_file_that_is_cut_off_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = Code(tmp_path)
    assert and_without_kept_code(str(tmp_path), code.look) == "code"
    whole = code.file.read_bytes()
    code.file.write_bytes(whole[:5])
    assert and_without_kept_code(str(tmp_path), code.look) == "code"
    assert (code.num_made, code.file.read_bytes()) == (2, whole)
    assert str(tmp_path) in caplog.text


def test_code_of_older_versions_goes_and_what_is_used_stays(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for age in range(6):
        folder = tmp_path / f"compiled-{age}"
        folder.mkdir()
        (folder / "step.nbc").write_bytes(b"code")
        os.utime(folder, (1000 - age, 1000 - age))
    used = Path(place_for_code(tmp_path))
    assert {found.name for found in tmp_path.iterdir()} == {
        "models", used.name, *(f"compiled-{age}" for age in range(FOLDERS_MAX - 1))}
    os.utime(used, (1, 1))
    (tmp_path / "compiled-new").mkdir()
    assert Path(place_for_code(tmp_path)) == used
    assert used.exists()


def test_what_fails_without_kept_code_fails_once(tmp_path: Path) -> None:
    calls = []

    def look() -> str:
        calls.append(1)
        raise RuntimeError("no compiler for this machine")

    with pytest.raises(RuntimeError, match="no compiler"):
        and_without_kept_code(str(tmp_path), look)
    with pytest.raises(RuntimeError, match="no compiler"):
        and_without_kept_code("", look)
    assert len(calls) == 2


def test_a_start_says_that_it_compiles_and_where_it_cannot_keep_that(tmp_path: Path,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    say_what_is_kept(str(tmp_path), tmp_path)
    assert "once" in caplog.text
    caplog.clear()
    Code(tmp_path).look()
    say_what_is_kept(str(tmp_path), tmp_path)
    assert not caplog.text
    say_what_is_kept("", tmp_path)
    assert "let HEADSTART_CACHE_DIR name a folder" in caplog.text


def test_a_cache_that_was_chosen_and_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_DIR", str(tmp_path))
    say_what_is_kept("", tmp_path)
    assert f"HEADSTART_CACHE_DIR, which is set to {tmp_path} and cannot be written" in caplog.text
    caplog.clear()
    say_what_is_kept("", tmp_path / "other")
    assert "let HEADSTART_CACHE_DIR name a folder" in caplog.text
