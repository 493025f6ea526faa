# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose a process is, from the control groups that real systems write."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import owners

H = "3f8a0c5d" * 8
OTHER = "77aa0c5d" * 8
UID = "2a4b6c8d-1111-2222-3333-444455556666"
UID_ = UID.replace("-", "_")
STATIC_UID = UID.replace("-", "")

V1 = "12:pids:{0}\n11:cpuset:{0}\n10:devices:{0}\n5:cpu,cpuacct:{0}\n1:name=systemd:{0}\n0::/\n"
HYBRID = "10:devices:{0}\n1:name=systemd:{0}\n0::{0}\n"
V2 = "0::{0}\n"
SHAPES = [V1, HYBRID, V2]

USER = "/user.slice/user-1000.slice/user@1000.service"
KUBELET = "/kubepods.slice/kubepods-besteffort.slice"

# Path of a control group, owner's kind, owner's id.
FENCED = [
    # LXC as Proxmox sets it up; the processes of pct exec (lxc-attach) are in .lxc.
    ("/lxc/129", "lxc", "129"),
    ("/lxc/129/ns", "lxc", "129"),
    ("/lxc/129/ns/init.scope", "lxc", "129"),
    ("/lxc/129/ns/system.slice/ssh.service", "lxc", "129"),
    ("/lxc/129/ns/user.slice/user-0.slice/session-4.scope", "lxc", "129"),
    ("/lxc/129/ns/.lxc", "lxc", "129"),
    ("/lxc/129/.lxc", "lxc", "129"),
    # LXC's own default, and LXD's and Incus's.
    ("/lxc.payload/129", "lxc", "129"),
    ("/lxc.payload.129", "lxc", "129"),
    ("/lxc.payload.web/system.slice/cron.service", "lxc", "web"),
    # One that a user has started is no container of the node's, whatever its name.
    (f"{USER}/lxc.payload.mine/init.scope", "user lxc", "mine"),
    (f"{USER}/app.slice/lxc.payload.129/x", "user lxc", "129"),
    # Nested: whatever is inside container 129 is 129's.
    (f"/lxc/129/ns/system.slice/docker-{H}.scope", "lxc", "129"),
    (f"/lxc/129/ns/docker/{H}", "lxc", "129"),
    (
        f"/lxc/129/ns{KUBELET}/kubepods-besteffort-pod{UID_}.slice/cri-containerd-{H}.scope",
        "lxc",
        "129",
    ),
    ("/lxc/129/ns/lxc/130/ns/init.scope", "lxc", "129"),
    ("/lxc/129/ns/lxc.payload.130/init.scope", "lxc", "129"),
    ("/lxc/129/ns/system.slice/slurmstepd.scope/job_6/step_0/user/task_0", "lxc", "129"),
    # Docker with the drivers cgroupfs and systemd, and rootless.
    (f"/docker/{H}", "docker", H),
    (f"/docker/{H}/docker/{OTHER}", "docker", H),
    (f"/system.slice/docker-{H}.scope", "docker", H),
    (f"/system.slice/docker-{H}.scope/init.scope", "docker", H),
    (f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{H}.scope", "docker", H),
    # Podman, of root and of a user.
    (f"/machine.slice/libpod-{H}.scope/container", "podman", H),
    (f"/machine.slice/libpod-{H}.scope", "podman", H),
    (f"/libpod_parent/libpod-{H}", "podman", H),
    (
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{H}.scope/container",
        "podman",
        H,
    ),
    # Quadlets with cgroups split, pods of podman with both drivers.
    (f"/system.slice/web.service/libpod-payload-{H}", "podman", H),
    (f"/libpod_parent/{OTHER}/libpod-{H}", "podman", H),
    (f"/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{H}.scope/container", "podman", H),
    # runc was given a name for systemd, and made the group itself.
    (f"/system.slice/docker.service/system.slice:docker:{H}", "docker", H),
    (f"/system.slice:docker:{H}", "docker", H),
    (f"/system.slice:nerdctl:{H}", "containerd", H),
    # containerd and CRI-O without a pod around them.
    (f"/system.slice/cri-containerd-{H}.scope", "containerd", H),
    (f"/system.slice/nerdctl-{H}.scope", "containerd", H),
    (f"/default/{H}", "containerd", H),
    (f"/machine.slice/crio-{H}.scope", "containerd", H),
    # Kubernetes: cgroup drivers systemd and cgroupfs, each class, and a static pod.
    (f"{KUBELET}/kubepods-besteffort-pod{UID_}.slice/cri-containerd-{H}.scope", "pod", UID_),
    (f"{KUBELET}/kubepods-besteffort-pod{UID_}.slice/crio-{H}.scope/container", "pod", UID_),
    (f"{KUBELET}/kubepods-besteffort-pod{UID_}.slice/docker-{H}.scope", "pod", UID_),
    (f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{H}.scope", "pod", UID_),
    (f"/kubepods/besteffort/pod{UID}/{H}", "pod", UID),
    (f"/kubepods/burstable/pod{UID}/{H}", "pod", UID),
    (f"/kubepods/pod{UID}/{H}", "pod", UID),
    (f"/kubepods/burstable/pod{STATIC_UID}/{H}", "pod", STATIC_UID),
    (
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{H}",
        "pod",
        UID_,
    ),
    (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID_}.slice", "pod", UID_),
    # Slurm on cgroup v1 and v2.
    ("/slurm/uid_0/job_6/step_batch", "slurm", "6"),
    ("/slurm/uid_1000/job_1234567/step_0/task_3", "slurm", "1234567"),
    ("/slurm_node1/uid_0/job_6/step_extern", "slurm", "6"),
    ("/system.slice/slurmstepd.scope/job_6/step_batch/user/task_0", "slurm", "6"),
    ("/system.slice/slurmstepd.scope/job_6/step_0/slurm", "slurm", "6"),
    ("/system.slice/node1_slurmstepd.scope/job_6/step_0/user/task_special", "slurm", "6"),
    # Without proctrack/cgroup, and the daemons that hold the jobs of the other schedulers.
    ("/system.slice/slurmd.service", "scheduler", "slurmd.service"),
    ("/system.slice/slurmd@n1.service", "scheduler", "slurmd@n1.service"),
    ("/system.slice/slurmstepd.scope/system", "scheduler", "slurmstepd.scope"),
    ("/system.slice/condor.service", "scheduler", "condor.service"),
    ("/system.slice/pbs.service", "scheduler", "pbs.service"),
    ("/system.slice/lsfd.service", "scheduler", "lsfd.service"),
    ("/system.slice/nomad.service", "scheduler", "nomad.service"),
    ("/system.slice/slurm.service", "scheduler", "slurm.service"),
    ("/system.slice/slurm-llnl.service", "scheduler", "slurm-llnl.service"),
    ("/system.slice/ego.service", "scheduler", "ego.service"),
    # Torque.
    ("/system.slice/pbs_mom.service", "scheduler", "pbs_mom.service"),
    ("/system.slice/torque-mom.service", "scheduler", "torque-mom.service"),
    # Grid Engine and its heirs; some make groups below their own.
    ("/system.slice/sgeexecd.service", "scheduler", "sgeexecd.service"),
    ("/system.slice/sgeexecd.p6444.service", "scheduler", "sgeexecd.p6444.service"),
    ("/system.slice/sgeexecd.p6444.service/UGE/4711.1", "scheduler", "sgeexecd.p6444.service"),
    ("/system.slice/sge_execd.service", "scheduler", "sge_execd.service"),
    ("/system.slice/gridengine-exec.service", "scheduler", "gridengine-exec.service"),
    ("/ocs8012.slice/ocs8012-execd.service", "scheduler", "ocs8012.slice"),
    ("/system.slice/ocs8012-execd.service", "scheduler", "ocs8012-execd.service"),
    ("/ocs8012.slice/ocs8012-jobs.slice/ocs8012.4711.scope", "scheduler", "ocs8012.slice"),
    # Flux, whose jobs may run in units of the flux user's own systemd.
    ("/system.slice/flux.service", "scheduler", "flux.service"),
    ("/system.slice/flux-housekeeping@f2XJ.service", "scheduler", "flux-housekeeping@f2XJ.service"),
    (f"{USER}/imp-shell-0-f2XJ.service", "scheduler", "imp-shell-0-f2XJ.service"),
    # OAR 3 and 2.
    ("/system.slice/oar-node.service", "scheduler", "oar-node.service"),
    ("/oar.slice/oar-u1000.slice/oar-u1000-j4711.slice", "oar", "4711"),
    (
        "/oar.slice/oar-u1000.slice/oar-u1000-j45670.slice/oar-u1000-j45670-s1.scope",
        "oar",
        "45670",
    ),
    ("/oar.slice/oar-u1000.slice/session-3.scope", "scheduler", "oar.slice"),
    ("/oar/eve_4711", "oar", "4711"),
    ("/oar/eve_adam_4711/x", "oar", "4711"),
    # YARN, and Mesos, which puts its executors into a slice.
    (
        "/system.slice/hadoop-yarn-nodemanager.service",
        "scheduler",
        "hadoop-yarn-nodemanager.service",
    ),
    ("/system.slice/yarn-nodemanager.service", "scheduler", "yarn-nodemanager.service"),
    ("/system.slice/mesos-slave.service", "scheduler", "mesos-slave.service"),
    (
        "/system.slice/dcos-mesos-slave-public.service",
        "scheduler",
        "dcos-mesos-slave-public.service",
    ),
    ("/mesos_executors.slice", "scheduler", "mesos_executors.slice"),
    # OpenPBS (v1 and v2), HTCondor (10 and later), LSF, Nomad.
    ("/pbs_jobs.service/jobid/12.srv", "pbs", "12.srv"),
    ("/pbs_jobs.service/jobs/12.srv", "pbs", "12.srv"),
    (
        "/htcondor/condor_var_lib_condor_execute_slot1_1@n1",
        "htcondor",
        "condor_var_lib_condor_execute_slot1_1@n1",
    ),
    ("/system.slice/htcondor/condor_slot1_1@n1", "htcondor", "condor_slot1_1@n1"),
    ("/lsf/cluster1/job.1234.5678", "lsf", "1234"),
    ("/nomad.slice/share.slice/0f3.web.scope", "nomad", "0f3.web.scope"),
    ("/nomad/0f3.web", "nomad", "0f3.web"),
    # Virtual machines of Proxmox and libvirt.
    ("/qemu.slice/100.scope", "vm", "100"),
    ("/machine.slice/machine-qemu\\x2d1\\x2dvm.scope/libvirt/emulator", "vm", "1\\x2dvm"),
    # A container that a job has started is the job's.
    (f"/system.slice/slurmstepd.scope/job_6/step_0/user/task_0/libpod-{H}", "slurm", "6"),
]

UNFENCED = [
    ("/system.slice/nvidia-persistenced.service", "unit", "nvidia-persistenced.service"),
    ("/system.slice/system-getty.slice/getty@tty1.service", "unit", "getty@tty1.service"),
    ("/gpu.slice/vllm.service", "unit", "vllm.service"),
    ("/gpu.slice/gpu-a.slice/vllm.service/worker", "unit", "vllm.service"),
    ("/system.slice/docker.service", "unit", "docker.service"),
    ("/system.slice/run-u12.scope", "unit", "run-u12.scope"),
    ("/user.slice/user-1000.slice/session-3.scope", "user", "1000"),
    ("/user.slice/user-1000.slice/user@1000.service/app.slice/a.service", "user", "1000"),
    ("/user.slice/user-0.slice/session-c1.scope", "user", "0"),
    # Not what schedulers run jobs in, whatever their names have in common.
    ("/system.slice/flux-server.service", "unit", "flux-server.service"),
    ("/system.slice/condor-exporter.service", "unit", "condor-exporter.service"),
    ("/system.slice/sgemaster.p6444.service", "unit", "sgemaster.p6444.service"),
    ("/system.slice/oar-server.service", "unit", "oar-server.service"),
    ("/system.slice/lego.service", "unit", "lego.service"),
    ("/roar.slice/vllm.service", "unit", "vllm.service"),
    # A user may call the groups below his own whatever he likes.
    (f"{USER}/lxc/129/ns", "user", "1000"),
    (f"{USER}/job_12/x", "user", "1000"),
]

# Paths that name nobody, but are the node's own all the same.
HOST = ["/", "/init.scope", "/user.slice", "/system.slice", "/gpu.slice"]

# Paths that prove nothing at all.
UNKNOWN = [
    # The monitor runs on the host in the host's PID namespace: LXC puts it beside the container
    # (lxc.cgroup.dir.monitor) so that it is no member of it. Ending it would end the container.
    "/lxc.monitor/129",
    "/lxc.monitor.129",
    "/lxc.pivot",
    "/lxc",
    "/lxcfs/129",
    "/my-lxc/129/ns",
    "/job_x/step_0",
    "/job_/step_0",
    "/job_6/step_0",
    "/slurm/uid_0/job_x",
    f"/docker/{H[:63]}",
    f"/docker-{H[:12]}.scope",
    "/docker/buildkit/abc123def",
    "/podcast/pod12",
    "/mine",
    "/own.service",
    "/e2b/sandbox-1",
    "/system.slice/made-by-hand",
    "/machine.slice",
    "/machine.slice/machine-deb.scope",
    "/machine.slice/systemd-nspawn@deb.service",
    "/kubepods.slice",
    "/kube.slice/kubelet.service",
    f"/system.slice/youki-{H}.scope",
    f"{USER}/user.slice/youki-{H}.scope",
    # Outside our own control group namespace.
    "/../system.slice/a.service",
]


def in_container(text: str, vmid: int) -> bool:
    owner = owners.owner_from_cgroup(text)
    return owner is not None and (owner.kind, owner.id) == ("lxc", str(vmid))


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "hybrid", "v2"])
@pytest.mark.parametrize(("path", "kind", "ident"), FENCED)
def test_what_is_behind_a_fence(shape: str, path: str, kind: str, ident: str) -> None:
    owner = owners.owner_from_cgroup(shape.format(path))
    assert owner is not None
    assert (owner.kind, owner.id) == (kind, ident)
    assert owner.fenced
    assert str(owner).startswith(f"{kind} {ident[:12]}")
    assert owner.evidence == f"cgroup {path}"
    # A fence is believed even in the node's own PID namespace (docker run --pid=host).
    assert owners.owner_of(shape.format(path), [1], [1]).fenced


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "hybrid", "v2"])
@pytest.mark.parametrize(("path", "kind", "ident"), UNFENCED)
def test_what_runs_on_the_node_itself(shape: str, path: str, kind: str, ident: str) -> None:
    owner = owners.owner_from_cgroup(shape.format(path))
    assert owner is not None
    assert (owner.kind, owner.id) == (kind, ident)
    assert not owner.fenced


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "hybrid", "v2"])
@pytest.mark.parametrize("path", HOST)
def test_paths_of_the_node_that_name_nobody(shape: str, path: str) -> None:
    assert owners.owner_from_cgroup(shape.format(path)) is None
    owner = owners.owner_of(shape.format(path), [1], [1])
    assert (owner.kind, owner.fenced) == ("host", False)


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "hybrid", "v2"])
@pytest.mark.parametrize("path", UNKNOWN)
def test_a_path_that_nobody_knows_is_not_the_nodes_own(shape: str, path: str) -> None:
    owner = owners.owner_of(shape.format(path), [1], [1])
    assert (owner.kind, owner.id, owner.fenced) == ("unknown", "", False)
    assert path in owner.evidence
    # One such line among others is enough.
    text = "1:name=systemd:/system.slice/a.service\n" + V2.format(path)
    assert owners.owner_of(text, [1], [1]).kind == "unknown"


