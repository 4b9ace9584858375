"""/openapi.json says what the gateway does: schemathesis sends what it allows and forbids, over real sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi import checks as openapi_checks

from gateway.server.client_headers import DEADLINE_HEADER
from gateway.server.http import Served
from gateway.server.openapi import OPERATIONS, document
from tests.support.gateway_in_process import ADMIN, GatewayUnderTest
from tests.support.gateway_in_thread import serving_in_thread

CASES, CASES_SLOW = 300, 5000
MODEL_SHARE = 4  # one case in so many keeps the model that was made up
# A deadline that passes is a 504 by contract; these cases look for others.
DEADLINE_MIN_MS = 60_000
# Fields that depend on others: with any of them at random hardly a body is right.
ENTANGLED = ("stream_options", "min_tokens", "suffix", "best_of", "top_logprobs", "tool_choice", "response_format",
             "logit_bias", "echo", "add_generation_prompt", "chat_template_kwargs")
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings",
              "/tokenize", "/detokenize", "/admin/explain")
CHECKS = [not_a_server_error, openapi_checks.status_code_conformance, openapi_checks.content_type_conformance,
          openapi_checks.response_headers_conformance, openapi_checks.response_schema_conformance]
load_all_checks()


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayUnderTest]:
    with serving_in_thread() as (_, gateway):
        yield gateway


def fitted(case: schemathesis.Case, number: int) -> schemathesis.Case:
    """Most bodies name the model that is served, or every request would end at the same 404."""
    if number % MODEL_SHARE and isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "stub"
    if number % 2 and isinstance(case.body, dict):
        case.body = without_fractions(case.body)
        for name in ENTANGLED:
            case.body.pop(name, None)
    deadline = (case.headers or {}).get(DEADLINE_HEADER)
    if deadline is not None and str(deadline).isdecimal():
        case.headers[DEADLINE_HEADER] = str(max(int(deadline), DEADLINE_MIN_MS))
    return case


def without_fractions(value: Any) -> Any:
    """1.0 as 1: to JSON Schema they are the same integer, and to the parser only one of them is."""
    if isinstance(value, dict):
        return {name: without_fractions(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_fractions(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def run_cases(gateway: GatewayUnderTest, num_cases: int) -> Counter[str]:
    """So many cases over all operations, five to one for those with a body; statuses counted by route."""
    schema = schemathesis.openapi.from_url(gateway.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    shares = [5 if operation.path in GENERATING else 1 for operation in operations]
    seen: Counter[str] = Counter()
    for operation, share in zip(operations, shares, strict=True):
        for mode in GenerationMode:
            most = -(-num_cases * share // (sum(shares) * len(GenerationMode)))

            @hypothesis.settings(max_examples=most, deadline=None, derandomize=True, database=None,
                                 suppress_health_check=list(hypothesis.HealthCheck))
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                headers = ADMIN if case.path.startswith("/admin") else {}
                answer = fitted(case, seen.total()).call_and_validate(
                    base_url=gateway.url, headers=headers, checks=CHECKS)
                seen[f"{case.method} {case.operation.path} {answer.status_code}"] += 1

            check()
    return seen


def test_nothing_the_document_allows_or_forbids_is_a_5xx_or_undocumented(gateway: GatewayUnderTest) -> None:
    seen = run_cases(gateway, CASES)
    assert seen.total() >= CASES * 0.9
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert seen[f"POST {path} 200"], f"nothing got through to {path}: {seen}"
        assert seen[f"POST {path} 400"], f"nothing was wrong at {path}: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_cases(gateway: GatewayUnderTest) -> None:
    seen = run_cases(gateway, CASES_SLOW)
    print(f"{seen.total()} cases:", dict(seen))
    assert seen.total() >= CASES_SLOW


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from references(item)


async def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    whole = document([Served(*key, is_prefix=key[1].endswith("/")) for key in OPERATIONS], has_tenants=True)
    schemas = whole["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})
    used = {name.removeprefix("#/components/schemas/") for name in references(whole)}
    assert used <= set(schemas)
    assert set(schemas) - used <= set(), "a schema that nothing refers to"


def test_what_is_served_is_described_and_nothing_else(gateway: GatewayUnderTest) -> None:
    main, _ = gateway.gateway._routes()
    unknown = [(route.method, route.path) for route in main.served()
               if route.is_offered and (route.method, route.path) not in OPERATIONS]
    assert not unknown, f"say in server/openapi.py what these do: {unknown}"
    assert {(route.method, route.path) for route in main.served()} >= set(OPERATIONS)
    whole = document(main.served(), has_tenants=False)
    for path in ("/v1/chat/completions", "/admin/workers/{worker_id}/drain", "/v1/models/{model}", "/openapi.json"):
        assert path in whole["paths"]


def test_keys_are_asked_for_where_there_are_tenants() -> None:
    routes = [Served("POST", "/v1/completions"), Served("GET", "/livez"), Served("GET", "/admin/workers"),
              Served("POST", "/v1/later", is_offered=False)]
    for has_tenants in (False, True):
        paths = document(routes, has_tenants=has_tenants, root_path="/llm/")["paths"]
        asked = [path for path, said in paths.items() if any("security" in how for how in said.values())]
        assert asked == (["/v1/completions"] if has_tenants else []) + ["/admin/workers"]
        assert ("401" in paths["/v1/completions"]["post"]["responses"]) is has_tenants
        assert "/v1/later" not in paths, "what is only refused is not offered"
    assert document(routes, has_tenants=False, root_path="/llm/")["servers"] == [{"url": "/llm"}]


def test_the_document_says_what_the_parser_checks() -> None:
    whole = document([Served(*key) for key in OPERATIONS], has_tenants=False)
    chat = whole["components"]["schemas"]["ChatBody"]
    assert set(chat["required"]) == {"model", "messages"}
    temperature = next(kind for kind in chat["properties"]["temperature"]["anyOf"] if kind["type"] == "number")
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 2.0)
    assert "functions" not in chat["properties"]
