# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who comes back after having been ended, how often, and by whose doing."""

from __future__ import annotations

import os
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    holders,
    nvidia_smi,
    owners,
    verdict,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a quarter as long to import as Python takes to start
    from typing import Any

# After so many restarts of what was ended, ending it once more will not help.
MOST = 2

# Seconds for which GPUs must stay at zero where somebody may restart what was ended. systemd and
# docker wait a tenth of a second by default, podman up to two.
WATCH = 1.0

# Seconds that a service manager or container runtime may take to say what it is about to do.
ASK_TIMEOUT = 2.0

# Who adopts orphans: as their parent it has not started them. busybox's init can start things again
# but cannot be told from the others; systemd (a user's too) starts units, which are known as such.
ADOPTERS = ("init", "tini", "dumb-init", "docker-init", "catatonit", "pause", "systemd")

UNITS = ("unit", "user unit")
RUNTIMES = ("docker", "podman")
# Policies that start a container again whatever its exit code.
ALWAYS = ("always", "unless-stopped")


def times(holder: holders.Holder, earlier: list[dict[str, Any]]) -> int:
    """How often was this ended and started again, up to this holder?

    Counted by generations: those that were there before this one started are the last one, however
    many they were and however often they were signalled; and so on back.
    """
    same = [
        each
        for each in earlier
        if each["result"] == "sent" and each["node_pid"] != holder.pid and is_same(holder, each)
    ]
    count, started = 0, holder.start
    while True:
        before = [each for each in same if each["at"] <= started]
        if not before:
            return count
        count += 1
        started = max(each["start"] for each in before)
        same = [each for each in before if each["start"] < started]


def is_same(holder: holders.Holder, ended: dict[str, Any]) -> bool:
    """Is this what was ended: of the same name, and the same command or started by the same one?

    Some start a server with another port in its command each time.
    """
    if ended["name"] != holder.name:
        return False
    if ended["command"] == holder.command:
        return True
    if ended.get("owner_evidence") == holder.owner.evidence and _nearest(holder).kind in UNITS:
        return True
    return ended.get("ppid") == holder.ppid and starter(holder) is not None


def supervised(holder: holders.Holder, chosen: list[holders.Holder]) -> bool:
    """May somebody restart it: a service manager, a container runtime, a parent that lives on?"""
    nearest = _nearest(holder)
    if nearest.fenced and nearest.kind not in ("lxc", "user lxc"):
        return True
    if holder.ppid in {each.pid for each in chosen}:
        return False
    parent = living_parent(holder)
    if parent is not None and parent.name == "systemd" and nearest.kind in UNITS:
        return True
    return starter(holder) is not None


def supervisor(holder: holders.Holder) -> tuple[str, str]:
    """Who starts it, and how to make that stop."""
    nearest = _nearest(holder)
    if nearest.kind in RUNTIMES:
        name = nearest.id[:12]
        return "%s %s" % (nearest.kind, name), "run %s stop %s first" % (nearest.kind, name)
    if nearest.kind == "slurm":
        return "Slurm job %s" % nearest.id, "run scancel %s first" % nearest.id
    pod = owners.pod_of(holder.cgroup or "")
    if pod:
        advice = "scale down or delete with kubectl what the pod belongs to first"
        return "Kubernetes, pod %s" % pod, advice
    parent = starter(holder)
    if parent is not None:
        by = "%s (%s): %s" % (parent.name, verdict.pids(parent), parent.command[:100])
        # PID 1 cannot be stopped without its container.
        return by, "have it stop that first" if parent.ns_pid == 1 else "stop that first"
    if nearest.kind == "unit":
        return "systemd", "run systemctl stop %s first" % nearest.id
    if nearest.kind == "user unit":
        return "systemd", "run systemctl --user stop %s first" % nearest.id
    return "a supervisor that is not its parent", "find and stop that first"


def pending(holder: holders.Holder) -> str:
    """What is about to start this ended holder again, in words, or ``""`` if nothing is known to.

    A service manager may wait longer before it does (``RestartSec=``) or prepare longer
    (``ExecStartPre=``) than anybody watches. systemd is asked about units of the system, docker and
    podman about their containers, of this node and in its LXC containers; what does not answer in
    time, and the units of users, are not known. Never raises.
    """
    nearest, owner = _nearest(holder), holder.owner
    reach = ["lxc-attach", "-n", owner.id, "--"] if owner.kind == "lxc" else []
    if owner.by_namespace:
        return ""  # Its control group is one of the node, which is not where it was started.
    if nearest.kind == "unit" and (reach or not owner.fenced):
        properties = "ActiveState,SubState,Restart"
        answer = _ask([*reach, "systemctl", "show", "-p", properties, "--", nearest.id])
        state = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
        active, restart = state.get("ActiveState"), state.get("Restart", "no")
        if active == "activating" or (active == "deactivating" and restart != "no"):
            return "systemd, unit %s is in state %s" % (nearest.id, state.get("SubState", active))
    if nearest.kind in RUNTIMES:
        form = "{{.State.Status}} {{.HostConfig.RestartPolicy.Name}}"
        answer = _ask([*reach, nearest.kind, "inspect", "--format", form, nearest.id])
        status, _, policy = answer.strip().partition(" ")
        if status == "restarting" or (status == "exited" and policy in ALWAYS):
            return "%s, container %s is %s" % (nearest.kind, nearest.id[:12], status)
    return ""


def _ask(argv: list[str]) -> str:
    """What a command answers in time, else ``""``; it is abandoned then, and never waited for."""
    try:
        pid, write, read = nvidia_smi.start(argv)
    except OSError:
        return ""
    until = time.monotonic() + ASK_TIMEOUT
    answer = b""
    while deadline.readable(read, until - time.monotonic()):
        more = os.read(read, 4096)
        if not more:
            break
        answer += more
    else:
        answer = b""
        nvidia_smi.kill(pid)
    nvidia_smi.close(pid, write, read)
    return answer.decode("utf-8", "replace")


def _nearest(holder: holders.Holder) -> owners.Owner:
    """Its nearest owner by its control group, who would restart it; one of no kind if none is."""
    return owners.innermost(holder.cgroup or "") or owners.Owner("", "", "")


def starter(holder: holders.Holder) -> holders.Holder | None:
    """Its living parent, if that is one that has started it and not adopted it."""
    parent = living_parent(holder)
    return parent if parent is not None and parent.name not in ADOPTERS else None


def living_parent(holder: holders.Holder) -> holders.Holder | None:
    """Its parent as it is now, if it is still there."""
    parent = holders.Holder(holder.ppid)
    return parent if holders.describe(parent) and parent.state != "Z" else None
