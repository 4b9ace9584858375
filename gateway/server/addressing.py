"""What is sent to a worker: the client's JSON alone, or the internal request with prompt ids (contract section 4).

Owns: headers and body of every generating request to a worker. Must never: pass on a header of the client's that is
not named here, its Authorization least of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.admission.cache_salt import with_cache_salt
from gateway.knowledge.endpoint_table import Endpoint
from gateway.relay.upstream import UpstreamRequest
from gateway.server.dispatch import is_plain
from worker.protocol.internal_request import WORKER_TOKEN_HEADER, Resume, encode_internal

if TYPE_CHECKING:
    from gateway.server.reading import Intake

_PASSED_ON = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class ChoiceToResume:
    """Not the whole request, but one choice of it to go on with; `resume` None: the whole, from its beginning."""

    prompts: list[Sequence[int]]
    resume: Resume | None


def passed_on_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What a worker gets to see of a client's head, but for the request's id."""
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def upstream_request(intake: Intake, endpoint: Endpoint, *, worker_token: str,
                     tells_token_ids: bool, choice: ChoiceToResume | None = None) -> UpstreamRequest:
    """`tells_token_ids`: a headstart worker is asked to tell the tokens of its stream."""
    headers, salt = {"content-type": "application/json"}, intake.routed.prepared.salt
    if is_plain(endpoint, worker_token):
        body = intake.body if salt.in_body is None else with_cache_salt(intake.body, salt.in_body)
    else:
        prompts = intake.routed.prepared.prompts if choice is None else choice.prompts
        headers, body = encode_internal(intake.body, prompts, salt=salt.internal, salt_from=salt.salt_from,
                                        tenant=intake.tenant.tenant_id or None, tells_token_ids=tells_token_ids,
                                        resume=None if choice is None else choice.resume)
        headers[WORKER_TOKEN_HEADER] = worker_token
    headers.update(intake.passed_on)
    if endpoint.worker.api_key:
        headers["Authorization"] = f"Bearer {endpoint.worker.api_key}"
    url = endpoint.worker.url + intake.route.upstream_path
    return UpstreamRequest(url, headers, body, endpoint.worker.ssl_context)
