# SPDX-License-Identifier: GPL-3.0-or-later
"""What was measured, and docs/real-gpu.md made of it."""

from __future__ import annotations

import collections
import itertools
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.commit import commit
from tests.gpu import parts

SETTINGS = "persistence_mode,compute_mode,mig.mode.current,power.limit,ecc.mode.current"
NOTES = Path(__file__).with_name("notes.md")
NOBODY, FULL = "nobody but the stopwatch", "a process per reading"
WAYS = (NOBODY, FULL, "a process per reading, memory.used only", "-lms 100", "-lms 50", "-lms 20")
READERS = ("nvidia-smi", "sh", "lxc-attach", "nsenter")

# Second zero, in driver's own times: what it must be, and what it should be.
MUST, AIM = 3.0, 1.5

# The product notes when it signalled in ticks of the kernel's clock since boot.
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Row:
    """One scenario: what was found before, what the playbook made of it, what is left."""

    def __init__(
        self,
        name: str,
        played: parts.Played,
        seen: dict[str, Any],
        used_before: int,
        used_after: int,
        apps_after: list[str],
    ) -> None:
        self.name = name
        self.played = played
        self.seen = seen
        self.used_before = used_before
        self.used_after = used_after
        self.apps_after = apps_after
        self.driver_seconds: float | None = None
        self.harmed: list[str] = []
        self.left: list[str] = []
        self.expected = ""
        self.deaths: dict[int, float] = {}

    def measure(self, watcher: parts.Watcher, victims: list[parts.Process]) -> None:
        """The driver's own time: from the first victim's exit to zero, as the stopwatch saw.

        Whoever had gone before the last rung signalled is not counted, as in the second zero.
        """
        time.sleep(0.05)
        pids = {victim.pid for victim in victims}
        self.deaths = {pid: at for pid, at in watcher.dying.items() if pid in pids}
        began = self.signalled_at(self.rung)
        due = [at for at in self.deaths.values() if began is not None and at >= began - TICK]
        if due:
            zero = watcher.zero_after(min(due))
            self.driver_seconds = zero - min(due) if zero else None

    @property
    def verdict(self) -> str:
        """The last word of the playbook about the host."""
        return str(self.played.final.get("verdict", "none"))

    @property
    def reason(self) -> str:
        """Its sentence."""
        return str(self.played.final.get("reason", ""))

    @property
    def rungs(self) -> list[dict[str, Any]]:
        """The rungs climbed."""
        climbed: list[dict[str, Any]] = self.played.release.get("rungs", [])
        return climbed

    @property
    def rung(self) -> str:
        """The last rung climbed."""
        return str(self.rungs[-1]["name"]) if self.rungs else ""

    @property
    def second_zero(self) -> float | None:
        """Seconds from the first signal of the last rung to the second reading of zero."""
        return self.rungs[-1]["timings"].get("second_zero") if self.rungs else None

    @property
    def actions(self) -> list[dict[str, Any]]:
        """What was done to whom, and when."""
        done: list[dict[str, Any]] = self.played.release.get("actions", [])
        return done

    def told_to_quit(self, rung: str = "") -> bool:
        """Was MPS told to quit (at this rung)? It waits for its clients, and has answered when that
        is noted, so no time can be counted from there."""
        return any(each["signal"] == "quit" and rung in ("", each["rung"]) for each in self.actions)

    def signalled_at(self, rung: str = "") -> float | None:
        """When the first signal (of this rung) was sent, by the stopwatch's clock."""
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        moments = [
            each["at"] * TICK - since_boot for each in self.actions if rung in ("", each["rung"])
        ]
        return min(moments, default=None)

    @property
    def from_first_signal(self) -> float | None:
        """Seconds from the very first signal to the second zero, the waits between rungs in it."""
        first, last = self.signalled_at(), self.signalled_at(self.rung)
        if self.second_zero is None or first is None or last is None or self.told_to_quit():
            return None
        return self.second_zero + last - first

    @property
    def ratio(self) -> float | None:
        """Second zero in driver's own times, both from the last rung on; only where memory was
        there to be released."""
        if not self.second_zero or not self.driver_seconds or self.used_before == 0:
            return None
        return None if self.told_to_quit(self.rung) else self.second_zero / self.driver_seconds

    @property
    def false_clean(self) -> bool:
        """Called clean while the real tool still shows memory or a process."""
        return self.verdict == "clean" and bool(self.used_after or self.apps_after)

    @property
    def readers_seen(self) -> list[str]:
        """Processes of our own readers that got into a result."""
        results = [self.seen, self.played.final, self.played.release]
        rows = [
            row
            for result in results
            for key in ("holders", "spared", "actions")
            for row in result.get(key, [])
        ]
        return sorted({row["name"] for row in rows if row["name"] in READERS})

    def plain(self) -> dict[str, Any]:
        """Everything as data."""
        keys = (
            "name verdict reason rung second_zero from_first_signal driver_seconds ratio "
            "used_before used_after apps_after harmed left expected false_clean readers_seen rungs "
            "seen deaths"
        )
        data = {key: getattr(self, key) for key in keys.split()}
        return data | {
            "seconds": self.played.seconds,
            "exit_code": self.played.exit_code,
            "output": self.played.output,
            "final": self.played.final,
        }


