# SPDX-License-Identifier: GPL-3.0-or-later
"""What the unit tests share: real outputs of the tool, and children that always end."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import holders
from tests import properties
from tests.lab.smi import CAPTURES

properties.load()

Child = subprocess.Popen[str]
Python = Callable[..., Child]


@pytest.fixture
def capture() -> Callable[[str], str]:
    """Read one of the real outputs of nvidia-smi, taken with driver 580."""
    return lambda name: (CAPTURES / name).read_text(encoding="utf-8")


@pytest.fixture
def python() -> Iterator[Python]:
    """Start a Python child that has run as far as its line ``print("ready")``; ended afterwards."""
    children: list[Child] = []

    def start(source: str, *arguments: str) -> Child:
        child = subprocess.Popen(
            [sys.executable, "-ISc", source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.communicate()


@pytest.fixture
def start_of() -> Callable[[int], int]:
    """The start time of a living process, read as the kernel shows it."""

    def read(pid: int) -> int:
        fields = holders.stat_fields(pid)
        assert fields is not None
        return int(fields[19])

    return read


@pytest.fixture
def no_descriptor_left() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """A block in which no file can be opened any more."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        # The limit is on the number of a descriptor, so those below it are used up.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    yield block
