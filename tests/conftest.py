"""Hypothesis draws the same examples in every run, so that red stays red; HEADSTART_FUZZ=1 draws fresh ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same-every-run", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("fresh" if os.environ.get("HEADSTART_FUZZ") else "same-every-run")
