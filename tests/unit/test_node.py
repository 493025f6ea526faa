# SPDX-License-Identifier: GPL-3.0-or-later
"""Who may be touched for whom: every reason to leave a process alone, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    holders,
    node,
    nvidia_smi,
    owners,
    verdict,
    work,
)
from tests.patience import PATIENCE, until

from .conftest import Python

COLLECTIONS = Path(__file__).resolve().parents[2] / "collections"

# PID namespaces: the node's own and the one above it, two containers', and some inside those.
ABOVE, NODE, CT129, CT130, INNER = 1, 2, 129000, 130000, 900
HOME = {129: CT129, 130: CT130, 12: None}
OURSELVES = 4242
ROOT = 0

H = "3f8a0c5d" * 8
OTHER = "77aa0c5d" * 8
UID = "2a4b6c8d-1111-2222-3333-444455556666"
USER = "/user.slice/user-1000.slice/user@1000.service"
PROTECT = ["", "nvidia-persistenced", "dcgm*", "nvidia-cuda-mps-server", "*-keep-me"]


def this_node(own: str = "/user.slice/user-0.slice/session-1.scope") -> node.Node:
    """A node as it is after its start, with nothing read from this machine."""
    host = node.Node.__new__(node.Node)
    host.own_namespaces = [NODE, ABOVE]
    host.own_family = {OURSELVES}
    host.own_owner = owners.owner_of("0::" + own + "\n", host.own_namespaces, host.own_namespaces)
    host.own_cgroup = "0::" + own + "\n"
    host._commands = {}
    host.stoppers = holders.Stoppers()
    return host


def holder(
    cgroup: str = "/user.slice/user-0.slice/session-1.scope",
    spaces: tuple[int, ...] = (),
    pid: int = 500,
    ns_pid: int = 50,
    name: str = "python3",
    command: str = "python3 -m sglang.launch_server",
    uid: int = ROOT,
) -> holders.Holder:
    """A process below this node's namespace, ``spaces`` deep."""
    one = holders.Holder(pid)
    one.cgroup = "".join(f"0::{path}\n" for path in cgroup.split(" "))
    one.namespaces = [*spaces, NODE, ABOVE]
    one.ns_pid = ns_pid if spaces else pid
    one.name, one.command, one.uid = name, command, uid
    one.owner = owners.owner_of(one.cgroup, one.namespaces, [NODE, ABOVE])
    return one


def why_not(one: holders.Holder, host: node.Node | None = None, **spec: Any) -> str:
    target = verdict.Target({"name": "x", "protect": PROTECT, **spec})
    home = HOME[target.vmid] if target.vmid else NODE
    return (host or this_node()).why_not(target, one, home)


CT = {"vmid": 129}
ALL = {"scope": "everything"}
ALL_CT = {"vmid": 129, "scope": "everything"}
JOB = {"scope": "job:6"}
BOB = {"scope": "user:root"}
IN_129 = {"cgroup": "/lxc/129/ns", "spaces": (CT129,)}
SLURM = "/system.slice/slurmstepd.scope/job_%s/step_0/user/task_0"
DOCKER = f"/system.slice/docker-{H}.scope"

