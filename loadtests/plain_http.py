"""One JSON request, synchronously, for scripts that need nothing more."""

from __future__ import annotations

import urllib.request
from typing import Any

import orjson

TIMEOUT_S = 300.0


def fetch(url: str, body: dict[str, Any] | None = None, *, token: str | None = None) -> dict[str, Any]:
    """GET, or POST when there is a body. Raises urllib.error.HTTPError on any status but 2xx."""
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else orjson.dumps(body)
    with urllib.request.urlopen(
        urllib.request.Request(url, data=data, headers=headers), timeout=TIMEOUT_S
    ) as response:
        return dict(orjson.loads(response.read()))
