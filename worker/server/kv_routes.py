"""The pool as others see it: GET /kv, GET /kv/snapshot, POST /kv/reset; and POST /abort.

Where a worker token is configured it guards what is not for strangers: the snapshot (its blocks carry prompt tokens,
and the event sockets that tell the same bind to loopback), the reset (it slows everybody down), the abort (ids can be
guessed), and in GET /kv the seed of the hash scheme (it would let a stranger forge hashes).
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
from aiohttp import web

from worker import __version__
from worker.engine.messages import EngineReady, EngineStats
from worker.prompt.json_body import decode_body
from worker.protocol.cache_events import SnapshotHeader, encode_snapshot_block, encode_snapshot_header
from worker.server.cpu_share import cpu_share
from worker.server.intake import has_worker_token, read_body, require_worker_token
from worker.server.model_routes import json_response
from worker.server.shell import Phase, Shell, shell_of
from worker.server.sse import open_unmeasured

SNAPSHOT_BLOCKS_PER_WRITE = 256
ABORT_BODY_BYTES_MAX = 4096


class _AbortBody(msgspec.Struct):
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


_abort_decoder = msgspec.json.Decoder(_AbortBody)


async def kv_state(request: web.Request) -> web.Response:
    """Who this worker is, how it hashes, where its events are, and how full and busy it is.

    503 while the engine is silent as well: by this answer a gateway knows whether to send anything here.
    """
    shell = shell_of(request)
    ready = shell.require_engine().ready
    # Without a configured token there is nobody to keep the seed from: it is the well-known one of unkeyed workers.
    with_seed = not shell.config.worker_token or has_worker_token(request, shell)
    publisher, stats = shell.publisher, shell.stats
    return json_response({
        "engine": "headstart",
        "version": __version__,
        "pid": os.getpid(),
        "epoch": publisher.epoch,
        "model": ready.model,
        "adapters": {name: digest.hex() for name, digest in ready.adapters},
        "hash_scheme": ready.hash_scheme.to_wire(with_seed=with_seed),
        "hash_scheme_digest": ready.hash_scheme.digest(),
        "block_size": ready.block_size,
        "max_context": ready.max_context,
        "exactness": ready.exactness,
        "kv_cache": shell.config.kv_cache,
        "kv_dtype": ready.kv_dtype,
        "weight_dtype": ready.weight_dtype,
        "internal_requests": _internal_requests(request, shell),
        "draining": shell.phase in (Phase.LEAVING, Phase.DRAINING),
        "events": {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint,
                   "topic": publisher.topic},
        **_pool(stats, shell, ready),
    })


async def kv_snapshot(request: web.Request) -> web.StreamResponse:
    """NDJSON: a header with epoch and barrier, then every findable block, parents first."""
    shell = shell_of(request)
    _require_token_if_configured(request, shell)
    ready = shell.require_serving().ready
    snapshot = shell.publisher.snapshot()
    response = await open_unmeasured(request, {"Content-Type": "application/x-ndjson"})
    header = SnapshotHeader(epoch=snapshot.epoch, barrier_seq=snapshot.barrier_seq, block_size=ready.block_size,
                            num_blocks=len(snapshot.blocks), hash_scheme_digest=ready.hash_scheme.digest())
    await response.write(encode_snapshot_header(header))
    for start in range(0, len(snapshot.blocks), SNAPSHOT_BLOCKS_PER_WRITE):
        some = snapshot.blocks[start:start + SNAPSHOT_BLOCKS_PER_WRITE]
        await response.write(b"".join(map(encode_snapshot_block, some)))
    await response.write_eof()
    return response


async def kv_reset(request: web.Request) -> web.Response:
    """Forget every cached block that no running sequence holds. 202: it happens at the engine's next step."""
    shell = shell_of(request)
    _require_token_if_configured(request, shell)
    shell.require_serving()
    shell.engine.reset()
    return web.Response(status=202, body=b'{"status":"resetting"}', content_type="application/json")


async def abort(request: web.Request) -> web.Response:
    """Stop every living request with this id. Idempotent: `aborted` is 0 when there is none (any more)."""
    shell = shell_of(request)
    _require_token_if_configured(request, shell)
    shell.require_serving()
    raw = await read_body(request, ABORT_BODY_BYTES_MAX)
    body = decode_body(raw, _abort_decoder).value
    return json_response({"aborted": shell.requests.abort(body.request_id)})


def _require_token_if_configured(request: web.Request, shell: Shell) -> None:
    if shell.config.worker_token:
        require_worker_token(request, shell)


def _internal_requests(request: web.Request, shell: Shell) -> str:
    """Whether this caller's token would be honoured; `off`: this worker has none, and honours nobody's."""
    if not shell.config.worker_token:
        return "off"
    return "accepted" if has_worker_token(request, shell) else "refused"


def _pool(stats: EngineStats, shell: Shell, ready: EngineReady) -> dict[str, Any]:
    return {
        "blocks": {"total": stats.blocks_total, "free": stats.blocks_free, "cached": stats.blocks_cached,
                   "used": stats.blocks_used},
        "load": {"running": stats.num_running, "waiting": stats.num_waiting, "requests": len(shell.requests),
                 "waiting_prefill_tokens": stats.waiting_prefill_tokens,
                 "running_prefill_tokens": stats.running_prefill_tokens,
                 "decode_context_tokens": stats.decode_context_tokens},
        "scheduling": {"batching": shell.config.batching, "target_itl_ms": shell.config.target_itl_ms,
                       "token_budget": stats.token_budget, "max_batch_tokens": shell.config.max_batch_tokens},
        "rates": {"prefill_tokens_per_s": stats.prefill_tokens_per_s, "decode_step_s": stats.decode_step_s},
        "computed_positions_total": stats.computed_positions_total,
        "cpu": cpu_share(ready.cpu_threads),
    }
