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
import re
import signal

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline, holders

# File systems that wait for no server: of this machine, or of the kernel itself. Any other may be
# what a stuck process waits for; those on a network are too many to name (proc/filesystems).
LOCAL = """
aufs bcachefs binfmt_misc bpf btrfs cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs erofs
exfat ext2 ext3 ext4 f2fs fusectl hfsplus hugetlbfs iso9660 jfs mqueue msdos nilfs2 nsfs ntfs ntfs3
overlay proc pstore ramfs reiserfs rootfs securityfs selinuxfs squashfs sysfs tmpfs tracefs udf vfat
xfs zfs
"""

# Seconds for reading the mappings of a process that is stuck: they may be locked.
MAPS_LIMIT = 1.0

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}


class Grip:
    """A hold on one process: signals it, and knows when it has ended.

    Where the kernel or Python has no pidfd (before Linux 5.3, Python 3.9) the start time is
    compared right before the signal instead; a small race is then left, as it is for every tool.

    :raises OSError: there is a pidfd, but no descriptor to be had for it.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start
        self.handle = -1
        if hasattr(os, "pidfd_open"):
            try:
                self.handle = os.pidfd_open(pid)
            except OSError as error:
                if error.errno in holders.EXHAUSTED:
                    raise
                # Gone, or no pidfd here; same() below tells which.

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


def grips_on(chosen: list[holders.Holder]) -> list[Grip]:
    """A grip on each of these, or on nobody.

    :raises OSError: as :class:`Grip` does.
    """
    grips: list[Grip] = []
    try:
        for holder in chosen:
            grips.append(Grip(holder.pid, holder.start))
    except OSError:
        for grip in grips:
            grip.close()
        raise
    return grips


def is_being_killed(holder: holders.Holder) -> bool:
    """Has it been sent SIGKILL, by whomever, and has not ended yet?"""
    text = holders.read_bytes("/proc/%d/status" % holder.pid)
    grip = Grip(holder.pid, holder.start)
    ended = grip.ended()
    grip.close()
    if ended:
        return False
    pending = re.findall(rb"^(?:ShdPnd|SigPnd):\s*([0-9a-f]+)$", text, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def why_stuck(pid: int) -> dict[str, str]:
    """What a process that does not die waits for: state, wait channel, stack, dead mounts.

    One whose control group is frozen waits for that; ``mounts`` then says so instead.
    """
    fields = holders.stat_fields(pid)
    return {
        "state": fields[0] if fields else "gone",
        "wait_channel": _first(pid, "wchan"),
        "stack": _first(pid, "stack", lines=8),
        "mounts": frozen(pid) or ", ".join(_remote_mounts(pid)),
    }


def frozen(pid: int, root: str = "/sys/fs/cgroup") -> str:
    """How to thaw the control group in which this process is frozen; ``""`` if it is not.

    SIGKILL ends nobody in a frozen group of cgroup v1. Of the groups around it that are frozen the
    outermost counts: those below cannot be thawed alone.
    """
    for line in holders.read_bytes("/proc/%d/cgroup" % pid).decode("utf-8", "replace").split("\n"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "freezer":
            found = _outermost(root + "/freezer", path, "freezer.state", _is_frozen_v1)
            if found:
                return "its frozen control group: write THAWED to %s/freezer.state" % found
        elif line.startswith("0::"):
            for top in (root, root + "/unified"):
                found = _outermost(top, path, "cgroup.events", _is_frozen_v2)
                if found:
                    return "its frozen control group: write 0 to %s/cgroup.freeze" % found
    return ""


def _is_frozen_v1(text: bytes) -> bool:
    return text.strip() in (b"FROZEN", b"FREEZING")


def _is_frozen_v2(text: bytes) -> bool:
    return b"frozen 1" in text.split(b"\n")


def _outermost(top: str, path: str, name: str, is_frozen: Callable[[bytes], bool]) -> str:
    """The outermost folder from ``top`` down to ``path`` whose file of this name says frozen."""
    folder = top
    for part in path.strip("/").split("/"):
        folder += "/" + part
        if is_frozen(holders.read_bytes(folder + "/" + name)):
            return folder
    return ""


def _first(pid: int, name: str, lines: int = 1) -> str:
    """The first lines of a file of any of the process's tasks: the stuck one may not lead."""
    try:
        tasks = sorted(os.listdir("/proc/%d/task" % pid), key=lambda task: task != str(pid))
    except OSError:
        return ""
    for task in tasks:
        try:
            with open("/proc/%d/task/%s/%s" % (pid, task, name), "rb") as file:
                text = file.read().decode("ascii", "replace")
        except OSError:
            continue
        found = [line.strip() for line in text.split("\n")[:lines] if line]
        if found and found[0] not in ("", "0"):
            return "; ".join(found)
    return ""


def _remote_mounts(pid: int) -> list[str]:
    """Mount points of file systems with a server on which the process uses a file."""
    mounts = parse_mountinfo(holders.read_bytes("/proc/%d/mountinfo" % pid))
    used = {mount_of(path, mounts) for path in _files(pid)}
    points = {point for point, kind in used if kind and kind not in LOCAL.split()}
    # A machine without disks has even its programs on such a one: it says little, if there is more.
    return sorted(points - {"/"} or points)


def _files(pid: int) -> list[str]:
    """The files that a process uses: open, mapped, its program, where it is."""
    folder = "/proc/%d/" % pid
    try:
        links = ["fd/" + name for name in os.listdir(folder + "fd")]
    except OSError:
        links = []
    found = []
    for link in [*links, "cwd", "root", "exe"]:
        try:
            found.append(os.readlink(folder + link))
        except OSError:
            continue
    maps = deadline.in_a_copy(lambda: holders.read_bytes(folder + "maps"), MAPS_LIMIT)
    return found + [path for _, path in holders.parse_maps(maps, b"/")]


def parse_mountinfo(text: bytes) -> list[tuple[str, str]]:
    """Mount point and type of file system of each line of a ``mountinfo``, in its order."""
    found = []
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        words, _, kind = line.partition(" - ")
        fields = words.split(" ")
        if len(fields) > 5 and kind:
            # Blanks, line ends and backslashes in a path are written as octal escapes.
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), fields[4])
            found.append((point, kind.split(" ")[0]))
    return found


def mount_of(path: str, mounts: list[tuple[str, str]]) -> tuple[str, str]:
    """The mount on which this file lies, and its type; of several at one place the last."""
    best = ("", "")
    for point, kind in mounts:
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best[0]):
            best = (point, kind)
    return best
