"""The model's one error: something the operator can mend.

Owns nothing else. Never used for a bug of ours (those are asserts) nor for one request's fault (those are ApiErrors).
"""

from __future__ import annotations


class ModelError(Exception):
    """One line saying what is wrong with the model, its files or its settings, and what to do about it."""
