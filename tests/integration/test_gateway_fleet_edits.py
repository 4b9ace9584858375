"""POST and DELETE /admin/workers with several processes: all of them know, and those that start later."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from gateway.shared.fleet_edits import EDITS_MAX, TOO_MANY, WORKER_EXISTS, AddedWorker, FleetEdits, encode_edit
from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN
from tests.support.gateway_processes import ProcessGroup, running_group
from tests.support.stub_worker import StubWorker, running

LOOKS = 16  # on connections of their own, which the kernel spreads over two processes


async def known_workers(group: ProcessGroup) -> set[frozenset[str]]:
    """What processes know, each fleet once."""
    found = await asyncio.gather(*(group.workers() for _ in range(LOOKS)))
    return {frozenset(row["id"] for row in rows) for rows in found}


async def test_a_change_holds_in_every_process_and_in_later_ones(tmp_path: Path) -> None:
    first, second = StubWorker(worker_token=WORKER_TOKEN), StubWorker(worker_token=WORKER_TOKEN)
    async with running(first, second), running_group(first.url, processes=2, log=tmp_path / "log") as group:
        async def add(worker_id: str) -> int:
            return (await group.send("POST", "/admin/workers", headers=ADMIN,
                                     payload={"url": second.url, "id": worker_id})).status

        (first_id,), = await known_workers(group)
        assert sorted(await asyncio.gather(*(add("second") for _ in range(4)))) == [201, 409, 409, 409]
        assert await known_workers(group) == {frozenset((first_id, "second"))}, "at once, in both"
        assert (await group.send("DELETE", f"/admin/workers/{first_id}", headers=ADMIN)).status == 200
        assert await known_workers(group) == {frozenset(("second",))}
        assert (await group.send("DELETE", f"/admin/workers/{first_id}", headers=ADMIN)).status == 404

        os.kill(group.pids()[0], signal.SIGKILL)
        await group.until_logged("process_ended")
        await group.until_serving(2)
        assert await known_workers(group) == {frozenset(("second",))}, "also one that was started after that"

        group.supervisor.send_signal(signal.SIGHUP)
        await group.until_logged("reload_finished")
        assert await known_workers(group) == {frozenset(("second",))}
        assert (await group.send("DELETE", "/admin/workers/second", headers=ADMIN)).status == 200
        assert await known_workers(group) == {frozenset()}
        assert await add("second") == 201


def test_the_last_edit_of_an_id_is_what_holds() -> None:
    edits, worker = FleetEdits(), AddedWorker("http://10.0.0.1:1")
    assert edits.take(encode_edit("a", worker)) == b""
    assert edits.take(encode_edit("a", worker)) == WORKER_EXISTS
    assert edits.take(encode_edit("a", None)) == b""
    assert edits.take(encode_edit("a", worker)) == b""
    for number in range(EDITS_MAX - 1):
        assert edits.take(encode_edit(f"{number}", None)) == b""
    assert edits.take(encode_edit("one more", None)) == TOO_MANY
    assert edits.take(encode_edit("a", None)) == b"", "known ones can still change"
