"""`make demo`: the same 800-token system prompt with different questions, cold, warm and round robin.

Prints a table and draws demo.png. Runs against a running gateway (--url) or a stack that it starts itself. The three
arms do equal work and are interleaved request by request, so that a busy machine slows all of them alike:
  cold         every prompt begins differently: nothing can be reused
  warm         four customers' prompts come back in turn, through the gateway
  round robin  the same, but sent to the workers in turn, past the gateway
Beside it: inter-token time against position with --kv-cache off (rising) and full (flat).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import orjson

from loadtests import demo_workload
from loadtests.local_stack import StackError, running_stack, running_worker
from loadtests.streaming_client import AnswerError, TimedAnswer, timed_chat

NUM_CUSTOMERS = 4
REQUESTS_MIN = 2 * NUM_CUSTOMERS
ANSWER_TOKENS = 8  # of the TTFT requests; the 300-token answers are separate
BLOCK_SIZE = 16
CURVE_PROMPT_TOKENS = 64
REQUEST_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's figures. Seconds; tokens summed over its requests."""

    arm: str
    requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    prompt_tokens: int
    computed_tokens: int
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """`ratio` is warm over cold TTFT, medians, of the requests that found their prefix; `bound` is what prefix reuse
    should reach: (suffix + one block) / prompt + 0.1."""

    arms: list[ArmResult]
    ratio: float
    bound: float
    curves: dict[str, list[float]]

    @property
    def ok(self) -> bool:
        return self.ratio <= self.bound


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.requests < REQUESTS_MIN:
        parser.error(f"--requests should be at least {REQUESTS_MIN}: {NUM_CUSTOMERS} customers ask in turn, and who "
                     "comes for the first time finds nothing")
    try:
        report = _run(args)
    except (AnswerError, StackError, aiohttp.ClientError) as error:
        print(f"headstart demo: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(orjson.dumps({**asdict(report), "ok": report.ok}, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_table(report))
    _draw(report, args.output)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description=(__doc__ or "").splitlines()[0],
        epilog="example: make demo ARGS='--requests 12 --output demo.png'",
    )
    parser.add_argument("--url", help="a running headstart gateway (default: start two workers and a gateway)")
    parser.add_argument(
        "--admin-token",
        default=os.environ.get("HEADSTART_ADMIN_TOKEN"),
        help="with --url: lists the workers for the round-robin arm (default: $HEADSTART_ADMIN_TOKEN)",
    )
    parser.add_argument("--admin-token-file", type=Path, help="file that holds it")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=20, help="per arm (default 20)")
    parser.add_argument(
        "--tokens", type=int, default=300, help="length of the answers that time a token (default 300)"
    )
    parser.add_argument(
        "--curve-tokens", type=int, default=150, help="length of the kv-cache curves; 0 leaves them out"
    )
    parser.add_argument("--output", type=Path, default=Path("demo.png"))
    parser.add_argument("--json", action="store_true")
    return parser


def _run(args: argparse.Namespace) -> DemoReport:
    if args.url:
        token = args.admin_token or (args.admin_token_file.read_text().strip() if args.admin_token_file else None)
        arms = asyncio.run(_experiment(args, args.url.rstrip("/"), token))
    else:
        _say("starting two workers and a gateway ...")
        with running_stack(workers=2, model=args.model) as stack:
            arms = asyncio.run(_experiment(args, stack.url, stack.admin_token))
    curves = _curves(args) if args.curve_tokens else {}
    return _report(arms, curves)


@dataclass(slots=True)
class _Arm:
    name: str
    pairs: list[tuple[str, str]]
    answers: list[TimedAnswer]
    long_answer: TimedAnswer | None = None


async def _experiment(args: argparse.Namespace, url: str, token: str | None) -> list[_Arm]:
    run = secrets.token_hex(3)  # so that a second demo on the same stack starts cold again
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        workers = await _worker_urls(session, url, token)
        arms = [_Arm("cold", demo_workload.cold_arm(f"{run} cold", num_requests=args.requests), [])]
        for name in ("warm", "round robin") if workers else ("warm",):
            pairs = demo_workload.shared_arm(f"{run} {name}", num_customers=NUM_CUSTOMERS, num_requests=args.requests)
            arms.append(_Arm(name, pairs, []))
        targets = _targets(url, workers)
        await _ask(session, url, args, customer=f"{run} warm-up", question="Hello?", max_tokens=ANSWER_TOKENS)
        for index in range(args.requests):
            for arm in arms:
                customer, question = arm.pairs[index]
                arm.answers.append(
                    await _ask(
                        session,
                        targets[arm.name](index),
                        args,
                        customer=customer,
                        question=question,
                        max_tokens=ANSWER_TOKENS,
                    )
                )
            _say(f"request {index + 1}/{args.requests} of each arm", progress=(index + 1) / args.requests)
        for arm in arms:
            _say(f"one answer of {args.tokens} tokens, {arm.name}")
            arm.long_answer = await _ask(
                session,
                targets[arm.name](0),
                args,
                customer=arm.pairs[0][0],
                question="Tell me everything you know.",
                max_tokens=args.tokens,
            )
        return arms


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    args: argparse.Namespace,
    *,
    customer: str,
    question: str,
    max_tokens: int,
) -> TimedAnswer:
    body = demo_workload.chat_body(args.model, customer=customer, question=question, max_tokens=max_tokens)
    return await timed_chat(session, url, body)


