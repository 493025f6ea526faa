# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose a process is, proved by its control group or its PID namespace.

Nothing here guesses: where neither proves an owner the answer is ``unknown``, and what is
unknown is foreign. The shapes of the cgroup paths are those of cgroup v1, hybrid and v2
as LXC, Docker, Podman, containerd, Kubernetes, schedulers and systemd write them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# From include/uapi/linux/nsfs.h: _IO(0xb7, 0x2), the parent of a PID or user namespace.
NS_GET_PARENT = 0xB702

# Owners that are a fence of their own: a process behind one is foreign to the node around it.
CONTAINERS = ("lxc", "user lxc", "pod", "docker", "podman", "containerd")
JOBS = ("slurm", "oar", "pbs", "htcondor", "lsf", "nomad", "scheduler")
FENCES = (*CONTAINERS, *JOBS, "vm", "pidns")

_HEX64 = r"([0-9a-f]{64})"
_POD = r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_UNIT = r"([^/]+\.(?:service|scope))(?:/|$)"
_USER_MANAGER = r"/user@%s\.service/(?:[^/]+\.slice/)*"

# Units that jobs run in, whosever they are, where a scheduler makes no groups of its own for them.
_SCHEDULERS = "|".join(
    (
        # Slurm: slurmd.service of its packages, slurmstepd.scope of its plugin cgroup/v2, and the
        # init scripts of old, slurm and Debian's slurm-llnl.
        r"[^/]*slurm(?:d|stepd)|slurm(?:-llnl)?",
        # OpenPBS and PBS Professional: pbs. Torque: pbs_mom of its sources, Debian's torque-mom.
        r"pbs(?:_mom)?|torque-mom",
        # HTCondor, LSF and Nomad: the units of their packages. Symphony: what egosetrc.sh installs.
        r"condor|lsfd?|nomad|ego",
        # Grid Engine: sgeexecd with the name of the cluster as inst_sge writes it, Fedora's
        # sge_execd, Debian's gridengine-exec; Open Cluster Scheduler: with its port in front.
        r"sge_?execd(?:\.[^/]+)?|gridengine-exec|ocs\d+-(?:execd|shepherds)",
        # Flux: flux-core's units; imp-shell-ID, in the flux user's own systemd, is a job.
        r"flux(?:-(?:prolog|epilog|housekeeping))?|imp-shell-[^/]+",
        # OAR: the units of oar-node, in which its sshd runs.
        r"oar-node(?:-script)?",
        # YARN: Bigtop's unit, and as many guides call it. Mesos: its packages' units, and DC/OS's.
        r"(?:hadoop-)?yarn-nodemanager|(?:dcos-)?mesos-(?:slave|agent)(?:-public)?",
    )
)
# Slices that schedulers have systemd make for jobs: OAR 3, Open Cluster Scheduler, Mesos.
_JOB_SLICES = r"oar|ocs\d+|mesos_executors"

