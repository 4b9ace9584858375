"""How the engine's threads wait: briefly awake where cores are its own, asleep at once where somebody says so. And
how strict mode has matrices multiplied."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.engine import exact_products
from worker.engine.engine_client import _environment
from worker.engine.engine_config import EngineConfig
from worker.engine.exact_products import VARIABLE, strict_products
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


AVX512 = "avx2 avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(("vendor", "flags", "value"), [
    ("GenuineIntel", AVX512, "AVX512,STRICT"),
    ("GenuineIntel", "sse4_2 avx2 fma", "AVX2,STRICT"),
    ("GenuineIntel", "avx2 avx512f avx512cd", "AVX2,STRICT"),
    ("GenuineIntel", "sse4_2", None),
    ("AuthenticAMD", AVX512, None),
])
def test_strict_products_by_processor(vendor: str, flags: str, value: str | None) -> None:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: A CPU: fast\nflags\t\t: fpu {flags} sse\n"
    assert strict_products(f"{one}\n{one}\n") == value


def test_no_processor_told() -> None:
    assert strict_products("") is None


def test_strict_mode_alone_asks_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(exact_products, "CPU_INFO", tmp_path / "cpuinfo")
    assert VARIABLE not in _environment(EngineConfig(exactness="strict")), "nothing is known of the processor"
    (tmp_path / "cpuinfo").write_text(f"vendor_id: GenuineIntel\nflags: {AVX512}\n")
    assert VARIABLE not in _environment(EngineConfig(exactness="fast"))
    assert _environment(EngineConfig(exactness="strict"))[VARIABLE] == "AVX512,STRICT"
    monkeypatch.setenv(VARIABLE, "COMPATIBLE")
    assert _environment(EngineConfig(exactness="strict"))[VARIABLE] == "COMPATIBLE"
