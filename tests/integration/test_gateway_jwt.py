"""Tokens of an identity provider as keys, over real sockets: which open what, and all the ways to be wrong."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from gateway.admission.keys_file import KeysError
from gateway.config import GatewayConfig
from gateway.server.app import Gateway, StartError
from gateway.server.jwt_verifier import JwtVerifier
from tests.integration.test_gateway_tenants import as_key, keys_file
from tests.support.certificates import private_pem, public_pem
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import StubWorker, running

ISSUER, AUDIENCE = "https://id.example", "llm"
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
STATIC = "hs-a-key-for-tenant-b-31415926"


def token(key: Any = KEY, *, algorithm: str = "ES256", kid: str | None = None, **changes: Any) -> str:
    claims = {"sub": "a", "iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, **changes}
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm=algorithm, headers=None if kid is None else {"kid": kid})


def unsigned() -> str:
    parts = [{"alg": "none", "typ": "JWT"}, {"sub": "a", "iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def jwks(**keys: ec.EllipticCurvePrivateKey) -> str:
    return json.dumps({"keys": [{**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}
                                for kid, key in keys.items()]})


@asynccontextmanager
async def serving(tmp_path: Path, keys: str | bytes, **settings: Any) -> AsyncIterator[tuple[StubWorker,
                                                                                             GatewayUnderTest]]:
    file = tmp_path / "provider"
    file.write_bytes(keys if isinstance(keys, bytes) else keys.encode())
    tenants = keys_file(tmp_path, {"id": "b", "key": STATIC}, more='[[tenants]]\nid = "a"\nmodels = ["stub"]\n')
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, keys_file=tenants, jwt_keys_file=file, jwt_issuer=ISSUER,
                                              jwt_audience=AUDIENCE, keys_reload_s=0.02, **settings) as gateway:
        await gateway.until_exact()
        yield stub, gateway


async def test_a_good_token_is_its_tenant_and_keys_go_on_opening(tmp_path: Path) -> None:
    async with serving(tmp_path, public_pem(KEY)) as (stub, gateway):
        assert (await gateway.chat(headers=as_key(token()))).status == 200
        assert (await gateway.chat(headers=as_key(STATIC))).status == 200
        assert [seen.headers["x-headstart-tenant"] for seen in stub.seen] == ["a", "b"]
        assert token() not in repr(stub.seen)


DAY_S = 86_400  # longer than a whole run of the tests: these are worked out when they are collected
WRONG = {
    "nobody's": {"sub": "c"}, "no tenant": {"sub": None}, "expired": {"exp": time.time() - DAY_S},
    "without an end": {"exp": None}, "not yet": {"nbf": time.time() + DAY_S, "exp": time.time() + 2 * DAY_S},
    "for others": {"aud": "another"},
    "for nobody": {"aud": None}, "of others": {"iss": "https://other"}, "of nobody": {"iss": None},
    "signed by another": {"key": OTHER}, "a tenant that is a list": {"tenant": ["a"]},
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_token_that_is_wrong_opens_nothing(name: str, tmp_path: Path) -> None:
    settings = {"jwt_tenant_claim": "tenant"} if "list" in name else {}
    async with serving(tmp_path, public_pem(KEY), **settings) as (stub, gateway):
        answer = await gateway.chat(headers=as_key(token(**WRONG[name])))
        assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
        assert not stub.seen


async def test_tokens_made_to_confuse_the_verifier_open_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, public_pem(KEY)) as (stub, gateway):
        good = token()
        head, claims, signature = good.split(".")
        hmac_head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=").decode()
        by_public_key = base64.urlsafe_b64encode(hmac.digest(
            public_pem(KEY), f"{hmac_head}.{claims}".encode(), hashlib.sha256)).rstrip(b"=").decode()
        for wrong in (unsigned(), f"{head}.{claims}.", f"{head}.{claims}.{signature[:-4]}AAAA", good[:-1], "a.b.c",
                      "..", f"{hmac_head}.{claims}.{by_public_key}", good + ".x", token(kid="x")[:-2]):
            answer = await gateway.chat(headers=as_key(wrong))
            assert answer.status == 401, wrong
        assert not stub.seen


async def test_keys_are_found_by_their_name_and_replaced_when_the_file_changes(tmp_path: Path) -> None:
    async with serving(tmp_path, jwks(one=KEY, two=OTHER)) as (_, gateway):

        async def status(key: Any, kid: str | None) -> int:
            return (await gateway.send("GET", "/v1/models", headers=as_key(token(key, kid=kid)))).status

        found = [await status(key, kid) for key, kid in ((KEY, "one"), (OTHER, "two"), (OTHER, "one"), (KEY, "three"),
                                                         (KEY, None))]
        assert found == [200, 200, 401, 401, 401]
        (tmp_path / "provider").write_text("{")
        gateway.gateway.state.access.reload()
        assert await status(KEY, "one") == 200, "a wrong file changes nothing"
        (tmp_path / "provider").write_text(jwks(three=OTHER))

        async def is_replaced() -> bool:
            return await status(OTHER, "three") == 200

        await gateway.until(is_replaced, "the new key counts")
        assert await status(KEY, "one") == 401


async def test_the_tenant_may_lie_deeper_in_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, public_pem(KEY), jwt_tenant_claim="account.id") as (_, gateway):
        assert (await gateway.chat(headers=as_key(token(account={"id": "a"})))).status == 200
        assert (await gateway.chat(headers=as_key(token(account="a")))).status == 401


@pytest.mark.parametrize(("settings", "keys"), [
    ({"jwt_audience": None}, public_pem(KEY)), ({"jwt_issuer": None}, public_pem(KEY)), ({}, b"nonsense"), ({}, b"{"),
    ({}, b'{"keys":[]}'), ({}, b'{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}'), ({}, private_pem(KEY)), ({}, None),
    ({"keys_file": None}, public_pem(KEY)),
], ids=range(9))
def test_a_set_up_that_cannot_work_ends_the_start(settings: dict[str, Any], keys: bytes | None,
                                                  tmp_path: Path) -> None:
    file = tmp_path / "provider"
    if keys is not None:
        file.write_bytes(keys)
    whole = {"jwt_keys_file": file, "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "worker_token": "w",
             "keys_file": keys_file(tmp_path, {"id": "b", "key": STATIC}), **settings}
    with pytest.raises(StartError) as wrong:
        Gateway(GatewayConfig(**whole))
    assert wrong.value.exit_code == 2


def test_no_algorithm_of_a_shared_secret_is_accepted(tmp_path: Path) -> None:
    from gateway.config import _algorithms_problem

    assert _algorithms_problem(("RS256", "HS256"))
    assert _algorithms_problem(("none",))
    assert _algorithms_problem(())
    assert _algorithms_problem(("ES256",)) is None
    with pytest.raises(KeysError):
        JwtVerifier(tmp_path / "missing", GatewayConfig(jwt_issuer="i", jwt_audience="a"))
