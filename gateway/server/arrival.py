"""Requests as they arrive, for the express lane: which heads are known, and what they say.

Owns: what is remembered of a head, and for how long it holds: until the keys change. Must never: judge a head that
aiohttp has not parsed, or remember who asks where that can end by itself (a JWT).
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import hdrs
from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage
from msgspec import Struct

from gateway.admission.tenants import Tenant
from gateway.server.access import Access
from gateway.server.addressing import passed_on_headers
from gateway.server.client_headers import DEADLINE_HEADER, MIGRATION_HEADER
from gateway.server.generate_route import GenerateRoute
from gateway.server.http import Routes, usable_request_id
from gateway.server.known_heads import Cut, KnownHeads
from gateway.server.migration import wants_migration
from gateway.server.strict_head import check_head
from worker.protocol.api_error import ApiError


class HeadFacts(Struct, frozen=True):
    """What a head says. `headers` are for the answer, `passed_on` for workers; neither has the request's id."""

    route: GenerateRoute
    tenant: Tenant
    request_id: str | None
    deadline: str | None
    forwarded_for: tuple[str, ...]
    forwarded: tuple[str, ...]
    passed_on: Mapping[str, str]
    headers: Mapping[str, str]


class Arrivals:
    """Lives on the event loop, one for each listener. Paths are those of `by_path`, behind the routes' root path."""

    def __init__(self, access: Access, routes: Routes, by_path: Mapping[str, GenerateRoute], *,
                 max_body_bytes: int) -> None:
        self._access = access
        self._routes = routes
        self._by_path = {routes.root_path + path: route for path, route in by_path.items()}
        self._max_body_bytes = max_body_bytes
        self._heads: KnownHeads[HeadFacts] = KnownHeads()
        self.cut = self._heads.cut
        self.is_closing = routes.is_closing  # whether connections should end with their next answer
        self._keys = access.directory

    def known(self, cut: Cut) -> HeadFacts | None:
        """What this head says, if it is known and still holds, and its body may be as long as it says."""
        if self._access.directory is not self._keys:
            self._keys = self._access.directory
            self._heads.forget()
        return self._heads.get(cut) if cut.length <= self._max_body_bytes else None

    def learn(self, cut: Cut, message: RawRequestMessage) -> None:
        """aiohttp has read this message from the head that was cut so."""
        facts = self._facts(cut, message)
        if facts is not None:
            self._heads.put(cut, facts)

    def _facts(self, cut: Cut, message: RawRequestMessage) -> HeadFacts | None:
        headers, route = message.headers, self._by_path.get(message.path)
        is_usual = (message.method == hdrs.METH_POST and message.version == HttpVersion11 and not message.should_close
                    and not message.upgrade and not message.chunked and message.compression is None
                    and hdrs.EXPECT not in headers and headers.getall(hdrs.CONTENT_LENGTH, []) == [str(cut.length)])
        if route is None or not is_usual:
            return None
        try:
            check_head(message.version, headers)
            wants_migration(headers.get(MIGRATION_HEADER))
        except ApiError:
            return None
        tenant = self._access.lasting_tenant_of(headers)
        return None if tenant is None else HeadFacts(
            route, tenant, usable_request_id(headers), headers.get(DEADLINE_HEADER),
            tuple(headers.getall("X-Forwarded-For", [])), tuple(headers.getall("Forwarded", [])),
            passed_on_headers(headers), self._routes.cors_headers(headers))
