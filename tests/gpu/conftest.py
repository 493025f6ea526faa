# SPDX-License-Identifier: GPL-3.0-or-later
"""The bench that all tests on a real GPU share; without a GPU they are skipped with the reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import parts, report


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder of this run's own."""
    made = parts.temporary_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def gpu() -> None:
    """Only where there is a GPU that nobody uses."""
    if why := parts.gpu_missing():
        pytest.skip(f"not run: {why}")


@pytest.fixture(scope="session")
def containers(gpu: None) -> Iterator[dict[int, parts.Container]]:
    """Container 129 and its neighbour 130."""
    with parts.proxmox() as made:
        yield made


@pytest.fixture(scope="session")
def watcher(gpu: None) -> Iterator[parts.Watcher]:
    """The stopwatch."""
    made = parts.Watcher()
    yield made
    made.close()


@pytest.fixture(scope="session")
def figures(gpu: None) -> Iterator[report.Figures]:
    """Everything that was measured; written to docs/real-gpu.md at the end of a whole run."""
    made = report.Figures()
    try:
        yield made
    finally:
        made.finish()
        if path := os.environ.get("GPU_TEST_RAW"):
            Path(path).write_text(made.raw(), encoding="utf-8")
        if path := os.environ.get("GPU_TEST_DOC"):
            Path(path).write_text(made.document(), encoding="utf-8")


@pytest.fixture(scope="session")
def bystanders(
    gpu: None, folder: Path, containers: dict[int, parts.Container], watcher: parts.Watcher
) -> Iterator[list[parts.Process]]:
    """Who must be alive after every single scenario."""
    bench = parts.Bench(folder)
    bench.start("idle", 0, name="sglang::router")
    bench.start("idle", 0, name="python3", vmid=129)
    bench.start("idle", 0, name="sglang::sched", vmid=130)
    bench.start("nvml", 0, name="dcgm-exporter")
    yield [*bench.started, *(each.init for each in containers.values()), watcher.process]
    bench.end_all()


@pytest.fixture
def bench(folder: Path, watcher: parts.Watcher) -> Iterator[parts.Bench]:
    """Holders of one test, all gone and the memory back before the next."""
    made = parts.Bench(folder)
    yield made
    made.end_all()
    parts.wait_for("the GPUs are idle again", lambda: not any(parts.truth()[0]), 10)
