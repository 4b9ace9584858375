"""What an answer does to its request's record and booking: the same whether a task waits for it or not.

Owns: the order of these steps. Must never: send anything to a client.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway import errors
from gateway.relay.retry import AttemptFailed
from gateway.relay.sse import body_usage
from gateway.relay.upstream import UpstreamResponse
from gateway.server.placement import Placement
from gateway.server.replies import Learn
from gateway.server.request_record import RequestRecord
from worker.protocol.internal_request import CACHED_TOKENS_HEADER
from worker.protocol.told_tokens import told_behind

JSON_TYPE = "application/json"
WORKER_HEADER = "x-headstart-worker"
MATCHED_TOKENS_HEADER = "x-headstart-matched-tokens"


def answer_began(record: RequestRecord, placement: Placement, response: UpstreamResponse) -> None:
    """The first bytes of an answer are here."""
    if response.status >= 400:
        placement.abandon()  # refused, so nothing of it will be in that cache
    placement.first_byte()
    record.first_byte()
    record.stages["connect"] = response.connect_s
    record.cached_tokens = _count(response.headers.get(CACHED_TOKENS_HEADER))
    record.status = response.status
    record.admitted = record.status == 200


def answer_ended(record: RequestRecord, placement: Placement, response: UpstreamResponse, body: bytes, *,
                 is_complete: bool, learn: Learn | None) -> bytes:
    """The client's part of a whole answer; AttemptFailed when it is torn. Without `is_complete` it is a part."""
    record.outcome = "ok" if response.status < 400 else "client_error"
    if response.status < 400:
        placement.succeeded()
    if is_complete and response.status == 200:
        body = _learned(response.headers, body, learn)
        record.reported(body_usage(body))
    return body


def tell_routing(headers: dict[str, str], placement: Placement) -> None:
    """In the answer's headers: where the request went, and why."""
    headers[WORKER_HEADER] = placement.endpoint_id
    headers[MATCHED_TOKENS_HEADER] = str(placement.decision.matched_tokens)


def _learned(headers: Mapping[str, str], body: bytes, learn: Learn | None) -> bytes:
    """The client's part of a whole answer; the ids behind it are remembered."""
    try:
        body, choices = told_behind(headers, body)
    except ValueError as error:
        torn = errors.worker_failed(f"The worker's answer is torn ({error}).")
        raise AttemptFailed("worker_error", torn) from error
    if learn is not None:
        learn(choices)
    return body


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
