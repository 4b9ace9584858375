"""The console script and what the commands do with flags: tables, one-line mistakes, exit codes, the plan of `up`."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.config import WorkerSpec
from gateway.up_plan import UpPlan, child_specs, free_ports, port_problem, read_plan, worker_urls
from loadtests import demo
from worker.cli import main as worker_main


def headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_in_the_table_exists_and_shows_an_example(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    assert importlib.util.find_spec(module) is not None
    done = headstart(name, "--help")
    assert done.returncode == 0
    assert f"headstart {name}" in done.stdout
    assert "example" in done.stdout
    assert function == "main"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown and command.example in shown for name, command in cli.COMMANDS.items())
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "headstart 0.1.0\n"
    assert cli.main([]) == 2


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wrker"]) == 2
    assert capsys.readouterr().err == "headstart: no command 'wrker'; did you mean 'worker'?\n"
    assert cli.main(["zzz"]) == 2
    assert "there are up, gateway, worker" in capsys.readouterr().err


def test_a_gateway_install_says_what_a_worker_needs(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["up"]) == 2
    assert "pip install '.[worker]'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["--modle", "x"], "unrecognized arguments: --modle x; did you mean --model?"),
    (["--zzz"], "unrecognized arguments: --zzz; see headstart worker --help"),
    (["--model"], "expected one argument"),
    (["--port", "x"], "--port: should be a whole number, got 'x'"),
    (["--worker-token", "x"], "unrecognized arguments"),
    (["--config", "/none.toml"], "/none.toml: no such file"),
    (["--kv-memory", "banana"], "--kv-memory: 'banana' is neither an amount like 2GiB nor a share like 0.9"),
    (["--kv-memory", "1.5", "--print-config"], "--kv-memory: '1.5': a share of free memory lies above 0"),
    (["--kv-memory", "0"], "--kv-memory: is 0: give the cache some room"),
    (["--kv-memory", "9" * 400], "--kv-memory: is more than any machine has"),
    (["--threads", "0"], "--threads: should be auto or a number from 1 to 1024"),
    (["--threads", "1025"], "--threads: should be auto or a number from 1 to 1024, got '1025'"),
    (["--threads", "9" * 5000], "--threads: should be auto or a number from 1 to 1024")])
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], wanted: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        worker_main(arguments)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("headstart worker: ")
    assert wanted in line
    assert line.count("\n") == 1


def test_print_config_masks_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                    tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('served_name = "from-file"\nport = 1')
    monkeypatch.setenv("HEADSTART_WORKER_TOKEN", "hush")
    monkeypatch.setenv("HEADSTART_WORKER_CONFIG", str(file))
    with pytest.raises(SystemExit) as caught:
        worker_main(["--print-config", "--port", "2"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown
    assert 'worker_token = "***"' in shown
    assert 'served_name = "from-file"' in shown
    assert "port = 2\n" in shown


def plan(*arguments: str, **environ: str) -> UpPlan:
    return read_plan(arguments, {"PATH": os.environ["PATH"], **environ})


def test_up_passes_flags_to_whom_they_concern() -> None:
    given = plan("--workers", "3", "--model", "m", "--port", "9000", "--policy", "random", "--log-level", "debug",
                 "--threads", "2", "--host", "127.0.0.2")
    assert given.num_workers == 3
    assert set(given.gateway_flags) == {"--port=9000", "--policy=random", "--log-level=debug", "--host=127.0.0.2"}
    assert given.worker_flags == ("--log-level=debug", "--model", "m", "--threads", "2")
    assert given.model == "m"
    assert given.url == "http://127.0.0.2:9000"


def test_up_shares_the_cores_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.up_plan.num_cores", lambda: 8)
    assert plan("--workers", "3").worker["threads"] == "2"
    assert "--threads=2" in plan("--workers", "3").worker_flags
    assert plan("--workers", "9").worker["threads"] == "1"
    assert plan("--workers", "3", "--threads", "5").worker["threads"] == "5"
    assert plan("--workers", "3", HEADSTART_WORKER_THREADS="7").worker["threads"] == "7"


def test_up_tells_every_mistake_of_both_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan("--workers", "0", "--port", "x", "--exactness", "exact", "--drain-s", "-1", HEADSTART_GATEWAY_POLCY="x")
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5  # --drain-s, which both take, once
    assert all(line.startswith("headstart up: ") for line in lines)


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["--modle", "x"], "unrecognized arguments: --modle x; did you mean --model?"),
    (["--zzz"], "unrecognized arguments: --zzz; see headstart up --help, and headstart worker --help"),
    (["--admin-token-file=x"], "set HEADSTART_ADMIN_TOKEN to choose the token"),
    (["--events-port=3"], "--events-port=3: `up` chooses it for each worker; leave it out"),
    (["--config", "x.toml"], "--config: `up` chooses it"),
    (["--worker-config", "/none.toml"], "/none.toml: no such file"),
    (["--gateway-config", "/none.toml"], "/none.toml: no such file")])
def test_up_asks_the_worker_about_its_flags(arguments: list[str], wanted: str,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments)
    assert caught.value.code == 2
    assert wanted in capsys.readouterr().err


def test_children_share_secrets_through_their_environment_alone() -> None:
    gateway, *workers = specs = child_specs(plan("--workers", "2"), "admin", {"PATH": "/bin"})
    assert [spec.name for spec in specs] == ["gateway", "worker-1", "worker-2"]
    tokens = {spec.environ["HEADSTART_WORKER_TOKEN"] for spec in specs}
    assert len(tokens) == 1
    seeds = {spec.environ["HEADSTART_HASH_SEED"] for spec in workers}
    assert len(seeds) == 1
    assert len(bytes.fromhex(seeds.pop())) == 32
    assert gateway.environ["HEADSTART_ADMIN_TOKEN"] == "admin"
    assert all("HEADSTART_ADMIN_TOKEN" not in spec.environ for spec in workers)
    keys = {"HEADSTART_API_KEYS": "a=hs-a-key-of-tenant-a", "HEADSTART_SALT_SECRET": "s"}
    gateway, worker = child_specs(plan("--workers", "1"), "admin", keys)
    assert keys.items() <= gateway.environ.items()
    assert not keys.keys() & worker.environ.keys(), "clients' keys are no worker's business"
    assert not any(secret in part for spec in specs for part in spec.argv for secret in (*tokens, "admin-token"))
    assert len(set(worker_urls(specs))) == 2
    again = child_specs(plan("--workers", "1"), "admin", {})
    assert again[0].environ["HEADSTART_WORKER_TOKEN"] not in tokens


def test_given_secrets_are_kept() -> None:
    environ = {"HEADSTART_WORKER_TOKEN": "t", "HEADSTART_HASH_SEED": "aa", "HEADSTART_ADMIN_TOKEN": "x"}
    environ["PATH"] = os.environ["PATH"]
    given = read_plan([], environ)
    assert given.gateway.admin_token == "x"
    for spec in child_specs(given, "x", environ):
        assert spec.environ["HEADSTART_WORKER_TOKEN"] == "t"
        assert spec.environ["HEADSTART_HASH_SEED"] == "aa"


def test_files_reach_the_children_and_a_seed_in_one_is_kept(tmp_path: Path) -> None:
    of_gateway, of_worker = tmp_path / "gateway.toml", tmp_path / "worker.toml"
    of_gateway.write_text('port = 9123\nworker_token = "from-file"')
    of_worker.write_text('hash_seed = "abcd"\nmodel = "m"')
    given = plan("--gateway-config", str(of_gateway), "--worker-config", str(of_worker))
    assert (given.url, given.model) == ("http://127.0.0.1:9123", "m")
    gateway, *workers = child_specs(given, "a", {})
    assert f"--config={of_gateway}" in gateway.argv
    assert all(f"--config={of_worker}" in spec.argv for spec in workers)
    assert all("HEADSTART_HASH_SEED" not in spec.environ for spec in workers)
    assert {spec.environ["HEADSTART_WORKER_TOKEN"] for spec in (gateway, *workers)} == {"from-file"}


def test_the_gateways_workers_are_urls_it_accepts() -> None:
    specs = child_specs(plan("--workers", "2"), "a", {})
    assert all(WorkerSpec(url).url.startswith("http://127.0.0.1:") for url in worker_urls(specs))


def test_addresses_for_clients() -> None:
    assert plan("--host", "0.0.0.0").url == "http://127.0.0.1:8000"
    assert plan("--host", "::1").url == "http://[::1]:8000"
    assert plan("--ops-port", "9").ops_url == "http://127.0.0.1:9"


def test_ports() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert port_problem("127.0.0.1", ports[0]) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert port_problem("127.0.0.1", number) == (f"cannot listen on 127.0.0.1:{number}: Address already in use; "
                                                     "stop what uses it, or choose another --port or --host")
    assert "not 0" in str(port_problem("127.0.0.1", 0))
    assert "cannot listen" in str(port_problem("no.such.host.invalid", 1))


def test_children_do_not_mistake_a_folder_of_the_user_for_ours(monkeypatch: pytest.MonkeyPatch,
                                                              tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert all("-P" in spec.argv for spec in child_specs(plan(), "a", {}))


def test_a_demo_too_short_to_find_anything_again_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--requests", str(demo.REQUESTS_MIN - 1)])
    assert "--requests should be at least 8" in capsys.readouterr().err