async def _worker_urls(session: aiohttp.ClientSession, url: str, token: str | None) -> list[str]:
    if not token:
        _say("no admin token: the round-robin arm is left out")
        return []
    async with session.get(f"{url}/admin/workers", headers={"Authorization": f"Bearer {token}"}) as response:
        if response.status != 200:
            raise AnswerError(f"{url}/admin/workers answered {response.status}: is the admin token right?",
                              str(response.status))
        listed = orjson.loads(await response.read())
    return [str(worker["url"]) for worker in listed["workers"]]


def _targets(url: str, workers: list[str]) -> dict[str, Callable[[int], str]]:
    def gateway(index: int) -> str:
        return url

    def in_turn(index: int) -> str:
        # Four customers over two workers in plain alternation would always meet the same worker: shift each round.
        return workers[(index + index // NUM_CUSTOMERS) % len(workers)]

    return {"cold": gateway, "warm": gateway, "round robin": in_turn}


def _curves(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds per token by position, for a worker without and with a KV cache."""
    curves: dict[str, list[float]] = {}
    for mode in ("off", "full"):
        _say(f"{args.curve_tokens} tokens with --kv-cache {mode}")
        with running_worker(model=args.model, arguments=["--kv-cache", mode]) as worker:
            answer = asyncio.run(_curve_answer(worker.url, args))
        at = answer.token_at_s
        curves[mode] = [round(1000 * (later - earlier), 3) for earlier, later in itertools.pairwise(at)]
    return curves


async def _curve_answer(url: str, args: argparse.Namespace) -> TimedAnswer:
    messages = [{"role": "user", "content": "Count upwards, one number a line. " * (CURVE_PROMPT_TOKENS // 8)}]
    body = {
        "model": args.model,
        "messages": messages,
        "max_tokens": args.curve_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,  # so that a token that adds no whole character is timed too
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session:
        return await timed_chat(session, url, body)


def _report(arms: list[_Arm], curves: dict[str, list[float]]) -> DemoReport:
    by_name = {arm.name: arm for arm in arms}
    warm_answers = [answer for answer in by_name["warm"].answers if answer.cached_tokens > answer.prompt_tokens // 2]
    cold = percentile([answer.ttft_s for answer in by_name["cold"].answers], 50)
    warm = percentile([answer.ttft_s for answer in warm_answers], 50) if warm_answers else cold
    prompt = percentile([answer.prompt_tokens for answer in warm_answers], 50) if warm_answers else 1.0
    suffix = percentile([answer.computed_tokens for answer in warm_answers], 50) if warm_answers else prompt
    return DemoReport(
        arms=[_arm_result(arm) for arm in arms],
        ratio=warm / cold,
        bound=(suffix + BLOCK_SIZE) / prompt + 0.1,
        curves=curves,
    )


def _arm_result(arm: _Arm) -> ArmResult:
    ttft = [answer.ttft_s for answer in arm.answers]
    return ArmResult(
        arm=arm.name,
        requests=len(arm.answers),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        ttft_p99_s=percentile(ttft, 99),
        prompt_tokens=sum(answer.prompt_tokens for answer in arm.answers),
        computed_tokens=sum(answer.computed_tokens for answer in arm.answers),
        ms_per_token=1000 * arm.long_answer.seconds_per_token if arm.long_answer else 0.0,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank-above percentile by linear interpolation; `values` must not be empty."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def as_table(report: DemoReport) -> str:
    """The figures as people read them."""
    lines = [
        f"{'arm':<12} {'requests':>8} {'TTFT p50':>10} {'p95':>10} {'p99':>10} "
        f"{'prompt tok':>11} {'computed':>9} {'ms/token':>9}"
    ]
    for arm in report.arms:
        lines.append(
            f"{arm.arm:<12} {arm.requests:>8} {1000 * arm.ttft_p50_s:>7.1f} ms {1000 * arm.ttft_p95_s:>7.1f} ms "
            f"{1000 * arm.ttft_p99_s:>7.1f} ms "
            f"{arm.prompt_tokens:>11} {arm.computed_tokens:>9} {arm.ms_per_token:>9.2f}"
        )
    lines.append(
        f"warm TTFT over cold: {report.ratio:.3f}; prefix reuse should reach at most {report.bound:.3f}: "
        f"{'reached' if report.ok else 'NOT reached'}"
    )
    for mode, curve in report.curves.items():
        head, tail = curve[: len(curve) // 4], curve[-(len(curve) // 4) :]
        if head and tail:
            lines.append(
                f"--kv-cache {mode:<5} ms per token: first quarter {percentile(head, 50):.1f}, "
                f"last quarter {percentile(tail, 50):.1f}"
            )
    return "\n".join(lines)


def _draw(report: DemoReport, output: Path) -> None:
    try:
        from loadtests.plots import draw_demo
    except ImportError:
        _say(f"{output} is not drawn: install matplotlib (pip install '.[demo]')")
        return
    draw_demo(report, output)
    _say(f"drawn: {output}")


def _say(text: str, *, progress: float | None = None) -> None:
    if progress is not None and sys.stderr.isatty():
        print(
            f"\r[{'#' * round(24 * progress):<24}] {text}",
            end="\n" if progress >= 1 else "",
            file=sys.stderr,
            flush=True,
        )
    elif progress is None or progress >= 1:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
