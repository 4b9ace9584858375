"""Every test that the threat model names exists."""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT

NAMED = re.compile(r"`((?:unit|property|integration|scenarios|conformance)/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = NAMED.findall((ROOT / "gateway" / "THREAT_MODEL.md").read_text())
    assert len(named) > 30
    for file, test in named:
        text = (ROOT / "tests" / file).read_text()
        assert not test or re.search(rf"^(async )?def {test}\(", text, re.M), f"{file}::{test}"
