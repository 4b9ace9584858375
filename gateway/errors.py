"""The gateway's own refusals, one function per line of contract section 3, so that each reads the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable

from worker.protocol.api_error import ApiError

RETRY_AFTER_S = "1"
RETRY_AFTER_MAX_S = 120


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    names = ", ".join(sorted(known)) or "none yet"
    return ApiError(404, "model_not_found", f"The model `{model[:200]}` is not served here. Served: {names}.",
                    param="model")


def model_not_named(known: Iterable[str]) -> ApiError:
    names = ", ".join(sorted(known)) or "none yet"
    return ApiError(404, "model_not_found", f"Name a model, as the field `model`. Served: {names}.", param="model")


def no_worker(detail: str) -> ApiError:
    return ApiError(503, "no_worker", detail, headers={"Retry-After": RETRY_AFTER_S})


def worker_failed(detail: str) -> ApiError:
    return ApiError(502, "worker_failed", detail)


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"The gateway failed on this request ({request_id}); its log says why.")


def gateway_stopping() -> ApiError:
    return worker_failed("The gateway is stopping and could not wait for the rest of this answer; send it again.")


def worker_timeout(detail: str) -> ApiError:
    return ApiError(504, "worker_timeout", detail)


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large",
                    f"The request body is larger than {limit_bytes} bytes; send less or raise max_body_bytes.")


def body_too_slow(limit_s: float) -> ApiError:
    return ApiError(408, "body_timeout", f"The request body did not arrive within {limit_s:g} s; send it again.")


def unknown_path(method: str, path: str) -> ApiError:
    return ApiError(404, "not_found", f"There is no route {method} {path[:200]}.")


def method_not_allowed(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    verbs = ", ".join(sorted(allowed))
    return ApiError(405, "method_not_allowed", f"{path[:200]} answers {verbs}, not {method[:20]}.",
                    headers={"Allow": verbs})


def no_api_key() -> ApiError:
    return ApiError(401, "unauthenticated", "Send a valid API key as `Authorization: Bearer KEY`.",
                    headers={"WWW-Authenticate": "Bearer"})


def model_forbidden(model: str) -> ApiError:
    return ApiError(403, "forbidden", f"This API key may not use the model `{model[:200]}`.", param="model")


def priority_forbidden(least: int) -> ApiError:
    return ApiError(403, "forbidden", f"This API key may not ask for a priority below {least}.", param="priority")


class Rejected(ApiError):
    """429: not now. `reason` tells the metrics more than the code tells the client; `retry_after_s` is rounded up."""

    def __init__(self, code: str, message: str, *, reason: str, retry_after_s: float,
                 retry_after_max_s: float | None = None) -> None:
        seconds = min(max(1, math.ceil(retry_after_s)), retry_after_max_s or RETRY_AFTER_MAX_S)
        super().__init__(429, code, message, headers={"Retry-After": str(seconds)})
        self.reason = reason


def rate_limited(limit: str, retry_after_s: float, *, is_budget: bool = False) -> Rejected:
    """`is_budget`: it is known to the second when the next one begins, be it days."""
    return Rejected("rate_limited", f"This API key is over its limit ({limit.replace('_', ' ')}); try again later.",
                    reason=limit, retry_after_s=retry_after_s, retry_after_max_s=math.inf if is_budget else None)


def queue_full(why: str, reason: str, retry_after_s: float) -> Rejected:
    return Rejected("queue_full", f"{why}; try again later.", reason=reason, retry_after_s=retry_after_s)


def deadline_too_soon(retry_after_s: float) -> Rejected:
    """No worker has been asked: the client's own deadline is what stands against it, not a queue that is full."""
    return Rejected("queue_full", "No answer could begin before this request's deadline (x-request-deadline-ms); "
                    "allow it more time, or try again later.", reason="deadline", retry_after_s=retry_after_s)


def tenant_not_found(tenant_id: str | None) -> ApiError:
    named = "Name a tenant as ?tenant=ID" if tenant_id is None else f"There is no tenant {tenant_id[:200]!r}"
    return ApiError(404, "tenant_not_found", f"{named}; the tenants are those of the gateway's keys.")


def unauthenticated() -> ApiError:
    return ApiError(401, "unauthenticated", "Send the admin token as `Authorization: Bearer TOKEN` "
                    "(HEADSTART_ADMIN_TOKEN, or the file named in the gateway's start-up log).",
                    headers={"WWW-Authenticate": "Bearer"})
