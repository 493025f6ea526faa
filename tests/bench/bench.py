# SPDX-License-Identifier: GPL-3.0-or-later
"""The benchmark's lab, and commands in it by the clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.report import ROOT
from tests.lab.lab import Lab, wait_until

CALLBACKS = Path(__file__).parent / "callback"
LONGEST_COMMAND = 120  # seconds


class BenchError(Exception):
    """Something did not run, or did not do what it was measured for; one line."""


@dataclass
class Run:
    """What one command did."""

    seconds: float
    output: str
    events: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """A lab of its own, and a scratch directory."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.lab = Lab("bench")
        # Short, because ssh's control sockets lie in it.
        self.scratch = Path(tempfile.mkdtemp(prefix="gb"))
        self.notes: dict[str, Any] = {}
        # What is typed must not depend on what else is set here.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def close(self) -> None:
        """Leave nothing: the lab's processes include every ssh master that was started in it."""
        self.lab.down()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"bench: {text}", file=sys.stderr, flush=True)

    def up(self, **shape: Any) -> None:
        """A fresh lab of that shape; one that is up in it already is kept."""
        current = self.lab.current_plan()
        if current and all(current.arguments[key] == value for key, value in shape.items()):
            self.lab.drop()
            return
        self.lab.down()
        self.lab.up(**shape)

    # --- commands ---

    def command(self, text: str, masters: Path, record: bool = False, code: int | None = 0) -> Run:
        """A typed line in a shell on the lab's controller.

        :param masters: where Ansible keeps ssh connections for the next command.
        :param record: load the callback that records; not where the time is compared.
        :param code: the exit code that it must have; None is any.
        """
        settings = [f"ANSIBLE_SSH_CONTROL_PATH_DIR={masters}"]
        events = self.scratch / "events"
        if record:
            events.unlink(missing_ok=True)
            settings += [
                f"ANSIBLE_CALLBACK_PLUGINS={CALLBACKS}",
                "ANSIBLE_CALLBACKS_ENABLED=bench_record",
                f"BENCH_RECORD={events}",
            ]
        argv = self.lab.command(["env", *settings, "bash", "-c", text])
        run = self.timed(argv, code, cwd=ROOT, env=self.environment)
        if record and events.exists():
            run.events = [json.loads(line) for line in events.read_text().splitlines()]
        return run

    def timed(self, argv: list[str], code: int | None = 0, **options: Any) -> Run:
        """Run by the clock. The output goes to a file: an ssh master would keep a pipe open."""
        with (self.scratch / "output").open("w+") as output:
            options.setdefault("stdin", subprocess.DEVNULL)
            began = time.perf_counter()
            process = subprocess.Popen(argv, stdout=output, stderr=output, **options)
            try:
                got = process.wait(LONGEST_COMMAND)
            except subprocess.TimeoutExpired:
                raise BenchError(f"more than {LONGEST_COMMAND} s: {argv[-1]}") from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            seconds = time.perf_counter() - began
            output.seek(0)
            text = output.read()
        if code is not None and got != code:
            tail = " | ".join(text.strip().splitlines()[-5:])
            raise BenchError(f"exit code {got} of {argv[-1]}: {tail}")
        return Run(seconds, text)

    @contextlib.contextmanager
    def masters(self) -> Iterator[Path]:
        """A place for ssh masters with none in it; those that come to be there are ended."""
        place = Path(tempfile.mkdtemp(prefix="m", dir=self.scratch))
        try:
            yield place
        finally:
            for socket in place.iterdir():
                self.lab.run(
                    ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "any"],
                    stderr=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            shutil.rmtree(place, ignore_errors=True)

    def cold(self, text: str, **options: Any) -> Run:
        """A typed line, with no ssh connection left from an earlier one."""
        with self.masters() as place:
            return self.command(text, place, **options)

    def alternate(
        self, ours: Callable[[], float], theirs: Callable[[], float]
    ) -> tuple[list[float], list[float]]:
        """Pairs of seconds, the order turned round from pair to pair."""
        first: list[float] = []
        second: list[float] = []
        for number in range(self.pairs):
            if number % 2:
                second.append(theirs())
                first.append(ours())
            else:
                first.append(ours())
                second.append(theirs())
        return first, second

    # --- the state of the GPUs ---

    def used(self, host: str = "pve1") -> list[int]:
        """MiB by GPU, as the driver has it."""
        used: list[int] = self.lab.ask(host, {"op": "status"})["used"]
        return used

    def clean(self) -> None:
        """Nobody holds anything, and the driver has released all of it."""
        self.lab.drop()
        wait_until(lambda: not any(self.used()), 20, "the driver to release memory")

    def hold(self, worker: bool = True) -> None:
        """The hung server in ct129, on eight GPUs and deaf to TERM; with it an orphaned worker."""
        self.clean()
        self.lab.hold("ct129", gpus="0-7", mib=76115, ignore_term=True)
        if worker:
            name = "sglang::scheduler_TP1"
            self.lab.hold("ct129", gpus="1", mib=1200, kind="orphan", name=name, ignore_term=True)

    def must_be_clean(self, what: str) -> None:
        """The command was to leave nothing in use."""
        if any(self.used()):
            raise BenchError(f"{what} left {self.used()} MiB in use")