# A colon stands in the names that runc writes where systemd was to make the group and did not.
_PATTERNS = [
    # Proxmox's containers and those of root lie at the top: a user may call a group of his own
    # lxc/129. LXC's monitors (lxc.monitor) are beside the containers, not of them.
    ("lxc", re.compile(r"^/lxc/([^/]+)(?:/|$)")),
    ("lxc", re.compile(r"^/lxc\.payload[./]([^/]+)(?:/|$)")),
    ("user lxc", re.compile(r"/lxc\.payload[./]([^/]+)(?:/|$)")),
    ("slurm", re.compile(r"/[^/]*slurm[^/]*(?:/uid_\d+)?/job_(\d+)(?:/|$)")),
    # OAR 3, and OAR 2 below: the job's number after the user's, and after the user's name.
    ("oar", re.compile(r"(?:/oar\.slice/oar-u\d+\.slice)?/oar-u\d+-j(\d+)[-.]")),
    ("oar", re.compile(r"/oar/[^/]+_(\d+)(?:/|$)")),
    ("pbs", re.compile(r"/pbs(?:pro|_jobs)(?:\.service|\.slice)?/(?:jobid/|jobs/)?([^/]+)")),
    ("htcondor", re.compile(r"/htcondor/([^/]+)")),
    ("lsf", re.compile(r"/lsf/[^/]+/job\.(\d+)")),
    ("nomad", re.compile(r"/nomad(?:\.slice)?/(?:(?:share|reserve)(?:\.slice)?/)?([^/]+)")),
    ("scheduler", re.compile(r"/((?:%s)(?:@[^/]*)?\.(?:service|scope))(?:/|$)" % _SCHEDULERS)),
    ("scheduler", re.compile(r"/((?:%s)\.slice)(?:/|$)" % _JOB_SLICES)),
    ("vm", re.compile(r"/qemu\.slice/([^/]+)\.scope(?:/|$)")),
    ("vm", re.compile(r"/machine-qemu(?:\\x2d|-)([^/]+)\.scope(?:/|$)")),
    ("pod", re.compile(_POD)),
    ("podman", re.compile(r"[/:]libpod[-:](?:conmon-|payload-)?" + _HEX64)),
    ("docker", re.compile(r"[/:]docker[-/:]" + _HEX64)),
    ("containerd", re.compile(r"[/:](?:cri-containerd|crio|nerdctl)[-:]" + _HEX64)),
    # With cgroupfs podman's pods are called by nothing but their number, too.
    ("containerd", re.compile(r"(?<!/libpod_parent)/" + _HEX64 + r"(?:/|$)")),
    ("user", re.compile(r"/user-(\d+)\.slice(?:/|$)")),
    ("user unit", re.compile(_USER_MANAGER % r"\d+" + _UNIT)),
    ("unit", re.compile(r"/(?:(?!user-)[^/]+\.slice/)+" + _UNIT)),
]

# The words that name a pod in containerd's annotations, after io.kubernetes.cri.sandbox-.
POD_NAME = ("namespace", "name")

# Where systemd puts what is the node's own, and whatever lies within a unit.
_OWN = re.compile(
    r"(?:/|/init\.scope|(?:/[^/]+\.slice)+(?:/[^/]+\.(?:service|scope)(?:/.*)?)?)\Z", re.DOTALL
)
# Slices for machines, containers and jobs, and the ids of containers, of makes we do not know.
_NOT_OWN = re.compile(
    r"/(?:machine|qemu|kube|nomad|pbs|slurm|condor|lsf|lxc|lxd|incus|docker|libpod|podman|containerd)"
    r"[^/]*\.slice(?:/|$)|[0-9a-f]{64}"
)
_LXC = re.compile(r"/lxc(?:\.payload[./]|/)[^/]+")

_DETAILS = {
    "slurm": re.compile(r"/job_\d+/(step_[^/]+)"),
    "user": re.compile(r"/(session-[^/]+)\.scope"),
}


class Owner:
    """Who a process belongs to.

    ``kind`` is one of FENCES, unit, user unit, user, host or unknown; ``id`` names it within the
    kind; ``evidence`` is the line that proves it;
    ``by_namespace`` says that only the PID namespace does, the cgroup having been left;
    ``detail`` is for people: a container's name, a job's step, a user's session.
    """

    def __init__(self, kind: str, ident: str, evidence: str, by_namespace: bool = False) -> None:
        self.kind = kind
        self.id = ident
        self.evidence = evidence
        self.by_namespace = by_namespace
        self.detail = _detail(kind, evidence)

    def __str__(self) -> str:
        # The ids of containers have 64 letters; twelve are what their own tools print.
        words = [self.kind, self.id[:12] if len(self.id) == 64 else self.id, self.detail]
        return " ".join(word for word in words if word)

    @property
    def fenced(self) -> bool:
        """True for a container, pod, job or namespace: not of the node that carries it."""
        return self.kind in FENCES


def _detail(kind: str, evidence: str) -> str:
    """What the cgroup says beyond the owner itself."""
    found = _DETAILS[kind].search(evidence) if kind in _DETAILS else None
    return found.group(1).replace("_", " ").replace("-", " ") if found else ""


