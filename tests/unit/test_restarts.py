"""What a run remembers of itself: how often a command has come back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, owners, restarts, work
from tests.patience import PATIENCE, until


def there(pid: int, start: int) -> holders.Holder:
    holder = holders.Holder(pid)
    holder.start, holder.name, holder.command = start, "python3", "python3 -m server"
    return holder


def pending(holder: holders.Holder, since: int = 950) -> str:
    """What starts this one again, that was signalled at this time."""
    found = restarts.pending([holder], {holder.pid: since})
    assert found is None or found[0] is holder
    return found[1] if found else ""


def done(pid: int, start: int, at: int, rung: str = "kill", result: str = "sent") -> dict[str, Any]:
    return {
        "node_pid": pid,
        "start": start,
        "at": at,
        "rung": rung,
        "result": result,
        "name": "python3",
        "command": "python3 -m server",
    }


@pytest.mark.parametrize(
    ("earlier", "times"),
    [
        ([], 0),
        # The same process, signalled before and still there, has not come back.
        ([done(9, 900, 950)], 0),
        ([done(5, 100, 800)], 1),
        # Told at two rungs, it was still one life.
        ([done(5, 100, 300, "terminate"), done(5, 100, 800)], 1),
        # Eight workers that ended together are one generation.
        ([done(pid, 100 + pid, 800) for pid in range(10, 18)], 1),
        ([done(5, 100, 300), done(6, 350, 800)], 2),
        ([done(5, 100, 200), done(6, 250, 400), done(7, 450, 800)], 3),
        # One that was there all along beside it is no life before.
        ([done(5, 100, 950)], 0),
        ([done(5, 100, 800, result="gone")], 0),
        ([dict(done(5, 100, 800), command="another")], 0),
        # A whole life within one tick of the clock.
        ([done(5, 900, 900)], 1),
    ],
)
def test_how_often_a_command_came_back(earlier: list[dict[str, Any]], times: int) -> None:
    assert restarts.times(there(9, 900), earlier) == times


@given(
    st.lists(
        st.builds(done, st.integers(2, 30), st.integers(0, 50), st.integers(0, 50)), max_size=30
    ),
    st.integers(0, 50),
)
def test_counting_ends_and_counts_no_more_than_there_were(
    earlier: list[dict[str, Any]], start: int
) -> None:
    assert 0 <= restarts.times(there(1, start), earlier) <= len(earlier)


VLLM = "/system.slice/vllm.service"
H = "3f8a0c5d" * 8
UID = "2a4b6c8d-1111-2222-3333-444455556666"


def in_group(cgroup: str, parent: holders.Holder | None = None) -> holders.Holder:
    holder = there(9, 900)
    holder.cgroup = f"0::{cgroup}\n"
    holder.owner = owners.owner_of(holder.cgroup, [1], [1])
    holder.ppid = parent.pid if parent else 0
    return holder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], holders.Holder]:
    """Give every holder a living parent of this name, with this number in its namespace."""

    def give(name: str, ns_pid: int) -> holders.Holder:
        one = holders.Holder(77)
        one.name, one.ns_pid, one.command = name, ns_pid, name + " -n"
        monkeypatch.setattr(restarts, "living_parent", lambda holder: one)
        return one

    return give


@pytest.mark.parametrize(
    ("change", "cgroup", "by", "times"),
    [
        # Another port each time, started by the same one: the same parent, or the same unit.
        ({"command": "python3 -m server --port 2", "ppid": 77}, "/", "bash", 1),
        (
            {"command": "python3 -m server --port 2", "owner_evidence": f"cgroup {VLLM}"},
            VLLM,
            "systemd",
            1,
        ),
        # An orphan's parent says nothing, nor does a login session, nor another unit.
        ({"command": "python3 -m server --port 2", "ppid": 77}, "/", "init", 0),
        ({"command": "x", "ppid": 77}, "/user.slice/user-0.slice/session-1.scope", "systemd", 0),
        ({"command": "x", "ppid": 78}, "/", "bash", 0),
        ({"command": "x", "owner_evidence": "cgroup /user.slice"}, "/user.slice", "systemd", 0),
        ({"command": "x", "owner_evidence": "cgroup /system.slice/a.service"}, VLLM, "systemd", 0),
        # Another program, though started by the same one.
        ({"name": "nginx", "command": "nginx", "ppid": 77}, "/", "bash", 0),
        ({"name": "nginx", "owner_evidence": f"cgroup {VLLM}"}, VLLM, "systemd", 0),
    ],
)
def test_a_server_that_comes_back_with_another_command(
    parent: Callable[[str, int], holders.Holder],
    change: dict[str, Any],
    cgroup: str,
    by: str,
    times: int,
) -> None:
    holder = in_group(cgroup, parent(by, 70))
    assert restarts.times(holder, [{**done(5, 100, 800), **change}]) == times


@pytest.mark.parametrize(
    ("cgroup", "name", "ns_pid", "expected"),
    [
        ("/system.slice/vllm.service", "systemd", 1, True),
        ("/gpu.slice/vllm.service", "systemd", 1, True),
        ("/lxc/131/ns/gpu.slice/gpu-a.slice/vllm.service", "systemd", 1, True),
        ("/system.slice/vllm.service", "init", 1, False),
        # A user's systemd is no PID 1.
        ("/user.slice/user-0.slice/user@0.service/session.slice/a.service", "systemd", 9, True),
        ("/user.slice/user-0.slice/session-1.scope", "systemd", 1, False),
        # Orphans of a session are handed to the user's systemd.
        ("/user.slice/user-0.slice/session-1.scope", "systemd", 9, False),
        ("/lxc/129/ns", "init", 1, False),
        ("/lxc/129/ns", "tini", 1, False),
        ("/lxc/129/ns", "supervisord", 1, True),
        ("/lxc/129/ns", "s6-svscan", 1, True),
        ("/lxc/129/ns", "bash", 20, True),
        (f"/system.slice/docker-{H}.scope", "containerd-shim", 40, True),
        (f"/lxc/129/ns/libpod_parent/libpod-{H}", "init", 1, True),
        ("/lxc/129/ns/lxc.payload.5", "init", 1, False),
    ],
)
def test_who_may_be_started_again(
    parent: Callable[[str, int], holders.Holder],
    cgroup: str,
    name: str,
    ns_pid: int,
    expected: bool,
) -> None:
    above = parent(name, ns_pid)
    assert restarts.supervised(in_group(cgroup, above), []) is expected


@pytest.mark.parametrize(("cgroup", "expected"), [(VLLM, True), ("/lxc/129/ns", False)])
def test_of_a_unit_nothing_may_be_left_when_it_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, cgroup: str, expected: bool
) -> None:
    monkeypatch.setattr(restarts, "living_parent", lambda holder: None)
    assert restarts.supervised(in_group(cgroup), []) is expected


@pytest.mark.parametrize(
    "cgroup",
    [
        VLLM,
        f"/lxc/131/ns{VLLM}",
        f"/lxc/129/ns/libpod_parent/libpod-{H}",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service",
        "/",
        # Control groups of version 1: the first names the container only.
        f"/lxc/129/ns\n1:name=systemd:/lxc/129/ns{VLLM}",
    ],
)
def test_whom_an_earlier_rung_has_signalled_is_asked_about_like_whom_this_one_has(
    cgroup: str,
) -> None:
    ended = in_group(cgroup)
    rung = {"name": "kill", "signal": "KILL"}
    found = restarts.remembered(work.action(ended, rung, "sent"))
    assert restarts._question(found) == restarts._question(ended)
    assert (found.pid, found.name, str(found.owner)) == (ended.pid, ended.name, str(ended.owner))
    escaped = in_group(VLLM)
    escaped.owner = owners.Owner("lxc", "131", "PID namespace 7", by_namespace=True)
    assert restarts._question(restarts.remembered(work.action(escaped, rung, "sent"))) == []


def test_who_is_to_be_ended_too_restarts_nothing(
    parent: Callable[[str, int], holders.Holder],
) -> None:
    above = parent("bash", 20)
    assert restarts.supervised(in_group("/lxc/129/ns", above), [above]) is False


@pytest.mark.parametrize(
    ("cgroup", "name", "ns_pid", "by", "remedy"),
    [
        ("/gpu.slice/vllm.service", "systemd", 1, "systemd", "systemctl stop vllm.service"),
        (
            "/user.slice/user-0.slice/user@0.service/session.slice/a.service",
            "systemd",
            9,
            "systemd",
            "as user 0, with XDG_RUNTIME_DIR=/run/user/0, run systemctl --user stop a.service",
        ),
        (f"/docker/{H}", "containerd-shim", 40, f"docker {H[:12]}", f"docker stop {H[:12]}"),
        (
            "/system.slice/slurmstepd.scope/job_6/step_0/user/task_0",
            "slurmstepd",
            40,
            "Slurm job 6",
            "scancel 6",
        ),
        (f"/kubepods/pod{UID}/{H}", "containerd-shim", 40, f"pod with uid {UID}", "kubectl"),
        ("/lxc/129/ns", "supervisord", 1, "supervisord (pid 1, 77 on the node)", "have it stop"),
        ("/lxc/129/ns", "bash", 20, "bash (pid 20, 77 on the node)", "stop that first"),
        ("/lxc/129/ns", "init", 1, "not its parent", "find and stop"),
    ],
)
def test_who_starts_it_and_how_to_stop_that(
    parent: Callable[[str, int], holders.Holder],
    cgroup: str,
    name: str,
    ns_pid: int,
    by: str,
    remedy: str,
) -> None:
    found = restarts.supervisor(in_group(cgroup, parent(name, ns_pid)))
    assert by in found[0]
    assert remedy in found[1]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """A command that is found first; returns the file it writes its arguments to."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(restarts, "ASK_TIMEOUT", PATIENCE)

    def make(name: str, body: str) -> Path:
        command, said = tmp_path / name, tmp_path / (name + ".said")
        command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >{said}\n{body}\n')
        command.chmod(0o755)
        return said

    return make


