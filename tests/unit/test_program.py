# SPDX-License-Identifier: GPL-3.0-or-later
"""A batch on the acting host: each target has its own answer, whatever becomes of the others."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    node,
    nvidia_smi,
    owners,
    program,
    verdict,
    work,
)
from tests.patience import PATIENCE, until


class Idle:
    """Stands for the readers and for what the targets share, where a test needs neither."""

    stuck = ""
    in_container = False

    def __init__(self, *_: object) -> None:
        self.session = SimpleNamespace(close=lambda: None)
        self.began = time.monotonic()

    def start_others(self) -> None:
        """Nothing to start."""

    def of(self, _: object) -> Any:
        """No reader."""
        return self.session


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "Readers", Idle)
    monkeypatch.setattr(node, "Node", Idle)


RUNG = {"name": "kill", "select": "devices", "signal": "KILL", "wait": 5.0}


def release(*specs: dict[str, Any], readers: Any = None, **more: Any) -> dict[str, dict[str, Any]]:
    """What comes of a release of these targets, by name."""
    request = {
        "verb": "release",
        "check": False,
        "targets": list(specs),
        "earlier": {},
        "rung": RUNG,
        **more,
    }
    hosts: dict[str, dict[str, Any]] = program.run(request, readers)["hosts"]
    return hosts


@pytest.mark.usefixtures("idle")
def test_the_signals_of_a_work_that_is_given_up_stay_in_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled = threading.Event()

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert signalled.wait(PATIENCE)
            super().join(timeout)

    def climb(self: work.Work, rung: dict[str, Any]) -> dict[str, Any]:
        self.actions.append({"rung": rung["name"], "result": "sent"})
        signalled.set()
        time.sleep(60)
        return {}

    monkeypatch.setattr(program, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(work.Work, "release", climb)
    monkeypatch.setattr(deadline, "of_request", lambda _: 0.5)
    answer = release({"name": "node1"})["node1"]
    assert answer["reason"] == "the work on node1 was given up after 0.5 s"
    assert (answer["verdict"], answer["changed"]) == ("unknown", True)
    assert answer["actions"] == [{"rung": "kill", "result": "sent"}]


@pytest.mark.usefixtures("idle")
def test_a_target_whose_work_does_not_end_is_unknown_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Thread(threading.Thread):
        """Is waited for only when no other has anything left to do."""

        def join(self, timeout: float | None = None) -> None:
            there = threading.enumerate
            assert until(lambda: sum(isinstance(each, Thread) for each in there()) < 2)
            super().join(timeout)

    def serve(_: object, target: Any, *__: object) -> dict[str, Any]:
        if target.name == "stuck":
            time.sleep(60)
        judged = verdict.Verdict(verdict.CLEAN, "")
        return work.bare_result(target.name, judged)

    monkeypatch.setattr(program, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(program, "_serve", serve)
    monkeypatch.setattr(deadline, "of_request", lambda _: 0.5)
    began = time.monotonic()
    names = ["one", "stuck", "two"]
    request = {"verb": "state", "targets": [{"name": name} for name in names], "earlier": {}}
    answer = program.run(request)
    assert time.monotonic() - began < PATIENCE
    words = {name: host["verdict"] for name, host in answer["hosts"].items()}
    assert words == {"one": "clean", "stuck": "unknown", "two": "clean"}
    late = answer["hosts"]["stuck"]
    assert late["reason"] == "the work on stuck was given up after 0.5 s"
    assert late["settled"]
    assert "reboot" in late["remedy"]


class Alone(Idle):
    """A reader that was started for a target whose reading is not wanted is closed."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.dropped: set[str] = set()

    def drop(self, name: str) -> None:
        """Remember it."""
        self.dropped.add(name)


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"baseline_mib": "abc"}, "baseline_mib is 'abc'; write a whole number of zero or more"),
        ({"baseline_mib": -1}, "baseline_mib is '-1'; write"),
        ({"baseline_mib": [4]}, "baseline_mib is '[4]'; write"),
        ({"baseline_mib": 1.5}, "baseline_mib is '1.5'; write"),
        ({"baseline_mib": {"0": 4, "1": "4 MiB"}}, "baseline_mib[1] is '4 MiB'; write"),
        ({"vmid": "12x"}, "vmid is '12x'; write"),
        ({"expected_gpus": -8}, "expected_gpus is '-8'; write"),
        ({"scope": "evrything"}, "scope is 'evrything'; write one of node, job:NUMBER, user:NAME"),
        ({"scope": "user:"}, "scope is 'user:'; write one of"),
        ({"scope": "job:abc"}, "scope is 'job:abc'; write one of node, job:NUMBER"),
        ({"scope": "job:"}, "scope is 'job:'; write one of"),
        ({"scope": "container"}, "scope is 'container'; write one of"),
        ({"vmid": 129, "scope": "node"}, "scope is 'node'; write one of container, everything"),
        ({"vmid": 129, "scope": "user:bob"}, "scope is 'user:bob'; write one of"),
        ({"smi_timeout": 1e300}, "smi_timeout is '1e+300'; write a number of seconds above"),
        ({"smi_timeout": 0}, "smi_timeout is '0'; write a number of seconds above zero, 86400"),
        ({"smi_timeout": INFINITE}, "smi_timeout is 'inf'; write"),
        ({"smi_timeout": float("nan")}, "smi_timeout is 'nan'; write"),
        ({"smi_timeout": -1}, "smi_timeout is '-1'; write"),
        ({"smi_timeout": "soon"}, "smi_timeout is 'soon'; write"),
        ({"name": "node2"}, "two targets are called node2; name each once"),
    ],
)
def test_a_target_that_cannot_be_is_refused_at_once_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any], reason: str
) -> None:
    served: list[str] = []

    def climb(self: work.Work, _: object) -> dict[str, Any]:
        served.append(self.target.name)
        return work.bare_result(self.target.name, verdict.Verdict(verdict.CLEAN, ""))

    monkeypatch.setattr(work.Work, "release", climb)
    monkeypatch.setattr(node, "Node", Idle)
    readers = Alone()
    hosts = release({"name": "node1"}, {"name": "node2"}, {"name": "node3", **bad}, readers=readers)
    name = bad.get("name", "node3")
    assert hosts[name]["verdict"] == "unknown"
    assert hosts[name]["reason"].startswith(reason)
    assert "correct that" in hosts[name]["remedy"]
    others = sorted({"node1", "node2"} - {name})
    assert (sorted(served), readers.dropped) == (others, {name})
    assert [hosts[other]["verdict"] for other in others] == ["clean"] * len(others)


