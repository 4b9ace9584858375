"""`headstart check` as an operator runs it: all well, another template on one worker, and a cache that is off."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtests.local_stack import Child, free_port, running_stack, running_worker, start

OTHER_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def check(url: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        # A machine with much else to do may let a prompt wait for longer than the 60 s of the default.
        [sys.executable, "-m", "gateway.cli", "check", url, "--timeout", "240", *arguments],
        capture_output=True, text=True, timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def test_every_worker_is_listed_and_predicted_equals_reported(stack: Child) -> None:
    code, out, err = check(stack.url, "--admin-token", str(stack.admin_token), "--json")
    assert code == 0, out + err
    report = json.loads(out)
    assert report["ok"]
    assert len(report["workers"]) == 2
    for worker in report["workers"]:
        assert worker["engine"] == "headstart"
        assert worker["knowledge"] == "exact"
        assert worker["predicted_tokens"] == worker["reported_tokens"] > 0


def test_a_wrong_admin_token_is_one_line(stack: Child) -> None:
    code, out, err = check(stack.url, "--admin-token", "wrong")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "admin token" in err


def test_nothing_there_is_one_line() -> None:
    code, out, err = check(f"http://127.0.0.1:{free_port()}")
    assert (code, out) == (1, "")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "URL"), (("localhost",), "http://host:port"), (("http://h", "--jsom"), "--json"),
    (("http://127.0.0.1:1", "--model", "m", "--admin-token-file", "missing"), "--admin-token-file"),
])
def test_a_usage_mistake_is_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "gateway.cli", "check", *arguments], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr


def test_a_gateway_without_a_ready_worker_fails_the_check() -> None:
    port = free_port()
    gateway = start(["gateway", "--port", str(port)], url=f"http://127.0.0.1:{port}")
    try:
        for _ in range(100):
            code, _out, err = check(gateway.url)
            if "lists no model" in err:
                break
            time.sleep(0.1)
    finally:
        gateway.stop()
    assert code == 1
    assert "lists no model" in err


def test_another_template_on_one_worker_is_named(tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(OTHER_TEMPLATE)
    tokens = {"HEADSTART_WORKER_TOKEN": "check-test", "HEADSTART_ADMIN_TOKEN": "check-admin"}
    small = ["--kv-memory", "256MiB"]
    with (
        running_worker(model="smollm2", arguments=small, env=tokens, wait=False) as right,
        running_worker(
            model="smollm2", arguments=[*small, "--chat-template", str(template)], env=tokens, wait=False
        ) as wrong,
    ):
        right.wait_ready()
        wrong.wait_ready()
        port = free_port()
        gateway = start(
            ["gateway", "--port", str(port), "--worker", right.url, "--worker", wrong.url],
            url=f"http://127.0.0.1:{port}",
            env=tokens,
        )
        try:
            gateway.wait_ready()
            gateway.admin_token = tokens["HEADSTART_ADMIN_TOKEN"]
            gateway.wait_workers_known()
            code, out, err = check(gateway.url, "--admin-token", gateway.admin_token)
        finally:
            gateway.stop()
    assert code == 1, (out, err)
    assert "first differing token at position" in out


@pytest.mark.slow
def test_a_cache_that_is_off_is_said_so() -> None:
    with running_stack(
        workers=1, model="smollm2", arguments=["--kv-cache", "decode", "--kv-memory", "256MiB"]
    ) as stack:
        code, out, _ = check(stack.url)
    assert code == 1
    assert "prefix cache is off or not reported" in out