@pytest.mark.parametrize(
    ("active", "sub", "restart", "expected"),
    [
        ("activating", "auto-restart", "always", "auto-restart"),
        ("activating", "start-pre", "no", "start-pre"),
        ("deactivating", "stop-post", "on-failure", "stop-post"),
        ("deactivating", "stop-post", "no", ""),
        ("active", "running", "always", ""),
        ("failed", "failed", "always", ""),
        ("inactive", "dead", "no", ""),
    ],
)
@pytest.mark.parametrize("vmid", ["", "131"])
def test_a_unit_that_is_about_to_start_again(
    fake: Callable[[str, str], Path], active: str, sub: str, restart: str, expected: str, vmid: str
) -> None:
    state = f"Restart={restart}\\nActiveState={active}\\nSubState={sub}\\n"
    said = fake("lxc-attach" if vmid else "systemctl", f"printf '{state}'")
    holder = in_group(f"/lxc/{vmid}/ns{VLLM}" if vmid else VLLM)
    found = pending(holder)
    assert found == (f"systemd, unit vllm.service is in state {expected}" if expected else "")
    asked = f"show -p {restarts.UNIT_STATE} -- vllm.service\n"
    assert said.read_text() == (f"-n {vmid} -- systemctl {asked}" if vmid else asked)


