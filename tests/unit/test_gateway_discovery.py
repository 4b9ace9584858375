"""Configured workers: ids, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import WorkerSpec
from gateway.knowledge.discovery.static import DiscoveryError, static_workers


def test_an_id_is_the_host_and_port_unless_given() -> None:
    workers = static_workers([WorkerSpec("http://10.0.0.7:8100/"), WorkerSpec("https://w.example", worker_id="w")])
    assert [(worker.endpoint_id, worker.url) for worker in workers] == [
        ("10.0.0.7:8100", "http://10.0.0.7:8100"), ("w", "https://w.example")]


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(DiscoveryError, match="api_key") as refused:
        static_workers([WorkerSpec("http://user:secret@h:1")])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["", "localhost:8100", "ftp://x", "http://", "http:///path"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(DiscoveryError, match="http://HOST:PORT"):
        static_workers([WorkerSpec(url)])


def test_one_id_twice_is_refused() -> None:
    with pytest.raises(DiscoveryError, match=r"h:1"):
        static_workers([WorkerSpec("http://h:1"), WorkerSpec("http://h:1/")])


def test_one_worker_under_two_names_is_refused() -> None:
    with pytest.raises(DiscoveryError, match=r"'h:1' and 'other' are one worker"):
        static_workers([WorkerSpec("http://h:1"), WorkerSpec("http://h:1/", worker_id="other")])


def test_an_unreadable_ca_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"missing\.pem"):
        static_workers([WorkerSpec("https://h:1", ca_file=tmp_path / "missing.pem")])
    (tmp_path / "bad.pem").write_text("not a certificate")
    with pytest.raises(DiscoveryError, match=r"bad\.pem"):
        static_workers([WorkerSpec("https://h:1", ca_file=tmp_path / "bad.pem")])