# Target, holder, and what the reason begins with: "" for one that may be touched.
TABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # What is the target's own may be touched.
    ({}, {}, ""),
    ({}, {"cgroup": "/"}, ""),
    ({}, {"cgroup": "/system.slice/vllm.service"}, ""),
    ({}, {"cgroup": "/gpu.slice/vllm.service"}, ""),
    ({}, {"cgroup": "/user.slice/user-1000.slice/session-3.scope", "uid": 1000}, ""),
    (CT, IN_129, ""),
    (CT, {"cgroup": "/lxc.payload.129", "spaces": (CT129,)}, ""),
    (CT, {"cgroup": f"/lxc/129/ns/docker/{H}", "spaces": (INNER, CT129)}, ""),
    # One that has left its container's cgroup is still in its namespace.
    (CT, {"cgroup": "/", "spaces": (CT129,)}, ""),
    (CT, {"cgroup": "/system.slice/ssh.service", "spaces": (INNER, CT129)}, ""),
    # Ourselves, and PID 1.
    ({}, {"pid": OURSELVES}, "protected: gpuops itself"),
    (ALL, {"pid": OURSELVES}, "protected: gpuops itself"),
    ({}, {"pid": 1}, "protected: it is PID 1"),
    (ALL, {"pid": 1, "cgroup": "/init.scope"}, "protected: it is PID 1"),
    (ALL_CT, {"pid": 1, "cgroup": "/init.scope"}, "protected: it is PID 1"),
    (CT, {**IN_129, "ns_pid": 1}, "protected: it is PID 1"),
    (CT, {"cgroup": "/", "spaces": (CT129,), "ns_pid": 1}, "protected: it is PID 1"),
    ({"vmid": 12}, {**IN_129, "ns_pid": 1}, "protected: it is PID 1"),
    (ALL, {**IN_129, "ns_pid": 1}, "protected: it is PID 1"),
    (ALL_CT, {"cgroup": "/lxc/130/ns", "spaces": (CT130,), "ns_pid": 1}, "protected: it is PID 1"),
    (ALL, {"cgroup": "/lxc.payload.x", "spaces": (INNER,), "ns_pid": 1}, "protected: it is PID 1"),
    (
        CT,
        {"cgroup": "/lxc/129/ns/lxc/130/ns", "spaces": (INNER, CT129), "ns_pid": 1},
        "protected: it is PID 1",
    ),
    # PID 1 of docker's container, of a sandbox in a container: the server itself as a rule.
    (ALL, {"cgroup": DOCKER, "spaces": (INNER,), "ns_pid": 1}, ""),
    (CT, {"cgroup": f"/lxc/129/ns/docker/{H}", "spaces": (INNER, CT129), "ns_pid": 1}, ""),
    (CT, {"cgroup": "/lxc/129/ns", "spaces": (INNER, CT129), "ns_pid": 1}, ""),
    # The protect list, whatever the scope.
    ({}, {"name": "dcgm-exporter"}, "protected by name (dcgm*)"),
    (ALL, {"name": "dcgm-exporter"}, "protected by name (dcgm*)"),
    (CT, {**IN_129, "command": "/usr/bin/dcgmi dmon"}, "protected by name (dcgm*)"),
    (JOB, {"cgroup": SLURM % 6, "name": "dcgm-exporter"}, "protected by name (dcgm*)"),
    ({}, {"command": "nvidia-cuda-mps-server"}, "protected by name (nvidia-cuda-mps-server)"),
    ({"mps": "quit"}, {"command": "nvidia-cuda-mps-server"}, ""),
    ({"mps": "quit"}, {"name": "dcgm-exporter"}, "protected by name (dcgm*)"),
    ({"mps": "quit", **CT}, {"command": "nvidia-cuda-mps-server"}, "foreign"),
    # The kernel cut its name; its command is that of the interpreter.
    (
        {},
        {"name": "nvidia-persiste", "command": "/usr/bin/python3 -m x"},
        "protected by name (nvidia-persistenced)",
    ),
    # A command that could not be read disproves nothing, but a whole name does.
    ({}, {"name": "dcgm-exporter", "command": ""}, "protected by name (dcgm*); its command"),
    ({}, {"name": "my-trainer-keep", "command": ""}, "protected by name (*-keep-me); its command"),
    ({}, {"name": "my-trainer-keep", "command": "my-trainer-keep-going"}, ""),
    ({}, {"name": "my-trainer", "command": ""}, ""),
    # No proof of an owner.
    ({}, {"cgroup": "/mine"}, "foreign: cgroup /mine"),
    ({}, {"cgroup": "/system.slice/made-by-hand"}, "foreign: cgroup /system.slice/made-by-hand"),
    ({}, {"cgroup": "/lxc.monitor/129"}, "foreign: cgroup /lxc.monitor/129"),
    ({}, {"cgroup": "/lxc/129 /lxc/130"}, "foreign: its control groups name"),
    (CT, {"cgroup": "/lxc/129 /lxc/130", "spaces": (CT129,)}, "foreign: its control groups name"),
    (BOB, {"cgroup": "/mine"}, "foreign: cgroup /mine"),
    (JOB, {"cgroup": "/mine"}, "foreign: cgroup /mine"),
    (ALL, {"cgroup": "/mine"}, ""),
    # Of another container, or only seemingly of this one.
    (CT, {"cgroup": "/lxc/130/ns", "spaces": (CT130,)}, "foreign: it belongs to lxc 130"),
    (CT, {"cgroup": "/lxc/12/ns", "spaces": (CT130,)}, "foreign: it belongs to lxc 12"),
    (CT, {"cgroup": "/lxc/1299/ns", "spaces": (CT130,)}, "foreign: it belongs to lxc 1299"),
    (CT, {"cgroup": "/lxc/130/ns", "spaces": (CT129,)}, "foreign: it belongs to lxc 130"),
    ({"vmid": 12}, IN_129, "foreign: it belongs to lxc 129"),
    (CT, {"cgroup": "/", "spaces": (CT130,)}, "foreign: it belongs to pidns 130000"),
    (CT, {"cgroup": "/lxc/129/ns", "spaces": (CT130,)}, "foreign: cgroup /lxc/129/ns, but not"),
    (CT, {"cgroup": "/lxc/129/x"}, "foreign: cgroup /lxc/129/x, but not"),
    ({"vmid": 12}, {"cgroup": "/lxc/12/ns", "spaces": (INNER,)}, "foreign: cgroup /lxc/12/ns, but"),
    (CT, {"cgroup": f"{USER}/lxc/129/x"}, "foreign: it belongs to user 1000"),
    (
        CT,
        {"cgroup": f"{USER}/lxc.payload.129/x", "spaces": (INNER,)},
        "foreign: it belongs to user",
    ),
    # Of the Proxmox host, or of what runs there beside the containers.
    (CT, {}, "foreign: it belongs to user 0"),
    (CT, {"cgroup": "/"}, "foreign: it belongs to host"),
    (CT, {"cgroup": DOCKER, "spaces": (CT129,)}, "foreign: it belongs to docker"),
    (ALL_CT, {"cgroup": "/lxc/130/ns", "spaces": (CT130,)}, ""),
    # Behind a fence on a node.
    ({}, IN_129, "foreign: it belongs to lxc 129"),
    ({}, {"cgroup": DOCKER}, "foreign: it belongs to docker"),
    ({}, {"cgroup": "/", "spaces": (INNER,)}, "foreign: it belongs to pidns 900"),
    ({}, {"cgroup": f"/kubepods/pod{UID}/{H}"}, "foreign: it belongs to pod"),
    ({}, {"cgroup": SLURM % 6}, "foreign: it belongs to slurm 6"),
    ({}, {"cgroup": "/system.slice/slurmd.service"}, "foreign: it belongs to scheduler"),
    ({}, {"cgroup": "/htcondor/condor_slot1_1@n1"}, "foreign: it belongs to htcondor"),
    ({}, {"cgroup": "/qemu.slice/100.scope"}, "foreign: it belongs to vm 100"),
    (ALL, {"cgroup": DOCKER}, ""),
    # A job, and no other that begins with its number.
    (JOB, {"cgroup": SLURM % 6}, ""),
    (JOB, {"cgroup": SLURM % 61}, "foreign: it belongs to slurm 61"),
    ({"scope": "job:61"}, {"cgroup": SLURM % 6}, "foreign: it belongs to slurm 6"),
    (JOB, {}, "foreign: it belongs to user 0"),
    # A user's, but only directly on the node.
    (BOB, {}, ""),
    (BOB, {"uid": 1}, "foreign: it belongs to user daemon"),
    (BOB, {"cgroup": DOCKER}, "foreign: it belongs to docker"),
    (BOB, {"cgroup": SLURM % 6}, "foreign: it belongs to slurm 6"),
]