def test_one_controller_that_knows_the_owner_is_enough() -> None:
    text = (
        "11:memory:/user.slice\n10:devices:/docker/"
        + H
        + "\n1:name=systemd:/system.slice/a.service\n"
    )
    owner = owners.owner_from_cgroup(text)
    assert owner is not None
    assert (owner.kind, owner.id) == ("docker", H)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/lxc/129", "/lxc/130"),
        ("/lxc/130/ns", "/lxc.payload.129"),
        (f"/docker/{H}", f"/docker/{OTHER}"),
        ("/slurm/uid_0/job_6/step_0", "/slurm/uid_0/job_7/step_0"),
    ],
)
def test_hierarchies_that_contradict_each_other_prove_nothing(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        text = f"5:cpu:{first}\n6:memory:{second}\n1:name=systemd:/\n0::/\n"
        owner = owners.owner_of(text, [7, 1], [1])
        assert (owner.kind, owner.id, owner.fenced) == ("unknown", "", False)


def test_a_job_on_cgroup_v1_is_known_beside_the_group_of_its_daemon() -> None:
    text = "9:freezer:/slurm/uid_0/job_6/step_0\n1:name=systemd:/system.slice/slurmd.service\n"
    owner = owners.owner_of(text, [1], [1])
    assert (owner.kind, owner.id) == ("slurm", "6")


def test_an_old_oars_job_is_known_beside_the_group_of_its_daemon() -> None:
    text = "4:cpuset:/oar/eve_4711\n1:name=systemd:/system.slice/oar-node.service\n"
    owner = owners.owner_of(text, [1], [1])
    assert (owner.kind, owner.id) == ("oar", "4711")


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_nothing_but_a_newline_ends_a_line(separator: str) -> None:
    text = V2.format(f"{USER}/a{separator}0::/lxc/129/x")
    assert len(owners.cgroup_paths(text)) == 1
    assert owners.owner_of(text, [1], [1]).kind == "user"


@pytest.mark.parametrize(
    ("path", "depth"),
    [
        ("/", 0),
        ("/lxc/129/ns/init.scope", 1),
        ("/lxc.payload.129", 1),
        ("/lxc/129/ns/lxc/130/ns", 2),
        ("/lxc/129/ns/lxc.payload.130", 2),
        (f"/lxc/129/ns/system.slice/docker-{H}.scope", 1),
        ("/lxc.monitor/129", 0),
        (f"/docker/{H}", 0),
    ],
)
def test_how_many_containers_lie_in_each_other(path: str, depth: int) -> None:
    assert owners.lxc_depth(V1.format(path)) == depth
    assert owners.lxc_depth("") == 0


def test_a_path_with_colons_is_read_whole() -> None:
    assert owners.cgroup_paths("0::/a:b:c\n1:x:/d\nnoise\n") == ["/a:b:c", "/d"]


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "hybrid", "v2"])
@pytest.mark.parametrize(
    ("path", "vmid", "inside"),
    [
        ("/lxc/129/ns", 129, True),
        ("/lxc/129/.lxc", 129, True),
        (f"/lxc/129/ns/docker/{H}", 129, True),
        ("/lxc/12/ns", 129, False),
        ("/lxc/1299/ns", 129, False),
        ("/lxc/129/ns", 12, False),
        ("/lxc/129/ns", 29, False),
        ("/lxc/0129/ns", 129, False),
        ("/lxc.monitor/129", 129, False),
        # A container inside container 130 that calls itself 129 is 130's.
        ("/lxc/130/ns/lxc/129/ns", 129, False),
        ("/lxc/130/ns/lxc/129/ns", 130, True),
        (f"/docker/{H}/lxc/129/ns", 129, False),
        ("/", 129, False),
    ],
)
def test_members_of_a_container(shape: str, path: str, vmid: int, inside: bool) -> None:
    assert in_container(shape.format(path), vmid) is inside


