"""The tiny engine that the engine's unit tests drive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_engine import EngineDriver, config_for, write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded two-layer Llama checkpoint on disk."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def driver(tiny_llama: Path) -> EngineDriver:
    """A loaded engine, stepped by hand."""
    return EngineDriver(config_for(tiny_llama))
