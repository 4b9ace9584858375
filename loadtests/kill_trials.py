"""`make kill-trials`: workers killed (-9) with streams open, and what their clients saw of it.

A gateway and three strict workers, all real processes. First every request runs undisturbed; then, trial by trial,
all streams are opened at once and one worker is killed at a random moment while enough of its streams are between 10
and 90 % done. Every stream must end as the undisturbed one, byte for byte but for the time and the cached tokens.
Only the killed worker is started again. Owns the processes it starts, and kills no other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.local_stack import Child, free_port, start
from loadtests.watched_stream import WatchedStream, comparable

LOW, HIGH = 0.1, 0.9
LOOK_S = 0.004
READY_TIMEOUT_S = 300.0
STREAM_TIMEOUT_S = 900.0
ATTEMPTS_PER_TRIAL = 5
_WORDS = ("river", "lamp", "engine", "garden", "winter", "paper", "bridge", "signal", "copper", "harbour", "music",
          "stone", "window", "forest", "letter", "cloud", "market", "silver", "candle", "train", "desert", "mirror")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. `between_min`: streams of the victim that must be between 10 and 90 % done when it is killed."""

    model: str
    served_name: str
    num_trials: int
    num_streams: int
    num_workers: int
    num_sets: int
    max_tokens: int
    between_min: int
    seed: int
    worker_arguments: tuple[str, ...] = ()
    log_level: str = "warning"


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill. `migrations` and `retries` are the gateway's counters before and after."""

    number: int
    victim: str
    streams_on_victim: int
    streams_between: int
    mean_done_ratio: float
    migrations: int
    retries: int
    errors: list[str]
    different: int
    differences: list[str]
    num_greedy: int
    num_seeded: int
    seconds: float

    @property
    def is_clean(self) -> bool:
        return not self.errors and not self.different


class Fleet:
    """One gateway and its workers. Ports stay; a killed worker comes back under the address it had."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokens = {f"HEADSTART_{whose}_TOKEN": secrets.token_hex(16) for whose in ("ADMIN", "WORKER")}
        self.workers = {f"127.0.0.1:{port}": self._start_worker(port)
                        for port in (free_port() for _ in range(plan.num_workers))}
        port = free_port()
        flags = [argument for worker in self.workers for argument in ("--worker", f"http://{worker}")]
        self.gateway = start(["gateway", "--port", str(port), "--log-level", "warning", *flags],
                             url=f"http://127.0.0.1:{port}", env=self._tokens)

    def _start_worker(self, port: int) -> Child:
        plan = self._plan
        return start(["worker", "--model", plan.model, "--served-name", plan.served_name, "--port", str(port),
                      "--exactness", "strict", "--threads", "1", "--log-level", plan.log_level,
                      *plan.worker_arguments],
                     url=f"http://127.0.0.1:{port}", env=self._tokens)

    def kill(self, worker_id: str) -> None:
        """kill -9, as the kernel does when memory is short."""
        child = self.workers[worker_id]
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def revive(self, worker_id: str) -> None:
        """Start the killed worker again."""
        self.workers[worker_id].log.close()
        self.workers[worker_id] = self._start_worker(int(worker_id.rpartition(":")[2]))

    async def until_ready(self, session: aiohttp.ClientSession) -> None:
        """Every worker is running, and the gateway knows its cache."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        headers = {"Authorization": f"Bearer {self._tokens['HEADSTART_ADMIN_TOKEN']}"}
        while time.monotonic() < deadline:
            for child in (self.gateway, *self.workers.values()):
                if child.process.poll() is not None:
                    raise RuntimeError(f"a child ended by itself:\n{child.log_tail()}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.gateway.url}/admin/workers", headers=headers) as response:
                    rows = (await response.json())["workers"]
                    pids = {row["id"]: row["pid"] for row in rows if row["state"] == "ready"
                            and row["events"]["in_sequence"]}
                    if all(pids.get(worker) == child.process.pid for worker, child in self.workers.items()):
                        return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"not ready after {READY_TIMEOUT_S:.0f} s:\n{self.gateway.log_tail()}")

    async def counts(self, session: aiohttp.ClientSession) -> tuple[int, int]:
        """(streams gone on with, requests asked again elsewhere) so far."""
        async with session.get(f"{self.gateway.url}/metrics") as response:
            text = await response.text()
        return _sum(text, r'headstart_migrations_total{outcome="ok"}'), _sum(text, "headstart_retries_total{")

    def stop(self) -> None:
        """End every process of this fleet."""
        for child in (self.gateway, *self.workers.values()):
            child.stop()