@given(st.integers(100, 10**9), st.integers(100, 10**9))
def test_a_container_is_never_another_one(one: int, other: int) -> None:
    for path in (f"/lxc/{one}", f"/lxc/{one}/ns/a", f"/lxc/{one}/ns/lxc/{other}/ns"):
        assert in_container(V2.format(path), one)
        assert in_container(V2.format(path), other) is (one == other)


MARK = re.compile(
    r"lxc|job|pod|pbs|torque|htcondor|nomad|slurm|condor|lsf|ego|qemu|sge_?execd|gridengine|ocs\d"
    r"|flux|imp-shell|oar|yarn|mesos|[0-9a-f]{64}"
)
texts = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            ["/", ":", "\n", "0::/", "1:name=systemd:/", "lxc", ".payload", "129", "job_", "6",
             "pod", UID, UID_, H, "docker-", "docker", "libpod-", "cri-containerd-", "system.slice",
             "a.service", "user-1000.slice", ".scope", "kubepods"]
        )
    ).map("".join),
)  # fmt: skip


@given(texts, st.lists(st.integers(1, 4)), st.lists(st.integers(1, 4)))
def test_any_text_gives_an_owner_and_no_error(text: str, spaces: list[int], own: list[int]) -> None:
    owner = owners.owner_of(text, spaces, own)
    assert owner.kind in (*owners.FENCES, "unit", "user", "user unit", "host", "unknown")
    assert owner.evidence
    if not spaces:
        assert owner.kind == "unknown"
    if spaces and own and spaces[0] != own[0]:
        assert owner.fenced or owner.kind == "unknown"


