# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/races.md: what the full numbers came to, as measured."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.commit import commit
from tests.races.operators import Played
from tests.races.pids import Result, own_pid_max

TARGET = Path(__file__).resolve().parents[2] / "docs/races.md"

HEAD = """\
# Races

Written by `python -m tests.races` ({command}); do not edit. `make test` plays the same with fewer
rounds, and there each guard is taken away once to see that the race would notice.

| | |
|---|---|
| date | {date} UTC, {minutes:.0f} min for everything |
| commit | {commit} |
| machine | {cpus} CPUs, load {load:.1f} at the end; kernel {kernel}; Python {python} |
| PIDs | {pids} |

| race | rounds | wrong | what was counted |
|---|--:|--:|---|
"""

TAIL = """
## What each one is

- PIDs change hands: the node program climbs its ladder against real processes in a PID namespace
  with {numbers}. Holders exit, fork (the child inherits the GPU), exec and let
  go; whoever has ended, his number is given at once to somebody innocent or to a protected monitor
  that holds a GPU too and gets its name a moment after it was forked. Pauses after the scan, before
  the handle is taken, between handle and re-check, and between re-check and signal stand for a busy
  node, and in them holders end and let go. Wrong is: an innocent or a monitor was ended by a signal
  (process 1 sees that in wait(2)); somebody was signalled who had let go before he was checked;
  clean was said and somebody held. The grace after TERM is 0.4 s there, and nvidia-smi is a script
  that reads /proc.
- The same, aimed: in every round holders end between the scan and the reading of who they are, and
  are protected monitors when it comes to signals.
- Two operators: two `ansible-playbook reset_gpus.yml -l ct129` at once, the second up to 0.6 s
  later, with connections of their own. Wrong is: an exit code that is not 0, a verdict that is
  not clean, memory left, a bystander harmed, a process signalled by both on the same rung.
- Controller killed: SIGKILL to `ansible-playbook`, alone or with all it had started, at random
  moments spread over a run, every other one while the node program runs. Wrong is: anything of
  ours on the node 15 s later, a next run that does not end clean, a bystander harmed.
- Connection cut: SIGKILL to the processes that sshd on pve1 has for the connection, likewise. If
  that run says clean nevertheless (Ansible connects once more), it has to be true.
"""


@dataclass
class Row:
    """One race."""

    name: str
    rounds: int
    wrong: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    note: str = ""

    def line(self) -> str:
        """As a row of the table."""
        counted = [f"{what} {number}" for what, number in sorted(self.counts.items())]
        text = "; ".join([*counted, *([self.note] if self.note else [])])
        return f"| {self.name} | {self.rounds} | {len(self.wrong)} | {text} |"


def of_pids(name: str, result: Result) -> Row:
    """The race of PIDs as a row."""
    counts = Counter(result.counts)
    for outcome, number in result.outcomes.items():
        counts[f"signals {outcome}" if outcome == "sent" else f"not signalled, {outcome}"] = number
    counts["let go between the check and the signal"] = result.let_go_after_check
    counts["runs of the ladder"] = result.ladders
    return Row(name, result.rounds, result.wrong, counts)


def of_played(name: str, played: Played) -> Row:
    """A race on the lab as a row."""
    note = f"longest until nothing of ours was on the node {played.longest_left:.1f} s"
    if any("still on the node" in each for each in played.wrong):
        note = f"not always gone after {played.longest_left:.0f} s"
    return Row(name, played.rounds, played.wrong, played.counts, note)


def write(rows: list[Row], seconds: float, command: str) -> None:
    """Write the file."""
    small = own_pid_max()
    head = HEAD.format(
        command=command,
        commit=commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        minutes=seconds / 60,
        cpus=os.cpu_count(),
        load=os.getloadavg()[0],
        kernel=platform.release(),
        python=platform.python_version(),
        pids="pid_max 420 in a namespace of its own, and ns_last_pid" if small else "ns_last_pid",
    )
    wrong = [f"- {row.name}, {each}" for row in rows for each in row.wrong]
    told = "\n## What was wrong\n\n" + "\n".join(wrong) + "\n" if wrong else ""
    numbers = "120 numbers to give out" if small else "numbers that are asked for (`ns_last_pid`)"
    text = head + "\n".join(row.line() for row in rows) + "\n" + told
    TARGET.write_text(text + TAIL.format(numbers=numbers), encoding="utf-8")
