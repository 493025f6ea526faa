"""The built wheel, installed into an empty environment, does the whole job from any folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuops
from gpuops.runner import DEFAULTS
from tests.lab import Lab

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel, and what it asks for, and no more."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--outdir",
        str(tmp_path / "dist"),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(wheel)], check=True)
    return python.parent


def clean_environment() -> dict[str, str]:
    """Nothing of this checkout may help: neither its configuration nor its collection."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab(f"wheel-{os.getpid()}")
    made.up(cts="129", nodes=0)
    yield made
    made.down()


@pytest.mark.lab
def test_a_held_container_is_reset_from_any_folder(
    installed: Path, lab: Lab, tmp_path: Path
) -> None:
    server = lab.hold("ct129", gpus="0-7", mib=76115, ignore_term=True)
    (tmp_path / "anywhere").mkdir()
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(lab.paths.inventory.read_text(encoding="utf-8"), encoding="utf-8")

    def typed() -> subprocess.CompletedProcess[str]:
        return lab.run(
            [
                str(installed / "ansible-playbook"),
                "gpuops.gpu.reset_gpus",
                *("-i", str(inventory), "-l", "ct129", "-e", "gpuops_profile=now"),
            ],
            cwd=tmp_path / "anywhere",
            env=clean_environment(),
            capture_output=True,
            text=True,
        )

    first, second = typed(), typed()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "used MiB by GPU: 0 0 0 0 0 0 0 0" in first.stdout
    assert f"KILL sent: python3 (pid {server['pid']}" in first.stdout
    assert second.returncode == 0, second.stdout + second.stderr
    assert "changed=0" in second.stdout
    assert "KILL" not in second.stdout


def test_documentation_comes_without_a_warning(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed / "ansible-doc"), "-t", "role", "gpuops.gpu.gpu_route"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpuops.gpu.gpu_route" in done.stdout


def test_the_installed_collection_has_its_version(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed / "ansible-galaxy"), "collection", "list", "gpuops.gpu", "--format=json"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    (collections,) = json.loads(done.stdout).values()
    assert collections == {"gpuops.gpu": {"version": gpuops.__version__}}


def test_the_callback_that_its_own_command_enables_is_there(
    installed: Path, tmp_path: Path
) -> None:
    name = DEFAULTS["ANSIBLE_CALLBACKS_ENABLED"]
    told = subprocess.run(
        [str(installed / "ansible-doc"), "-t", "callback", name],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"CALLBACK {name}" in re.sub(r"\x1b\[\d+m", "", told.stdout), told.stderr
