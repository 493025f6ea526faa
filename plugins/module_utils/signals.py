# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Signal exactly the process that was seen, or nobody.

A PID is only a number that may by now be somebody else's. A handle (pidfd) taken first, and
the start time compared through it afterwards, make it a process: from then on the number cannot
be reused without the handle noticing.
"""

from __future__ import annotations

import os
import signal

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline, holders

SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}


class Grip:
    """A hold on one process: signals it, and knows when it has ended.

    Where the kernel or Python has no pidfd (before Linux 5.3, Python 3.9) the start time is
    compared right before the signal instead; a small race is then left, as it is for every tool.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start
        self.handle = -1
        if hasattr(os, "pidfd_open"):
            try:
                self.handle = os.pidfd_open(pid)
            except OSError:
                pass  # Gone, or no pidfd here; same() below tells which.

    def same(self) -> bool:
        """Is the process behind the number still the one that was seen?"""
        fields = holders.stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.start

    def send(self, name: str) -> str:
        """Send a signal by name; returns ``sent``, ``gone`` or why it was refused."""
        if not self.same():
            return "gone"
        number = SIGNALS[name]
        try:
            if self.handle >= 0:
                signal.pidfd_send_signal(self.handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            return "not permitted"
        return "sent"

    def ended(self) -> bool:
        """Has it ended? A zombie has: it holds no memory and no descriptor any more."""
        fields = holders.stat_fields(self.pid)
        if fields is None or int(fields[19]) != self.start:
            return True
        if self.handle >= 0:
            return deadline.readable(self.handle, 0)
        return fields[0] in "ZX" and not holders.has_threads(str(self.pid))

    def close(self) -> None:
        """Give the handle back."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def why_stuck(pid: int) -> dict[str, str]:
    """What a process that does not die waits for: state, wait channel, stack, dead mounts."""
    fields = holders.stat_fields(pid)
    return {
        "state": fields[0] if fields else "gone",
        "wait_channel": _first(pid, "wchan"),
        "stack": _first(pid, "stack", lines=8),
        "mounts": ", ".join(_network_mounts(pid)),
    }


def _first(pid: int, name: str, lines: int = 1) -> str:
    """The first lines of a file of any of the process's tasks: the stuck one may not lead."""
    try:
        tasks = sorted(os.listdir("/proc/%d/task" % pid), key=lambda task: task != str(pid))
    except OSError:
        return ""
    for task in tasks:
        try:
            with open("/proc/%d/task/%s/%s" % (pid, task, name), encoding="ascii") as text:
                found = [line.strip() for line in text.read().splitlines()[:lines]]
        except OSError:
            continue
        if found and found[0] not in ("", "0"):
            return "; ".join(found)
    return ""


def _network_mounts(pid: int) -> list[str]:
    """Mount points of FUSE and network file systems that the process has a file open on."""
    try:
        with open("/proc/%d/mountinfo" % pid, encoding="utf-8", errors="replace") as table:
            rows = [line.split() for line in table]
        descriptors = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return []
    network = [row for row in rows if row[row.index("-") + 1].startswith(("fuse", "nfs", "cifs"))]
    # A blank in a path is written as an octal escape there.
    points = {
        row[4].encode().decode("unicode_escape").encode("latin-1").decode() for row in network
    }
    used = set()
    for descriptor in descriptors:
        try:
            target = os.readlink("/proc/%d/fd/%s" % (pid, descriptor))
        except OSError:
            continue
        used |= {point for point in points if target == point or target.startswith(point + "/")}
    return sorted(used)