@pytest.mark.parametrize(("spec", "who", "why"), TABLE)
def test_who_may_be_touched(spec: dict[str, Any], who: dict[str, Any], why: str) -> None:
    found = why_not(holder(**who), **spec)
    assert found.startswith(why) if why else found == ""


def test_who_has_left_the_cgroup_is_said_to_be_the_containers() -> None:
    one = holder("/", (CT129,))
    assert why_not(one, vmid=129) == ""
    assert (one.owner.kind, one.owner.id, one.escaped) == ("lxc", "129", True)
    assert why_not(one, vmid=130).startswith("foreign: it belongs to lxc 129")


def test_a_node_inside_a_container_is_reset_and_not_the_one_beside_it() -> None:
    host = this_node(f"/docker/{H}")
    assert why_not(holder(f"/docker/{H}"), host) == ""
    assert why_not(holder(f"/docker/{OTHER}"), host).startswith("foreign: it belongs to docker")
    assert why_not(holder("/lxc/129"), host).startswith("foreign: it belongs to lxc")


CGROUPS = [
    "/",
    "/init.scope",
    "/mine",
    "/system.slice/a.service",
    "/lxc/129/ns",
    "/lxc/130/ns",
    "/lxc/1299",
    "/lxc.payload.129",
    f"{USER}/lxc/129",
    DOCKER,
    SLURM % 6,
    "/qemu.slice/129.scope",
]


