# SPDX-License-Identifier: GPL-3.0-or-later
"""Whoever reads the output may be slow, stop or leave: nodes, history and files do not wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuops import history
from gpuops.report import Report
from tests.lab import Lab
from tests.patience import PATIENCE, until

GPUOPS = [sys.executable, "-m", "gpuops"]
XOFF, XON = b"\x13", b"\x11"

Start = Callable[..., "subprocess.Popen[bytes]"]


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe into which not one more byte goes."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"\n")
    os.set_blocking(writes, True)
    return reads, writes


def stopped_terminal() -> tuple[int, int]:
    """Both ends of a terminal on which somebody has typed Ctrl-S."""
    master, slave = os.openpty()
    os.write(master, XOFF)
    return master, slave


def drain(reads: int, pause: float = 0.0, size: int = 1 << 16) -> str:
    """All that comes until the last writer is gone."""
    parts = []
    with contextlib.suppress(OSError):  # a terminal's way to say that it is over
        while part := os.read(reads, size):
            parts.append(part)
            time.sleep(pause)
    return b"".join(parts).decode()


@pytest.fixture
def start(lab: Lab, tmp_path: Path) -> Iterator[Start]:
    """Start a reset of ct129, which is held; its history is in the test's folder."""
    runs = []

    def begin(*options: str, **streams: Any) -> subprocess.Popen[bytes]:
        lab.hold("ct129", gpus="0-7")
        run = lab.popen(
            [
                *GPUOPS,
                "reset",
                "-l",
                "ct129",
                "--profile",
                "now",
                "--yes",
                "--log-dir",
                str(tmp_path),
                *options,
            ],
            env={**os.environ, "TERM": "xterm-256color"},
            **{"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams},
        )
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.kill()
        run.wait()


def remembered(folder: Path) -> dict[str, Any]:
    """The run, as soon as it is in the history."""
    assert until(lambda: list(history.read(folder)), 3 * PATIENCE), "the run waits for its reader"
    return next(iter(history.read(folder)))


@pytest.mark.lab
@pytest.mark.parametrize("place", [full_pipe, stopped_terminal])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_stops_holds_up_nothing_but_the_screen(
    start: Start, tmp_path: Path, stream: str, place: Callable[[], tuple[int, int]]
) -> None:
    reads, writes = place()
    file = tmp_path / "report.json"
    options = ["--output", f"json={file}"]
    streams: dict[str, Any] = {stream: writes}
    if stream == "stderr":  # where the words for people go if a program reads standard output
        options += ["-v", "--output", "jsonl"]
        streams["stdout"] = subprocess.DEVNULL
    run = start(*options, **streams)
    os.close(writes)
    entry = remembered(tmp_path)
    assert (entry["verdict"], entry["changed"]) == ("clean", True)
    assert run.poll() is None, "it has shown its result to nobody"
    assert until(file.exists)
    assert Report.from_json(file.read_text()).clean
    if place is stopped_terminal:
        os.write(reads, XON)
    shown = drain(reads)
    assert run.wait(3 * PATIENCE) == 0
    assert "1 host: 1 clean; 1 process signalled" in shown
    os.close(reads)


@pytest.mark.lab
@pytest.mark.parametrize("place", [full_pipe, stopped_terminal])
def test_ctrl_c_ends_a_run_whose_reader_has_stopped(
    start: Start, tmp_path: Path, place: Callable[[], tuple[int, int]]
) -> None:
    reads, writes = place()
    run = start(stdout=writes, stderr=writes)
    os.close(writes)
    remembered(tmp_path)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    assert run.wait(3 * PATIENCE) == 130
    os.close(reads)


@pytest.mark.lab
def test_a_slow_terminal_fails_nothing(start: Start, tmp_path: Path) -> None:
    """About 1,000 characters a second, as over a bad line."""
    master, slave = os.openpty()
    run = start(stdout=slave, stderr=slave)
    os.close(slave)
    shown = drain(master, pause=0.03, size=32)
    assert run.wait(3 * PATIENCE) == 0
    assert remembered(tmp_path)["verdict"] == "clean"
    assert "1 host: 1 clean; 1 process signalled" in shown
    os.close(master)


@pytest.mark.lab
def test_a_reader_that_leaves_does_not_stop_a_reset(start: Start, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    run = start(stdout=writes)
    os.close(writes)
    assert run.wait(3 * PATIENCE) == 0
    assert remembered(tmp_path)["verdict"] == "clean"
