# SPDX-License-Identifier: GPL-3.0-or-later
"""One target's part of a run, against readers and processes that the test makes up."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    holders,
    node,
    nvidia_smi,
    owners,
    restarts,
    signals,
    turns,
    verdict,
    work,
)
from tests.patience import PATIENCE, until

NAMESPACE = 2
UUID = "GPU-0"


class Reader:
    """Stands for a session: each question is answered when it is taken."""

    def __init__(self, used: str = "0", meanwhile: Callable[[], object] | None = None) -> None:
        self.lost = ""
        self.hung = False
        self.used = used
        self.meanwhile = meanwhile or (lambda: None)
        self.last: nvidia_smi.Reading | None = None

    def answer(self) -> tuple[str, int]:
        """The names in /dev."""
        return "null nvidia0 nvidiactl", 0

    def gpus(self) -> nvidia_smi.Reading:
        """One GPU."""
        self.meanwhile()
        gpu = nvidia_smi.Gpu(0, UUID)
        gpu.used_text, gpu.used_mib = self.used, nvidia_smi.number(self.used)
        self.last = nvidia_smi.Reading([gpu], [])
        return self.last

    def ask(self, *questions: str) -> None:
        """Nothing to do before the answer is taken."""

    def apps(self) -> tuple[list[nvidia_smi.App], list[str]]:
        """The driver lists nobody."""
        return [], []

    def drop_answers(self) -> None:
        """Nothing was asked before."""

    def close(self) -> None:
        """Nothing to close."""


class Machine:
    """A node whose processes are those in ``there``; ``looks`` counts how often they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: list[holders.Holder] = []
        self.looks = 0
        self.during: Callable[[], object] = lambda: None
        host = node.Node.__new__(node.Node)
        host.began = time.monotonic()
        host.devices = holders.Device({})
        host.own_namespaces = [NAMESPACE]
        host.own_family = {4242}
        host.own_owner = owners.Owner("host", "", "")
        host.own_cgroup = "0::/\n"
        host.in_container = False
        host.problems = []
        host.minors = {UUID: 0}
        host.session = Reader()  # type: ignore[assignment]
        host._apps_readable = True
        host.ghosts = []
        host._lock = threading.Lock()
        host._scan = None
        host._commands = {}
        host.stoppers = holders.Stoppers()
        host._tool_told_minors = False
        self.node = host
        monkeypatch.setattr(holders, "scan", self.scan)
        monkeypatch.setattr(holders, "describe", self.describe)
        monkeypatch.setattr(holders, "family", lambda pid: [pid, 1])

    def scan(self, devices: object, deep: bool = False, **_: object) -> holders.Scan:
        """Stands for the look at all processes."""
        self.looks += 1
        found = holders.Scan(deep)
        found.holders = {one.pid: one for one in self.there}
        self.during()
        return found

    def describe(self, one: holders.Holder) -> bool:
        """Stands for what /proc says of a process."""
        known = [each for each in self.there if each.pid == one.pid]
        for each in known:
            one.cgroup, one.namespaces = each.cgroup, list(each.namespaces)
            one.name, one.command = each.name, each.command
        return bool(known)

    def comes(self, pid: int = 500, device: str = "gpu0", how: str = "descriptor") -> None:
        """A process of the node's own opens a device."""
        one = holders.Holder(pid)
        one.evidence = {device: {how}}
        one.cgroup, one.namespaces = "0::/\n", [NAMESPACE]
        one.name, one.command = "python3", "python3 serve.py"
        self.there.append(one)

    def work(self, reader: Reader, **spec: Any) -> work.Work:
        """The part of one target."""
        target = verdict.Target({"name": "node1", **spec})
        return work.Work(self.node, target, reader, [])  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("used", ["0", "[N/A]"])
def test_a_slow_reader_does_not_take_the_look_of_a_fast_one(machine: Machine, used: str) -> None:
    only = {"holders_only": used != "0"}
    assert machine.work(Reader(used), **only).state()["verdict"] == "clean"
    # Whoever comes before a target's own first reading was there when it was read.
    slow = Reader(used, meanwhile=lambda: machine.there or machine.comes())
    result = machine.work(slow, **only).state()
    assert (result["verdict"], [each["node_pid"] for each in result["holders"]]) == ("held", [500])


class Queue:
    """A lock that knows how many have ever come to it."""

    def __init__(self) -> None:
        self.came = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.came += 1
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_those_who_wait_for_a_look_share_the_next_one(machine: Machine) -> None:
    count = 40
    queue = Queue()
    machine.node._lock = queue  # type: ignore[assignment]
    # The first look ends when all the others have come to wait for it.
    machine.during = lambda: machine.looks > 1 or until(lambda: queue.came == count)
    results: list[dict[str, Any]] = []

    def serve() -> None:
        results.append(machine.work(Reader()).state())

    threads = [threading.Thread(target=serve) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each["verdict"] for each in results] == ["clean"] * count
    assert (queue.came, machine.looks) == (count, 2)


