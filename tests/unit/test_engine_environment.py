"""How the engine's threads wait: briefly awake where cores are its own, asleep at once where somebody says so."""

from __future__ import annotations

import pytest

from worker.engine.engine_client import _environment
from worker.engine.engine_config import EngineConfig
from worker.model.compiled.team import looks_before_sleep


def test_threads_look_for_work_before_they_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    made = _environment(EngineConfig(threads=2))
    assert (made["OMP_NUM_THREADS"], made["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert int(made["GOMP_SPINCOUNT"]) > 0
    assert min(looks_before_sleep(made)) > 0, "nor do those of compiled steps sleep at every barrier"


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    made = _environment(EngineConfig())
    assert "GOMP_SPINCOUNT" not in made
    assert looks_before_sleep(made) == (0, 0)
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert _environment(EngineConfig())["GOMP_SPINCOUNT"] == "7"
