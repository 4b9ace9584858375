"""The baseline of the gateway benchmark: a reverse proxy as one writes it in an afternoon, web.Application over
ClientSession. It knows no tokens and checks nothing.

    python -m loadtests.bench.aiohttp_proxy --port 9000 --worker http://127.0.0.1:9100
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Awaitable, Callable

import aiohttp
import uvloop
from aiohttp import web

MAX_BODY_BYTES = 64 * 1024 * 1024


def _handler(workers: list[str]) -> tuple[Callable[[web.Request], Awaitable[web.StreamResponse]],
                                          Callable[[web.Application], Awaitable[None]]]:
    turn, sessions = itertools.cycle(workers), list[aiohttp.ClientSession]()

    async def start(_: web.Application) -> None:
        sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False))

    async def proxy(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        url = next(turn) + request.path
        async with sessions[0].request(request.method, url, data=body, headers=headers) as answer:
            if not answer.content_type.startswith("text/event-stream"):
                return web.Response(status=answer.status, body=await answer.read(),
                                    content_type=answer.content_type)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    return proxy, start


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.aiohttp_proxy",
                                     description="A plain aiohttp reverse proxy.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker", action="append", required=True, help="where to send requests, in turn")
    arguments = parser.parse_args()
    proxy, start = _handler(arguments.worker)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.on_startup.append(start)
    app.router.add_route("*", "/{path:.*}", proxy)
    web.run_app(app, host="127.0.0.1", port=arguments.port, access_log=None, print=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