@pytest.mark.parametrize("wait", [INFINITE, float("nan"), -1.0, 86401.0])
def test_a_rung_that_would_never_end_is_refused(wait: float) -> None:
    hosts = release({"name": "node1"}, rung={**RUNG, "wait": wait})
    assert hosts["node1"]["verdict"] == "unknown"
    assert hosts["node1"]["reason"] == (
        f"wait of the rung is '{wait}'; write a number of seconds, 86400 at most"
    )


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("where", ["release", "result"])
def test_a_work_that_fails_says_so_at_once_with_what_it_has_done(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def climb(self: work.Work, _: object) -> dict[str, Any]:
        self.actions.append({"result": "sent"})
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(work.Work, "release", climb)
    if where == "result":
        monkeypatch.setattr(work.Work, "judge", climb)
    answer = release({"name": "node1"})["node1"]
    assert (answer["verdict"], answer["changed"]) == ("unknown", True)
    assert answer["reason"] == "internal error: RuntimeError: unforeseen"
    assert answer["actions"] == [{"result": "sent"}]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_what_the_host_does_not_give_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def climb(*_: object) -> dict[str, Any]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(work.Work, "release", climb)
    answer = release({"name": "node1"})["node1"]
    assert (answer["verdict"], answer["reason"]) == (
        "unknown",
        f"the acting host does not give gpuops what it needs: {os.strerror(number)}",
    )
    assert "ulimit" in answer["remedy"]


@pytest.mark.usefixtures("idle")
def test_a_container_that_stops_during_the_run_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owners, "container_cgroup", lambda *_: str(tmp_path / "gone"))
    answer = release({"name": "ct129", "vmid": 129})["ct129"]
    assert answer["verdict"] == "unknown"
    assert answer["reason"] == "container 129 is not running any more"
    assert answer["remedy"] == "start the container (pct start), or leave it out with -l"


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("possible", [0, 2])
def test_few_threads_serve_everybody(monkeypatch: pytest.MonkeyPatch, possible: int) -> None:
    start, started = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if len(started) == possible:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    def climb(self: work.Work, _: object) -> dict[str, Any]:
        return work.bare_result(self.target.name, verdict.Verdict(verdict.CLEAN, ""))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(work.Work, "release", climb)
    hosts = release(*({"name": f"ct{number}"} for number in range(8)))
    assert [each["verdict"] for each in hosts.values()] == ["clean"] * 8