@pytest.mark.parametrize("vmid", ["", "131"])
def test_a_users_own_systemd_is_asked_in_that_users_name(
    fake: Callable[[str, str], Path], vmid: str
) -> None:
    said = fake(
        "lxc-attach" if vmid else "setpriv",
        "printf 'ActiveState=activating\\nSubState=auto-restart\\n'",
    )
    unit = "/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service"
    found = pending(in_group(f"/lxc/{vmid}/ns{unit}" if vmid else unit))
    assert found == "systemd, unit vllm.service is in state auto-restart"
    asked = (
        "--reuid=1000 --regid=65534 --clear-groups env XDG_RUNTIME_DIR=/run/user/1000 "
        f"systemctl --user show -p {restarts.UNIT_STATE} -- vllm.service\n"
    )
    assert said.read_text() == (f"-n {vmid} -- setpriv {asked}" if vmid else asked)


@pytest.mark.parametrize(
    ("status", "policy", "expected"),
    [
        ("restarting", "on-failure", True),
        ("exited", "always", True),
        ("exited", "unless-stopped", True),
        ("exited", "no", False),
        ("exited", "on-failure", False),
        ("running", "always", False),
    ],
)
@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_container_that_is_about_to_start_again(
    fake: Callable[[str, str], Path], kind: str, status: str, policy: str, expected: bool
) -> None:
    said = fake(kind, f"echo {status} {policy}")
    found = pending(in_group({"docker": f"/docker/{H}"}.get(kind, f"/a/libpod-{H}")))
    assert found == (f"{kind}, container {H[:12]} is {status}" if expected else "")
    assert said.read_text().endswith(f"{H}\n")


@pytest.mark.parametrize(
    ("active", "after", "expected"),
    [
        ("active", 1.0, True),
        # The main process was there before: what was ended is one of those that it has started.
        ("active", -1.0, False),
        ("inactive", 1.0, False),
    ],
)
def test_a_unit_that_runs_again_but_holds_no_gpu_yet(
    fake: Callable[[str, str], Path], active: str, after: float, expected: bool
) -> None:
    signalled, now = holders.ticks_since_boot(), time.clock_gettime(time.CLOCK_MONOTONIC)
    started = f"ExecMainStartTimestampMonotonic={int((now + after) * 1e6)}"
    fake("systemctl", f"printf 'ActiveState={active}\n{started}\n'")
    found = pending(in_group(VLLM), signalled)
    assert found == ("systemd, unit vllm.service runs again" if expected else "")


