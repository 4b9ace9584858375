"""The gateway's own refusals, one function per line of contract section 3, so that each reads the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from worker.protocol.api_error import ApiError

RETRY_AFTER_S = "1"


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    names = ", ".join(sorted(known)) or "none yet"
    return ApiError(404, "model_not_found", f"The model `{model[:200]}` is not served here. Served: {names}.",
                    param="model")


def no_worker(detail: str) -> ApiError:
    return ApiError(503, "no_worker", detail, headers={"Retry-After": RETRY_AFTER_S})


def worker_failed(detail: str) -> ApiError:
    return ApiError(502, "worker_failed", detail)


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


def not_served(path: str) -> ApiError:
    return ApiError(501, "not_served", f"{path} is not served by this version; use /v1/chat/completions.")


def unauthenticated() -> ApiError:
    return ApiError(401, "unauthenticated", "Send the admin token as `Authorization: Bearer TOKEN` "
                    "(HEADSTART_ADMIN_TOKEN, or the file named in the gateway's start-up log).",
                    headers={"WWW-Authenticate": "Bearer"})
