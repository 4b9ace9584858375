"""Who may know whom. The arrows of the house, held by the syntax trees of all files and by two real imports."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, imports, imports_of, inside

SHARED = ("worker.prompt", "worker.protocol")
# A room may import itself, the rooms named here, and anything that is not ours.
MAY_IMPORT = {
    "worker.protocol": ("worker",),  # its version
    "worker.prompt": ("worker.protocol",),
    "worker.core": SHARED,
    "worker.model": SHARED,
    "worker.engine": ("worker.core", "worker.model", *SHARED),
    "worker.server": ("worker", "worker.config", "worker.engine", "worker.core.batch", *SHARED),
    "worker.config": ("worker.protocol", "worker.engine.engine_config", "worker.engine.kv_budget"),
    "worker.cli": ("worker.config", "worker.server", "worker.protocol"),
    "worker.__main__": ("worker.cli",),
    "gateway.routing": SHARED,
    "gateway.admission": ("gateway.routing", "gateway.errors", *SHARED),
    "gateway.listening": (),
    "gateway.shared": ("gateway.routing", "gateway.admission", *SHARED),
    "gateway.processes": ("gateway.config", "gateway.listening", "gateway.supervisor", "gateway.shared",
                          "gateway.server.admin_token", "worker.protocol"),
    "gateway.member": ("gateway.serve", "gateway.server", "gateway.shared"),
    "gateway.relay": ("gateway", "gateway.routing", "gateway.errors", *SHARED),
    "gateway.knowledge": ("gateway", "gateway.config", "gateway.routing", "gateway.relay", "gateway.errors", *SHARED),
    "gateway.server": ("gateway", "gateway.config", "gateway.errors", "gateway.routing", "gateway.admission",
                       "gateway.relay", "gateway.knowledge", "gateway.shared", "gateway.listening", *SHARED),
    "gateway.config": ("gateway.routing", "gateway.admission", *SHARED),
    "gateway.errors": SHARED,
    "gateway.serve": ("gateway.config", "gateway.server", "gateway.processes", "worker.protocol"),
    "gateway.supervisor": (),
    "gateway.up_plan": ("gateway.config", "gateway.supervisor", "worker.protocol"),
    "gateway.up": ("gateway.up_plan", "gateway.supervisor", "worker.protocol"),
    "gateway.check_probe": ("worker.protocol",),
    "gateway.check": ("gateway.check_probe", "worker.protocol"),
    "gateway.new_key": ("gateway.admission", "worker.protocol"),
    "gateway.cli": ("gateway",),  # its version; commands are named in a table of text, the one exemption
    "gateway.__main__": ("gateway.serve",),
    "loadtests": ("gateway.routing", "gateway.admission", "worker.core", *SHARED),
}
PURE = ("worker.core", "gateway.routing", "gateway.admission")
IMPURE = ("asyncio", "torch", "redis", "time", "random", "zmq", "aiohttp", "threading", "socket", "subprocess",
          "multiprocessing", "transformers", "secrets", "datetime", "urllib.request", "logging", "structlog",
          "prometheus_client")
NO_TORCH = ("worker.server", "worker.prompt", "worker.protocol", "worker.core", "worker.engine.messages",
            "worker.engine.engine_config", "worker.engine.engine_client", "worker.engine.kv_budget",
            "worker.config", "worker.cli", "gateway")
HEAVY = ("torch", "transformers", "safetensors", "gguf", "llguidance", "numba", "worker.model")


def _room(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "loadtests":
        return "loadtests"
    return ".".join(parts[:2])


def test_every_room_has_a_rule() -> None:
    rooms = {_room(found.importer) for found in imports(*PACKAGES)} - {"worker", "gateway"}
    assert rooms <= set(MAY_IMPORT), f"say what these may import: {sorted(rooms - set(MAY_IMPORT))}"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_lies_below_them(room: str) -> None:
    allowed = MAY_IMPORT[room]
    wrong = [str(found) for found in imports(*PACKAGES)
             if inside(found.importer, room) and found.module.split(".")[0] in PACKAGES
             and not inside(found.module, room, *(name for name in allowed if "." in name))
             and found.module not in allowed]
    assert not wrong, "\n".join(wrong)


def test_the_worker_knows_no_gateway_and_nobody_knows_the_tests() -> None:
    wrong = [str(found) for found in imports(*PACKAGES)
             if (inside(found.importer, "worker") and inside(found.module, "gateway", "loadtests"))
             or (inside(found.importer, "gateway") and inside(found.module, "loadtests"))
             or inside(found.module, "tests")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_have_no_clock_no_chance_and_no_outside(room: str) -> None:
    wrong = [str(found) for found in imports(*PACKAGES)
             if inside(found.importer, room) and inside(found.module, *IMPURE)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", NO_TORCH)
def test_rooms_without_tensors(room: str) -> None:
    wrong = [str(found) for found in imports(*PACKAGES)
             if inside(found.importer, room) and inside(found.module, *HEAVY)]
    assert not wrong, "\n".join(wrong)


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_gateway_process_loads_no_torch_and_no_scheduler() -> None:
    loaded = _loaded_after("import gateway.__main__, gateway.server.app, gateway.up, gateway.check, gateway.cli")
    assert "gateway.server.app" in loaded
    assert not {name for name in loaded if inside(name, "torch", "transformers", "llguidance", "worker.core",
                                                  "worker.model", "worker.engine", "worker.server")}


def test_the_workers_http_process_loads_no_torch() -> None:
    loaded = _loaded_after("import worker.__main__, worker.server.app")
    assert "worker.server.app" in loaded
    assert not {name for name in loaded if inside(name, "torch", "transformers", "llguidance", "worker.model",
                                                  "gateway")}


def test_the_reader_of_imports_sees_them_all() -> None:
    source = ("import a.b, time as t\nfrom gateway import routing, __version__\nfrom worker.core import batch\n"
              "def f():\n    if x:\n        import torch\n")
    found = {(item.module, item.line) for item in imports_of(ast.parse(source), "m")}
    assert found == {("a.b", 1), ("time", 1), ("gateway.routing", 2), ("gateway", 2), ("worker.core.batch", 3),
                     ("torch", 6)}