names = st.text(st.characters(exclude_characters="/\n\0", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(names, min_size=1))
def test_only_slices_and_units_are_the_nodes_own(parts: list[str]) -> None:
    owner = owners.owner_of(V2.format("/" + "/".join(parts)), [1], [1])
    if owner.kind in ("host", "unit", "user", "user unit"):
        assert parts == ["init.scope"] or parts[0].endswith(".slice")


SCHEDULERS = sorted({ident for _, kind, ident in FENCED if kind == "scheduler"})


@given(
    st.lists(st.from_regex(r"[a-z]+\.slice", fullmatch=True)),
    st.sampled_from(SCHEDULERS),
    st.lists(names),
)
def test_whatever_lies_in_the_group_of_a_scheduler_is_not_the_nodes_own(
    around: list[str], unit: str, below: list[str]
) -> None:
    path = "/" + "/".join([*around, unit, *below])
    assert owners.owner_of(V2.format(path), [1], [1]).fenced


@given(texts)
def test_no_fence_without_a_mark(text: str) -> None:
    owner = owners.owner_from_cgroup(text)
    if not MARK.search(text):
        assert owner is None or not owner.fenced
    if owner is not None and owner.fenced:
        assert owner.id in text


def test_what_cannot_be_read_is_unknown() -> None:
    for cgroup, spaces in ((None, [1]), (V2.format("/"), []), (V2.format("/lxc/129/ns"), [])):
        owner = owners.owner_of(cgroup, spaces, [1])
        assert (owner.kind, owner.id, owner.fenced) == ("unknown", "", False)


def test_another_pid_namespace_is_a_fence_where_the_cgroup_says_nothing() -> None:
    for path in ("/", "/system.slice/run-u1.scope", "/lxc.monitor/129"):
        owner = owners.owner_of(V2.format(path), [7, 1], [1])
        assert (owner.kind, owner.id, owner.fenced) == ("pidns", "7", True)
        assert "PID namespace 7" in owner.evidence


def test_the_namespaces_of_this_process() -> None:
    own = Path("/proc/self/ns/pid").stat().st_ino
    assert owners.pid_namespaces(os.getpid())[0] == own
    assert owners.pid_namespaces(2**22 + 1) == []


@pytest.fixture
def nested(request: pytest.FixtureRequest) -> int:
    """The PID of a process two PID namespaces below ours."""
    inner = "import time; print('ready', flush=True); time.sleep(60)"
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    outer = subprocess.Popen(
        [*unshare, *unshare, sys.executable, "-ISc", inner], stdout=subprocess.PIPE, text=True
    )

    def end() -> None:
        os.kill(outer.pid, signal.SIGKILL)
        outer.communicate()

    request.addfinalizer(end)
    assert outer.stdout is not None
    assert outer.stdout.readline() == "ready\n"
    pid = outer.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))
    return pid


