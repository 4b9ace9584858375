"""Clients over TLS: the whole API, a certificate that changes under open connections, and files that are no good."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.config import GatewayConfig
from gateway.server.app import Gateway, StartError
from loadtests.local_stack import free_port
from tests.support.certificates import private_pem, write_certificate
from tests.support.gateway_in_process import WORKER_TOKEN, running_gateway
from tests.support.stub_worker import StubWorker, running

BODY = orjson.dumps({"model": "stub", "prompt": "hello", "stream": True})
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


def trusting(cert_file: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert_file)


def name_shown(port: int, context: ssl.SSLContext) -> str:
    """The common name in the certificate that the gateway shows."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain, \
            context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
        assert client.version() in ("TLSv1.2", "TLSv1.3")
        assert client.getpeercert() is not None
        return str(dict(pair[0] for pair in client.getpeercert()["subject"])["commonName"])  # type: ignore[index]


async def test_a_stream_comes_over_tls_and_plain_http_does_not_pass(tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, tls_cert=cert_file, tls_key=key_file, ops_port=0) as gateway:
        port = gateway.gateway.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(cert_file))
        for _ in range(200):
            writer.write(REQUEST)
            status = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            if status == b"200":
                break
            await reader.readuntil(b"}}")  # no worker yet
            await asyncio.sleep(0.05)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"200" not in await asyncio.wait_for(reader.read(100), 20)
        writer.close()


def test_the_certificate_is_read_again_on_sighup_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", f"--port={port}", f"--tls-cert={cert_file}", f"--tls-key={key_file}",
         f"--admin-token-file={tmp_path / 'admin'}", "--drain-delay-s=0", "--worker=http://127.0.0.1:1"],
        env=os.environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None

    def until(event: str) -> None:
        line = ""
        while event not in line:
            line = process.stderr.readline()  # type: ignore[union-attr]
            assert line

    try:
        until("gateway_started")
        first = trusting(cert_file)
        assert name_shown(port, first) == "one"
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/livez", context=first, timeout=20) as answer:
            assert answer.status == 200
        key_file.write_bytes(b"nonsense")
        process.send_signal(signal.SIGHUP)
        until("certificate_not_reloaded")
        assert name_shown(port, first) == "one"
        write_certificate(tmp_path, "two")
        process.send_signal(signal.SIGHUP)
        until("certificate_read")
        assert name_shown(port, trusting(cert_file)) == "two"
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("how", ["half", "missing", "not a key", "another's key", "encrypted"])
async def test_files_that_are_no_good_end_the_start_with_one_line(how: str, tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    settings: dict[str, Path] = {"tls_cert": cert_file, "tls_key": key_file}
    if how == "half":
        del settings["tls_key"]
    elif how == "missing":
        key_file.unlink()
    elif how == "not a key":
        key_file.write_bytes(b"nonsense")
    else:
        key_file.write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()),
                                         b"passphrase" if how == "encrypted" else None))
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with pytest.raises(StartError) as wrong:
        Gateway(GatewayConfig(**settings))  # type: ignore[arg-type]
    assert wrong.value.exit_code == 2
    assert "tls_" in str(wrong.value)
    assert "\n" not in str(wrong.value)
    del wrong
    gc.collect()
    assert complaints == [], "what was opened before is left open"
