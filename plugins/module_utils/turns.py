# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run at a time acts on a target, and a later one knows whom an earlier one has told to end.

Two operators may reset the same container at once. A second SIGTERM is harmful: many servers take
it as "at once, without finishing". So the runs take turns, and what has been told is told once.
"""

from __future__ import annotations

import fcntl
import json
import os
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Signals that ask. Those that do not may be repeated, they change nothing any more.
ASKING = ("TERM", "INT")


class Turn:
    """The right to act on one target, for as long as this object lives or until :meth:`end`.

    The lock is an advisory one on a folder that is there anyway - the container's control group, or
    the root of all of them for a node - so that it leaves nothing behind, and the kernel takes it
    back from a run that dies.

    :param vmid: the container, 0 for the node itself.
    """

    def __init__(self, vmid: int, root: str = "/sys/fs/cgroup", run: str = "/run") -> None:
        self._lock = os.open(owners.container_cgroup(vmid, root) or root, os.O_RDONLY)
        self._path = os.path.join(run, "gpuops-told-%s.json" % (vmid or "node"))

    def take(self, patience: float) -> float | None:
        """Wait for the turn; returns the seconds waited, or ``None`` if ``patience`` ran out."""
        waited = 0.0
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return waited
            except OSError:
                if waited > patience:
                    return None
                time.sleep(0.05)
                waited += 0.05

    def was_told(self, holder: holders.Holder, signal: str) -> bool:
        """Has a run sent this very process this signal, one that need not be repeated?"""
        return signal in ASKING and [holder.pid, holder.start, signal] in self._told()

    def remember(self, told: list[dict[str, Any]]) -> None:
        """Keep whom these actions told, for as long as they live; nothing is kept of the dead."""
        entries = self._told() + [
            [each["node_pid"], each["start"], each["signal"]]
            for each in told
            if each["result"] == "sent" and each["signal"] in ASKING
        ]
        alive = [entry for entry in entries if _is_alive(entry[0], entry[1])]
        try:
            if not alive:
                os.unlink(self._path)
                return
            with open(self._path + ".new", "w", encoding="ascii") as file:
                json.dump(alive, file)
            os.rename(self._path + ".new", self._path)
        except OSError:
            pass  # Nothing to forget, or nowhere to remember; the turns still hold.

    def _told(self) -> list[list[Any]]:
        try:
            with open(self._path, encoding="ascii") as file:
                told: list[list[Any]] | None = json.load(file)
            return told or []
        except (OSError, ValueError):
            return []

    def end(self) -> None:
        """Give the turn back."""
        os.close(self._lock)


def _is_alive(pid: int, start: int) -> bool:
    fields = holders.stat_fields(pid)
    return fields is not None and int(fields[19]) == start