@given(
    st.lists(st.sampled_from(CGROUPS), min_size=1, max_size=3).map(" ".join),
    st.lists(st.sampled_from([CT129, CT130, INNER]), max_size=2, unique=True).map(tuple),
    st.sampled_from([1, 50]),
    st.sampled_from([129, 130, 12]),
)
def test_a_reset_of_a_container_touches_nobody_outside_its_namespace(
    cgroup: str, spaces: tuple[int, ...], ns_pid: int, vmid: int
) -> None:
    one = holder(cgroup, spaces, ns_pid=ns_pid)
    if why_not(one, vmid=vmid) == "":
        assert HOME[vmid] in spaces
        assert not (ns_pid == 1 and spaces[0] == HOME[vmid])
        assert one.owner.id == str(vmid)


@given(
    st.lists(st.sampled_from(CGROUPS), min_size=1, max_size=3).map(" ".join),
    st.lists(st.sampled_from([CT129, INNER]), max_size=2, unique=True).map(tuple),
)
def test_a_reset_of_a_node_touches_nobody_in_a_container(
    cgroup: str, spaces: tuple[int, ...]
) -> None:
    if why_not(holder(cgroup, spaces)) == "":
        assert not spaces
        assert set(cgroup.split()) <= {
            "/",
            "/init.scope",
            "/system.slice/a.service",
            f"{USER}/lxc/129",
        }


class Daemon:
    """Stands in for the reader that tells MPS to quit."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def quit_mps(self, directory: str) -> str:
        self.told.append(directory)
        return "sent"


Told = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, python: Python, start_of: Any) -> Told:
    """What becomes of the rung that tells MPS to quit, and the directories it is told through.

    ``source`` is what the MPS does before it is ready; ``args`` are its arguments.
    """

    def tell(
        directory: Path | str,
        source: str = "",
        *args: str,
        vmid: int = 0,
        spaces: tuple[int, ...] = (),
        init: int | None = None,
        uid: int = ROOT,
        ppid: int = 1,
    ) -> tuple[str, list[str]]:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
        monkeypatch.setattr(
            owners, "container_init", lambda vmid: os.getpid() if init is None else init
        )
        pid = python(f"import os, sys, time\n{source}\n{LIVE}", *args).pid
        cgroup = "/lxc/129/ns" if vmid else "/system.slice/mps.service"
        one = holder(cgroup, spaces, pid=pid, command="nvidia-cuda-mps-server", uid=uid)
        one.start, one.ppid = start_of(pid), ppid
        job = work.Work.__new__(work.Work)
        daemon = Daemon()
        job.node, job.session, job.actions = this_node(), daemon, []  # type: ignore[assignment]
        job.node.home = lambda target: CT129 if vmid else NODE  # type: ignore[method-assign]
        job.target = verdict.Target({"name": "x", "vmid": vmid, "mps": "quit", "protect": PROTECT})
        for grip in job.quit_mps([one], {"name": "mps", "signal": "quit"}):
            grip.close()
        (done,) = job.actions
        return done["result"], daemon.told

    return tell


OUT_OF_REACH: tuple[str, list[str]] = ("out of reach", [])
LIVE = "print('ready', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("spaces", "init", "result"),
    [
        ((CT129,), None, "sent"),
        ((INNER, CT129), None, "out of reach"),
        ((CT129,), 0, "out of reach"),
    ],
)
def test_the_mps_of_a_container_in_the_container_is_not_told_to_quit(
    told: Told, tmp_path: Path, spaces: tuple[int, ...], init: int | None, result: str
) -> None:
    found = told(tmp_path, vmid=129, spaces=spaces, init=init)
    assert found == (result, [str(tmp_path)] if result == "sent" else [])


CHROOT = "os.chroot(sys.argv[1])"
MOUNT_NAMESPACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
"""
# As systemd's PrivateTmp= does.
PRIVATE_TMP = (
    MOUNT_NAMESPACE
    + """
assert libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, None) == 0
os.mkdir(sys.argv[2])
"""
)


