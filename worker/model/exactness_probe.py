"""Asks the machine itself whether strict mode's promise holds on it."""

from __future__ import annotations

from dataclasses import dataclass

from worker.model.paged_model import PagedModel


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """`exact`: every cut of the probe prompt gave the same bits. `note` is one line for the start-up log."""

    exact: bool
    note: str


def probe_exactness(model: PagedModel) -> ExactnessReport:
    """Cut a short prompt several ways (whole, chunked, token by token, batched) and compare logits bit by bit."""
    return ExactnessReport(False, f"not probed: {model.spec.name}")