def test_the_namespaces_of_a_nested_process(nested: int) -> None:
    own = owners.pid_namespaces(os.getpid())
    chain = owners.pid_namespaces(nested)
    assert len(set(chain)) == len(chain) == len(own) + 2
    assert chain[2:] == own
    cgroup = Path(f"/proc/{nested}/cgroup").read_text(encoding="utf-8")
    assert owners.owner_of(cgroup, chain, own).fenced


@pytest.mark.parametrize("hierarchy", ["", "unified", "systemd", "pids"])
@pytest.mark.parametrize("group", ["ns", "ns/init.scope", "ns/system.slice/docker-1.scope"])
def test_the_namespace_of_a_container(
    nested: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hierarchy: str, group: str
) -> None:
    folder = tmp_path / hierarchy / "lxc" / "129" / group
    folder.mkdir(parents=True)
    # One that has left, one in our own namespace, and then one of the container.
    (folder / "cgroup.procs").write_text(f"{2**22 + 1}\n{os.getpid()}\n{nested}\n")
    found = owners.container_cgroup(129, str(tmp_path))
    assert Path(found) == tmp_path / hierarchy / "lxc" / "129" / "ns"
    assert owners.container_cgroup(12, str(tmp_path)) == ""
    monkeypatch.setattr(owners, "container_cgroup", lambda vmid: found if vmid == 129 else "")
    # The outermost one below ours: what is nested in the container is deeper.
    assert owners.container_namespace(129) == owners.pid_namespaces(nested)[1]
    assert owners.container_namespace(12) is None


