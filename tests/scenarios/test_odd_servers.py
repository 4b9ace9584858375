"""Servers that answer otherwise than OpenAI's API says: `headstart check` and `headstart replay` say so and go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway import check
from loadtests.live import command as replay
from tests.support.canned_server import DONE, STREAM, TOKEN, canned
from tests.support.simulated import TRACES

KEY = "sk-very-secret"
MOONCAKE = str(TRACES / "mooncake_small.jsonl")
SENT = (MOONCAKE, "--api-key", KEY, "--rate", "1e6", "--requests", "3", "--block-size", "16")


def usage(text: str) -> bytes:
    return STREAM + TOKEN + b'data: {"choices":[],"usage":%b}\n\n' % text.encode() + DONE


@dataclass(frozen=True)
class Case:
    """What the server says, the kind under which a replay counts it, and a part of what the check says."""

    name: str
    says: bytes
    kind: str
    check_says: str


CASES = [
    Case("no HTTP", b"\xff\xfe nonsense\r\n\r\n", "broke off", "broke off"),
    Case("a number", STREAM + b"data: 5\n\n" + DONE, "bad chunk", "is not a chat completion's: 5"),
    Case("no JSON", STREAM + b"data: {]\n\n" + DONE, "bad chunk", "is not a chat completion's: {]"),
    Case("choices of text", STREAM + b'data: {"choices":["a"]}\n\n' + DONE, "bad chunk",
         "is not a chat completion's"),
    Case("usage of a number", STREAM + b'data: {"usage":5}\n\n' + DONE, "bad chunk", "is not a chat completion's"),
    Case("a line without end", STREAM + b"data: " + b"x" * (1 << 20), "bad chunk", "broke off"),
    Case("an error as text", STREAM + b'data: {"error":"no room"}\n\n', "error in the stream", "no room"),
    Case("more cached than asked", usage('{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":99999}}'),
         "impossible usage", "99999 cached of 10 prompt tokens"),
    Case("fewer than none", usage('{"prompt_tokens":-1}'), "impossible usage", "0 cached of -1 prompt tokens")]


async def run(tool: Any, *arguments: str) -> int:
    """In a thread: the command has an event loop of its own."""
    status = await asyncio.to_thread(tool.main, arguments)
    assert isinstance(status, int)
    return status


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_what_breaks_the_protocol_is_counted_and_told_and_no_secret_with_it(
        case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    async with canned(case.says) as url:
        assert await run(replay, *SENT, "--url", url, "--json") == 1
        report = json.loads(capsys.readouterr().out)
        assert await run(check, url, "--api-key", KEY) == 1
    said = capsys.readouterr()
    assert report["errors"] == {case.kind: 3}
    [result] = report["policies"]
    assert {result[key] for key in result if key.startswith(("ttft_", "inter_token_", "request_"))} == {None}
    assert result["hit_token_ratio"] is None
    assert case.check_says in said.out + said.err
    assert KEY not in said.out + said.err + str(report)


async def test_no_key_gets_into_a_report(tmp_path: Path) -> None:
    async with canned(CASES[0].says) as url:
        assert await run(replay, *SENT, "--url", url, "--report", str(tmp_path)) == 1
    written = [(tmp_path / name).read_text() for name in ("table.md", "report.json", "requests.jsonl")]
    assert "ms: TTFT p50 -, p90 -, p99 -, mean -; between tokens p50 -" in written[0]
    assert "broke off" in written[0]
    assert KEY not in "".join(written)


async def test_a_server_that_never_answers_is_waited_for_so_long(capsys: pytest.CaptureFixture[str]) -> None:
    async with canned(None) as url:
        assert await run(check, url, "--timeout", "0.2") == 1
    said = capsys.readouterr().err
    assert "silent for 0.2 s (--timeout)" in said
    assert said.count("\n") == 1


def refused(tool: Any, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What it says to arguments that it does not take: one line."""
    with pytest.raises(SystemExit) as stopped:
        tool.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("address", ["http://user:pw-secret@host", "https://pw-secret@host:1/v1"])
def test_an_address_with_a_password_is_refused_and_not_repeated(address: str,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    for tool, arguments in ((check, [address]), (replay, [MOONCAKE, "--url", address])):
        said = refused(tool, arguments, capsys)
        assert "URL" in said.upper()
        assert "holds a user name or password" in said
        assert "pw-secret" not in said


@pytest.mark.parametrize("flag", ["--api-key", "--admin-token"])
def test_a_key_in_two_lines_is_refused_by_name_and_not_repeated(flag: str,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(check, ["http://h", flag, "pw-secret\nb"], capsys)
    assert flag in said
    assert "control character" in said
    assert "pw-secret" not in said


async def test_a_line_break_behind_a_key_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\n")
    async with canned(usage('{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":8}}')) as url:
        assert await run(check, url) == 0
    assert "8 of 10 prompt tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "says"), [(b" \n", "is empty"), (b"a\nb\n", "control character"),
                                               (b"\xff\xfe", "is not text")])
def test_a_token_file_that_holds_no_token_is_named(content: bytes, says: str, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "admin-token"
    file.write_bytes(content)
    assert check.main(["http://127.0.0.1:1", "--admin-token-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert "--admin-token-file" in said
    assert says in said
    assert said.count("\n") == 1
