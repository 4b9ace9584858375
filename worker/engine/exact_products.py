"""Which way of multiplying strict mode asks MKL for, before torch is there.

On Intel's own processors MKL cuts a product of few rows over its inner dimension where two threads and more share it,
so a row's bits depend on how many others there are (seen with 2 threads on AVX-512: 640 x 2048 up to 256 rows). Its
"strict conditional numerical reproducibility" (MKL_CBWR, Intel's developer guide) forbids that; one thread pays
nothing for it. MKL takes other vendors' processors another way, where nothing of the kind was seen.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "MKL_CBWR"
CPU_INFO = Path("/proc/cpuinfo")
_INTEL = "GenuineIntel"
_AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def strict_products(cpu_info: str) -> str | None:
    """The variable's value for the first processor of a /proc/cpuinfo; None where there is nothing to ask for."""
    facts: dict[str, str] = {}
    for line in cpu_info.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    flags = set(facts.get("flags", "").split())
    if facts.get("vendor_id") != _INTEL or "avx2" not in flags:
        return None
    return "AVX512,STRICT" if flags >= _AVX512 else "AVX2,STRICT"


def ask_for_strict_products(environment: MutableMapping[str, str]) -> None:
    """For the process that `environment` is for, unless somebody has asked for something else."""
    try:
        value = strict_products(CPU_INFO.read_text())
    except OSError:
        return
    if value is not None:
        environment.setdefault(VARIABLE, value)
