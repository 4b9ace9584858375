"""The maps: each package's README names every module of its rooms, and nothing that is gone."""

from __future__ import annotations

import re

import pytest

from gateway.routing.cost import Rates, Work, candidate_cost
from gateway.routing.endpoint import EndpointView
from gateway.routing.load_ledger import NO_LOAD, LoadView
from gateway.routing.prefix_index import NO_MATCH, Match
from tests.architecture.source_tree import ROOT, python_files


@pytest.mark.parametrize("package", ["gateway", "worker"])
def test_the_map_names_every_module(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    rows = _rows(text)
    modules = {str(path.relative_to(ROOT / package)) for path in python_files(package) if path.stem != "__init__"}
    assert not modules - rows, f"{package}/README.md does not name: {sorted(modules - rows)}"
    assert not rows - modules, f"{package}/README.md names what is gone: {sorted(rows - modules)}"


def _rows(text: str) -> set[str]:
    """Module paths in the map: headings give the folder (### `core/`), list items the file (- `block_pool.py`)."""
    folder, found = "", set()
    for line in text.splitlines():
        if heading := re.match(r"#+ `?([\w/]*/)?`?", line):
            folder = (heading[1] or "") if line.startswith("###") else ""
        elif item := re.match(r"[-*] `([\w/]+\.py)`", line):
            found.add(folder + item[1])
    return found


def test_the_worked_example_is_what_the_code_says() -> None:
    table = (ROOT / "gateway" / "README.md").read_text()
    rates, work = Rates(), Work(prompt_tokens=1000, expected_output_tokens=128)
    speed = {"prefill_tokens_per_s": 4000.0, "decode_step_s": 0.02}
    busy = candidate_cost(EndpointView("a", "e", **speed), Match(50, 0), LoadView(3, 680, 0), work, rates=rates)
    idle = candidate_cost(EndpointView("b", "e", **speed), NO_MATCH, NO_LOAD, work, rates=rates)
    for term in ("prefill_s", "queue_s", "steps_s", "others_s"):
        row = next(line for line in table.splitlines() if line.startswith(f"| {term}"))
        assert f"{getattr(busy, term):.3f} |" in row
        assert f"{getattr(idle, term):.3f} |" in row or row.endswith("| 0 |")
    assert f"| **{busy.total_s:.3f}** | **{idle.total_s:.3f}** |" in table


def test_reading_a_map() -> None:
    assert _rows("## Map\n- `cli.py`: x\n### `core/`: PURE\n- `block_pool.py`: y\n## Life\n- `not a row`\n") == {
        "cli.py", "core/block_pool.py"}


def test_the_stranger_finds_the_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make up" in text
    assert "make test" in text
