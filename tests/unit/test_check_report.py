"""What `headstart check` prints for people, and what it makes of a worker's row."""

from __future__ import annotations

from gateway.check import CheckReport, EndpointCheck, as_text, verdict
from gateway.check_probe import ProbeResult

READY = {"id": "w1", "engine": "headstart", "knowledge": "exact", "state": "ready", "parity": {"ok": True}}
ENDPOINT = EndpointCheck(
    model="m",
    prompt_tokens=900,
    first_ttft_s=1.5,
    second_ttft_s=0.1,
    cached_tokens=880,
    ok=True,
    detail="880 of 900 prompt tokens came from the cache",
)


def second(*, predicted: int | None, reported: int | None) -> ProbeResult:
    return ProbeResult(
        ttft_s=0.1, prompt_tokens=900, cached_tokens=reported, worker_id="w1", predicted_tokens=predicted
    )


def test_predicted_equals_reported_is_well() -> None:
    row = verdict(READY, second(predicted=880, reported=880))
    assert row.ok
    assert (row.predicted_tokens, row.reported_tokens) == (880, 880)


def test_whatever_differs_is_said() -> None:
    assert "differ" in verdict(READY, second(predicted=880, reported=864)).detail
    assert "no cached tokens" in verdict(READY, second(predicted=0, reported=0)).detail
    assert "no probe reached it" in verdict(READY, None).detail
    assert "worker is unready" in verdict({**READY, "state": "unready"}, None).detail
    parity = {"ok": False, "position": 7, "gateway_token": "<a>", "worker_token": "<b>"}
    detail = verdict({**READY, "parity": parity}, second(predicted=880, reported=880)).detail
    assert "first differing token at position 7: gateway <a>, worker <b>" in detail


def test_one_bad_worker_is_a_bad_report() -> None:
    good, bad = verdict(READY, second(predicted=880, reported=880)), verdict(READY, None)
    assert CheckReport(url="http://g", endpoint=ENDPOINT, workers=[good]).ok
    assert not CheckReport(url="http://g", endpoint=ENDPOINT, workers=[good, bad]).ok


def test_the_text_names_each_worker_and_both_times() -> None:
    report = CheckReport(
        url="http://g", endpoint=ENDPOINT, workers=[verdict(READY, second(predicted=880, reported=880))]
    )
    text = as_text(report)
    assert "1500.0 ms" in text
    assert "100.0 ms" in text
    assert "w1" in text
    assert "exact" in text
    assert "predicted = reported" in text


def test_without_a_list_of_workers_the_text_says_why() -> None:
    assert "pass --admin-token-file" in as_text(CheckReport(url="http://g", endpoint=ENDPOINT))
