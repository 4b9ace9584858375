"""The OpenAI error object, once, for worker and gateway (contract section 3).

An ApiError says whose fault it was and how to fix it. Only the outermost handler renders it; only shells catch it.
"""

from __future__ import annotations

from collections.abc import Mapping

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
          404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An outcome that a client sees as an HTTP error.

    `code` is the contract's stable word ("invalid_request", "model_not_found", "queue_full", ...), `param` names the
    offending field or is None, `headers` are sent along (Retry-After).
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON object to send: {"error": {"message", "type", "param", "code"}}."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid_request(message: str, param: str | None) -> ApiError:
    """400 `invalid_request`: the client can mend it, and `param` says where."""
    return ApiError(400, "invalid_request", message, param=param)