class Figures:
    """All of one run."""

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self.commit = commit()
        self.settings_before = self.settings()
        self.rows: list[Row] = []
        # What this machine cannot play, and why.
        self.not_played: dict[str, str] = {}
        self.kinds: dict[str, dict[str, Any]] = {}
        # Our own readers in each of many looks.
        self.looks: list[list[str]] = []
        self.reader: dict[str, Any] = {}
        self.direct: dict[str, Any] = {}
        self.minors: dict[str, dict[str, int]] = {}
        self.seconds = 0.0

    def settings(self) -> str:
        """The settings of the GPU that a careless test could change."""
        return parts.smi(f"--query-gpu={SETTINGS}").strip()

    def finish(self) -> None:
        """The run is over."""
        self.seconds = (datetime.now(UTC) - self.began).total_seconds()

    def raw(self) -> str:
        """Everything, for whoever wants to look closer."""
        data = {
            "commit": self.commit,
            "rows": [row.plain() for row in self.rows],
            "not_played": self.not_played,
            "kinds": self.kinds,
            "reader": self.reader,
            "direct": self.direct,
            "looks": self.looks,
            "minors": self.minors,
        }
        return json.dumps(data, indent=1, default=str)

    def document(self) -> str:
        """docs/real-gpu.md."""
        sections = [self._head(), self._scenarios(), self._kinds(), self._reader(), self._rest()]
        if NOTES.exists():
            sections.append(NOTES.read_text(encoding="utf-8").strip())
        return "\n\n".join(section for section in sections if section) + "\n"

    def _head(self) -> str:
        lines = parts.smi("--query-gpu=name,driver_version,memory.total").strip().splitlines()
        name, driver, total = lines[0].split(", ")
        ansible = subprocess.run(
            [sys.executable, "-m", "ansible", "adhoc", "--version"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.partition("]")[0]
        node = subprocess.run(
            [parts.NODE_PYTHON, "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[1]
        ratios = [row.ratio for row in self.rows if row.ratio and row.expected == "clean"]
        harmed = sum(len(row.harmed) for row in self.rows)
        wrong = [row.name for row in self.rows if row.verdict != row.expected]
        plays = spread([row.played.seconds for row in self.rows if len(row.rungs) == 1], 2)
        times = " / ".join(
            f"{ratio:.2f} ({judged(ratio)})"
            for ratio in ([statistics.median(ratios), max(ratios)] if ratios else [])
        )
        return f"""\
# On a real GPU

Written by `make gpu-test` (`tests/gpu/`); do not edit. Holders are real CUDA processes; what the
real `nvidia-smi` says is the only truth, and the driver's own time is taken by a process of its
own that reads NVML every 2 ms.

| | |
|---|---|
| date | {self.began:%Y-%m-%d %H:%M} UTC, {self.seconds:.0f} s for everything |
| commit | {self.commit} |
| machine | {len(lines)} {name}, {total} MiB; {os.cpu_count()} CPUs; kernel {platform.release()} |
| driver | {driver} |
| software | {ansible.replace("adhoc ", "").replace("[", "")}, Python {platform.python_version()}; \
on the node side {parts.NODE_PYTHON} ({node}) |
| scenarios | {len(self.rows)}, with the expected verdict {len(self.rows) - len(wrong)}\
; not played: {len(self.not_played)} |
| false clean | {sum(row.false_clean for row in self.rows)} |
| bystanders harmed | {harmed} |
| second zero ÷ driver's own time, median / worst | {times or "-"}; \
must be {MUST:g} or less, aim {AIM:g} or less |
| the aim of {AIM:g} | {self._aim()} |
| the whole playbook with one rung climbed, median (least to most) | {plays} s |
| gpuops' own readers in a result | {sum(bool(row.readers_seen) for row in self.rows)} \
of {len(self.rows)}, and in {sum(map(bool, self.looks))} of {len(self.looks)} looks |
| settings of the GPU before and after | {self.settings_before} / {self.settings()} |"""

    def _aim(self) -> str:
        """How many ratios are within it, and which are not."""
        ratios = {row.name: row.ratio for row in self.rows if row.ratio}
        missed = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio > AIM]
        text = f"met in {len(ratios) - len(missed)} of {len(ratios)}"
        return f"{text}; missed: {', '.join(missed)}" if missed else text

    def _scenarios(self) -> str:
        lines = [
            "## Scenarios",
            "",
            "Second zero, from the very first signal: to the second reading of zero, with the time",
            "in it that a rung gives those it asked before the next one is climbed; from the last",
            "rung: from the first signal of the rung that freed the GPU. Driver: from the exit of",
            "the first process that ended at that rung to zero in NVML, in the same run. Ratio: of",
            f"the two, which must be {MUST:g} or less and is aimed at {AIM:g} or less. Play: the",
            "whole `ansible-playbook reset_gpus.yml`. Where MPS was told to quit, when it was told",
            "is not recorded, only when it had answered; so nothing is counted from there.",
            "",
            "| scenario | MiB before | verdict | rung reached | second zero from the very first "
            "signal s | second zero from the last rung s | driver s | ratio | met | play s "
            "| MiB after |",
            "|---|--:|---|---|--:|--:|--:|--:|---|--:|--:|",
        ]
        for row in self.rows:
            mark = "" if row.verdict == row.expected else f" (expected {row.expected})"
            lines.append(
                f"| {row.name} | {row.used_before} | {row.verdict}{mark} | {row.rung or '-'} "
                f"| {number(row.from_first_signal)} | {number(row.second_zero)} "
                f"| {number(row.driver_seconds)} | {number(row.ratio, 2)} | {judged(row.ratio)} "
                f"| {row.played.seconds:.2f} | {row.used_after} |"
            )
        if self.not_played:
            lines += ["", "Not played here:", ""]
            lines += [f"- {name}: {why}" for name, why in self.not_played.items()]
        lines += ["", "What was said where it could not be clean:", ""]
        lines += [f"- {row.name}: {row.reason}" for row in self.rows if row.verdict != "clean"]
        return "\n".join(lines)

    def _kinds(self) -> str:
        if not self.kinds:
            return ""
        lines = [
            "## What the scan sees of each kind",
            "",
            "| kind | computes? | evidence | descriptors | mappings |",
            "|---|---|---|---|---|",
        ]
        for kind, seen in self.kinds.items():
            evidence = "; ".join(
                f"{device}: {', '.join(how)}" for device, how in seen.get("evidence", {}).items()
            )
            files = seen["files"]
            answer = "yes" if seen["workload"] else "no"
            lines.append(
                f"| {kind} | {answer} | {evidence or 'not seen'} | {counts(files['descriptors'])} "
                f"| {counts(files['mappings'])} |"
            )
        return "\n".join(lines)

    def _reader(self) -> str:
        if not self.reader:
            return ""
        call, short, loop = (self.reader[key] for key in ("call", "short", "loop"))
        fresh = "\n".join(
            f"| {way} | {spread(each['late'])} | {spread(each['driver'])} |"
            for way, each in self.reader["fresh"].items()
        )
        return f"""\
## How fast the tool reads

One process per reading: {spread(call)} s with all fields that the product asks for, \
{spread(short)} s with `memory.used` alone (n = {len(call)}).
One process that loops (`-lms {loop["asked_ms"]}`), its standard output a pipe: first line after \
{loop["first"]:.3f} s, then a line every {spread(loop["gaps"])} s; \
each line is flushed at once: {"yes" if loop["flushes_each_line"] else "no"}.

A 20 GiB holder is killed while it is read; seconds, median (least to most):

| read by | zero is read, after NVML shows zero | driver's own time meanwhile |
|---|--:|--:|
{fresh}"""

    def _rest(self) -> str:
        lines = []
        if self.direct:
            lines += [
                "## The node program without Ansible",
                "",
                f"20 GiB, rung kill: second zero after {number(self.direct['second_zero'])} s, "
                f"driver {number(self.direct['driver'])} s; the whole program "
                f"{self.direct['seconds']:.2f} s; "
                f"its last scan {self.direct['scan']['processes']} processes in "
                f"{self.direct['scan']['seconds'] * 1000:.1f} ms.",
                "",
            ]
        scans = [row.seen["scan"]["seconds"] for row in self.rows]
        looks = [row.seen["program_seconds"] for row in self.rows]
        if scans:
            lines.append(
                f"A look (scan and two readings, no Ansible) took {spread(looks)} s, "
                f"the scan in it {spread(scans, 4)} s."
            )
        if self.minors:
            same = len({json.dumps(each, sort_keys=True) for each in self.minors.values()}) == 1
            lines.append(
                "Minor numbers from `/proc/driver/nvidia/gpus/*/information` and `nvidia-smi -q` "
                + ("agree." if same else f"differ: {self.minors}.")
            )
        return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def judged(ratio: float | None) -> str:
    """Is a ratio what it must be, and what it should be?"""
    if ratio is None:
        return "-"
    if ratio > MUST:
        return "must missed"
    return "must and aim met" if ratio <= AIM else "must met, aim missed"


def spread(values: list[float], digits: int = 3) -> str:
    """Median (least to most)."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def counts(files: dict[str, int]) -> str:
    """3 nvidia0, 1 nvidiactl."""
    return ", ".join(f"{count} {name}" for name, count in sorted(files.items())) or "none"


def device_files(pid: int) -> dict[str, dict[str, int]]:
    """How often a process has each NVIDIA device open (any one task) and mapped."""
    open_files: collections.Counter[str] = collections.Counter()
    mapped: collections.Counter[str] = collections.Counter()
    # The last task: the main thread may be dead, and tasks share both tables.
    task = max(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    for link in (task / "fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
        if name.startswith("/dev/nvidia"):
            open_files[name.rpartition("/")[2]] += 1
    for line in (task / "maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if name.startswith("/dev/nvidia"):
            mapped[name.rpartition("/")[2]] += 1
    return {"descriptors": dict(open_files), "mappings": dict(mapped)}


def query() -> list[str]:
    """The product's own question."""
    from ansible_collections.gpuops.gpu.plugins.module_utils import nvidia_smi

    fields = ",".join(nvidia_smi.GPU_FIELDS)
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def used_of(line: str) -> int:
    """The column memory.used of a line that answers the product's question, or the short one."""
    return int(line.split(",")[3] if "," in line else line)


def short_query() -> list[str]:
    """The least that one could ask."""
    return ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]


def single_calls(
    argv: list[str], until_zero: bool = True, most: int = 100
) -> list[tuple[float, int]]:
    """(when answered, MiB) of one process after the other."""
    answers = []
    for _ in range(most):
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        answers.append((time.monotonic(), used_of(text)))
        if until_zero and answers[-1][1] == 0:
            break
    return answers


class Loop:
    """One nvidia-smi that answers again and again into a pipe."""

    def __init__(self, milliseconds: int) -> None:
        self.began = time.monotonic()
        argv = [*query(), "-lms", str(milliseconds)]
        self.popen = subprocess.Popen(argv, stdout=subprocess.PIPE)
        self.lines_of_chunks: list[int] = []
        self.rest = b""

    def read(self, seconds: float, until_zero: bool = False) -> list[tuple[float, int]]:
        """(when it came, MiB) of each line."""
        assert self.popen.stdout
        answers: list[tuple[float, int]] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not select.select([self.popen.stdout], [], [], 0.05)[0]:
                continue
            data = os.read(self.popen.stdout.fileno(), 65536)
            now = time.monotonic()
            self.lines_of_chunks.append(data.count(b"\n"))
            *lines, self.rest = (self.rest + data).split(b"\n")
            answers += [(now, used_of(line.decode())) for line in lines]
            if until_zero and answers and answers[-1][1] == 0:
                break
        return answers

    def close(self) -> None:
        """End it."""
        self.popen.kill()
        self.popen.wait(5)


def reader_speed(bench: parts.Bench, watcher: parts.Watcher) -> dict[str, Any]:
    """How long a reading takes, and how soon a zero is read after it is true."""
    call, short = (
        [
            later - earlier
            for earlier, later in itertools.pairwise(
                at for at, _ in single_calls(argv, until_zero=False, most=13)
            )
        ]
        for argv in (query(), short_query())
    )
    loop = Loop(20)
    answers = loop.read(2)
    loop.close()
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(answers)]
    measured: dict[str, Any] = {
        "call": call,
        "short": short,
        "loop": {
            "asked_ms": 20,
            "first": answers[0][0] - loop.began,
            "gaps": gaps,
            "flushes_each_line": max(loop.lines_of_chunks) == 1 and len(answers) > 50,
        },
        "fresh": {},
    }
    for way in WAYS:
        late, driver = [], []
        for _ in range(4):
            holder = bench.start("plain", 20)
            loop = Loop(int(way.split()[1])) if way.startswith("-lms") else None
            if loop:
                loop.read(0.2)
            watcher.watch([holder])
            os.kill(holder.pid, 9)
            if loop:
                answers = loop.read(5, until_zero=True)
                loop.close()
            elif way != NOBODY:
                answers = single_calls(query() if way == FULL else short_query())
            holder.end()
            died = watcher.died(holder)
            zero = parts.wait_for("zero", lambda died=died: watcher.zero_after(died))
            driver.append(zero - died)
            if way != NOBODY:
                late.append(answers[-1][0] - zero)
        measured["fresh"][way] = {"late": late, "driver": driver}
    return measured
