# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who comes back after having been ended, how often, and by whose doing."""

from __future__ import annotations

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, owners, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a quarter as long to import as Python takes to start
    from typing import Any

# After so many restarts of what was ended, ending it once more will not help.
MOST = 2

# Seconds for which GPUs must stay at zero where somebody may restart what was ended. systemd and
# docker wait a tenth of a second by default, podman up to two.
WATCH = 1.0


def times(holder: holders.Holder, earlier: list[dict[str, Any]]) -> int:
    """How often was this command ended and started again, up to this holder?

    Counted by generations: those that were there before this one started are the last one, however
    many they were and however often they were signalled; and so on back.
    """
    same = [
        each
        for each in earlier
        if each["result"] == "sent"
        and (each["name"], each["command"]) == (holder.name, holder.command)
        and each["node_pid"] != holder.pid
    ]
    count, started = 0, holder.start
    while True:
        before = [each for each in same if each["at"] <= started]
        if not before:
            return count
        count += 1
        started = max(each["start"] for each in before)
        same = [each for each in before if each["start"] < started]


def supervised(holder: holders.Holder, chosen: list[holders.Holder]) -> bool:
    """May somebody restart it: a service manager, a container runtime, a parent that lives on?"""
    nearest = owners.innermost(holder.cgroup or "")
    if nearest is not None and nearest.fenced and nearest.kind != "lxc":
        return True
    if holder.ppid in {each.pid for each in chosen}:
        return False
    parent = living_parent(holder)
    if parent is None:
        return False
    # Orphans are handed to PID 1 of their namespace. A plain one starts nothing, systemd may.
    is_service = nearest is not None and nearest.kind in ("unit", "user unit")
    return parent.ns_pid != 1 or (is_service and parent.name == "systemd")


def supervisor(holder: holders.Holder) -> tuple[str, str]:
    """Who starts it, and how to make that stop."""
    nearest = owners.innermost(holder.cgroup or "")
    if nearest is not None and nearest.kind in ("docker", "podman"):
        name = nearest.id[:12]
        return "%s %s" % (nearest.kind, name), "run %s stop %s first" % (nearest.kind, name)
    parent = living_parent(holder)
    if parent is not None and parent.ns_pid != 1 and parent.name != "systemd":
        command = parent.command[:100]
        return "%s (%s): %s" % (parent.name, verdict.pids(parent), command), "stop that first"
    if nearest is not None and nearest.kind == "unit":
        return "systemd", "run systemctl stop %s first" % nearest.id
    if nearest is not None and nearest.kind == "user unit":
        return "systemd", "run systemctl --user stop %s first" % nearest.id
    return "a supervisor that is not its parent", "find and stop that first"


def living_parent(holder: holders.Holder) -> holders.Holder | None:
    """Its parent as it is now, if it is still there."""
    parent = holders.Holder(holder.ppid)
    return parent if holders.describe(parent) and parent.state != "Z" else None
