# SPDX-License-Identifier: GPL-3.0-or-later
"""A crowd of processes inside pve1, and two ways to look through it for holders of GPUs."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import Bench, BenchError
from tests.bench.report import ROOT
from tests.lab.lab import INSIDE_PATH, in_host, kill_cgroup

PROCESSES = 5000
DESCRIPTORS = 15
PYTHON = "/usr/bin/python3"
KNOWLEDGE = ROOT / "plugins/module_utils"
PACKAGE = "ansible_collections.gpuops.gpu.plugins.module_utils"

# Runs inside pve1: opens once what a small server has open, and forks. Three descriptors of
# /dev/null, eight of regular files, a socket pair and a pipe.
CROWD = """
import gc, os, signal, socket, sys
count, report = int(sys.argv[1]), int(sys.argv[2])
os.dup2(report, 3)
os.closerange(4, 1024)
null = os.open("/dev/null", os.O_RDWR)
for target in (0, 1, 2):
    os.dup2(null, target)
os.close(null)
report = 3
for name in range(8):
    os.open("/tmp/crowd-%d" % name, os.O_CREAT | os.O_RDWR)
pair, ends = socket.socketpair(), os.pipe()
gc.disable()
gc.freeze()
for number in range(count):
    if os.fork() == 0:
        os.close(report)
        while True:
            signal.pause()
os.write(report, b"ready")
os.close(report)
while True:
    signal.pause()
"""

# The knowledge as the action plugin sends it, but only as much of it as a scan needs.
PROGRAM = """\
import sys
package = {package!r}
parent = type(sys)(package)
sys.modules[package] = parent
for name, source in {sources!r}.items():
    module = type(sys)(package + "." + name)
    sys.modules[module.__name__] = module
    setattr(parent, name, module)
    exec(compile(source, name + ".py", "exec", dont_inherit=True), module.__dict__)
found = parent.holders.scan(parent.holders.read_devices(), deep={deep!r})
print(found.processes, *found.holders)
"""


@contextlib.contextmanager
def crowd(bench: Bench) -> Iterator[None]:
    """The crowd is there, in a control group of its own, by which it is ended."""
    cgroup = bench.lab.paths.host_cgroup("pve1") / "system.slice/crowd.service"
    cgroup.mkdir(parents=True, exist_ok=True)
    read, write = os.pipe()

    def body() -> int:
        if os.fork():
            return 0
        os.setsid()
        os.set_inheritable(write, True)
        argv = [PYTHON, "-IS", "-c", CROWD, str(PROCESSES), str(write)]
        os.execve(PYTHON, argv, {"PATH": INSIDE_PATH})

    try:
        status = in_host(bench.lab.running_init("pve1"), cgroup, body)
        os.close(write)
        with os.fdopen(read, "rb") as report:
            if status or report.read() != b"ready":
                raise BenchError(f"cannot start {PROCESSES} processes in pve1")
        pids = (cgroup / "cgroup.procs").read_text().split()
        if len(pids) != PROCESSES + 1:
            raise BenchError(f"{len(pids)} processes are in the crowd, not {PROCESSES + 1}")
        open_there = len(list(Path(f"/proc/{pids[-1]}/fd").iterdir()))
        if open_there != DESCRIPTORS:
            raise BenchError(f"a process of the crowd has {open_there} descriptors")
        yield
    finally:
        kill_cgroup(cgroup, seconds=30)


def knowledge(name: str, known: dict[str, str] | None = None) -> dict[str, str]:
    """The source of a module of the knowledge and, before it, of those that it imports."""
    sources = {} if known is None else known
    text = (KNOWLEDGE / f"{name}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            for each in node.names:
                if each.name not in sources:
                    knowledge(each.name, sources)
    sources[name] = text
    return sources


class Looker:
    """A command inside pve1 that must find the one who holds the GPUs."""

    found = 0

    def __init__(self, bench: Bench, argv: list[str], program: Path | None = None) -> None:
        self.bench = bench
        self.program = program or Path("/dev/null")
        init = bench.lab.running_init("pve1")
        self.argv = ["nsenter", "--target", str(init), "--all", "--root", "--wd", *argv]

    def seconds(self) -> float:
        """One look by the clock, from the start of the interpreter to its end."""
        with self.program.open() as stdin:
            run = self.bench.timed(self.argv, stdin=stdin, env={"PATH": INSIDE_PATH})
        if str(self.found) not in run.output.replace(":", " ").split():
            raise BenchError(f"{self.argv[-1]} did not find process {self.found}: {run.output}")
        return run.seconds


class Scanner(Looker):
    """The tool's scan for holders and nothing else, sent over standard input."""

    def __init__(self, bench: Bench, deep: bool) -> None:
        program = bench.scratch / f"scan-{deep}.py"
        text = PROGRAM.format(package=PACKAGE, sources=knowledge("holders"), deep=deep)
        program.write_text(text, encoding="utf-8")
        super().__init__(bench, [PYTHON, "-IS", "-"], program)


class Fuser(Looker):
    """What people type to find them."""

    TEXT = "fuser /dev/nvidia*"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench, ["sh", "-c", f"exec {self.TEXT}"])