@pytest.mark.parametrize("group", ["lxc/129/ns", "lxc.payload.129", "lxc.payload/129", "lxc/129"])
def test_where_the_processes_of_a_container_are(tmp_path: Path, group: str) -> None:
    (tmp_path / "lxc.monitor" / "129").mkdir(parents=True)
    (tmp_path / "lxc.payload.1299").mkdir()
    assert owners.container_cgroup(129, str(tmp_path)) == ""
    (tmp_path / group).mkdir(parents=True)
    assert Path(owners.container_cgroup(129, str(tmp_path))) == tmp_path / group


def test_a_stranger_in_its_cgroup_does_not_decide_a_containers_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = {10: [7, 1], 11: [8, 1], 12: [8, 1], 13: [9, 8, 1]}
    first = {11, 13}
    (tmp_path / "cgroup.procs").write_text("10\n13\n")
    for folder, pids in (("a.scope", "12\n"), ("init.scope", "11\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cgroup.procs").write_text(pids)
    monkeypatch.setattr(owners, "container_cgroup", lambda vmid: str(tmp_path))
    monkeypatch.setattr(owners, "pid_namespaces", lambda pid: spaces.get(pid, [1]))
    monkeypatch.setattr(owners, "_is_first", lambda pid: pid in first)
    assert owners.container_namespace(129) == 8
    assert owners.container_init(129) == 11
    # Without a PID 1 of the container they contradict each other, and nothing is proved.
    first.remove(11)
    assert owners.container_namespace(129) is None
    assert owners.container_init(129) == 0
    spaces[10] = [8, 1]
    assert owners.container_namespace(129) == 8


def test_who_is_pid_1_of_its_namespace(nested: int) -> None:
    assert owners._is_first(nested)
    assert not owners._is_first(os.getpid())
    assert not owners._is_first(2**22 + 1)


@pytest.mark.parametrize("members", [None, "", f"{2**22 + 1}\n"])
def test_a_container_without_processes_has_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: str | None
) -> None:
    if members is not None:
        (tmp_path / "cgroup.procs").write_text(members)
    monkeypatch.setattr(owners, "container_cgroup", lambda vmid: str(tmp_path))
    assert owners.container_namespace(129) is None


HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("path", "kind", "ident"),
    [
        ("/lxc/131/ns/system.slice/vllm.service", "unit", "vllm.service"),
        (f"/lxc/129/ns/libpod_parent/libpod-{HEX}", "podman", HEX),
        (f"/system.slice/docker-{HEX}.scope", "docker", HEX),
        (f"/lxc/129/ns/system.slice/docker-{HEX}.scope", "docker", HEX),
        ("/lxc/129/ns", "lxc", "129"),
        (
            "/user.slice/user-1001.slice/user@1001.service/app.slice/vllm.service",
            "user unit",
            "vllm.service",
        ),
        ("/user.slice/user-0.slice/session-1.scope", "user", "0"),
        ("/lxc/131/ns/gpu.slice/vllm.service", "unit", "vllm.service"),
        ("/gpu.slice/vllm.service", "unit", "vllm.service"),
        (f"{USER}/session.slice/vllm.service", "user unit", "vllm.service"),
        (f"{USER}/background.slice/background-a.slice/a.service", "user unit", "a.service"),
    ],
)
def test_who_would_restart_it_is_the_innermost(path: str, kind: str, ident: str) -> None:
    found = owners.innermost(f"0::{path}\n")
    assert found is not None
    assert (found.kind, found.id) == (kind, ident)


