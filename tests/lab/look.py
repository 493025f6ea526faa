"""How the lab's tests look at a lab: what its hosts say, and what is left of it afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from tests.patience import until

from .lab import Lab
from .linux import cgroup2_mount

USED = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
APPS = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader,nounits"


def sh(lab: Lab, host: str, command: str) -> str:
    """Standard output of a shell command on a host."""
    return str(lab.inside(host, ["sh", "-c", command]).stdout)


def used(lab: Lab, host: str) -> list[int]:
    """MiB per GPU as nvidia-smi on that host says."""
    return [int(line) for line in sh(lab, host, USED).split()]


def fuser(lab: Lab, host: str, gpu: int) -> list[int]:
    """The PIDs that fuser prints for a GPU."""
    return [int(pid) for pid in sh(lab, host, f"fuser /dev/nvidia{gpu} 2>/dev/null").split()]


def stat(lab: Lab, host: str, pid: int) -> str:
    """The state letters that ps shows, but those for a priority, which is that of the tests."""
    return sh(lab, host, f"ps -o stat= -p {pid}").strip().translate({ord("N"): "", ord("<"): ""})


def mapped(lab: Lab, host: str, pid: int) -> list[str]:
    """The names of the driver's nodes that a process has mapped, as seen from a host."""
    paths = [line.split()[5:] for line in sh(lab, host, f"cat /proc/{pid}/maps").splitlines()]
    return sorted({path[0] for path in paths if path and "nvidia" in path[0]})


def descriptors(lab: Lab, host: str, pid: int) -> list[str]:
    """The driver's nodes that a process has open."""
    links = sh(lab, host, f"readlink /proc/{pid}/fd/* /proc/{pid}/task/*/fd/*").split()
    return sorted({link for link in links if "nvidia" in link})


def leftovers(name: str) -> list[str]:
    """What of a lab is still there: cgroups, files, mounts, processes."""
    found = [
        f"{place}/{entry}"
        for top in (cgroup2_mount(), Path("/run"))
        for place, directories, files in os.walk(top)  # unlike rglob it bears what vanishes
        for entry in (*directories, *files)
        if name in entry
    ]
    found += [m for m in Path("/proc/self/mountinfo").read_text().splitlines() if name in m]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "cgroup").read_text() + (entry / "mountinfo").read_text()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"gpuops-lab/{name}" in text:
            found.append(f"process {entry.name}: {command!r}")
    return found


def left_behind(name: str) -> list[str]:
    """What is left of a lab once its processes have had time to be gone from /proc."""
    until(lambda: not leftovers(name))
    return leftovers(name)
