# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who comes back after having been ended, how often, and by whose doing."""

from __future__ import annotations

import os
import re
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import commands, holders, owners, verdict

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
UNIT_STATE = "ActiveState,SubState,Restart,ExecMainStartTimestampMonotonic"
# The kernel's overflow group: whoever asks in a user's name needs none.
NO_GROUP = "65534"

RUNTIMES = ("docker", "podman")
CONTAINER_STATE = "{{.State.Status}} {{.HostConfig.RestartPolicy.Name}}"
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


def remembered(ended: dict[str, Any]) -> holders.Holder:
    """Whom an action of this run was about, as far as its record tells."""
    holder = holders.Holder(ended["node_pid"])
    holder.ns_pid, holder.ppid, holder.start = ended["pid"], ended["ppid"], ended["start"]
    holder.name, holder.command = ended["name"], ended["command"]
    holder.evidence = {device: set(how) for device, how in ended["evidence"].items()}
    holder.owner = owners.Owner("host", "", ended["owner_evidence"])
    path = ended["restarted_by"].partition("cgroup ")[2]
    if path:
        holder.cgroup = "0::%s\n" % path
        holder.owner = owners.owner_from_cgroup(holder.cgroup) or holder.owner
    return holder


def supervised(holder: holders.Holder, chosen: list[holders.Holder]) -> bool:
    """May somebody restart it: a service manager, a container runtime, a parent that lives on?"""
    nearest = _nearest(holder)
    if nearest.fenced and nearest.kind not in ("lxc", "user lxc"):
        return True
    if holder.ppid in {each.pid for each in chosen}:
        return False
    parent = living_parent(holder)
    # One whose parent has ended since it was seen may have been all that its unit ran.
    if nearest.kind in UNITS and (parent is None or parent.name == "systemd"):
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
        by = "%s: %s" % (_named(parent), parent.command[:100])
        # PID 1 cannot be stopped without its container.
        return by, "have it stop that first" if parent.ns_pid == 1 else "stop that first"
    if nearest.kind == "unit":
        return "systemd", "run systemctl stop %s first" % nearest.id
    if nearest.kind == "user unit":
        uid = owners.user_of(nearest)
        how = "as user %s, with XDG_RUNTIME_DIR=/run/user/%s, run systemctl --user stop %s first"
        return "systemd", how % (uid, uid, nearest.id)
    return "a supervisor that is not its parent", "find and stop that first"


def pending(ended: list[holders.Holder], told: dict[int, int]) -> tuple[holders.Holder, str] | None:
    """One of these ended holders that something starts again, and what does, in words.

    A service manager may wait longer before it does (``RestartSec=``) or prepare longer
    (``ExecStartPre=``) than anybody watches; and a server that runs again takes a while until it
    opens a GPU. systemd, a user's own too, is asked about its units, docker and podman about their
    containers, of this node and in its LXC containers; of what has not answered within
    ``ASK_TIMEOUT``, all of them together, nothing is known.

    :param told: when each was signalled last, by PID, in clock ticks since boot.
    """
    until = time.monotonic() + ASK_TIMEOUT
    answers: dict[tuple[str, ...], str] = {}
    for holder in ended:
        question = tuple(_question(holder))
        left = until - time.monotonic()
        since = told.get(holder.pid, min(told.values()))
        if question and question not in answers and left > 0:
            answers[question] = commands.answer_of(list(question), left)
        by = _who_restarts(holder, answers.get(question, ""), since)
        by = by or _started_by_parent(holder, since)
        if by:
            return holder, by
    return None


def _started_by_parent(holder: holders.Holder, since: int) -> str:
    """The living parent that has started the same again since then, in words, or ``""``.

    A script goes on to other things, which may have the name of the same interpreter.
    """
    parent = starter(holder)
    if parent is not None:
        for pid in holders.children(parent.pid):
            child = holders.Holder(pid)
            if not holders.describe(child) or child.state == "Z" or pid == holder.pid:
                continue
            if child.start >= since and _words_of(child) == _words_of(holder):
                return "%s has started %s" % (_named(parent), _named(child))
    return ""


def _words_of(one: holders.Holder) -> tuple[str, str]:
    """Name and command but for numbers: some start a server with another port each time."""
    return one.name, re.sub("[0-9]+", "", one.command)


def _named(one: holders.Holder) -> str:
    return "%s (%s)" % (one.name, verdict.pids(one))


def _question(holder: holders.Holder) -> list[str]:
    """The command that asks what becomes of its unit or container; empty if nobody can be asked."""
    nearest, owner = _nearest(holder), holder.owner
    if owner.by_namespace:
        return []  # Its control group is one of the node, which is not where it was started.
    reach = ["lxc-attach", "-n", owner.id, "--"] if owner.kind == "lxc" else []
    if nearest.kind in UNITS and (reach or not owner.fenced):
        return [*reach, *_systemctl(nearest), "show", "-p", UNIT_STATE, "--", nearest.id]
    if nearest.kind in RUNTIMES:
        return [*reach, nearest.kind, "inspect", "--format", CONTAINER_STATE, nearest.id]
    return []


def _who_restarts(holder: holders.Holder, answer: str, since: int) -> str:
    """What starts the unit or container of this one again by this answer, in words, or ``""``."""
    nearest = _nearest(holder)
    if nearest.kind in UNITS:
        state = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
        active, restart = state.get("ActiveState"), state.get("Restart", "no")
        if active == "activating" or (active == "deactivating" and restart != "no"):
            return "systemd, unit %s is in state %s" % (nearest.id, state.get("SubState", active))
        started = state.get("ExecMainStartTimestampMonotonic", "")
        known = started.isascii() and started.isdigit()
        if active == "active" and known and int(started) > _microseconds(since):
            return "systemd, unit %s runs again" % nearest.id
        return ""
    status, _, policy = answer.strip().partition(" ")
    if status == "restarting" or (status == "exited" and policy in ALWAYS):
        return "%s, container %s is %s" % (nearest.kind, nearest.id[:12], status)
    # Without its process 1 a container ends.
    if status == "running" and holder.ns_pid == 1 and _is_gone(holder):
        return "%s, container %s runs again" % (nearest.kind, nearest.id[:12])
    return ""


def _is_gone(holder: holders.Holder) -> bool:
    fields = holders.stat_fields(holder.pid)
    return fields is None or int(fields[19]) != holder.start or fields[0] == "Z"


def _microseconds(ticks: int) -> float:
    """A time in clock ticks since boot by the clock of systemd, which stands while suspended."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return (ticks / os.sysconf("SC_CLK_TCK") - asleep) * 1e6


def _systemctl(unit: owners.Owner) -> list[str]:
    """How the systemd of this unit is asked; a user's own answers nobody but that user."""
    if unit.kind == "unit":
        return ["systemctl"]
    uid = owners.user_of(unit)
    become = ["setpriv", "--reuid=" + uid, "--regid=" + NO_GROUP, "--clear-groups"]
    return [*become, "env", "XDG_RUNTIME_DIR=/run/user/" + uid, "systemctl", "--user"]


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
