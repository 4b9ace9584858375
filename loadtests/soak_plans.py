"""What the soak asks: requests that are right, wrong, cut short and slow, drawn by seed.

Owns: the mix. Every right request knows the text of its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import orjson

from loadtests.bench.relay_prompts import MODEL, words
from loadtests.soak_client import Plan
from loadtests.soak_worker import answer_words

NUM_PREFIXES = 64
PREFIX_CHARS = 400
TURN_CHARS = 60
NUM_TURNS = 512
# Requests in a thousand; the rest are plain ones.
MIX = {"half close": 10, "slow body": 10, "slow reader": 6, "chunked": 30, "expect": 10, "http/1.0": 10,
       "leave in the head": 5, "leave at once": 15, "leave waiting": 15, "leave in mid-stream": 20,
       "no json": 6, "wrong field": 6, "two models": 4, "unknown model": 6, "no route": 4, "no http": 6,
       "two framings": 4, "too large": 3}
_CHAT, _COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"


def http(body: bytes, *, path: bytes = _CHAT, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A request in one piece."""
    return b"POST %b HTTP/%b\r\nHost: soak\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path, version, more, len(body), body)


def in_chunks(body: bytes, path: bytes) -> bytes:
    """The same in two chunks."""
    half = len(body) // 2
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return (b"POST %b HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%b0\r\n\r\n" % (path, framed))


_Make = Callable[[bytes, bytes], bytes]  # from a right body and its path
_WRONG: dict[str, tuple[_Make, tuple[int, ...]]] = {
    "no json": (lambda body, path: http(body[:-2], path=path), (400,)),
    "wrong field": (lambda body, path: http(b'{"temperature":"hot",' + body[1:], path=path), (400,)),
    "two models": (lambda body, path: http(b'{"model":"other",' + body[1:], path=path), (400,)),
    "unknown model": (lambda body, path: http(body.replace(b'"model":"', b'"model":"un', 1), path=path), (404,)),
    "no route": (lambda body, path: http(body, path=b"/v1/nothing"), (404,)),
    "no http": (lambda body, path: b"POST %b HTTP/1.1\r\nHost : x\r\n\r\n" % path, (400,)),
    "two framings": (lambda body, path: http(body, path=path, more=b"Transfer-Encoding: chunked\r\n"), (400,)),
    "too large": (lambda body, path: b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" % path,
                  (413,)),
}


def kinds(rng: random.Random, count: int) -> Iterator[str]:
    """So many kinds, by the mix; plain ones are "stream" or "whole"."""
    names = [name for name, share in MIX.items() for _ in range(share)]
    plain = 1000 - len(names)
    names += ["stream"] * (plain * 2 // 3)
    names += ["whole"] * (1000 - len(names))
    for _ in range(count):
        yield rng.choice(names)


def is_streamed(kind: str, rng: random.Random) -> bool:
    """Whether a request of this kind asks for a stream."""
    if kind in ("whole", "http/1.0"):
        return False
    return kind in ("stream", "leave in mid-stream") or rng.random() < 0.5


def plan_of(kind: str, body: bytes, expected: bytes, *, is_stream: bool, path: bytes = _CHAT) -> Plan:
    """The request of this kind with this body."""
    if kind in _WRONG:
        make, refusals = _WRONG[kind]
        return Plan(kind, make(body, path), is_stream, refusals=refusals)
    if kind == "chunked":
        data = in_chunks(body, path)
    else:
        data = http(body, path=path, more=b"Expect: 100-continue\r\n" if kind == "expect" else b"",
                    version=b"1.0" if kind == "http/1.0" else b"1.1")
    return Plan(kind, data, is_stream, expected)


def stub_plans(count: int, seed: int) -> Iterator[Plan]:
    """Chats for the stub workers: a prefix that others share, and a number that nobody else has."""
    rng = random.Random(f"soak {seed}")
    prefixes = [words(rng, PREFIX_CHARS).encode() for _ in range(NUM_PREFIXES)]
    turns = [words(rng, TURN_CHARS).encode() for _ in range(NUM_TURNS)]
    for number, kind in enumerate(kinds(rng, count)):
        is_stream, is_large = is_streamed(kind, rng), kind == "slow reader"
        body = (b'{"model":"%b","stream":%b,"max_tokens":16,"messages":[{"role":"system","content":"%b"},'
                b'{"role":"user","content":"%b #%d%b"}]}' % (
                    MODEL.encode(), b"true" if is_stream else b"false", rng.choice(prefixes), rng.choice(turns),
                    number, b"@" if is_large else b""))
        yield plan_of(kind, body, b"".join(answer_words(number, is_large=is_large)), is_stream=is_stream)


def tiny_bodies(model: str, count: int, seed: int) -> list[dict[str, object]]:
    """Completions for a real model: so many prompts, greedy and of a fixed length."""
    rng = random.Random(f"tiny {seed}")
    shared = [words(rng, 200) for _ in range(4)]
    return [{"model": model, "prompt": f"{rng.choice(shared)} {words(rng, 40)} {number}", "max_tokens": 6,
             "temperature": 0, "ignore_eos": True} for number in range(count)]


def tiny_plans(bodies: list[dict[str, object]], texts: list[bytes], count: int, seed: int) -> Iterator[Plan]:
    """Those completions in every kind; `texts` are the answers of undisturbed runs."""
    rng = random.Random(f"tiny kinds {seed}")
    for kind in kinds(rng, count):
        which, is_stream = rng.randrange(len(bodies)), is_streamed(kind, rng)
        body = orjson.dumps({**bodies[which], "stream": is_stream})
        yield plan_of(kind, body, texts[which], is_stream=is_stream, path=_COMPLETIONS)
