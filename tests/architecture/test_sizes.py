"""Files, functions and parameter lists that fit in a head."""

from __future__ import annotations

import ast

from tests.architecture.source_tree import PACKAGES, Function, functions, python_files

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 4
# transformers calls it so: the signature of its AttentionInterface.
SIGNATURE_OF_OTHERS = {"worker.model.attention._paged_attention"}


def test_no_file_is_two_rooms() -> None:
    long = {str(path): lines for path in python_files(*PACKAGES, "tests")
            if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX}
    assert not long, f"over {FILE_LINES_MAX} lines: {long}"


def test_no_function_is_too_long() -> None:
    long = {name: length for path in python_files(*PACKAGES, "tests") for name, node, _ in functions(path)
            if (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX}
    assert not long, f"over {FUNCTION_LINES_MAX} lines: {long}"


def test_no_function_takes_many_positional_parameters() -> None:
    many = {name: count for path in python_files(*PACKAGES) for name, node, is_method in functions(path)
            if (count := num_positional(node, is_method=is_method)) > POSITIONAL_MAX
            and name not in SIGNATURE_OF_OTHERS}
    assert not many, f"over {POSITIONAL_MAX} positional parameters (use keyword-only ones): {many}"


def num_positional(node: Function, *, is_method: bool) -> int:
    """Positional parameters beside self or cls."""
    is_static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    return len(node.args.posonlyargs) + len(node.args.args) - (is_method and not is_static)


def test_the_count_of_parameters() -> None:
    def count(source: str, *, is_method: bool = False) -> int:
        (node,) = ast.parse(source).body
        assert isinstance(node, Function)
        return num_positional(node, is_method=is_method)

    assert count("def f(a, b, /, c, *, d): ...") == 3
    assert count("async def f(self, a): ...", is_method=True) == 1
    assert count("@staticmethod\ndef f(a): ...", is_method=True) == 1
