"""Cutting at added tokens against the expression that says what it means."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.prompt.boundary_splitter import FEW, boundary_splitter

CHAT = ("<|im_start|>", "<|im_end|>", "<tool>")
APART = ("[INST]", "<s>")
SURROUNDINGS = ("<", "<|", "im_end", "|>", "[", "INST]", "a", "\n", "é", "\u3c3c", "\U0001f600", "<|im_end|", "<s")


@pytest.mark.parametrize("boundaries", [CHAT, CHAT[:1], APART])
@given(data=st.data())
def test_it_is_the_split_of_an_expression(boundaries: tuple[str, ...], data: st.DataObject) -> None:
    piece = st.sampled_from((*boundaries, *SURROUNDINGS))
    text = "".join(data.draw(st.lists(piece, max_size=30)) * data.draw(st.sampled_from((1, 1, FEW))))
    assert boundary_splitter(boundaries)(text) == re.split(f"({'|'.join(map(re.escape, boundaries))})", text)
