"""The project's Python files, their imports and functions, as the architecture tests look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("gateway", "worker", "loadtests")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, where it is imported, and whether only when the code around it runs."""

    importer: str
    module: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


@cache
def python_files(*packages: str) -> tuple[Path, ...]:
    """Every .py file of these packages, sorted."""
    return tuple(sorted(path for package in packages for path in (ROOT / package).rglob("*.py")))


def module_name(path: Path) -> str:
    """Dotted name of a file; a package's __init__ is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(*packages: str) -> tuple[Import, ...]:
    """Every import of these packages, also those inside functions and under TYPE_CHECKING."""
    return tuple(found for path in python_files(*packages) for found in imports_of(tree_of(path), module_name(path)))


def imports_of(tree: ast.Module, importer: str) -> Iterator[Import]:
    """`from package import name` counts as package.name where that is a module of ours, else as the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}:{node.lineno}: write imports in full"
            base = node.module or ""
            names = {f"{base}.{alias.name}" if _is_ours(f"{base}.{alias.name}") else base for alias in node.names}
            yield from (Import(importer, name, node.lineno) for name in sorted(names))


def functions(path: Path) -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, definition, whether it is a method) of every function in a file, nested ones too."""
    yield from _functions(tree_of(path), module_name(path), in_class=False)


def inside(module: str, *rooms: str) -> bool:
    """Whether `module` is one of `rooms` or lies in one."""
    return any(module == room or module.startswith(room + ".") for room in rooms)


def _is_ours(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith(PACKAGES) and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def _functions(node: ast.AST, name: str, *, in_class: bool) -> Iterator[tuple[str, Function, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{name}.{child.name}", in_class=True)
        elif isinstance(child, Function):
            yield f"{name}.{child.name}", child, in_class
            yield from _functions(child, f"{name}.{child.name}", in_class=False)
        else:
            yield from _functions(child, name, in_class=in_class)