@pytest.mark.parametrize(("ns_pid", "expected"), [(1, True), (7, False)])
def test_a_container_that_runs_again_but_holds_no_gpu_yet(
    fake: Callable[[str, str], Path], ns_pid: int, expected: bool
) -> None:
    fake("podman", "echo running always")
    ended = in_group(f"/a/libpod-{H}")
    ended.ns_pid = ns_pid
    assert pending(ended) == (f"podman, container {H[:12]} runs again" if expected else "")
    # Asked once for all of them, and one that has let go of its GPUs may still be there.
    other = in_group(f"/a/libpod-{H}")
    assert (restarts.pending([other, ended], {ended.pid: 950}) is not None) is expected
    ended.pid, ended.start = os.getpid(), int((holders.stat_fields(os.getpid()) or [])[19])
    assert pending(ended) == ""


@pytest.mark.parametrize(
    ("command", "later", "expected"),
    [
        ("sleep 61", 0, True),
        # A supervisor may give it another port.
        ("sleep 8000", 0, True),
        ("sleep 61", 10**9, False),
        # A script goes on to the next thing; the interpreter is the same.
        ("sleep 1m", 0, False),
    ],
)
def test_a_parent_that_has_started_it_again(command: str, later: int, expected: bool) -> None:
    ended = there(9, 900)
    ended.ppid, ended.name, ended.command = os.getpid(), "sleep", command
    since = holders.ticks_since_boot() + later
    with subprocess.Popen(["sleep", "61"]) as child:
        try:
            assert until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
            found = pending(ended, since)
        finally:
            child.kill()
    assert (f"has started sleep (pid {child.pid})" in found) is expected


def test_the_user_is_the_one_whose_unit_it_is(fake: Callable[[str, str], Path]) -> None:
    said = fake("setpriv", "true")
    own = "/user.slice/user-1000.slice/user@1000.service/app.slice/box.service"
    # Whoever has a unit of his own can make groups below it that are called like another's.
    for below in (
        "",
        "/user@0.service/x",
        "/user-1.slice/user@1.service/app.slice/a.service",
    ):
        assert pending(in_group(own + below)) == ""
        asked = said.read_text().splitlines()[-1].split()
        assert (asked[0], asked[4], asked[-1]) == (
            "--reuid=1000",
            "XDG_RUNTIME_DIR=/run/user/1000",
            "box.service",
        )


def test_each_is_asked_once_and_all_within_one_time(
    fake: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = fake("systemctl", "true")
    workers = [in_group(f"{VLLM}/worker-{each}") for each in range(40)]
    assert restarts.pending(workers, {workers[0].pid: 950}) is None
    assert len(said.read_text().splitlines()) == 1
    # A manager that hangs takes the time of all.
    monkeypatch.setattr(restarts, "ASK_TIMEOUT", 0.3)
    said = fake("systemctl", "exec sleep 60")
    units = [in_group(f"/system.slice/vllm-{each}.service") for each in range(200)]
    began = time.monotonic()
    assert restarts.pending(units, {units[0].pid: 950}) is None
    assert time.monotonic() - began < PATIENCE
    assert len(said.read_text().splitlines()) <= 2


def test_nobody_is_asked_about_what_is_not_his(fake: Callable[[str, str], Path]) -> None:
    said = [
        fake(name, "printf 'ActiveState=activating\\n'")
        for name in ("systemctl", "lxc-attach", "setpriv")
    ]
    escaped = in_group(VLLM)
    escaped.owner = owners.Owner("lxc", "131", "PID namespace 7", by_namespace=True)
    for holder in (
        escaped,
        # A unit in a container that has no manager we can reach, a user's too; none at all.
        in_group(f"/default/{H}{VLLM}"),
        in_group(f"/default/{H}/user.slice/user-0.slice/user@0.service/app.slice/a.service"),
        in_group("/user.slice/user-0.slice/session-1.scope"),
        in_group("/"),
        there(9, 900),
    ):
        assert pending(holder) == ""
        assert not any(file.exists() for file in said)
    assert pending(in_group(VLLM)) != ""


@pytest.mark.parametrize(
    "body",
    [
        "exit 3",
        "echo Failed to connect to bus",
        "printf '\\377=\\n'",
        "exec sleep 60",
        "exec yes ActiveState=activating",
    ],
)
def test_a_manager_that_does_not_answer_is_not_waited_for(
    fake: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(restarts, "ASK_TIMEOUT", 0.3)
    fake("systemctl", body)
    began = time.monotonic()
    assert pending(in_group(VLLM)) == ""
    assert time.monotonic() - began < PATIENCE


def test_a_manager_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pending(in_group(VLLM)) == ""
    assert pending(in_group(f"/docker/{H}")) == ""
