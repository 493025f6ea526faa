# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose a process is, proved by its control group or its PID namespace.

Nothing here guesses: where neither proves an owner the answer is ``unknown``, and what is
unknown is foreign. The shapes of the cgroup paths are those of cgroup v1, hybrid and v2
as LXC, Docker, Podman, containerd, Kubernetes, Slurm and systemd write them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# From include/uapi/linux/nsfs.h: _IO(0xb7, 0x2), the parent of a PID or user namespace.
NS_GET_PARENT = 0xB702

# Owners that are a fence of their own: a process behind one is foreign to the node around it.
FENCES = ("lxc", "pod", "docker", "podman", "containerd", "slurm", "pidns")

_HEX64 = r"([0-9a-f]{64})"
_POD = r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_PATTERNS = [
    ("lxc", re.compile(r"(?:^|/)lxc/([^/]+)(?:/|$)")),
    ("lxc", re.compile(r"(?:^|/)lxc\.payload[./]([^/]+)(?:/|$)")),
    ("slurm", re.compile(r"(?:^|/)job_(\d+)(?:/|$)")),
    ("pod", re.compile(_POD)),
    ("podman", re.compile(r"(?:^|/)libpod-(?:conmon-)?" + _HEX64)),
    ("docker", re.compile(r"(?:^|/)docker[-/]" + _HEX64)),
    ("containerd", re.compile(r"(?:^|/)cri-containerd-" + _HEX64)),
    ("containerd", re.compile(r"(?:^|/)(?:crio|nerdctl)-" + _HEX64)),
    ("containerd", re.compile(r"(?:^|/)" + _HEX64 + r"(?:/|$)")),
    (
        "unit",
        re.compile(r"(?:^|/)system\.slice/(?:[^/]+\.slice/)*([^/]+\.(?:service|scope))(?:/|$)"),
    ),
    ("user", re.compile(r"(?:^|/)user-(\d+)\.slice(?:/|$)")),
    (
        "user unit",
        re.compile(r"(?:^|/)app\.slice/(?:[^/]+\.slice/)*([^/]+\.(?:service|scope))(?:/|$)"),
    ),
]


_DETAILS = {
    "slurm": re.compile(r"/job_\d+/(step_[^/]+)"),
    "user": re.compile(r"/(session-[^/]+)\.scope"),
}


class Owner:
    """Who a process belongs to.

    ``kind`` is one of lxc, pod, docker, podman, containerd, slurm, pidns, unit, user unit, user,
    host or unknown; ``id`` names it within the kind; ``evidence`` is the line that proves it;
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
            path = "run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/config.json" % ident
            return _word(_json(root, path)["annotations"]["io.kubernetes.cri.container-name"])
    except (KeyError, IndexError, TypeError):
        pass  # Written in another way than we know: the id is name enough.
    return ""


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _json(root: str, path: str) -> Any:
    try:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def cgroup_paths(text: str) -> list[str]:
    """The paths of ``/proc/PID/cgroup``, whatever the version of the hierarchy."""
    return [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]


def owner_from_cgroup(text: str) -> Owner | None:
    """The outermost owner that a ``/proc/PID/cgroup`` names, or ``None`` if it names none.

    Outermost, because a Docker container inside LXC container 129 is 129's. A fence wins over
    the systemd unit or user slice around it: Docker's scopes lie in ``system.slice``.
    """
    best: tuple[bool, int, int] | None = None
    found: Owner | None = None
    for path in cgroup_paths(text):
        for rank, (kind, pattern) in enumerate(_PATTERNS):
            match = pattern.search(path)
            if match is None:
                continue
            place = (kind not in FENCES, match.start(), rank)
            if best is None or place < best:
                best, found = place, Owner(kind, match.group(1), "cgroup %s" % path)
    return found


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

    LXC puts them below ``lxc/VMID/ns`` in every hierarchy, v1 or v2 alike.
    """
    for base in ("", "unified", "systemd", "pids"):
        folder = os.path.join(root, base, "lxc", str(vmid), "ns")
        if os.path.isdir(folder):
            return folder
    return ""


def container_namespace(vmid: int) -> int | None:
    """The PID namespace of a running container, read off the processes of its cgroup."""
    own = pid_namespaces(os.getpid())
    for folder, _, _ in os.walk(container_cgroup(vmid)):
        try:
            with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as members:
                pids = members.read().split()
        except OSError:
            continue
        for pid in pids:
            inner = [space for space in pid_namespaces(int(pid)) if space not in own]
            if inner:
                # The outermost below our own: containers nested in it are deeper.
                return inner[-1]
    return None


def owner_of(cgroup: str | None, namespaces: list[int], own_namespaces: list[int]) -> Owner:
    """The owner of a process from its cgroup text and its PID namespaces.

    :param cgroup: the text of ``/proc/PID/cgroup``, ``None`` if it could not be read.
    :param namespaces: as :func:`pid_namespaces` gives them.
    :param own_namespaces: those of this program.
    """
    if cgroup is None or not namespaces:
        return Owner("unknown", "", "its control group or namespace could not be read")
    owner = owner_from_cgroup(cgroup)
    if owner is not None and owner.fenced:
        return owner
    if own_namespaces and namespaces[0] != own_namespaces[0]:
        evidence = "PID namespace %d is not that of this node" % namespaces[0]
        return Owner("pidns", str(namespaces[0]), evidence)
    if owner is not None:
        return owner
    paths = cgroup_paths(cgroup)
    return Owner("host", "", "cgroup %s" % (paths[-1] if paths else "/"))
