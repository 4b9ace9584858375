"""Names of headers that are between clients and this gateway."""

from __future__ import annotations

REQUEST_ID_HEADER = "x-request-id"
DEADLINE_HEADER = "x-request-deadline-ms"
MIGRATION_HEADER = "x-request-migration"