def container_name(kind: str, ident: str, root: str = "/") -> str:
    """The name of a container of this node, from its runtime's own files; ``""`` if they say none.

    Only of this node: in the file system of a container a link may lead anywhere.
    """
    try:
        if kind == "docker":
            path = "var/lib/docker/containers/%s/config.v2.json" % ident
            return _word(_json(root, path)["Name"]).lstrip("/")
        if kind == "podman":
            for driver in ("overlay", "vfs"):
                path = "var/lib/containers/storage/%s-containers/containers.json" % driver
                for each in _json(root, path) or []:
                    if each["id"] == ident:
                        return _word(each["names"][0])
        if kind == "containerd":
            return _word(_annotations(ident, root)["io.kubernetes.cri.container-name"])
    except (KeyError, IndexError, TypeError):
        pass  # Written in another way than we know: the id is name enough.
    return ""


def _annotations(container: str, root: str) -> dict[str, Any]:
    """What containerd's state notes of a container of a pod."""
    path = "run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/config.json" % container
    content = _json(root, path)
    notes = content.get("annotations") if isinstance(content, dict) else None
    return notes if isinstance(notes, dict) else {}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _json(root: str, path: str) -> Any:
    try:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def cgroup_paths(text: str) -> list[str]:
    """The paths of ``/proc/PID/cgroup``, whatever the version of the hierarchy.

    The kernel refuses a newline in a group's name (cgroup_mkdir), but no other separator that
    ``splitlines`` knows.
    """
    return [line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2]


def owner_from_cgroup(text: str) -> Owner | None:
    """The outermost owner that a ``/proc/PID/cgroup`` names, or ``None`` if it names none.

    Outermost, because a Docker container inside LXC container 129 is 129's. A fence wins over
    the systemd unit or user slice around it: Docker's scopes lie in ``system.slice``. Where the
    hierarchies of cgroup v1 name two fences of one kind, neither is proved.
    """
    named = [each for each in map(_outermost, cgroup_paths(text)) if each is not None]
    if not named:
        return None
    owner = min(named, key=lambda each: each[0])[1]
    for _, other in named:
        if owner.fenced and other.kind == owner.kind and other.id != owner.id:
            return Owner("unknown", "", "its control groups name %s and %s" % (owner, other))
    return owner


def _outermost(path: str) -> tuple[tuple[bool, int, int], Owner] | None:
    """The outermost owner that one path names, and how early it does."""
    found = []
    for rank, (kind, pattern) in enumerate(_PATTERNS):
        match = pattern.search(path)
        if match:
            place = (kind not in FENCES, match.start(), rank)
            found.append((place, Owner(kind, match.group(1), "cgroup %s" % path)))
    return min(found, key=lambda each: each[0]) if found else None


def innermost(text: str) -> Owner | None:
    """The owner nearest to the process: who would restart it, whoever it belongs to in the end."""
    best: tuple[int, int] | None = None
    found: Owner | None = None
    for path in cgroup_paths(text):
        for rank, (kind, pattern) in enumerate(_PATTERNS):
            match = pattern.search(path)
            if match and (best is None or (match.start(1), -rank) > best):
                best, found = (match.start(1), -rank), Owner(kind, match.group(1), "cgroup " + path)
    return found


def user_of(unit: Owner) -> str:
    """The number of the user whose own systemd has started a ``user unit``."""
    found = re.search(_USER_MANAGER % r"(\d+)" + _UNIT, unit.evidence)
    return found.group(1) if found else ""


def pod_of(text: str, root: str = "/") -> str:
    """The Kubernetes pod of a ``/proc/PID/cgroup``: ``namespace/name`` where containerd's state
    tells it, else its uid; ``""`` if there is none."""
    for path in cgroup_paths(text):
        pod = re.search(_POD, path)
        if pod:
            container = (re.findall(_HEX64, path) or [""])[-1]
            notes = _annotations(container, root)
            names = [_word(notes.get("io.kubernetes.cri.sandbox-" + key)) for key in POD_NAME]
            return "/".join(names) if all(names) else "with uid " + pod.group(1).replace("_", "-")
    return ""