def test_an_mps_with_a_tmp_of_its_own_is_not_told_through_ours(told: Told, tmp_path: Path) -> None:
    """What lies there in ours may be another's daemon, with clients that the run is not about."""
    pipes = tmp_path / "nvidia-mps"
    pipes.mkdir()
    for source in ("", MOUNT_NAMESPACE):
        assert told(pipes, source) == ("sent", [str(pipes)])
    assert told(pipes, PRIVATE_TMP, str(tmp_path), str(pipes)) == OUT_OF_REACH


@pytest.mark.parametrize("linked", [False, True])
def test_an_mps_in_a_chroot_is_not_told_through_our_file_system(
    told: Told, tmp_path: Path, linked: bool
) -> None:
    """A link leads it to where it leads in there, though it has the words of ours."""
    pipes, aim, inside = tmp_path / "pipes", tmp_path / "aim", tmp_path / "chroot"
    for root in (Path("/"), inside):
        own_pipes, own_aim = (root / path.relative_to("/") for path in (pipes, aim))
        own_aim.mkdir(parents=True)
        own_pipes.symlink_to(aim) if linked else own_pipes.mkdir()
    assert told(pipes) == ("sent", [str(pipes)])
    assert told(pipes, CHROOT, str(inside)) == OUT_OF_REACH


@pytest.mark.parametrize(
    ("owner", "uid", "result"),
    [(ROOT, ROOT, "sent"), (1001, 1001, "sent"), (1001, ROOT, "out of reach"),
     (ROOT, 1001, "out of reach"), (1002, 1001, "out of reach")],
)  # fmt: skip
def test_an_mps_is_not_told_through_the_directory_of_somebody_else(
    told: Told, tmp_path: Path, owner: int, uid: int, result: str
) -> None:
    """Whoever calls his process so can have it point at the daemon of another."""
    os.chown(tmp_path, owner, owner)
    assert told(tmp_path, uid=uid)[0] == result


@pytest.mark.parametrize(
    ("name", "result"), [("nvidia-cuda-mps-control", "sent"), ("python3", "out of reach")]
)
def test_a_server_that_runs_as_its_clients_user_is_reached_through_its_daemons_directory(
    told: Told, tmp_path: Path, name: str, result: str
) -> None:
    with subprocess.Popen(
        [name, "-ISc", "import time; time.sleep(60)"], executable=sys.executable
    ) as daemon:
        assert until(lambda: name in holders.read_bytes(f"/proc/{daemon.pid}/cmdline").decode())
        found = told(tmp_path, uid=1001, ppid=daemon.pid)
        daemon.kill()
    assert found[0] == result


