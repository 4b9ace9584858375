"""Keys and tenants through a gateway's own sockets: who gets in, to what, and what nobody may read in the log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.tenants import hash_key
from gateway.config import GatewayConfig
from gateway.server.app import Gateway, StartError
from loadtests.local_stack import free_port
from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, Answer, GatewayUnderTest, running_gateway
from tests.support.stub_worker import StubWorker, running

KEY_A, KEY_B, KEY_C = (f"hs-a-key-for-tenant-{name}-31415926" for name in "abc")


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys_file(folder: Path, *tenants: dict[str, Any], more: str = "") -> Path:
    """A keys file with these tenants; `key` is given in clear and stored as its hash."""
    lines = []
    for tenant in tenants:
        fields = {**tenant, "keys": [hash_key(tenant["key"])]}
        del fields["key"]
        lines += ["[[tenants]]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    path = folder / "keys.toml"
    path.with_suffix(".new").write_text("\n".join(lines) + "\n" + more)
    path.with_suffix(".new").replace(path)
    return path


A = {"id": "a", "key": KEY_A}
B = {"id": "b", "key": KEY_B, "models": ["other"]}


@pytest.mark.parametrize("headers", [
    {}, as_key("wrong-key-wrong-key"), as_key(""), {"Authorization": KEY_A}, {"Authorization": f"Basic {KEY_A}"},
    {"x-api-key": KEY_A + "x"}, {**as_key(KEY_A), "x-api-key": KEY_B}, as_key(hash_key(KEY_A)), ADMIN,
], ids=range(9))
async def test_without_the_right_key_nothing_is_answered(headers: dict[str, str], tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, keys_file=keys_file(tmp_path, A, B)) as gateway:
        await gateway.until_exact()
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
                             ("GET", "/v1/models/stub"), ("POST", "/tokenize"), ("POST", "/detokenize")):
            answer = await gateway.send(method, path, headers=headers, body=b"{")
            assert (answer.status, answer.error["code"]) == (401, "unauthenticated"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert not stub.seen
        assert (await gateway.send("GET", "/readyz")).status == 200, "probes need no key"
        assert (await gateway.chat(headers=as_key(KEY_A))).status == 200


async def test_two_authorization_headers_are_none(tmp_path: Path) -> None:
    async with running_gateway("http://127.0.0.1:1", keys_file=keys_file(tmp_path, A, B)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        keys = [f"Authorization: Bearer {key}" for key in (KEY_A, KEY_B)]
        writer.write("\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *keys, "", ""]).encode())
        assert b" 401 " in await reader.readline()
        writer.close()


async def test_a_tenant_sees_and_uses_its_models_only(tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, keys_file=keys_file(tmp_path, A, B)) as gateway:
        await gateway.until_exact()
        listed = [json.loads((await gateway.send("GET", "/v1/models", headers=as_key(key))).body)["data"]
                  for key in (KEY_A, KEY_B)]
        assert [len(models) for models in listed] == [1, 0]
        assert (await gateway.send("GET", "/v1/models/stub", headers={"x-api-key": KEY_A})).status == 200
        for answer in (await gateway.chat(headers=as_key(KEY_B)),
                       await gateway.send("GET", "/v1/models/stub", headers=as_key(KEY_B)),
                       await gateway.send("POST", "/tokenize", headers=as_key(KEY_B),
                                          payload={"model": "stub", "prompt": "x"}),
                       await gateway.send("POST", "/v1/chat/completions", headers=as_key(KEY_B), body=(
                           b'{"m\\u006fdel":"st\\u0075b","messages":[{"role":"user","content":"x"}]}'))):
            assert (answer.status, answer.error["code"], answer.error["param"]) == (403, "forbidden", "model")
        for path, payload in (("/v1/completions", {"model": "other", "prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            allowed = await gateway.send("POST", path, headers=as_key(KEY_B), payload=payload)
            assert (allowed.status, allowed.error["param"]) == (404, "model")
            assert "stub" not in allowed.error["message"], "what others may use is not told"
        assert not stub.seen


async def test_the_worker_gets_the_tenant_and_its_salt_and_never_the_key(tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, keys_file=keys_file(tmp_path, A, B)) as gateway:
        await gateway.until_exact()
        await gateway.chat(headers={**as_key(KEY_A), "x-headstart-salt": "00", "x-headstart-tenant": "b"})
        await gateway.chat(headers={"x-api-key": KEY_A}, cache_salt="narrower")
        first, second = stub.seen
        assert first.headers["x-headstart-tenant"] == "a"
        assert len({seen.headers["x-headstart-salt"] for seen in stub.seen} | {"00"}) == 3
        for seen in (first, second):
            assert KEY_A not in repr((seen.headers, seen.body))
            assert "authorization" not in seen.headers


async def test_a_worker_that_reads_the_body_finds_the_salt_in_it(tmp_path: Path) -> None:
    stub = StubWorker()
    async with running(stub), running_gateway(stub.url, worker_token="", salt_secret="deployment",
                                              keys_file=keys_file(tmp_path, A, {**B, "models": ["stub"]})) as gateway:
        await gateway.until(lambda: _ready(gateway), "ready")
        for key, salt in ((KEY_A, "s"), (KEY_B, "s"), (KEY_A, None)):
            await gateway.chat(headers=as_key(key), **({} if salt is None else {"cache_salt": salt}))
        bodies = [json.loads(seen.body) for seen in stub.seen]
        assert len({body["cache_salt"] for body in bodies} | {"s"}) == 4
        assert [seen.internal for seen in stub.seen] == [False] * 3


async def _ready(gateway: GatewayUnderTest) -> bool:
    return (await gateway.send("GET", "/readyz")).status == 200


async def test_the_admin_explains_for_a_tenant_by_name(tmp_path: Path) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    keys = keys_file(tmp_path, A, {**B, "models": ["stub"]})
    async with running(stub), running_gateway(stub.url, keys_file=keys) as gateway:
        await gateway.until_exact()
        await gateway.chat(headers=as_key(KEY_A))

        async def matched(tenant: str) -> int:
            answer = await gateway.send("POST", f"/admin/explain?tenant={tenant}", headers=ADMIN, payload={
                "model": "stub", "messages": [{"role": "user", "content": "Say hello to everybody in this room."}]})
            return int(json.loads(answer.body)["decision"]["matched_tokens"])

        await gateway.until(lambda: matched("a"), "the tenant's own prompt is known")
        assert await matched("b") == 0
        for path in ("/admin/explain", "/admin/explain?tenant=nobody"):
            refused = await gateway.send("POST", path, headers=ADMIN, body=b'{"model":"stub","prompt":"x"}')
            assert (refused.status, refused.error["code"]) == (404, "tenant_not_found")


async def test_keys_are_read_again_when_the_file_changes_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path, A)
    async with running_gateway("http://127.0.0.1:1", keys_file=path, keys_reload_s=0.02) as gateway:

        async def opens(key: str) -> bool:
            return (await gateway.send("GET", "/v1/models", headers=as_key(key))).status == 200

        assert [await opens(KEY_A), await opens(KEY_B)] == [True, False]
        keys_file(tmp_path, B)
        await gateway.until(lambda: opens(KEY_B), "the new key is known")
        assert not await opens(KEY_A)
        path.write_text("[[tenants]\n")
        gateway.gateway.state.access.reload()
        assert await opens(KEY_B)
        path.unlink()
        gateway.gateway.state.access.reload()
        assert await opens(KEY_B)
        keys_file(tmp_path, A)
        await gateway.until(lambda: opens(KEY_A), "mended")
        assert not await opens(KEY_B)


@pytest.mark.parametrize("settings", [
    {"keys_file": "missing"}, {"keys_file": "empty"}, {"keys_file": "good", "worker_token": ""},
    {"api_keys": ("a=" + KEY_A,), "worker_token": ""}], ids=range(4))
async def test_keys_that_cannot_be_used_end_the_start(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    keys_file(tmp_path, A).rename(tmp_path / "good")
    if "keys_file" in settings:
        settings = {**settings, "keys_file": tmp_path / settings["keys_file"]}
    with pytest.raises(StartError) as wrong:
        Gateway(GatewayConfig(**{"worker_token": "w", **settings}))
    assert wrong.value.exit_code == 2
    assert KEY_A not in str(wrong.value)


def test_no_key_and_no_hash_is_ever_logged(tmp_path: Path) -> None:
    """A real process at debug level: good and bad keys, a reload by SIGHUP, a wrong file, a failing body."""
    path, port = keys_file(tmp_path, A, B), free_port()
    environ = {**os.environ, "HEADSTART_API_KEYS": f"c={KEY_C}", "HEADSTART_SALT_SECRET": "a-secret-of-27182818"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", f"--port={port}", f"--keys-file={path}", "--log-level=debug",
         f"--admin-token-file={tmp_path / 'admin'}", "--drain-delay-s=0", "--keys-reload-s=60",
         "--worker=http://127.0.0.1:1"], env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []

    def until(event: str) -> None:
        while event not in (lines[-1] if lines else ""):
            lines.append(process.stderr.readline())  # type: ignore[union-attr]
            assert lines[-1], lines

    def ask(key: str, path: str = "/v1/models") -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=as_key(key),
                                         data=b'{"cache_salt":1' if "chat" in path else None)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        until("gateway_started")
        assert [ask(KEY_A), ask(KEY_C), ask("a-bad-key-1618033988"), ask(KEY_A, "/v1/chat/completions")] == \
            [200, 200, 401, 400]
        path.write_text(path.read_text() + f'\nkey = "{KEY_B}"\n')
        process.send_signal(signal.SIGHUP)
        until("keys_not_reloaded")
        keys_file(tmp_path, B)
        process.send_signal(signal.SIGHUP)
        until("keys_read")
        assert [ask(KEY_A), ask(KEY_B), ask(KEY_C)] == [401, 200, 200]
    finally:
        process.terminate()
        rest = process.communicate(timeout=30)[1]
    log = "".join(lines) + rest
    assert '"tenant":"a"' in log
    for secret in (KEY_A, KEY_B, KEY_C, "a-bad-key-1618033988", "a-secret-of-27182818",
                   *(hash_key(key)[7:] for key in (KEY_A, KEY_B, KEY_C))):
        assert secret not in log


async def test_without_keys_everybody_is_one_tenant() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        answers: list[Answer] = [await gateway.chat(headers=headers) for headers in ({}, as_key("whatever"))]
        assert [answer.status for answer in answers] == [200, 200]
        assert stub.seen[1].cached_tokens > 0
        assert "x-headstart-salt" not in stub.seen[0].headers
        assert "x-headstart-tenant" not in stub.seen[0].headers