def test_a_proof_is_as_old_as_the_first_of_its_two_readings(machine: Machine) -> None:
    part = machine.work(Reader())
    part.state()
    first, second = part.readings
    assert part.proved_at() == first.at < second.at
    assert part.scan is not None
    assert part.scan.started > first.at


@pytest.mark.parametrize("how", ["refused", "late", "ending"])
def test_who_could_not_be_looked_at_is_named_with_what_to_do(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever has yet to end may do so while one waits."""
    late = how != "refused"

    def scan(*_: object, **__: object) -> holders.Scan:
        found = holders.Scan(deep=True)
        found.skipped = {500}
        if late:
            getattr(found, how).add(500)
        return found

    monkeypatch.setattr(holders, "scan", scan)
    monkeypatch.setattr(holders, "describe", lambda one: one.pid == 500)
    result = machine.work(Reader()).state()
    assert (result["verdict"], result["reason"][:37]) == (
        "unknown",
        "1 processes could not be looked at: ?",
    )
    assert ("run as root" in result["remedy"]) is not late
    assert ("/proc/PID/stack" in result["remedy"]) is late
    assert result["waiting"] is (how == "ending")


@pytest.mark.parametrize("hung", [False, True])
def test_only_a_call_that_hangs_takes_the_drivers_list_from_the_others(
    machine: Machine, hung: bool
) -> None:
    """A container that is not running says nothing about the driver."""
    gone = Reader()
    gone.lost, gone.hung = "container 130: not running", hung
    machine.work(gone).state()
    assert machine.node._apps_readable is not hung
    assert (machine.node.problems != []) is hung


@pytest.mark.parametrize("later", [{UUID: 0}, {}])
def test_a_gpu_that_nobody_has_used_yet_is_told_from_the_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, later: dict[str, int]
) -> None:
    """Without its number every holder of another GPU would count as its holder."""
    asked: list[str] = []

    class Tool(Reader):
        def ask(self, *questions: str) -> None:
            asked.extend(questions)

        def answer(self) -> tuple[str, int]:
            return f"GPU UUID : {UUID}\nMinor Number : 0\nGPU UUID : GPU-5\nMinor Number : 7\n", 0

    machine.node.minors = {"GPU-5": 5}
    machine.node.session = Tool()  # type: ignore[assignment]
    monkeypatch.setattr(nvidia_smi, "minors_from_proc", lambda: {"GPU-5": 5, **later})
    machine.comes(device="gpu5")
    assert machine.node.minor_of(UUID) == 0
    assert machine.node.minor_of("GPU-5") == 5
    assert machine.node.minor_of("GPU-6") is None
    assert machine.node.minor_of("GPU-7") is None
    # The driver's own files are enough, and nvidia-smi is asked once at most.
    assert asked == ["minors"]
    result = machine.work(Reader(), gpus=["0"]).state()
    assert result["gpus"][0]["verdict"] == "clean"


@pytest.mark.parametrize(
    ("owner", "named"),
    [
        (500, ": its lock is held by python3 (pid 500, host)"),
        (501, ": its lock is held by process 501, which has ended"),
        (0, ""),
    ],
)
def test_who_has_the_turn_is_named_where_it_is_waited_for_in_vain(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, owner: int, named: str
) -> None:
    class Taken:
        def __init__(self, _: int) -> None:
            pass

        def take(self, _: float) -> None:
            """Never."""

        def owner(self) -> int:
            return owner

        def end(self) -> None:
            pass

    machine.comes()
    monkeypatch.setattr(turns, "Turn", Taken)
    result = machine.work(Reader()).release({"name": "kill", "wait": 0.0})
    assert result["verdict"] == "unknown"
    assert result["reason"] == (
        f"another run of gpuops is at work on node1 and does not get done{named}"
    )


KILL = {"name": "kill", "select": "escaped", "signal": "KILL", "wait": 5}


def signalled(outcome: str = "sent", proof: str = "PID namespace 7") -> dict[str, Any]:
    """What an earlier rung has done to one that is gone."""
    who: dict[str, Any] = {
        "node_pid": 499,
        "pid": 9,
        "ppid": 0,
        "start": 1,
        "name": "python3",
        "command": "x",
    }
    near = proof if proof.startswith("cgroup ") else ""
    who["evidence"] = {"gpu0": ["descriptor"]}
    return {**who, "owner_evidence": proof, "restarted_by": near, "result": outcome, "at": 2}


@pytest.mark.parametrize("verb", ["release", "verify"])
@pytest.mark.parametrize(("outcome", "verdict_of_it"), [("sent", "held"), ("gone", "clean")])
def test_who_ends_after_a_rung_is_watched_like_who_ends_during_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, outcome: str, verdict_of_it: str, verb: str
) -> None:
    readings = []

    def meanwhile() -> None:
        readings.append(time.monotonic())
        if len(readings) == 4:
            machine.comes()

    part = machine.work(Reader(meanwhile=meanwhile))
    # Longer than four readings take, however slow the machine.
    monkeypatch.setattr(restarts, "WATCH", PATIENCE)
    part.earlier = [signalled(outcome, "cgroup /system.slice/vllm.service")]
    result = part.release(KILL) if verb == "release" else part.verify()
    assert result["verdict"] == verdict_of_it


@pytest.mark.parametrize("verb", ["release", "verify"])
def test_what_the_baseline_covers_is_waited_for_after_a_rung_too(
    machine: Machine, verb: str
) -> None:
    reader = Reader("500")
    part = machine.work(reader, baseline_mib=616)
    part.earlier = [signalled()]
    began = time.monotonic()
    result = part.release(KILL) if verb == "release" else part.verify()
    assert result["verdict"] == "clean"
    assert time.monotonic() - began >= work.UNSEEN_RELEASE


@pytest.mark.parametrize(("outcome", "waiting"), [("sent", True), ("gone", False)])
def test_from_inside_memory_may_be_that_of_whom_we_have_ended(
    machine: Machine, outcome: str, waiting: bool
) -> None:
    machine.node.in_container = True
    part = machine.work(Reader("500"))
    part.earlier = [signalled(outcome)]
    result = part.verify()
    assert (result["verdict"], result["waiting"]) == ("blocked", waiting)


class Grip:
    """A hold on one that lives for so many seconds."""

    pid = 500

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def ended(self) -> bool:
        return time.monotonic() > self.until

    def close(self) -> None:
        pass


@pytest.mark.parametrize("baseline", [0, 616])
def test_who_lets_go_at_the_end_of_a_wait_and_lives_on_is_no_reason_for_unknown(
    machine: Machine, baseline: int
) -> None:
    """The wait is over between the two readings that show zero."""
    reader = Reader("700")
    part = machine.work(reader, baseline_mib=baseline)
    machine.comes()
    assert part.state()["verdict"] == "held"
    machine.there.clear()
    reader.used = "500" if baseline else "0"
    part.first_signal = began = time.monotonic()
    part.wait([Grip(60)], {"signal": "TERM", "wait": 0.0}, [])  # type: ignore[list-item]
    assert part.judge().word == "clean"
    assert time.monotonic() - began >= (work.UNSEEN_RELEASE if baseline else 0)


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_the_second_for_the_driver_runs_from_the_end_of_the_process(
    machine: Machine, signal: str
) -> None:
    """What the baseline covers reads as zero all the time, while it is held too."""
    part = machine.work(Reader("500"), baseline_mib=616)
    part.state()
    part.first_signal = time.monotonic()
    ends = Grip(work.UNSEEN_RELEASE + 0.2)
    part.wait([ends], {"signal": signal, "wait": 30.0}, [])  # type: ignore[list-item]
    assert part.judge().word == "clean"
    assert time.monotonic() - ends.until >= work.UNSEEN_RELEASE


def test_who_could_not_be_looked_at_may_have_what_the_baseline_covers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(*_: object, **__: object) -> holders.Scan:
        found = holders.Scan(deep=True)
        found.busy = {500}
        return found

    monkeypatch.setattr(holders, "scan", scan)
    monkeypatch.setattr(holders, "describe", lambda one: one.pid == 500)
    for used, word in (("500", "unknown"), ("4", "clean")):
        assert machine.work(Reader(used), baseline_mib=616).state()["verdict"] == word


class Told:
    """A turn that knows that somebody was told so many seconds ago, by a run that is gone."""

    def __init__(self, pid: int, ago: float) -> None:
        self.pid = pid
        self.at = holders.ticks_since_boot() - int(ago * os.sysconf("SC_CLK_TCK"))

    def told_at(self, holder: holders.Holder, _: str) -> int:
        return self.at if holder.pid == self.pid else 0

    def remember(self, _: object) -> None:
        """Whom this run tells."""


@pytest.mark.parametrize(
    ("newcomer", "ago", "wait", "least", "most"),
    [
        (False, 58.8, 60.0, 1.2, 60.0),
        (False, 120.0, 60.0, 0.0, 60.0),
        (True, 0.5, 1.5, 1.0, PATIENCE),  # who is told only now has the whole of it
        (True, 120.0, 60.0, 0.0, 60.0),
    ],
)
def test_whom_a_broken_off_run_has_told_has_the_same_time_to_end(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    newcomer: bool,
    ago: float,
    wait: float,
    least: float,
    most: float,
) -> None:
    """Else the next rung kills at once, a moment after SIGTERM; also if others are there by now."""
    told = os.getpid()
    machine.comes(pid=told, how="mapping")
    other = subprocess.Popen(["sleep", "60"])
    try:
        if newcomer:
            machine.comes(pid=other.pid, how="mapping")
        for one in machine.there:
            one.start = int((holders.stat_fields(one.pid) or [])[19])
        everybody = list(machine.there)

        def during() -> None:
            machine.there = everybody[: 1 if other.poll() is not None else 2]

        machine.during = during
        part = machine.work(Reader("500"))
        monkeypatch.setattr(part, "start_loop", lambda: None)
        rung = {"name": "terminate", "select": "devices", "signal": "TERM", "wait": wait}
        began = time.monotonic()
        result = part.climb(rung, Told(told, ago))  # type: ignore[arg-type]
        took = time.monotonic() - began
    finally:
        other.kill()
        other.wait()
    assert result["verdict"] == "held"
    assert [each["node_pid"] for each in result["actions"]] == [other.pid] * newcomer
    assert least <= took + 0.05
    assert took < most


@pytest.mark.parametrize("ends", [False, True])
def test_who_is_being_killed_is_given_the_time_to_end(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """And what is said then is of then."""
    asked = []

    def being_killed(_: holders.Holder) -> bool:
        asked.append(1)
        if ends and len(asked) == 3:
            machine.there.clear()
            reader.used = "0"
        return len(asked) < 3 or not ends

    monkeypatch.setattr(signals, "is_being_killed", being_killed)
    monkeypatch.setattr(work, "UNKILLABLE_AFTER", PATIENCE if ends else 0.5)
    machine.comes()
    reader = Reader("500")
    result = machine.work(reader).verify()
    assert result["verdict"] == ("clean" if ends else "unkillable")


@pytest.mark.parametrize("verb", ["release", "verify"])
def test_who_ends_at_the_last_look_is_not_called_unkillable(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A server with eight GPUs may take longer to end than one is waited for."""
    monkeypatch.setattr(work, "UNKILLABLE_AFTER", 0.5)
    child = subprocess.Popen(["sleep", "600"])
    began = time.monotonic()

    def ends_late() -> None:
        if time.monotonic() > max(began, part.first_signal) + 0.5:
            child.kill()
            child.wait()
            machine.there.clear()

    machine.comes(child.pid)
    machine.there[0].start = int((holders.stat_fields(child.pid) or [])[19])
    machine.during = ends_late
    monkeypatch.setattr(signals, "is_being_killed", lambda holder: not gone(holder))
    monkeypatch.setattr(signals.Grip, "send", lambda *_: "sent")
    part = machine.work(Reader())
    rung = {**KILL, "select": "devices", "wait": 0.1}
    result = part.verify() if verb == "verify" else part.release(rung)
    assert (result["verdict"], result["stuck"]) == ("clean", {})


def gone(holder: holders.Holder) -> bool:
    """Has it ended?"""
    return holders.stat_fields(holder.pid) is None


@pytest.mark.parametrize(("device", "word"), [("gpu0", "unkillable"), ("gpu1", "clean")])
def test_who_was_killed_and_hangs_while_it_ends_is_not_taken_for_gone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, device: str, word: str
) -> None:
    """Nothing that it has open is seen any more, and none of it is free."""
    monkeypatch.setattr(work, "UNKILLABLE_AFTER", 0.3)
    stuck = [500]
    monkeypatch.setattr(signals, "is_being_killed", lambda holder: holder.pid in stuck)
    part = machine.work(Reader(), gpus=["0"])
    machine.comes(device=device)
    part.state()
    machine.there.clear()
    result = part.verify()
    assert result["verdict"] == word
    assert [each["node_pid"] for each in result["holders"]] == [500] * (word == "unkillable")
    stuck.clear()
    assert part.verify()["verdict"] == "clean"


def test_who_is_being_killed_elsewhere_is_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "is_being_killed", lambda _: pytest.fail("he was asked about"))
    machine.comes(device="gpu1")
    assert machine.work(Reader(), gpus=["0"]).verify()["verdict"] == "clean"


@pytest.mark.parametrize("earlier", [False, True])
def test_whom_the_driver_lists_a_moment_longer_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """It has just ended; where no memory is told the list alone says that it is still freed."""
    listed = [[nvidia_smi.App(UUID, 499, None)]] * 2
    session = machine.node.session
    monkeypatch.setattr(session, "apps", lambda: (listed.pop() if listed else [], []))
    part = machine.work(Reader("[N/A]"), holders_only=True)
    part.earlier = [signalled()] if earlier else []
    result = part.verify()
    assert (result["verdict"], result["waiting"]) == (
        ("clean", False) if earlier else ("unknown", True)
    )
