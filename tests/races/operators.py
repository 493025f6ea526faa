# SPDX-License-Identifier: GPL-3.0-or-later
"""Races on the lab with the whole command: two operators, a killed controller, a cut connection."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import linux
from tests.lab.lab import Lab, kill_exactly
from tests.scenarios.runner import ROOT, Process, Run, World, command_line, recorded

# ct130 computes on the other GPUs, so the command is about those of ct129.
COMMAND = "ansible-playbook reset_gpus.yml -l ct129 -e gpuops_gpus=0,1,2,3"
PATIENCE = 15  # seconds that something of ours may stay on a node after its controller is gone
LONGEST = 120

# What ct129 holds when somebody is about to reset it. `stuck` is memory that nobody holds, which a
# rung waits for; it goes away when the controller is dead.
WORKLOADS: list[dict[str, Any]] = [
    {"count": 1, "gpus": "0-3", "name": "python3"},
    {"count": 4, "gpus": "0-3", "name": "sglang::scheduler_TP0"},
    {"count": 1, "gpus": "0-3", "ignore_term": True},
    {"count": 2, "gpus": "1", "kind": "orphan"},
    {"count": 1, "gpus": "2", "kind": "stopped"},
    {"count": 1, "gpus": "0", "stuck": 512, "options": "-e gpuops_profile=now"},
]
STUBBORN = 2


@dataclass
class Operator:
    """One typed command that runs."""

    process: subprocess.Popen[str]
    record: Path
    masters: Path
    began: float

    def kill(self) -> None:
        """SIGKILL to the command itself, and to nothing that it has started."""
        self.process.kill()

    def belongs(self, pid: int) -> bool:
        """Is that a process of this command? ssh's kept connections have lost their environment."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return str(self.record).encode() in environment or str(self.masters) in command_line(pid)

    def result(self) -> Run:
        """Wait for its end, and say what it did."""
        output, _ = self.process.communicate(timeout=LONGEST)
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        events = [json.loads(line) for line in lines]
        return Run(self.process.returncode, output, time.monotonic() - self.began, events, {})


@dataclass
class Played:
    """What came of some rounds."""

    rounds: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest_left: float = 0.0

    def say(self, text: str) -> None:
        """Something that must not be."""
        self.wrong.append(f"round {self.rounds}: {text}")