def test_a_process_of_the_root_group_has_nobody_nearest() -> None:
    assert owners.innermost("0::/\n") is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/system.slice/slurmstepd.scope/job_6/step_batch/user/task_0", "slurm 6 step batch"),
        ("/slurm/uid_0/job_6", "slurm 6"),
        ("/user.slice/user-1000.slice/session-3.scope", "user 1000 session 3"),
        (f"/libpod_parent/libpod-{HEX}", "podman 0123456789ab"),
        ("/lxc/129/ns", "lxc 129"),
    ],
)
def test_what_people_read_of_an_owner(path: str, words: str) -> None:
    assert str(owners.owner_from_cgroup(f"0::{path}\n")) == words


@pytest.mark.parametrize(
    ("kind", "path", "content"),
    [
        ("docker", f"var/lib/docker/containers/{HEX}/config.v2.json", '{"Name": "/vllm"}'),
        (
            "podman",
            "var/lib/containers/storage/vfs-containers/containers.json",
            f'[{{"id": "0", "names": ["other"]}}, {{"id": "{HEX}", "names": ["vllm"]}}]',
        ),
        (
            "containerd",
            f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{HEX}/config.json",
            '{"annotations": {"io.kubernetes.cri.container-name": "vllm"}}',
        ),
    ],
)
@pytest.mark.parametrize("broken", ["", "{", "null", "5", '{"Name": null}', "[{}]"])
def test_the_name_of_a_container_is_what_its_runtime_wrote(
    tmp_path: Path, kind: str, path: str, content: str, broken: str
) -> None:
    file = tmp_path / path
    assert owners.container_name(kind, HEX, str(tmp_path)) == ""
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert owners.container_name(kind, HEX, str(tmp_path)) == "vllm"
    assert owners.container_name("lxc", "129", str(tmp_path)) == ""
    file.write_text(broken)
    assert owners.container_name(kind, HEX, str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{KUBELET}/kubepods-besteffort-pod{UID_}.slice/cri-containerd-{H}.scope", "llm/vllm-0"),
        (f"/kubepods/pod{UID}/{H}", "llm/vllm-0"),
        # A node of kind is a container itself.
        (f"/docker/{OTHER}/kubelet/kubepods/pod{UID}/{H}", "llm/vllm-0"),
        (f"/kubepods/pod{UID}/{OTHER}", f"with uid {UID}"),
        (f"/kubelet.slice/kubelet-kubepods-pod{UID_}.slice", f"with uid {UID}"),
        (f"/docker/{H}", ""),
        ("/", ""),
    ],
)
def test_the_pod_is_called_what_people_call_it(tmp_path: Path, path: str, name: str) -> None:
    folder = tmp_path / "run/containerd/io.containerd.runtime.v2.task/k8s.io" / H
    folder.mkdir(parents=True)
    notes = (
        '"io.kubernetes.cri.sandbox-namespace": "llm", "io.kubernetes.cri.sandbox-name": "vllm-0"'
    )
    (folder / "config.json").write_text(f'{{"annotations": {{{notes}}}}}')
    assert owners.pod_of(V1.format(path), str(tmp_path)) == name
    for broken in ("[]", '{"annotations": []}', '{"annotations": {"x": 1}}', "{"):
        (folder / "config.json").write_text(broken)
        expected = f"with uid {UID}" if name else ""
        assert owners.pod_of(V1.format(path), str(tmp_path)) == expected
