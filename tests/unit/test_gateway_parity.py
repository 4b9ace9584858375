"""The token comparison between gateway and worker, and what it is asked with."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gateway.knowledge.parity import PROBE_MESSAGES, compare

IDS = st.lists(st.integers(0, 5), max_size=12)


@given(IDS, IDS)
def test_the_first_difference_is_named(ours: list[int], theirs: list[int]) -> None:
    report = compare(ours, theirs)
    assert report.ok == (ours == theirs)
    if report.ok:
        return
    at = report.position
    assert at is not None
    assert ours[:at] == theirs[:at]
    assert ours[at:at + 1] != theirs[at:at + 1]
    assert report.gateway_token == (ours[at] if at < len(ours) else None)
    assert report.worker_token == (theirs[at] if at < len(theirs) else None)
    assert report.as_json()["position"] == at


def test_the_probe_covers_what_templates_and_tokenizers_disagree_on() -> None:
    text = "".join(message["content"] for message in PROBE_MESSAGES)
    assert [message["role"] for message in PROBE_MESSAGES] == ["user", "assistant", "user"]
    assert any(unicodedata.combining(letter) for letter in text)
    assert {"\n", "\t", "\u200d", "東", "п"} <= set(text)
    assert "  " in text
    assert "\n\n" in text
