"""`pip install headstart` alone is a gateway: no torch, and it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.local_stack import Child, free_port

ROOT = Path(__file__).parent.parent.parent
INSTALL_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def gateway_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the base install and nothing else."""
    folder = tmp_path_factory.mktemp("gateway-only")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(ROOT)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    if done.returncode != 0 and "Could not find a version" in done.stderr + done.stdout:
        pytest.skip("the package registry cannot be reached, so nothing can be installed")
    assert done.returncode == 0, done.stderr
    return python


def test_there_is_no_torch_and_it_starts(gateway_python: Path, tmp_path: Path) -> None:
    found = subprocess.run([str(gateway_python), "-c", "import torch"], capture_output=True, cwd=tmp_path)
    assert found.returncode != 0, "a gateway install pulled torch"
    port = free_port()
    with open(tmp_path / "log", "w+b") as log:
        process = subprocess.Popen(
            [
                str(gateway_python.parent / "headstart"),
                "gateway",
                "--port",
                str(port),
                "--worker",
                f"http://127.0.0.1:{free_port()}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "HEADSTART_ADMIN_TOKEN": "t"},
        )
        child = Child(process=process, url=f"http://127.0.0.1:{port}", log=log)
        child.wait_ready("/livez", timeout_s=30)
        assert (
            "headstart"
            in subprocess.run(
                [str(gateway_python.parent / "headstart"), "--version"], capture_output=True, text=True, cwd=tmp_path
            ).stdout
        )
        child.stop()
