"""GET /livez, /readyz, /health, /metrics: what supervisors and Prometheus ask."""

from __future__ import annotations

from aiohttp import web

from worker.protocol.api_error import ApiError
from worker.server.shell import Phase, Shell, shell_of

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def livez(request: web.Request) -> web.Response:
    """200 while this process works, also when the model is still loading."""
    return web.Response(text="ok\n")


async def readyz(request: web.Request) -> web.Response:
    """200 when requests should be sent here."""
    shell_of(request).require_ready()
    return web.Response(text="ok\n")


async def health(request: web.Request) -> web.Response:
    """200 while the model is loaded and its engine gives signs of life; a worker that drains is healthy."""
    shell = shell_of(request)
    shell.require_engine()
    _require_engine(shell)
    return web.Response(text="ok\n")


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=shell_of(request).metrics.render(), headers={"Content-Type": METRICS_CONTENT_TYPE})


def _require_engine(shell: Shell) -> None:
    if shell.phase is not Phase.FAILED and not shell.engine.alive:
        raise ApiError(503, "worker_failed", "This worker's engine process has ended.")