class Site:
    """A lab with bystanders on pve1 and in its containers, and operators who type."""

    def __init__(self, name: str, seed: int = 3) -> None:
        self.world = World(Lab(name))
        self.lab = self.world.lab
        self.random = random.Random(seed)
        # Short, because a socket's path is: each operator keeps connections of his own there.
        self.folder = Path(tempfile.mkdtemp(prefix="gr"))
        self.operators: list[Operator] = []
        self.held: list[dict[str, Any]] = []
        self.usual = 0.0

    def __enter__(self) -> Site:
        try:
            shape = {"nodes": 0}
            self.lab.up(**shape)
            self.world.shape = shape
            self.world.place_bystanders()
            neighbour = self.lab.hold("ct130", gpus="4-7", mib=60000, name="python3")
            what = "the neighbour's workload in ct130"
            self.world.bystanders[what] = Process(
                what, neighbour["outer_pid"], neighbour["start_time"]
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started, and take the lab away."""
        for operator in list(self.operators):
            self.forget(operator)
        self.lab.down()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- operators ---

    def type(self, command: str = COMMAND) -> Operator:
        """Type a command, as an operator with connections of his own, and go on."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        process: subprocess.Popen[str] = self.lab.popen(
            ["env", f"ANSIBLE_SSH_CONTROL_PATH_DIR={home}", *command.split()],
            cwd=ROOT,
            env=recorded(home / "record"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        operator = Operator(process, home / "record", home, time.monotonic())
        self.operators.append(operator)
        return operator

    def forget(self, operator: Operator) -> None:
        """Close the connections that an operator kept, and end what is left of his command."""
        self.kill_all(operator)
        if operator.process.stdout:
            operator.process.stdout.close()
        operator.process.wait()
        shutil.rmtree(operator.masters, ignore_errors=True)
        self.operators.remove(operator)

    def kill_all(self, operator: Operator) -> None:
        """SIGKILL to a command and all that it has started here, each by its PID."""
        operator.kill()
        for file in (self.lab.paths.cgroup / "controller").rglob("cgroup.procs"):
            for pid in map(int, file.read_text().split()):
                with suppress(OSError):
                    start = linux.start_time(pid)
                    if operator.belongs(pid):
                        kill_exactly(pid, start, signal.SIGKILL)

    def answer(self, operator: Operator, played: Played) -> Run:
        """The result of a command that should come to its end."""
        try:
            run = operator.result()
        except subprocess.TimeoutExpired:
            played.say(f"did not end within {LONGEST} s")
            self.kill_all(operator)
            run = operator.result()
        for words in ("Traceback", "internal error", "MODULE FAILURE"):
            if words in run.words:
                played.say(f"says {words!r}")
        return run

    # --- what must hold ---

    def arrange(self, workload: dict[str, Any]) -> None:
        """Somebody holds GPUs of ct129."""
        options = dict(workload)
        stuck = options.pop("stuck", 0)
        options.pop("options", "")
        self.held = self.lab.hold_many("ct129", options.pop("count"), **options)
        if stuck:
            self.lab.fault("pve1:3", "stuck", str(stuck))

    def clear(self) -> None:
        """End what is left of it."""
        self.lab.heal()
        for holder in self.held:
            self.world.end(holder)

    def check(self, played: Played, run: Run, who: str) -> None:
        """A command that came to its end undisturbed: clean, exit 0, and it is true."""
        if run.code or run.verdict("ct129") != "clean":
            played.say(f"{who}: exit {run.code}, {run.verdict('ct129')}: {reason(run)}")

    def truth(self, played: Played) -> None:
        """Nothing is in use but the neighbour's, and nobody else was harmed."""
        used = self.world.used()["pve1"]
        if any(used[:4]):
            played.say(f"NOT CLEAN after all: MiB in use {used}")
        self.harmed(played)

    def harmed(self, played: Played) -> None:
        """Bystanders by PID and start time."""
        for what, process in list(self.world.bystanders.items()):
            if not process.alive:
                played.say(f"BYSTANDER HARMED: {what}")
                del self.world.bystanders[what]

    def gone(self, played: Played, since: float) -> None:
        """Wait until nothing of ours is on the node any more; at most so long."""
        while left := self.world.ours():
            if time.monotonic() - since > PATIENCE:
                played.say(f"still on the node after {PATIENCE} s: {left}")
                break
            time.sleep(0.05)
        played.longest_left = max(played.longest_left, time.monotonic() - since)

    # --- two operators ---

    def two_operators(self, rounds: int, tell: Callable[[Played], None] = lambda _: None) -> Played:
        """Both reset ct129 at once."""
        played = Played()
        for number in range(rounds):
            played.rounds += 1
            self.arrange(WORKLOADS[STUBBORN] if number % 10 == 2 else WORKLOADS[number % 10 % 2])
            first = self.type()
            time.sleep(self.random.choice([0, 0, self.random.uniform(0, 0.6)]))
            second = self.type()
            runs = [self.answer(first, played), self.answer(second, played)]
            for who, run in zip(("first", "second"), runs, strict=True):
                self.check(played, run, who)
            self.truth(played)
            self.twice(played, runs)
            self.gone(played, time.monotonic())
            for operator in (first, second):
                self.forget(operator)
            self.clear()
            tell(played)
        return played

    def twice(self, played: Played, runs: list[Run]) -> None:
        """Was a process signalled by both on the same rung, or by one twice?"""
        sent = [Counter(signalled(run)) for run in runs]
        for counter in sent:
            played.counts["signals sent"] += sum(counter.values())
            for each, times in counter.items():
                if times > 1:
                    played.say(f"one operator signalled {each} {times} times")
        both = sent[0] & sent[1]
        played.counts["rounds in which both sent signals"] += all(sent)
        for each in both:
            played.say(f"climbed twice: both signalled {each}")

    # --- a controller that dies, a connection that is cut ---

    def interrupted(
        self,
        rounds: int,
        interrupt: Callable[[Operator, Played], float],
        tell: Callable[[Played], None] = lambda _: None,
    ) -> Played:
        """Interrupt a reset at a random moment; then nothing may be left, and the next is clean.

        The moments are spread over a whole run, each in a slice of its own.
        """
        played = Played()
        usual = self.usual_seconds(played)
        order = [WORKLOADS[-1 - n % len(WORKLOADS)] for n in range(rounds)]
        first, *rest = order  # with few rounds too, the one that makes a rung wait is among them
        self.random.shuffle(rest)
        order = [first, *rest]
        for number, workload in enumerate(order):
            # A command that ended too soon is no round; on a machine whose speed changes the same
            # moment would come too late again.
            for attempt in range(10):
                before_end = usual * 0.9**attempt
                if self.interrupt_once(played, workload, (number, rounds), before_end, interrupt):
                    break
            tell(played)
        return played

    def interrupt_once(
        self,
        played: Played,
        workload: dict[str, Any],
        part: tuple[int, int],
        usual: float,
        interrupt: Callable[[Operator, Played], float],
    ) -> bool:
        """Interrupt one command and type the next; False if it ended before."""
        number, rounds = part
        self.arrange(workload)
        operator = self.type(f"{COMMAND} {workload.get('options', '')}")
        longest = usual + 5 if "stuck" in workload or "ignore_term" in workload else usual
        if (
            number % 2 or "stuck" in workload
        ):  # every other time on the node itself, where it matters most
            self.wait_for_work(operator)
            longest -= usual / 2
        with suppress(subprocess.TimeoutExpired):
            operator.process.wait(longest * (number + self.random.random()) / rounds)
        if operator.process.poll() is not None:
            self.answer(operator, played)
            self.forget(operator)
            self.clear()
            return False
        played.rounds += 1
        self.gone(played, interrupt(operator, played))
        self.forget(operator)
        self.lab.heal()
        after = self.type()
        self.check(played, self.answer(after, played), "the next run")
        self.truth(played)
        self.gone(played, time.monotonic())
        self.forget(after)
        self.clear()
        return True

    def usual_seconds(self, played: Played) -> float:
        """How long a run takes here that nobody disturbs; measured once."""
        if self.usual:
            return self.usual
        self.arrange(WORKLOADS[0])
        operator = self.type()
        run = self.answer(operator, played)
        self.check(played, run, "undisturbed")
        self.forget(operator)
        self.clear()
        self.usual = run.seconds
        return self.usual

    def wait_for_work(self, operator: Operator) -> None:
        """Until the node program runs, or the command has ended without it."""
        while operator.process.poll() is None and not self.world.ours():
            time.sleep(0.01)

    def kill_controller(self, operator: Operator, played: Played) -> float:
        """SIGKILL to ansible-playbook alone, or to all its processes."""
        if self.world.ours():
            played.counts["while something of ours ran on the node"] += 1
        everything = played.rounds % 2 == 0
        played.counts["with all its processes" if everything else "alone"] += 1
        if everything:
            self.kill_all(operator)
        operator.kill()
        since = time.monotonic()
        if operator.process.stdout:
            operator.process.stdout.close()
        operator.process.wait()
        return since

    def cut_connection(self, operator: Operator, played: Played) -> float:
        """SIGKILL to the processes that sshd on pve1 has for the run's connection."""
        killed = 0
        if self.world.ours():
            played.counts["while something of ours ran on the node"] += 1
        for pid in self.world.processes("pve1"):
            line = command_line(pid)
            if re.match(r"sshd(-session)?: root", line) and is_session(pid):
                with suppress(OSError):
                    kill_exactly(pid, linux.start_time(pid), signal.SIGKILL)
                    killed += 1
        played.counts["connections cut"] += killed
        since = time.monotonic()
        run = self.answer(operator, played)
        played.counts[f"then ended with exit code {run.code}"] += 1
        if run.code == 0:
            self.check(played, run, "the run that was cut")
        return max(since, time.monotonic() - 1)


def signalled(run: Run) -> list[tuple[int, int, str]]:
    """(PID on the node, start time, rung) of every signal that was sent."""
    return [(each["node_pid"], each["start"], each["rung"]) for each in run.actions("sent")]


def is_session(pid: int) -> bool:
    """A process of sshd for a connection (not the one that listens)."""
    return "listener" not in command_line(pid)


def reason(run: Run) -> str:
    """Why a run did not end clean, in its own words."""
    results = run.results("ct129")
    return "; ".join([*run.refusals("ct129")[-1:], *[r["reason"] for r in results[-1:]]])