def pid_namespaces(pid: int) -> list[int]:
    """The PID namespaces (inode numbers) of a process, its own first, then the parents we may see.

    Returns an empty list when the process is gone or may not be looked at.
    """
    chain: list[int] = []
    try:
        handle = os.open("/proc/%d/ns/pid" % pid, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return chain
    try:
        while True:
            chain.append(os.fstat(handle).st_ino)
            try:
                parent = fcntl.ioctl(handle, NS_GET_PARENT)
            except OSError:
                return chain  # The namespace above is outside our own: as far as we may see.
            os.close(handle)
            handle = parent
    finally:
        os.close(handle)


def container_cgroup(vmid: int, root: str = "/sys/fs/cgroup") -> str:
    """The folder of a running container's own processes, or ``""`` if it does not run here.

    Proxmox has LXC put them below ``lxc/VMID/ns`` in every hierarchy, v1 or v2 alike; LXC's own
    default is ``lxc.payload.VMID``, and ``lxc/VMID`` before version 4.
    """
    for group in ("lxc/%d/ns", "lxc.payload.%d", "lxc.payload/%d", "lxc/%d"):
        for base in ("", "unified", "systemd", "pids"):
            folder = os.path.join(root, base, group % vmid)
            if os.path.isdir(folder):
                return folder
    return ""


def container_namespace(vmid: int) -> int | None:
    """The PID namespace of a running container: that of its PID 1, read off its cgroup.

    Any process may have been put into the cgroup, so where no PID 1 is found there (it may have
    ended before the others) they all have to agree.
    """
    seen = set()
    for pid, inner in _inhabitants(vmid):
        if len(inner) == 1 and _is_first(pid):
            return inner[0]
        # The outermost below our own: containers nested in it are deeper.
        seen.update(inner[-1:])
    return seen.pop() if len(seen) == 1 else None


def container_init(vmid: int) -> int:
    """The PID 1 of a running container, by its number here; 0 if none is found."""
    for pid, inner in _inhabitants(vmid):
        if len(inner) == 1 and _is_first(pid):
            return pid
    return 0


def _inhabitants(vmid: int) -> Iterator[tuple[int, list[int]]]:
    """The processes in a container's cgroup, and the PID namespaces of each that are not ours."""
    own = pid_namespaces(os.getpid())
    for pid in _members(container_cgroup(vmid)):
        yield pid, [space for space in pid_namespaces(pid) if space not in own]


def _members(cgroup: str) -> Iterator[int]:
    """The processes of a control group and of those below it, systemd's own group first."""
    for folder, below, _ in os.walk(cgroup):
        below.sort(key=lambda name: name != "init.scope")
        try:
            with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as members:
                pids = members.read().split()
        except OSError:
            continue
        yield from map(int, pids)


def _is_first(pid: int) -> bool:
    """Is it PID 1 in its own namespace?"""
    try:
        with open("/proc/%d/status" % pid, encoding="utf-8", errors="replace") as status:
            numbers = [line.split() for line in status if line.startswith("NSpid:")]
    except OSError:
        return False
    return bool(numbers) and numbers[0][-1] == "1"


def lxc_depth(text: str) -> int:
    """In how many LXC containers, one in the other, a ``/proc/PID/cgroup`` places its process."""
    return max((len(_LXC.findall(path)) for path in cgroup_paths(text)), default=0)


def _is_nodes_own(path: str) -> bool:
    """Is this positively a path of the node itself: the root, a slice, or a unit in slices?

    Everything else was made by somebody who manages other people's processes.
    """
    return bool(_OWN.match(path)) and not _NOT_OWN.search(path)


def owner_of(cgroup: str | None, namespaces: list[int], own_namespaces: list[int]) -> Owner:
    """The owner of a process from its cgroup text and its PID namespaces.

    :param cgroup: the text of ``/proc/PID/cgroup``, ``None`` if it could not be read.
    :param namespaces: as :func:`pid_namespaces` gives them.
    :param own_namespaces: those of this program.
    """
    paths = cgroup_paths(cgroup or "")
    if not paths or not namespaces:
        return Owner("unknown", "", "its control group or namespace could not be read")
    owner = owner_from_cgroup(cgroup or "")
    if owner is not None and (owner.fenced or owner.kind == "unknown"):
        return owner
    if own_namespaces and namespaces[0] != own_namespaces[0]:
        evidence = "PID namespace %d is not that of this node" % namespaces[0]
        return Owner("pidns", str(namespaces[0]), evidence)
    for path in paths:
        if not _is_nodes_own(path):
            return Owner("unknown", "", "cgroup %s is not known as one of the node itself" % path)
    return owner or Owner("host", "", "cgroup %s" % paths[-1])
