"""Names and words that a tree of finished rooms does not have, and the prose that every file owes its reader."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, module_name, python_files, tree_of

VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base"}
# Written in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b|(raise |\b)Not" r"Implemented(Error)?\b")
MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9_.~$])/(wo" r"rk|ro" r"ot|ho" r"me/[a-z]+)/")
TEXT_SUFFIXES = (".py", ".toml", ".md", ".txt", ".yaml", ".yml", ".sh", ".jinja", "")
SKIPPED = {".git", ".venv", "__pycache__", ".cache", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache",
           "build", "dist", "shared"}


def _text_files() -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.endswith(".egg-info")]
        found += [Path(folder, name) for name in names if Path(name).suffix in TEXT_SUFFIXES and name not in SKIPPED]
    return sorted(path for path in found if not path.is_symlink())


def test_no_room_has_a_vague_name() -> None:
    vague = [str(path) for path in python_files(*PACKAGES, "tests")
             if VAGUE_NAMES & {path.stem, *path.relative_to(ROOT).parts[:-1]}]
    assert not vague


@pytest.mark.parametrize(("pattern", "meaning"), [(UNFINISHED, "left unfinished"),
                                                  (MACHINE_PATH, "a path of one machine")])
def test_words_that_have_no_place_here(pattern: re.Pattern[str], meaning: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}" for path in _text_files()
             for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1) if pattern.search(line)]
    assert not found, f"{meaning}:\n" + "\n".join(found)


def test_every_file_says_what_it_owns() -> None:
    silent = [module_name(path) for path in python_files(*PACKAGES)
              if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not silent, f"no docstring at the top: {silent}"


def test_annotations_are_postponed_everywhere() -> None:
    without = [module_name(path) for path in python_files(*PACKAGES, "tests")
               if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign)
                      for node in ast.walk(tree_of(path)))
               and "from __future__ import annotations" not in path.read_text()]
    assert not without


def test_no_exception_is_swallowed_whole() -> None:
    found = []
    for path in python_files(*PACKAGES):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
                broad = node.type is None or (isinstance(node.type, ast.Name)
                                              and node.type.id in ("Exception", "BaseException"))
                if broad:
                    found.append(f"{module_name(path)}:{node.lineno}")
    assert not found, f"`except: pass` hides our bugs: {found}"


def test_ignored_types_say_which() -> None:
    bare = []
    for path in python_files(*PACKAGES):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and re.search(r"type: ignore(?!\[)|noqa(?!:)", token.string):
                bare.append(f"{module_name(path)}:{token.start[0]}")
    assert not bare


def test_the_patterns_bite() -> None:
    assert UNFINISHED.search("# TO" + "DO later")
    assert not UNFINISHED.search("todos and hacksaws")
    assert MACHINE_PATH.search("see /wo" + "rk/x")
    assert not MACHINE_PATH.search("a frame/work/x of ~/wo" + "rk")
