"""Layers, coercion, problems all at once, and the printed outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from worker.protocol.settings import SettingsError, load_settings, render_settings, setting


@dataclass(frozen=True, slots=True)
class Upstream:
    url: str
    api_key: str | None = None
    weight: int = setting(1, bounds=(1, None))


@dataclass(frozen=True, slots=True)
class Config:
    host: str = "h"
    port: int = setting(1, bounds=(0, 65535), help="where to listen")
    mode: str = setting("fast", choices=("fast", "strict"))
    memory: str = "1GiB"
    timeout_s: float = 2.0
    verbose: bool = False
    path: Path | None = None
    limit: int | None = None
    names: tuple[str, ...] = ()
    upstreams: tuple[Upstream, ...] = ()
    keepalive_s: float = setting(15.0, table="stream")
    worker_token: str = setting("", env="APP_WORKER_TOKEN")
    admin_token: str = setting("", env="OTHER_TOKEN")


def load(tmp_path: Path, *, flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None,
         toml: str | None = None) -> Config:
    path = None
    if toml is not None:
        path = tmp_path / "app.toml"
        path.write_text(toml)
    return load_settings(Config, flags=flags or {}, environ=environ or {}, env_prefix="APP_", toml_path=path)


def test_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == Config()


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    toml = 'host = "file"\nport = 1\nmemory = "file"'
    environ = {"APP_PORT": "2", "APP_HOST": "env"}
    config = load(tmp_path, toml=toml, environ=environ, flags={"port": "3", "host": None})
    assert (config.memory, config.host, config.port) == ("file", "env", 3)


def test_every_type_from_text(tmp_path: Path) -> None:
    config = load(tmp_path, environ={
        "APP_PORT": "80", "APP_TIMEOUT_S": "0.5", "APP_VERBOSE": "Yes", "APP_PATH": "/a/b", "APP_LIMIT": "7",
        "APP_NAMES": "a, b,", "APP_UPSTREAMS": "http://a,http://b", "APP_KEEPALIVE_S": "3", "APP_WORKER_TOKEN": "t",
        "OTHER_TOKEN": "o", "APP_MODE": ""})
    assert config == Config(port=80, timeout_s=0.5, verbose=True, path=Path("/a/b"), limit=7, names=("a", "b"),
                            upstreams=(Upstream("http://a"), Upstream("http://b")), keepalive_s=3.0,
                            worker_token="t", admin_token="o")


def test_tables_and_natural_toml_values(tmp_path: Path) -> None:
    config = load(tmp_path, toml='memory = 0.9\ntimeout_s = 3\nnames = ["x"]\n[stream]\nkeepalive_s = 1\n'
                                 '[[upstreams]]\nurl = "u"\napi_key = "k"\n[[upstreams]]\nurl = "v"\nweight = 2')
    assert (config.memory, config.timeout_s, config.names, config.keepalive_s) == ("0.9", 3.0, ("x",), 1.0)
    assert config.upstreams == (Upstream("u", "k"), Upstream("v", None, 2))


def test_every_problem_at_once(tmp_path: Path) -> None:
    toml = ('prot = 1\nkeepalive_s = 2\nmode = "fats"\nverbose = 3\nlimit = 1.5\n[stream]\nnope = 1\n'
            '[[upstreams]]\napi_key = "k"\nwieght = 2\n[[upstreams]]\nurl = "v"\nweight = 0\n')
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, toml=toml, environ={"APP_TIMEOUTS": "1", "APP_TIMEOUT_S": "soon"}, flags={"port": "99999"})
    text = str(caught.value)
    for wanted in ("unknown key 'prot'; did you mean 'port'?", "unknown key 'keepalive_s'; did you mean "
                   "'stream.keepalive_s'?", "'fats' is not one of fast, strict; did you mean 'fast'?",
                   "should be true or false, got 3", "should be a whole number, got 1.5", "unknown key 'stream.nope'",
                   "entry 1: unknown key 'wieght'; did you mean 'weight'?; url is missing",
                   "entry 2: weight: should be at least 1, got 0",
                   "APP_TIMEOUTS: unknown setting; did you mean 'APP_TIMEOUT_S'?",
                   "APP_TIMEOUT_S: should be a number, got 'soon'", "--port: should be at most 65535, got 99999"):
        assert wanted in text
    assert len(caught.value.lines) == 10


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_such_numbers(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="finite"):
        load(tmp_path, environ={"APP_TIMEOUT_S": value})


@pytest.mark.parametrize(("toml", "wanted"), [
    ("a = ", "cannot be read as TOML"), ("names = 3", "should be a list"), ("host = true", "should be text"),
    ("upstreams = [3]", "should be a table or text"), ('path = ""', "should be a path"),
    ("port = true", "whole number"), ("host = [1]", "should be text")])
def test_bad_files(tmp_path: Path, toml: str, wanted: str) -> None:
    with pytest.raises(SettingsError, match=wanted):
        load(tmp_path, toml=toml)


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file; name an existing one with --config"):
        load_settings(Config, flags={}, environ={}, env_prefix="APP_", toml_path=tmp_path / "none.toml")


def test_variables_that_kubernetes_injects_are_not_ours(tmp_path: Path) -> None:
    injected = {"APP_SERVICE_HOST": "10.0.0.1", "APP_SERVICE_PORT": "8100", "APP_SERVICE_PORT_HTTP": "8100",
                "APP_PORT": "tcp://10.0.0.1:8100", "APP_PORT_8100_TCP": "tcp://10.0.0.1:8100",
                "APP_PORT_8100_TCP_PROTO": "tcp", "APP_CONFIG": "x", "APPLE": "x"}
    assert load(tmp_path, environ=injected) == Config()


def test_the_printed_outcome_masks_secrets_and_loads_again(tmp_path: Path) -> None:
    config = Config(host='a"b\\c\n\x7fü', path=Path("/p"), names=("x", "y"), verbose=True, worker_token="hush",
                    upstreams=(Upstream("u", "hush"), Upstream("v")), keepalive_s=1.5)
    text = render_settings(config)
    assert "hush" not in text
    assert text.count('"***"') == 2
    again = load(tmp_path, toml=text)
    assert again == Config(host='a"b\\c\n\x7fü', path=Path("/p"), names=("x", "y"), verbose=True, worker_token="***",
                           upstreams=(Upstream("u", "***"), Upstream("v")), keepalive_s=1.5)