@pytest.mark.parametrize("directory", ["{} ", "{}\n", "{}\t", "pipes"])
def test_a_directory_that_a_shell_would_take_for_another_is_out_of_reach(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = directory.format(tmp_path / "pipes")
    Path(path).mkdir()
    assert told(path) == OUT_OF_REACH


def test_a_directory_on_a_mount_that_does_not_answer_is_out_of_reach(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "MPS_PATIENCE", 0.1)
    monkeypatch.setattr(os, "stat", lambda *_: time.sleep(60))
    began = time.monotonic()
    assert told(tmp_path) == OUT_OF_REACH
    assert time.monotonic() - began < PATIENCE


def test_a_command_is_remembered_while_the_process_waits_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = this_node()
    seen = {"state": "S", "command": "my-trainer", "start": 100, "name": "python3"}
    asked: list[int] = []

    def describe(one: holders.Holder) -> bool:
        vars(one).update(seen, cgroup="0::/\n", namespaces=[NODE, ABOVE])
        return True

    def read(pid: int) -> str:
        asked.append(pid)
        return "read-aside"

    monkeypatch.setattr(holders, "describe", describe)
    monkeypatch.setattr(node, "_command_of_stuck", read)

    def command() -> str:
        one = holders.Holder(500)
        assert host.identify(one)
        return one.command

    assert command() == "my-trainer"
    seen.update(state="D", command="")
    assert command() == "my-trainer"
    assert asked == []
    # Another process of that number, or another program in it.
    seen["start"] = 200
    assert command() == "read-aside"
    seen["name"] = "other"
    assert command() == "read-aside"
    # Once only: the child that reads may be stuck.
    command()
    assert asked == [500, 500]
    seen["state"] = "Z"
    seen["start"] = 300
    assert command() == ""


def test_a_command_is_read_by_a_child_that_can_be_abandoned(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = python("import time; print('ready', flush=True); time.sleep(60)").pid
    with monkeypatch.context() as patch:
        patch.setattr(node, "COMMAND_TIMEOUT", PATIENCE)
        assert "import time;" in node._command_of_stuck(pid)
        assert node._command_of_stuck(2**22 + 1) == ""
    # What gives no answer, as the memory of a process whose lock is held.
    silent = tmp_path / "silent"
    os.mkfifo(silent)
    monkeypatch.setattr(holders, "read_bytes", lambda _: silent.read_bytes())
    began = time.monotonic()
    assert node._command_of_stuck(pid) == ""
    assert time.monotonic() - began < PATIENCE


def test_our_reader_stays_ours_when_it_ends_in_the_middle_of_the_look(python: Python) -> None:
    host = this_node()
    shell = python(
        "import os, time\npid = os.fork()\nif pid == 0: time.sleep(60)\n"
        "print('ready', flush=True)\nprint(pid, flush=True)\nos.wait()\ntime.sleep(60)"
    )
    assert shell.stdout is not None
    reader, stranger = holders.Holder(int(shell.stdout.readline())), holders.Holder(1)
    assert holders.describe(reader)
    assert holders.describe(stranger)
    os.kill(reader.pid, signal.SIGKILL)
    assert until(lambda: holders.stat_fields(reader.pid) is None)
    assert host._is_own(reader)
    assert not host._is_own(stranger)


PARENTS = {19: 7}


def described(monkeypatch: pytest.MonkeyPatch, cgroup: str, namespaces: list[int]) -> None:
    """What /proc says of everybody."""

    def describe(one: holders.Holder) -> bool:
        one.cgroup, one.namespaces, one.name = cgroup, list(namespaces), "python3"
        one.command = "python3 serve"
        one.ppid = PARENTS.get(one.pid, 1)
        return True

    monkeypatch.setattr(holders, "describe", describe)


@pytest.mark.parametrize(
    ("cgroup", "namespaces", "kind"),
    [
        ("0::/process_api/7f\n", [NODE, ABOVE], "host"),
        ("0::/process_api/8a\n", [NODE, ABOVE], "unknown"),
        ("", [NODE, ABOVE], "unknown"),
        ("0::/process_api/7f/x\n", [NODE, ABOVE], "unknown"),
        ("0::/process_api/7f\n", [NODE + 9, NODE, ABOVE], "unknown"),
    ],
)
def test_the_group_that_we_run_in_ourselves_is_the_nodes_own(
    monkeypatch: pytest.MonkeyPatch, cgroup: str, namespaces: list[int], kind: str
) -> None:
    host = this_node("/process_api/7f")
    host.own_cgroup = "0::/process_api/7f\n" if cgroup else ""
    described(monkeypatch, cgroup, namespaces)
    one = holders.Holder(500)
    assert host.identify(one)
    assert one.owner.kind in (kind, "pidns")
    assert (one.owner.kind == "host") is (kind == "host")


def test_who_could_not_be_looked_at_counts_unless_it_is_ours_or_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = this_node()
    described(monkeypatch, "0::/\n", [NODE, ABOVE])
    monkeypatch.setattr(holders, "family", lambda pid: [pid, 1])
    monkeypatch.setattr(node.os, "getpid", lambda: 7)
    found = holders.Scan(deep=True)
    found.skipped, found.busy = {1, 18, 19}, {20}
    unseen = {
        spec: [
            each.pid for each in host._unseen(verdict.Target({"name": "n", **more}), found, untold)
        ]
        for spec, more, untold in (
            ("usual", {}, False),
            ("no memory told", {}, True),
            ("protected", {"protect": ["python3"]}, False),
        )
    }
    assert unseen == {"usual": [18], "no memory told": [18, 20], "protected": []}


@pytest.mark.parametrize("known", ["a stopper", "not reached"])
def test_the_command_of_who_has_stopped_a_look_is_read_aside(
    python: Python, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Its memory may be locked, and who reads that in this program would never come back."""
    pid = python("import time; print('ready', flush=True); time.sleep(60)").pid
    host = this_node()
    found = holders.Scan(deep=True)
    found.skipped = {pid}
    if "stopper" in known:
        host.stoppers.add(pid, wholly=False)
    else:
        found.late = {pid}
    asked: list[int] = []
    monkeypatch.setattr(node, "_command_of_stuck", lambda pid: asked.append(pid) or "my-editor")
    read = holders.read_bytes

    def only_without_a_lock(path: str) -> bytes:
        assert "cmdline" not in path
        return read(path)

    monkeypatch.setattr(holders, "read_bytes", only_without_a_lock)
    monkeypatch.setattr(host, "_is_own", lambda _: False)
    spec = {"name": "n", "scope": "everything"}
    assert [each.command for each in host._unseen(verdict.Target(spec), found, False)] == [
        "my-editor"
    ]
    protecting = verdict.Target({**spec, "protect": ["my-editor"]})
    assert host._unseen(protecting, found, False) == []
    assert asked == [pid]


IN_CONTAINER = """\
import sys; sys.path.insert(0, {path!r})
from ansible_collections.gpuops.gpu.plugins.module_utils import node
node.MARKS = {marks!r}
print(node._in_container())
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="makes a namespace")
@pytest.mark.parametrize(
    ("told", "marks", "inside"),
    [
        ("HOME=/root", [], False),
        ("HOME=/root", ["/proc"], True),
        ("container=lxc", [], True),
        ("KUBERNETES_SERVICE_HOST=10.0.0.1", [], True),
        ("MY_container=x", [], False),
    ],
)
def test_a_pod_is_known_for_a_container_too(told: str, marks: list[str], inside: bool) -> None:
    """From inside one the holders of others are not seen: what is zero there proves less."""
    code = IN_CONTAINER.format(path=str(COLLECTIONS), marks=marks)
    clean = ["env", "-i", f"PATH={os.environ['PATH']}", told]
    space = ["unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, "-c"]
    ran = subprocess.run([*clean, *space, code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{inside}\n"


def test_after_a_look_that_failed_no_answer_passes_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = this_node()
    host._lock, host._scan, host._apps_readable = threading.Lock(), None, True
    host.devices, host.ghosts, host.problems = holders.Device({}), [], []
    waiting: list[str] = []

    def apps() -> tuple[list[nvidia_smi.App], list[str]]:
        waiting.pop()
        return [], []

    host.session = cast(
        "nvidia_smi.Session",
        SimpleNamespace(
            ask=waiting.append,
            drop_answers=waiting.clear,
            apps=apps,
        ),
    )

    def scan(*_: object, **__: object) -> holders.Scan:
        if fails:
            raise OSError(11, "Resource temporarily unavailable")
        return holders.Scan(deep=False)

    monkeypatch.setattr(holders, "scan", scan)
    fails = True
    with pytest.raises(OSError, match="unavailable"):
        host.look(0.0)
    assert waiting == []
    fails = False
    assert host.look(0.0).holders == {}
    assert waiting == []


def test_a_number_in_the_drivers_list_makes_no_holder_of_who_holds_nothing() -> None:
    host = this_node()
    host.minors = {"GPU-a": 3}
    there, innocent = 500, 501
    listed = [nvidia_smi.App("GPU-a", pid, 900) for pid in (there, innocent)]
    host.session = cast("nvidia_smi.Session", SimpleNamespace(apps=lambda: (listed, [])))
    found = holders.Scan(deep=True)
    found.add(there, "descriptor", ["gpu3"])
    assert not host._add_driver_list(found)
    assert list(found.holders) == [there]
    assert found.holders[there].used_mib == {3: 900}
    assert found.holders[there].evidence == {"gpu3": {"descriptor", "driver list"}}
    assert host.ghosts == [(3, innocent)]
