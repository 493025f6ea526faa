"""The lab's further real parts: systemd, podman, an unprivileged container, MPS; and the shapes
of Slurm's and Kubernetes' cgroups.

Needs root and the packages of packages.txt; skipped without them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, LabError
from tests.lab.lab import is_there
from tests.lab.linux import process_state
from tests.lab.look import descriptors, fuser, left_behind, mapped, sh, used
from tests.lab.node import which_missing
from tests.lab.systemd import INIT
from tests.patience import PATIENCE, until

MISSING = [*which_missing(), *(name for name in ("podman", "runc") if not shutil.which(name))]
pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(MISSING) or not Path(INIT).exists(),
        reason="needs root, LXC, systemd, podman, runc",
    ),
]
NAME = f"test-parts-{os.getpid()}"
SYSTEMD = ("ct131", "node9")


@pytest.fixture(scope="module")
def the_lab() -> Iterator[Lab]:
    """One lab for the module."""
    lab = Lab(NAME)
    answer = lab.up(cts="129", nodes=1, systemd="131,node9", unprivileged="132")
    print(f"up: {answer['seconds']} s")
    yield lab
    print(f"down: {lab.down()['seconds']} s")
    assert left_behind(NAME) == []


@pytest.fixture
def lab(the_lab: Lab) -> Iterator[Lab]:
    """The lab, without holders before and after."""
    yield the_lab
    the_lab.drop()
    assert until(
        lambda: not any(used(the_lab, "pve1") + used(the_lab, "node1") + used(the_lab, "node9"))
    )


def cgroup(lab: Lab, host: str, pid: int) -> str:
    """The v2 cgroup of a process as that host shows it."""
    text = sh(lab, host, f"cat /proc/{pid}/cgroup")
    return next(line[3:] for line in text.splitlines() if line.startswith("0::"))


# --- systemd ---


@pytest.mark.parametrize("host", SYSTEMD)
def test_systemd_is_process_1_and_runs_sshd(lab: Lab, host: str) -> None:
    command = "cat /proc/1/comm; systemctl is-system-running; systemctl is-active ssh"
    result = lab.run(["ssh", host, command], capture_output=True, text=True)
    assert result.stdout.split() == ["systemd", "running", "active"]


@pytest.mark.parametrize("host", SYSTEMD)
def test_systemd_changes_nothing_of_the_machine(lab: Lab, host: str) -> None:
    for path in ("/proc/sys/fs/file-max", "/proc/sys/kernel/printk", "/sys/kernel/uevent_seqnum"):
        assert sh(lab, host, f"test -w {path} || echo no").strip() == "no"


@pytest.mark.parametrize("host", SYSTEMD)
def test_unit_comes_again_until_it_is_stopped(lab: Lab, host: str) -> None:
    holder = lab.hold(host, gpus="0", unit="vllm", restart="always", user="alice", name="vllm")
    assert cgroup(lab, host, holder["pid"]) == "/system.slice/vllm.service"
    assert used(lab, host)[0] == 76115
    line = sh(lab, host, f"ps -o user=,comm=,args= -p {holder['pid']}").split()
    assert line[:4] == ["alice", "vllm", "vllm", "-m"]
    sh(lab, host, f"kill -9 {holder['pid']}")
    assert until(lambda: fuser(lab, host, 0) not in ([], [holder["pid"]]))
    assert sh(lab, host, "systemctl show -P NRestarts vllm").strip() == "1"
    sh(lab, host, "systemctl stop vllm")
    assert until(lambda: not any(used(lab, host)))
    assert not lab.alive(holder["id"])[holder["id"]]


def test_unit_in_a_container_as_the_proxmox_host_sees_it(lab: Lab) -> None:
    holder = lab.hold("ct131", gpus="0", unit="vllm")
    path = "/lxc/131/ns/system.slice/vllm.service"
    assert cgroup(lab, "pve1", holder["node_pid"]) == path
    sh(lab, "ct131", f"kill -9 {holder['pid']}")
    assert until(lambda: sh(lab, "ct131", "systemctl is-failed vllm").strip() == "failed")
    assert not lab.alive(holder["id"])[holder["id"]]


@pytest.mark.parametrize("host", SYSTEMD)
def test_service_of_a_users_own_systemd(lab: Lab, host: str) -> None:
    holder = lab.hold(host, gpus="0", user_session="alice", restart="always")
    uid = int(sh(lab, host, "id -u alice"))
    path = f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/vllm.service"
    assert cgroup(lab, host, holder["pid"]) == path
    line = sh(lab, host, f"ps -o user=,ppid= -p {holder['pid']}").split()
    assert line[0] == "alice"
    assert sh(lab, host, f"ps -o args= -p {line[1]}").strip() == "/lib/systemd/systemd --user"
    assert len(mapped(lab, host, holder["pid"])) == 3
    sh(lab, host, f"kill -9 {holder['pid']}")
    assert until(lambda: fuser(lab, host, 0) not in ([], [holder["pid"]]))
    lab.drop(holder["id"])
    assert not fuser(lab, host, 0)


def test_drop_of_a_unit_that_always_restarts_and_cannot_be_killed(lab: Lab) -> None:
    holder = lab.hold("node9", gpus="0", unit="vllm", restart="always", kind="unkillable")
    os.kill(holder["outer_pid"], signal.SIGKILL)
    time.sleep(0.1)
    # It wakes up for a moment.
    assert until(lambda: process_state(holder["outer_pid"]) == "D")
    lab.drop(holder["id"])
    assert not Path(f"/proc/{holder['outer_pid']}").exists()
    assert until(lambda: sh(lab, "node9", "systemctl is-active vllm").strip() != "deactivating")
    assert not fuser(lab, "node9", 0)
    assert not sh(lab, "node9", "ls /etc/systemd/system/vllm.service")


def test_systemd_hosts_can_be_cut_and_mended(lab: Lab) -> None:
    lab.cut("ct131")
    result = lab.run(["ssh", "ct131", "true"], capture_output=True, text=True)
    assert result.returncode == 255 and "refused" in result.stderr
    lab.mend("ct131")
    assert lab.run(["ssh", "ct131", "true"]).returncode == 0


def test_units_are_refused_where_they_cannot_be(lab: Lab) -> None:
    for host, options in (
        ("ct129", {"unit": "vllm"}),
        ("node9", {"unit": "vllm.service"}),
        ("node9", {"unit": "a/b"}),
        ("node9", {"unit": "vllm", "kind": "orphan"}),
        ("node9", {"restart": "always"}),
        ("node1", {"podman": "vllm", "kind": "unkillable"}),
        ("node1", {"podman": "-x"}),
        ("node9", {"podman": "a", "unit": "b"}),
    ):
        with pytest.raises(LabError):
            lab.hold(host, **options)


# --- podman ---


@pytest.mark.parametrize(
    ("host", "vantage"), [("ct129", "pve1"), ("node1", "node1"), ("ct132", "pve1")]
)
def test_podman_container(lab: Lab, host: str, vantage: str) -> None:
    holder = lab.hold(host, gpus="0", podman="vllm", name="vllm", user="alice")
    assert holder["pid"] == 1
    path = cgroup(lab, vantage, holder["node_pid"])
    inside = f"/lxc/{host[2:]}/ns" if vantage == "pve1" else ""
    assert re.fullmatch(rf"{inside}/libpod_parent/libpod-[0-9a-f]{{64}}", path)
    known = sh(lab, host, "podman ps --no-trunc --format '{{.ID}} {{.Names}}'").split()
    assert known == [path.rpartition("-")[2], "vllm"]
    numbers = sh(lab, vantage, f"grep NSpid /proc/{holder['node_pid']}/status").split()
    assert len(numbers) == (4 if vantage == "pve1" else 3)
    nodes = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
    assert descriptors(lab, vantage, holder["node_pid"]) == nodes
    assert mapped(lab, vantage, holder["node_pid"]) == nodes
    assert used(lab, host)[0] == 76115
    line = sh(lab, vantage, f"ps -o comm=,args= -p {holder['node_pid']}").split()
    assert line[:3] == ["vllm", "vllm", "-m"]


def test_podman_restarts_it_until_it_is_dropped(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", podman="vllm", restart="always")
    os.kill(holder["outer_pid"], signal.SIGKILL)
    # That it was gone may be over before it is looked at.
    assert until(lambda: not is_there(holder["outer_pid"], holder["start_time"]))
    assert until(lambda: lab.alive(holder["id"])[holder["id"]])
    lab.drop(holder["id"])
    assert not sh(lab, "node1", "podman ps --all --quiet")
    assert not lab.alive(holder["id"])[holder["id"]]


def test_podman_says_why_it_cannot(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", podman="vllm")
    with pytest.raises(LabError, match="already has"):
        lab.hold("node1", gpus="0", podman="vllm")
    assert lab.alive(holder["id"])[holder["id"]]
    sh(lab, "node1", "mv /usr/sbin/runc /usr/sbin/runc.away")
    with pytest.raises(LabError, match="runc"):
        lab.hold("node1", gpus="0", podman="other")
    sh(lab, "node1", "mv /usr/sbin/runc.away /usr/sbin/runc")


# --- an unprivileged container ---


def test_unprivileged_container_is_reached_like_the_others(lab: Lab) -> None:
    result = lab.run(["ssh", "ct132", "id -u; nvidia-smi -L"], capture_output=True, text=True)
    assert result.stdout.splitlines()[0] == "0" and len(result.stdout.splitlines()) == 9
    assert "unprivileged: 1" in sh(lab, "pve1", "pct config 132")
    assert sh(lab, "pve1", "pct exec 132 -- cat /proc/self/uid_map").split() == [
        "0",
        "100000",
        "65536",
    ]


@pytest.mark.parametrize("kind", ["plain", "mapped-only", "dead-main-thread", "unkillable"])
def test_unprivileged_holder(lab: Lab, kind: str) -> None:
    holder = lab.hold("ct132", gpus="0", kind=kind)
    assert used(lab, "pve1")[0] == used(lab, "ct132")[0] == 76115
    assert cgroup(lab, "pve1", holder["node_pid"]) == "/lxc/132/ns"
    for host, pid, uid in (("ct132", holder["pid"], "0"), ("pve1", holder["node_pid"], "100000")):
        assert sh(lab, host, f"grep Uid /proc/{pid}/status").split()[1] == uid
        names = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
        assert descriptors(lab, host, pid) == ([] if kind == "mapped-only" else names)
        if kind != "dead-main-thread":
            assert mapped(lab, host, pid) == names
    numbers = sh(lab, "pve1", f"stat -Lc %t:%T /proc/{holder['node_pid']}/task/*/fd/*").split()
    assert ("c3:0" in numbers) == (kind != "mapped-only")
    sh(lab, "pve1", f"kill -9 {holder['node_pid']}")
    if kind != "unkillable":
        assert until(lambda: not any(used(lab, "pve1")))
    lab.drop(holder["id"])
    assert not process_state(holder["outer_pid"])


def test_unprivileged_container_with_users_can_be_stopped_and_started(lab: Lab) -> None:
    holder = lab.hold("ct132", gpus="0", user="alice", respawn=1)
    status = sh(lab, "pve1", f"grep Uid /proc/{holder['node_pid']}/status")
    assert int(status.split()[1]) > 101000
    lab.stop("ct132")
    assert not lab.alive(holder["id"])[holder["id"]]
    lab.start("ct132")
    assert lab.run(["ssh", "ct132", "true"]).returncode == 0


# --- the shapes of Slurm's and Kubernetes' cgroups ---


def test_slurm_step(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0-1", slurm="6")
    path = "/system.slice/slurmstepd.scope/job_6/step_batch/user/task_0"
    assert cgroup(lab, "node1", holder["pid"]) == path
    environment = sh(lab, "node1", f"tr '\\0' '\\n' </proc/{holder['pid']}/environ").splitlines()
    assert {"SLURM_JOB_ID=6", "SLURM_JOB_GPUS=0,1"} <= set(environment)
    assert sh(lab, "node1", f"ps -o user= -p {holder['pid']}").strip() == "alice"
    step = lab.hold("ct129", gpus="0", slurm="7.0", user="bob")
    path = "/lxc/129/ns/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    assert cgroup(lab, "pve1", step["node_pid"]) == path


def test_pod(lab: Lab) -> None:
    uid = "0a1b2c3d-0000-4000-8000-00000000beef"
    holders = lab.hold_many("node1", 2, gpus="0", pod=uid)
    paths = [cgroup(lab, "node1", holder["pid"]) for holder in holders]
    slice = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    shape = rf"/kubepods.slice/kubepods-burstable.slice/{slice}/cri-containerd-[0-9a-f]{{64}}.scope"
    assert all(re.fullmatch(shape, path) for path in paths)
    assert paths[0] != paths[1]


# --- MPS ---


def mps(lab: Lab, host: str, line: str) -> tuple[int, str]:
    """Exit code and output of nvidia-cuda-mps-control for one line of input."""
    result = lab.inside(host, ["sh", "-c", f"echo {line} | nvidia-cuda-mps-control"])
    return result.returncode, result.stdout


def test_mps_server_outlives_its_clients_until_it_is_told_to_quit(lab: Lab) -> None:
    assert mps(lab, "ct129", "quit") == (1, "Cannot find MPS control daemon process\n")
    server = lab.hold("ct129", gpus="0", kind="mps")
    client = lab.hold("ct129", gpus="0", mib=21009, mps_client=True)
    line = sh(lab, "ct129", f"ps -o ppid=,comm=,args= -p {server['pid']}").split()
    assert line[1:] == ["nvidia-cuda-mps", "nvidia-cuda-mps-server"]
    parent = sh(lab, "ct129", f"ps -o ppid=,comm=,args= -p {line[0]}").split()
    assert parent == ["1", "nvidia-cuda-mps", "nvidia-cuda-mps-control", "-d"]
    assert used(lab, "ct129")[0] == 66 + 21009
    assert mps(lab, "ct129", "get_server_list") == (0, f"{server['pid']}\n")
    assert mps(lab, "ct129", f"get_client_list {server['pid']}") == (0, f"{client['pid']}\n")
    sh(lab, "ct129", f"kill -9 {client['pid']}")
    assert until(lambda: used(lab, "ct129")[0] == 66)
    assert mps(lab, "ct129", "quit") == (0, "")
    assert until(lambda: used(lab, "ct129")[0] == 0)
    assert until(lambda: not sh(lab, "ct129", "pgrep nvidia-cuda-mps"))


def test_mps_daemon_has_the_gpus_but_not_uvm(lab: Lab) -> None:
    server = lab.hold("node1", gpus="0", kind="mps")
    daemon = int(sh(lab, "node1", f"ps -o ppid= -p {server['pid']}"))
    nodes = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
    assert descriptors(lab, "node1", daemon) == mapped(lab, "node1", daemon) == nodes[1:]
    assert descriptors(lab, "node1", server["pid"]) == mapped(lab, "node1", server["pid"]) == nodes
    assert fuser(lab, "node1", 0) == sorted([daemon, server["pid"]])


def test_mps_quit_after_a_time_leaves_a_client_its_memory(lab: Lab) -> None:
    lab.hold("node1", gpus="0", kind="mps")
    client = lab.hold("node1", gpus="0", mib=21009, mps_client=True)
    quitting = lab.popen(["ssh", "node1", "echo quit | nvidia-cuda-mps-control"])

    def refused() -> bool:
        try:
            early = lab.hold("node1", mps_client=True)
        except LabError as error:
            return "no more clients" in str(error)
        lab.drop(early["id"])  # the word has not arrived yet
        return False

    assert until(refused)
    assert quitting.poll() is None, "it waits for the client"
    assert mps(lab, "node1", "quit -t 1") == (0, "")
    assert quitting.wait(PATIENCE) == 0
    assert until(lambda: used(lab, "node1")[0] == 21009)
    assert lab.alive(client["id"])[client["id"]]


def test_mps_server_that_was_killed_comes_with_the_next_client(lab: Lab) -> None:
    server = lab.hold("node9", gpus="0", kind="mps", unit="nvidia-mps")
    assert cgroup(lab, "node9", server["pid"]) == "/system.slice/nvidia-mps.service"
    os.kill(server["outer_pid"], signal.SIGKILL)
    assert until(lambda: not any(used(lab, "node9")))
    lab.hold("node9", gpus="0", mib=100, mps_client=True)
    assert until(lambda: used(lab, "node9")[0] == 166)
    with pytest.raises(LabError, match="no MPS control daemon"):
        lab.hold("ct131", mps_client=True)


def test_down_leaves_nothing_of_any_part() -> None:
    name = f"{NAME}-b"
    lab = Lab(name)
    lab.up(cts="none", nodes=0, systemd="131,132,node9", unprivileged="132")
    for host in ("ct131", "ct132", "node9"):
        lab.hold(host, unit="vllm", restart="always")
        lab.hold(host, podman="vllm", restart="always")
        lab.hold(host, kind="mps")
        lab.hold(host, kind="unkillable")
    lab.down()
    assert left_behind(name) == []
