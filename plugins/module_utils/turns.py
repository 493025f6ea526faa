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

# Where it is kept whom a run has told: an extended attribute of the folder that is locked. A
# container's control group is one folder, whether it is seen from around it or as the root inside.
TOLD = "user.gpuops-told"
# So many of them, the newest: an attribute holds 64 KiB. Nobody is ever taken for an old one.
MOST_TOLD = 1000

# Signals that ask. Those that do not may be repeated, they change nothing any more.
ASKING = ("TERM", "INT")


class TurnError(Exception):
    """There is nothing to take turns on; the text says why, and ``remedy`` what to do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


class Turn:
    """The right to act on one target, for as long as this object lives or until :meth:`end`.

    The lock is an advisory one on a folder that is there anyway - the container's control group, or
    the root of all of them for a node - so that it leaves nothing behind, and the kernel takes it
    back from a run that dies.

    :param vmid: the container, 0 for the node itself.
    :raises TurnError: the container has stopped just now, or nobody has mounted the control groups.
    """

    def __init__(self, vmid: int, root: str = "/sys/fs/cgroup", run: str = "/run") -> None:
        group = owners.container_cgroup(vmid, root)
        try:
            self._lock = os.open(group or root, os.O_RDONLY)
        except FileNotFoundError:
            raise _nothing_there(vmid if group else 0, root) from None
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

    def owner(self) -> int:
        """The process that has taken the turn, 0 where the kernel does not tell.

        Whoever may open the folder can take its lock, so a run that waits in vain names who has.
        """
        place = os.fstat(self._lock)
        device = place.st_dev
        where = "%02x:%02x:%d" % (os.major(device), os.minor(device), place.st_ino)
        for line in holders.read_bytes("/proc/locks").decode("ascii", "replace").split("\n"):
            # Number, kind, and after two more words the process and the file; in a line of one that
            # waits an arrow comes first.
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [where] and words[4].isdigit():
                return int(words[4])
        return 0

    def told_at(self, holder: holders.Holder, signal: str) -> int:
        """When a run has sent this very process this signal, one that need not be repeated.

        In clock ticks since boot, 0 if none has. The process is known by its number in its own PID
        namespace, and when it started: these are the same from wherever a run looks.
        """
        if signal not in ASKING:
            return 0
        who = [holder.ns_pid, holder.start, signal]
        times = [each[3] for each in self._told() if each[:3] == who]
        return max(times, default=0)

    def remember(self, told: list[dict[str, Any]]) -> None:
        """Keep whom these actions told."""
        entries = [
            [each["pid"], each["start"], each["signal"], each["at"]]
            for each in told
            if each["result"] == "sent" and each["signal"] in ASKING
        ]
        if not entries:
            return
        text = json.dumps((self._told() + entries)[-MOST_TOLD:]).encode()
        try:
            os.setxattr(self._lock, TOLD, text)
        except OSError:
            self._keep(text)

    def _keep(self, text: bytes) -> None:
        """Where the folder takes no attribute (before Linux 5.7, or read only): in a file."""
        try:
            with open(self._path + ".new", "wb") as file:
                file.write(text)
            os.rename(self._path + ".new", self._path)
        except OSError:
            pass  # Nowhere to remember; the turns still hold.

    def _told(self) -> list[Any]:
        try:
            text = os.getxattr(self._lock, TOLD)
        except OSError:
            text = holders.read_bytes(self._path)
        try:
            told = json.loads(text or b"[]")
        except (ValueError, RecursionError):  # Whoever rules in the container can write it.
            return []
        return [each for each in told if _is_entry(each)] if isinstance(told, list) else []

    def end(self) -> None:
        """Give the turn back, also where a copy of this program still has the descriptor."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def _nothing_there(vmid: int, root: str) -> TurnError:
    """Why there is no folder to lock.

    :param vmid: the container whose folder was there a moment ago, 0 if the root is missing.
    """
    if vmid:
        why = "container %d is not running any more" % vmid
        return TurnError(why, "start the container (pct start), or leave it out with -l")
    why = "there is no %s on the acting host, on which runs take turns" % root
    return TurnError(why, "mount the control groups there, or act from the node around it")


def _is_entry(each: Any) -> bool:
    return isinstance(each, list) and len(each) == 4 and isinstance(each[3], int)