PROC = "proc /proc proc rw,nosuid,nodev,noexec,relatime%s 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "value"),
    [
        ("", ""),
        (PROC % "", ""),
        (PROC % ",gid=27,hidepid=2", "2"),
        (PROC % ",hidepid=invisible", "invisible"),
        (PROC % ",hidepid=ptraceable,subset=pid", "ptraceable"),
        # The last one covers those before; elsewhere and other things are not it.
        (PROC % ",hidepid=2" + PROC % "", ""),
        (PROC % "" + "none /a tmpfs rw 0 0\n" + PROC % ",hidepid=4", "4"),
        (PROC % "" + "proc /jail/proc proc rw,hidepid=2 0 0\n", ""),
        (PROC % "" + "lxcfs /proc/stat fuse.lxcfs rw,hidepid=2 0 0\n", ""),
        ("hidepid=2 /proc proc rw,nothidepid=2 0 0\nnonsense\n", ""),
    ],
)
def test_what_the_mounts_say_of_hidden_processes(mounts: str, value: str) -> None:
    assert program.hidepid(mounts) == value


FITNESS = """
import sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import program
judged = program.unfit()
print(judged and "%s: %s; %s" % (judged.word, judged.reason, judged.remedy))
"""


@pytest.mark.parametrize(
    ("options", "may_trace", "fit"),
    [
        ("hidepid=0", False, True),
        ("hidepid=1", False, True),
        ("hidepid=2,gid=27", True, True),
        ("hidepid=2,gid=27", False, False),
        ("hidepid=4", True, True),
        ("hidepid=4", False, False),
    ],
)
def test_whom_proc_does_not_list_may_hold_what_looks_free(
    root: Path, options: str, may_trace: bool, fit: bool
) -> None:
    """A process that is not in the listing is not missed anywhere else."""
    mount = f'mount -t proc -o {options} proc /proc && exec "$@"'
    drop = [] if may_trace else ["setpriv", "--bounding-set=-sys_ptrace"]
    python3 = [sys.executable, "-c", FITNESS, str(root / "collections")]
    ran = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", mount, "sh", *drop, *python3],
        capture_output=True,
        text=True,
        check=False,
    )
    if fit:
        assert (ran.stdout, ran.stderr) == ("None\n", "")
    else:
        assert ran.stdout.startswith(
            "unknown: /proc on the acting host hides processes from gpuops"
        )
        assert "CAP_SYS_PTRACE" in ran.stdout
        assert "mount /proc without hidepid" in ran.stdout


@pytest.mark.usefixtures("idle")
def test_there_are_descriptors_for_thousands_of_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    def climb(self: work.Work, _: object) -> dict[str, Any]:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return work.bare_result(self.target.name, verdict.Verdict(verdict.CLEAN, ""))

    monkeypatch.setattr(work.Work, "release", climb)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        release({"name": "node1"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == [min(before[1], program.MOST_FILES)]
