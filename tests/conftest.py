"""Hypothesis draws the same examples in every run, so that red stays red; HEADSTART_FUZZ=1 draws fresh ones.
Models that tests load in their own process multiply as a strict worker's engine does."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from worker.engine.exact_products import ask_for_strict_products

READABLE_BYTES_MAX = 24

settings.register_profile("same-every-run", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("fresh" if os.environ.get("HEADSTART_FUZZ") else "same-every-run")

ask_for_strict_products(os.environ)     # MKL looks once, at its first product


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Test processes must collect the same names, and packed bytes may hold the time they were packed at."""
    if not isinstance(val, bytes):
        return None
    readable = len(val) <= READABLE_BYTES_MAX and val.isascii() and val.decode().isprintable()
    return None if readable else argname


@pytest.fixture(autouse=True, scope="module")
def _models_end_with_their_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file's own `@cache` holds, models and tokenizers of hundreds of MiB, nobody asks for after it."""
    yield
    own = [value for value in vars(request.module).values()
           if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__]
    if not any(function.cache_info().currsize for function in own):
        return
    for function in own:
        function.cache_clear()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