def _sum(text: str, series: str) -> int:
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)))


def requests_of(plan: Plan, number: int) -> list[WatchedStream]:
    """The streams of one set: half of them greedy, half seeded; the same in every run."""
    rng = random.Random(f"{plan.seed}/{number}")
    streams = []
    for index in range(plan.num_streams):
        text = f"Tell me about the {' and the '.join(rng.sample(_WORDS, 6))}."
        chance = {"temperature": 0} if index % 2 == 0 else {"temperature": 1.0, "seed": rng.randrange(2**31)}
        body = {"model": plan.served_name, "messages": [{"role": "user", "content": text}], "stream": True,
                "max_tokens": rng.randint(plan.max_tokens * 3 // 4, plan.max_tokens), "ignore_eos": True,
                "stream_options": {"include_usage": True}, **chance}
        streams.append(WatchedStream(f"set{number}-stream{index}", body))
    return streams


class Trials:
    """Undisturbed runs first, then kills."""

    def __init__(self, plan: Plan, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._fleet = fleet
        self._session = session
        self._url = f"{fleet.gateway.url}/v1/chat/completions"
        self._rng = random.Random(plan.seed)
        self._undisturbed: dict[str, bytes] = {}
        self.num_void = 0

    async def run_undisturbed(self) -> None:
        """What every request answers when nobody is killed."""
        for number in range(self._plan.num_sets):
            streams = requests_of(self._plan, number)
            await asyncio.gather(*(stream.read(self._session, self._url) for stream in streams))
            for stream in streams:
                if stream.error is not None:
                    raise RuntimeError(f"an undisturbed stream failed: {stream.error}")
                self._undisturbed[stream.request_id] = stream.answer

    async def run_one(self, number: int) -> Trial:
        """One trial, begun again when all streams ended before enough of one worker's were under way."""
        for _ in range(ATTEMPTS_PER_TRIAL):
            await self._fleet.until_ready(self._session)
            trial = await self._attempt(number)
            if trial is not None:
                return trial
            self.num_void += 1
        raise RuntimeError(f"no moment with {self._plan.between_min} streams of one worker between 10 and 90 % done")

    async def _attempt(self, number: int) -> Trial | None:
        streams, began_at = requests_of(self._plan, number % self._plan.num_sets), time.monotonic()
        for stream in streams:
            stream.expected_bytes = len(self._undisturbed[stream.request_id])
        before = await self._fleet.counts(self._session)
        tasks = [asyncio.create_task(stream.read(self._session, self._url)) for stream in streams]
        moment = await self._await_moment(streams, lambda: all(task.done() for task in tasks))
        if moment is None:
            await asyncio.gather(*tasks)
            return None
        victim, theirs = moment
        between = [stream.done_ratio for stream in theirs if LOW <= stream.done_ratio <= HIGH]
        self._fleet.kill(victim)
        if number + 1 < self._plan.num_trials:
            self._fleet.revive(victim)
        await asyncio.gather(*tasks)
        after = await self._fleet.counts(self._session)
        differences = [self._difference(stream, victim) for stream in streams if self._differs(stream)]
        return Trial(number, victim, len(theirs), len(between), round(sum(between) / len(between), 3),
                     after[0] - before[0], after[1] - before[1],
                     [f"{stream.request_id}: {stream.error}" for stream in streams if stream.error is not None],
                     len(differences), differences,
                     sum("seed" not in stream.body for stream in streams),
                     sum("seed" in stream.body for stream in streams), round(time.monotonic() - began_at, 2))

    def _differs(self, stream: WatchedStream) -> bool:
        return stream.error is None and comparable(stream.answer) != comparable(self._undisturbed[stream.request_id])

    def _difference(self, stream: WatchedStream, victim: str) -> str:
        """Where a stream leaves its undisturbed run, and whether it had to move."""
        expected, got = (comparable(answer).split(b"\n\n") for answer in (
            self._undisturbed[stream.request_id], stream.answer))
        at = next(index for index, pair in enumerate(zip_longest(expected, got)) if pair[0] != pair[1])
        kind = "seeded" if "seed" in stream.body else "greedy"
        return (f"{stream.request_id}, {kind}, {'moved' if stream.worker_id == victim else 'stayed'}, event {at} of "
                f"{len(expected)}: {expected[at:at + 1]!r} became {got[at:at + 1]!r}")

    async def _await_moment(self, streams: Sequence[WatchedStream],
                            is_over: Callable[[], bool]) -> tuple[str, list[WatchedStream]] | None:
        """A random worker, at a random mean progress of its streams."""
        workers = list(self._fleet.workers)
        order, wanted = self._rng.sample(workers, len(workers)), self._rng.uniform(LOW, 0.8)
        while not is_over():
            for worker in order:
                theirs = [stream for stream in streams if stream.worker_id == worker]
                between = sum(LOW <= stream.done_ratio <= HIGH for stream in theirs)
                mean = sum(stream.done_ratio for stream in theirs) / max(1, len(theirs))
                if between >= self._plan.between_min and mean >= wanted:
                    return worker, theirs
            await asyncio.sleep(LOOK_S)
        return None


@contextlib.asynccontextmanager
async def _running(plan: Plan) -> AsyncIterator[Trials]:
    fleet = Fleet(plan)
    try:
        timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await fleet.until_ready(session)
            yield Trials(plan, fleet, session)
    finally:
        fleet.stop()


async def run_trials(plan: Plan, note: Callable[[Trial], None] = lambda _: None) -> dict[str, Any]:
    """The report: every trial, and the sums."""
    async with _running(plan) as trials:
        await trials.run_undisturbed()
        done = []
        for number in range(plan.num_trials):
            done.append(await trials.run_one(number))
            note(done[-1])
        return report_of(plan, done, num_void=trials.num_void)


def report_of(plan: Plan, trials: Sequence[Trial], *, num_void: int) -> dict[str, Any]:
    """JSON-ready."""
    plan_row = asdict(plan) | {"model": plan.served_name}
    return {**stamp(), "plan": plan_row,
            "trials": len(trials), "clean": sum(trial.is_clean for trial in trials),
            "client_visible_errors": sum(len(trial.errors) for trial in trials),
            "different_streams": sum(trial.different for trial in trials),
            "streams": plan.num_streams * len(trials),
            "migrations": sum(trial.migrations for trial in trials),
            "migrations_min": min(trial.migrations for trial in trials),
            "between_min": min(trial.streams_between for trial in trials),
            "retries": sum(trial.retries for trial in trials), "void": num_void,
            "by_trial": [asdict(trial) for trial in trials]}


def stamp() -> dict[str, str]:
    """When and where a report was made."""
    return {"date": datetime.date.today().isoformat(), "commit": _commit(), "exactness": "strict",
            "machine": f"{os.cpu_count()} x {platform.machine()}"}


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True,
                          check=False, cwd=Path(__file__).parent.parent)
    return done.stdout.strip() or "unknown"


def _plan(arguments: argparse.Namespace) -> Plan:
    name = re.sub(r"\W+", "-", Path(arguments.model).name)
    return Plan(arguments.model, arguments.name or name, arguments.trials, arguments.streams, arguments.workers,
                arguments.sets, arguments.max_tokens, arguments.between, arguments.seed,
                ("--kv-memory", arguments.kv_memory))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.kill_trials", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", help="the name to serve it under")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--sets", type=int, default=2, help="different sets of requests")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--between", type=int, default=15, help="streams of the victim between 10 and 90 %% done")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()

    def note(trial: Trial) -> None:
        print(f"trial {trial.number}: killed with {trial.streams_between} of {trial.streams_on_victim} streams open, "
              f"{trial.mean_done_ratio:.0%} done on average; {trial.migrations} moved, {len(trial.errors)} errors, "
              f"{trial.different} different, {trial.seconds} s", flush=True)
        for error in (*trial.errors, *trial.differences):
            print("   ", error, flush=True)

    report = asyncio.run(run_trials(_plan(arguments), note))
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "by_trial"}))
    return 0 if report["clean"] == report["trials"] else 1


if __name__ == "__main__":
    sys.exit(main())
