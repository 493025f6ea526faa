# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which processes hold which GPU, by every evidence that the kernel and the driver give.

Three kinds of evidence, because each alone misses real cases (all seen on a real GPU):

* descriptors of the device nodes, of *all tasks*: a process whose main thread has exited shows
  none at ``/proc/PID/fd`` but keeps its memory;
* mappings of the device nodes: a process may close its descriptors and keep its memory, and is
  then missing from the driver's own list;
* the driver's list of compute processes.

Devices are matched by number. Links are read, and only what is named below ``/dev`` or after
nvidia is looked at further: a stat on a descriptor of a dead network mount hangs for ever.
"""

from __future__ import annotations

import errno
import mmap
import os
import pwd
import re
import signal
import stat
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline, owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from typing import Any

# The major number of NVIDIA's GPUs, fixed by the kernel's list of devices. The numbers of
# nvidia-uvm and nvidia-caps are given out at load time and read from /proc/devices.
GPU_MAJOR = 195
CTL_MINOR = 255
MODESET_MINOR = 254

# Device files that nearly every process has open; not worth a stat.
COMMON = frozenset(
    "/dev/" + name for name in ("null", "zero", "full", "tty", "ptmx", "random", "urandom", "fuse")
)

# Where the driver's device files are.
DEVICE_FOLDERS = ("/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")

# From here on the scan is split over forked workers: below, a fork costs more than it saves.
PROCESSES_PER_WORKER = 1000
MOST_WORKERS = 4

# Seconds that the look at one process may take before it is given up as stuck in the kernel.
LOOK_PATIENCE = 2.0

# Seconds that a look at the directory of an MPS may take, which can lie on a mount of anybody's.
MPS_PATIENCE = 1.0

# How often, and after how many seconds, a process is looked at again whose mappings could not be
# read because it was in state D: a healthy one is there for moments only.
BUSY_LOOKS = 2
BUSY_PAUSE = 0.02

# Seconds for which one is looked at again that has yet to end: one with a GPU does not before the
# driver has freed its memory.
ENDING_PATIENCE = 1.0

# How often the processes that have come during a look are looked at.
NEW_LOOKS = 3

# From so many descriptors on, read for one process, its further tasks are asked for shared tables.
MANY_DESCRIPTORS = 10000

# The number of the system call kcmp by kind of machine, and from linux/kcmp.h what to compare.
KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354, "s390x": 343}
KCMP_FILES = 2

# This program, or the whole machine, has as many files open as it may.
EXHAUSTED = (errno.EMFILE, errno.ENFILE)

# Flags in /proc/PID/stat, from include/linux/sched.h: of one that ends, and of a kernel thread.
EXITING = 0x00000004
KERNEL_THREAD = 0x00200000

# What the first process of a PID namespace waits in, which may be for ever, until the others there
# are gone: it has let go of all that it had by then (kernel/pid_namespace.c).
WAITS_FOR_OTHERS = (b"zap_pid_ns_processes", b"do_wait")

# The last word of an option or variable that says who somebody is, and the place for that in an
# address. Not tokens in general: of those servers have a number.
SECRET = re.compile(r"(?:^|[-_])(?:key|token|secret|pass|passwd|password|credentials?)$", re.I)
IN_ADDRESS = re.compile(r"//[^/@\s]+@")
STARS = "***"

# Stand in the place of the evidence for a process that cannot be looked at, now or at all.
BUSY = "busy"
ENDING = "ending"
UNREADABLE = "unreadable"


class Device:
    """What a device number means: a GPU by minor number, or one of the driver's other nodes."""

    def __init__(self, extra_majors: dict[int, str]) -> None:
        self.extra_majors = extra_majors

    def name(self, number: int) -> str:
        """``gpu3``, ``ctl``, ``modeset``, ``nvidia-uvm`` …, or ``""`` if it is not NVIDIA's."""
        major, minor = os.major(number), os.minor(number)
        if major == GPU_MAJOR:
            if minor == CTL_MINOR:
                return "ctl"
            return "modeset" if minor == MODESET_MINOR else "gpu%d" % minor
        return self.extra_majors.get(major, "")


def read_devices(path: str = "/proc/devices") -> Device:
    """The driver's further major numbers (nvidia-uvm, nvidia-caps …) on this node."""
    majors: dict[int, str] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as devices:
            for line in devices:
                words = line.split()
                if len(words) == 2 and words[0].isdigit() and words[1].startswith("nvidia"):
                    majors[int(words[0])] = words[1]
    except OSError:
        pass  # Without it only GPUs are recognised by number; the names still are.
    return Device(majors)


class Holder:
    """A process that holds a GPU, as it was when it was seen.

    ``evidence`` maps a device (``gpu3``, ``ctl``, ``nvidia-uvm``) to how it is known to be held:
    ``descriptor``, ``task descriptor``, ``mapping``, ``driver list``.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.evidence: dict[str, set[str]] = {}
        self.used_mib: dict[int, int | None] = {}
        self.start = 0
        self.state = ""
        self.ppid = 0
        self.uid: int | None = None
        self.name = ""
        self.command = ""
        self.ns_pid = pid
        self.namespaces: list[int] = []
        self.cgroup: str | None = None
        self.owner = owners.Owner("unknown", "", "not looked at yet")
        # Its memory is not to be touched again: the look at it got stuck there.
        self.blocks = False

    @property
    def gpus(self) -> set[int]:
        """The minor numbers of the GPUs it holds."""
        return {int(device[3:]) for device in self.evidence if device.startswith("gpu")}

    @property
    def maps(self) -> bool:
        """Has it mapped a GPU? Whoever has only opened one can do nothing there."""
        return any(
            "mapping" in how for device, how in self.evidence.items() if device.startswith("gpu")
        )

    @property
    def escaped(self) -> bool:
        """Known for its owner's only by its PID namespace: it has left the control group."""
        return self.owner.by_namespace

    @property
    def is_mps(self) -> bool:
        """Is it NVIDIA's Multi-Process Service, which holds GPUs on behalf of its clients?"""
        return base_name(self.command).startswith("nvidia-cuda-mps-")

    @property
    def is_workload(self) -> bool:
        """Does it compute? The driver lists it, or it has unified memory mapped.

        A monitor that has only initialised NVML opens the same nodes, nvidia-uvm among them, but
        maps none of them (seen with driver 580).
        """
        listed = any("driver list" in how for how in self.evidence.values())
        return listed or "mapping" in self.evidence.get("nvidia-uvm", ())

    def as_dict(self) -> dict[str, Any]:
        """The holder as plain data for the report."""
        return {
            "pid": self.ns_pid,
            "node_pid": self.pid,
            "ppid": self.ppid,
            "start": self.start,
            "state": self.state,
            "uid": self.uid,
            "user": user_name(self.uid),
            "name": self.name,
            "command": self.command,
            "owner": str(self.owner),
            "owner_evidence": self.owner.evidence,
            "gpus": sorted(self.gpus),
            "used_mib": {str(minor): used for minor, used in sorted(self.used_mib.items())},
            "evidence": {device: sorted(how) for device, how in sorted(self.evidence.items())},
        }


class Stoppers:
    """Who has stopped a look of this run, so that no further look is stopped there again.

    Each would leave one more copy of this program behind, stuck where no signal ends it. What they
    have mapped is not looked at again then; and nothing of those who stop a look even so.
    """

    def __init__(self) -> None:
        self._wholly: dict[tuple[int, str], bool] = {}

    def add(self, pid: int, wholly: bool) -> None:
        """This process has stopped a look; ``wholly``: already that at its descriptors."""
        fields = stat_fields(pid)
        if fields:
            who = (pid, fields[19])
            self._wholly[who] = wholly or self._wholly.get(who, False)

    def known(self) -> dict[int, bool]:
        """Those that are still there, and whether wholly; another with their number has not."""
        return {
            pid: wholly
            for (pid, start), wholly in list(self._wholly.items())
            if (stat_fields(pid) or [""] * 20)[19] == start
        }


class Scan:
    """One look at all processes of the node, deep or quick.

    ``skipped``: the PIDs of those that could not be looked at, or not wholly. ``late``: those of
    them at which the look did not come to an end. ``ending``: those that have yet to end.
    ``busy``: those whose mappings alone could not be read, being in the kernel all the time.
    """

    def __init__(self, deep: bool) -> None:
        self.holders: dict[int, Holder] = {}
        self.started = time.monotonic()
        self.seconds = 0.0
        self.processes = 0
        self.deep = deep
        self.skipped: set[int] = set()
        self.late: set[int] = set()
        self.ending: set[int] = set()
        self.busy: set[int] = set()

    def add(self, pid: int, how: str, devices: list[str]) -> None:
        """Note what is known of a process."""
        if how == UNREADABLE:
            self.skipped.add(pid)
            return
        holder = self.holders.setdefault(pid, Holder(pid))
        for device in devices:
            holder.evidence.setdefault(device, set()).add(how)


def scan(
    devices: Device,
    deep: bool = False,
    pids: list[int] | None = None,
    limit: float = 30.0,
    stoppers: Stoppers | None = None,
) -> Scan:
    """Find every process of this node that holds an NVIDIA device.

    :param deep: read the mappings of every process and every task's own descriptor table too. The
        quick look reads mappings only of a process that has a device open, and the tasks only of
        one whose main thread has exited; the caller asks for the deep one when what it found does
        not explain the memory in use.
    :param pids: look at these only; default all.
    :param limit: seconds; a look may block in the kernel on a process that is stuck there,
        so it is made in forked workers that can be abandoned.
    :param stoppers: who has stopped earlier looks; those who stop this one are added.

    A process that vanishes in the middle of a read is simply gone. Who could not be looked at is in
    ``skipped``, and costs nobody else a look.

    :raises OSError: no further file can be opened, or no process started.
    """
    result = Scan(deep)
    stoppers = stoppers or Stoppers()
    if pids is None:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    else:
        names = [str(pid) for pid in pids]
    result.processes = len(names)
    until = result.started + limit
    again = _look_at_all(names, devices, result, until, stoppers)
    for _ in range(NEW_LOOKS if pids is None else 0):
        # Who was not there yet may have what one had who is not there any more.
        new = sorted({name for name in os.listdir("/proc") if name.isdigit()}.difference(names))
        if not new:
            break
        names += new
        again.update(_look_at_all(new, devices, result, until, stoppers))
    looks, since = 0, time.monotonic()
    while again and (
        looks < BUSY_LOOKS
        or (ENDING in again.values() and time.monotonic() < since + ENDING_PATIENCE)
    ):
        time.sleep(BUSY_PAUSE)
        again = _look_at_all(list(again), devices, result, until, stoppers)
        looks += 1
    result.ending.update(int(name) for name, how in again.items() if how == ENDING)
    result.skipped |= result.late | result.ending
    result.busy.update(int(name) for name, how in again.items() if how == BUSY)
    result.seconds = time.monotonic() - result.started
    return result


def _look_at_all(
    names: list[str], devices: Device, result: Scan, until: float, stoppers: Stoppers
) -> dict[str, str]:
    """Look at these processes, by several workers at once.

    Returns those that are to be looked at again: in state D (``busy``), or there while they end.
    """
    known = stoppers.known()
    result.late.update(pid for pid in known if str(pid) in names)
    names = [name for name in names if not known.get(int(name))]
    count = min(MOST_WORKERS, os.cpu_count() or 1, 1 + len(names) // PROCESSES_PER_WORKER)
    workers = [_Worker(names[part::count], devices, result.deep, known) for part in range(count)]
    again = {}
    for worker in workers:
        left = worker.collect(until)
        for name, how, *held in worker.rows():
            if how in (BUSY, ENDING):
                again[name] = how
            else:
                result.add(int(name), how, held)
        if left:
            culprit = int(left[0])
            result.late.add(culprit)
            if not worker.died:
                # Where its mappings were left out already, it is its descriptors that stop a look.
                stoppers.add(culprit, not worker.has_begun or culprit in known)
            if time.monotonic() < until:
                workers.append(_Worker(left[1:], devices, result.deep, known))
            else:
                result.late.update(int(name) for name in left)
    for pid in stoppers.known():
        if pid in result.holders:
            result.holders[pid].blocks = True
    return again


class _Worker:
    """A forked copy of this program that looks at some processes, and may be given up.

    What it finds it writes at once, and how far it is stands in memory that it shares with us: so
    a process that blocks it costs nothing but the look at that process.
    """

    def __init__(
        self, names: list[str], devices: Device, deep: bool, stoppers: Container[int]
    ) -> None:
        self._names = names
        # How many processes, of all of them how many tables and mappings, and of the present one.
        self._done = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")
        self._data = b""
        self.died = False
        self._pipe, write_end = os.pipe()
        try:
            self._child = os.fork()
        except OSError:
            os.close(self._pipe)
            os.close(write_end)
            raise
        if self._child == 0:
            try:
                deadline.let_go(write_end)
                self._work(write_end, devices, deep, stoppers)
            finally:
                os._exit(0)
        os.close(write_end)

    def _work(self, pipe: int, devices: Device, deep: bool, stoppers: Container[int]) -> None:
        for number, name in enumerate(self._names, 1):
            for how, held in _look_at(name, devices, deep, int(name) not in stoppers):
                if held or how in (BUSY, ENDING, UNREADABLE):
                    os.write(pipe, ("\t".join([name, how, *held]) + "\n").encode())
                self._done[1] += 1
                self._done[2] += 1
            self._done[2] = 0
            self._done[0] = number

    def collect(self, until: float) -> list[str]:
        """Wait for its end; returns whom it did not get done, first the one that stopped it."""
        seen, since = (0, 0), time.monotonic()
        while True:
            now = (self._done[0], self._done[1])
            if now != seen:
                seen, since = now, time.monotonic()
            if seen[0] == len(self._names) or time.monotonic() > min(until, since + LOOK_PATIENCE):
                break
            if self._readable(LOOK_PATIENCE / 4) and not self._read():
                self.died = True
                break
        left = self._names[self._done[0] :]
        while self._readable(0) and self._read():
            pass  # what was found is written before it counts as done
        os.close(self._pipe)
        if left:
            os.kill(self._child, signal.SIGKILL)
        # One that was killed is never waited for: it may be stuck.
        os.waitpid(self._child, os.WNOHANG if left else 0)
        return left

    @property
    def has_begun(self) -> bool:
        """Has it looked at anything of the process at which it stopped?"""
        return self._done[2] > 0

    def _readable(self, seconds: float) -> bool:
        return deadline.readable(self._pipe, seconds)

    def _read(self) -> bool:
        """Take what it has written; False at its end."""
        more = os.read(self._pipe, 65536)
        self._data += more
        return bool(more)

    def rows(self) -> list[list[str]]:
        """PID, evidence and devices, as far as they were written whole."""
        return [line.split("\t") for line in self._data.decode().split("\n")[:-1]]


def _look_at(
    name: str, devices: Device, deep: bool, maps: bool = True
) -> Iterator[tuple[str, set[str]]]:
    """Evidence against one process and the devices it is for, each as soon as it is known.

    Also what has been looked at in vain, with no devices: so it is seen to go on.

    :param maps: whether its mappings may be looked at.

    Moves about in /proc, so only for a worker.
    """
    try:
        count, held = _open_devices("/proc/" + name + "/fd", devices)
        yield "descriptor", held
        if not count and _is_kernels("/proc/" + name):
            return
        if (deep or not count) and has_threads(name):
            for more, own in _task_devices(name, count, devices):
                count += more
                yield "task descriptor", own
        if maps and (deep or held):
            mapped = _mapped_devices(name, devices)
            if mapped is not None:
                yield "mapping", mapped
            elif deep:
                yield BUSY, set()
        if not count and _has_yet_to_end(name):
            yield ENDING, set()
    except (FileNotFoundError, ProcessLookupError):
        return  # It has ended, and what has ended holds nothing.
    except Exception:  # Refused, or unlike anything we know: it may hold whatever it likes.
        yield UNREADABLE, set()


def _open_devices(folder: str, devices: Device) -> tuple[int, set[str]]:
    """How many descriptors are in this folder, and which NVIDIA devices are open in it?

    Relative names from inside the folder: a third faster than absolute ones, because the
    kernel does not walk ``/proc/PID`` for each link again.

    :raises PermissionError: root may list the folder of any process, but without CAP_SYS_PTRACE,
        as in a stock Docker container, not read the links of another user's.
    """
    os.chdir(folder)
    descriptors = os.listdir(".")
    held: set[str] = set()
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed in the meantime
        if (target[:5] != "/dev/" and "nvidia" not in target) or target in COMMON:
            continue
        device = _device_behind(descriptor, target, devices)
        if device:
            held.add(device)
    return len(descriptors), held


def _device_behind(descriptor: str, target: str, devices: Device) -> str:
    """The NVIDIA device of a descriptor, by number; by name where its file system tells none."""
    try:
        number = os.stat(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return _device_by_place(target)
    return devices.name(number.st_rdev) if stat.S_ISCHR(number.st_mode) else ""


def _stat(folder: str) -> list[str] | None:
    """The fields of the process or task of this folder from the state on; ``None`` if gone."""
    return parse_stat(read_bytes(folder + "/stat"))


def _state(folder: str) -> str:
    """The state of the process or task of this folder; ``""`` if it is gone."""
    fields = _stat(folder)
    return fields[0] if fields else ""


def _is_kernels(folder: str) -> bool:
    """Is this a thread of the kernel? It has no memory of its own, and no files."""
    fields = _stat(folder)
    return fields is not None and bool(int(fields[6]) & KERNEL_THREAD)


def _is_ending(fields: list[str]) -> bool:
    """Is the task of these fields about to exit, or has it exited?"""
    return bool(int(fields[6]) & EXITING)


def _has_yet_to_end(name: str) -> bool:
    """Has a task of this process, which has nothing open, begun to exit, and not let go of all?

    The kernel closes all files of a process that ends before it lets go of any: while one of them
    cannot be closed the process has nothing open to be seen, and what it had is not free. In which
    state it waits says nothing: who was not killed can be in S, and the driver polls in R.
    """
    for task in _live_tasks(name):
        folder = "/proc/%s/task/%s" % (name, task)
        fields = _stat(folder)
        ends = fields and _is_ending(fields) and fields[0] not in "ZX"
        if ends and read_bytes(folder + "/wchan") not in WAITS_FOR_OTHERS:
            return True
    return False


def has_threads(name: str) -> bool:
    """More than one task? The link count of the folder says so without listing it."""
    try:
        return os.stat("/proc/" + name + "/task").st_nlink > 3
    except OSError:
        return False


def _task_devices(name: str, count: int, devices: Device) -> Iterator[tuple[int, set[str]]]:
    """As :func:`_open_devices`, of the descriptor table of each task but the main thread.

    As a rule all have one table, and reading it once for each of hundreds of tasks takes seconds:
    so if it is long the kernel is asked which of them have the same.

    :param count: how many descriptors the main thread has.
    """
    known = name if count else ""
    for task in _live_tasks(name):
        if task == name or (count > MANY_DESCRIPTORS and known and share_table(known, task)):
            continue
        try:
            more, held = _open_devices("/proc/%s/task/%s/fd" % (name, task), devices)
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += more
        known = known or (task if more else "")
        yield more, held


def share_table(one: str, other: str) -> bool:
    """Does the kernel say that these two tasks have one descriptor table? False if it says nothing.

    There is no file that tells it, so the system call kcmp has to; what calls it is loaded only
    where it is needed, because that takes a third as long as Python takes to start.
    """
    try:
        import ctypes

        numbers = (KCMP[os.uname().machine], int(one), int(other), KCMP_FILES, 0, 0)
        same = ctypes.CDLL(None).syscall(*map(ctypes.c_long, numbers)) == 0
        # A program of 32 bits has other numbers on the same machine.
        return same and ctypes.sizeof(ctypes.c_long) == 8
    except Exception:  # Not there, or not allowed: then the table is read.
        return False


def _mapped_devices(name: str, devices: Device) -> set[str] | None:
    """The devices mapped by a process, by number where the kernel lets us see it, else by name.

    ``maps`` gives a mapping's path and the number of the file system, not of the device;
    the number is behind ``map_files``, which a container without CAP_SYS_ADMIN cannot follow.

    Returns ``None`` for one in state D: it may hold the lock of its memory, and who reads that
    would wait with it.
    """
    for task in _live_tasks(name):
        folder = "/proc/%s/task/%s" % (name, task)
        if _state(folder) == "D":
            return None
        try:
            with open(folder + "/maps", "rb") as maps:
                text = maps.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text:  # Tasks of a process share their memory; one that has exited has none.
            held = {_mapped_device(task, *each, devices) for each in parse_maps(text, b"/dev/")}
            return held - {""}
    return set()


def parse_maps(text: bytes, part: bytes) -> list[tuple[str, str]]:
    """Address range and path of the files in a ``maps`` that have ``part`` in their path."""
    found = []
    for line in text.split(b"\n") if part in text else []:
        words = line.split(None, 5)
        # What has no inode is no file, whatever a process has called it (PR_SET_VMA_ANON_NAME).
        if len(words) == 6 and part in words[5] and words[4] != b"0":
            span, path = words[0].decode("ascii", "replace"), words[5].decode("utf-8", "replace")
            found.append((span, path))
    return found


def _mapped_device(task: str, span: str, path: str, devices: Device) -> str:
    if path.startswith(("/dev/shm/", "/dev/zero")):
        return ""
    try:
        number = os.stat("/proc/%s/map_files/%s" % (task, span))
    except OSError:
        return _device_by_place(path)  # Not allowed here, or just unmapped.
    if not stat.S_ISCHR(number.st_mode):
        return ""
    # The name again where the number says nothing, as when /proc/devices could not be read.
    return devices.name(number.st_rdev) or _device_by_name(path)


def _device_by_place(path: str) -> str:
    """The same for a file of which nothing but its path is told.

    Only in folders that belong to root: on a mount of his own, which refuses root, any user can
    have a file called nvidia3.
    """
    folder = path.partition(" ")[0].rpartition("/")[0]
    return _device_by_name(path) if folder in DEVICE_FOLDERS else ""


def _device_by_name(path: str) -> str:
    """``gpu3`` for ``/dev/nvidia3`` and so on; ``""`` for what is not named like NVIDIA's."""
    base = path.partition(" ")[0].rpartition("/")[2]
    rest = base[6:]
    # Nothing but the driver's own way of naming: any user can map a file called nvidia-something.
    if base[:6] != "nvidia" or not rest.isascii() or not rest.replace("-", "").isalnum():
        return ""
    return "gpu" + rest if rest.isdigit() else rest if rest in ("ctl", "modeset") else base


def _live_tasks(name: str) -> list[str]:
    """The process itself and then its other tasks: the main thread may have exited.

    :raises OSError: as :func:`read_bytes` does.
    """
    try:
        tasks = os.listdir("/proc/" + name + "/task")
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return []
    return sorted(tasks, key=lambda task: task != name)


def _cgroup(pid: int) -> str:
    """The control groups of a process, as told by a task of it that is not ending.

    Of one that is, cgroup v1 says the root group, which is the node's own, whatever it is in. Of a
    process that ends as a whole nothing else is to be had, and it is past being harmed.
    """
    for task in _live_tasks(str(pid)):
        text = _read(pid, "task/%s/cgroup" % task)
        # Asked afterwards: it was not ending when it was read.
        fields = _stat("/proc/%d/task/%s" % (pid, task))
        if fields and not _is_ending(fields):
            return text
    return _read(pid, "cgroup")


def children(pid: int) -> list[int]:
    """The living children of a process; none where the kernel does not tell."""
    tasks = _live_tasks(str(pid))
    lists = [_read(pid, "task/%s/children" % task) for task in tasks]
    return [int(child) for child in " ".join(lists).split()]


def stat_fields(pid: int) -> list[str] | None:
    """``/proc/PID/stat`` from the state on, or ``None`` if the process is gone.

    Index 0 is the state, 1 the parent, 6 the flags, 19 the start time in clock ticks since boot.
    """
    return parse_stat(read_bytes("/proc/%d/stat" % pid))


def parse_stat(text: bytes) -> list[str] | None:
    """The fields of a ``stat`` from the state on, ``None`` if it is none.

    The name before them may hold spaces and brackets, so the text is cut at the last bracket.
    """
    fields = text.rpartition(b")")[2].decode("ascii", "replace").split()
    numbers = fields[1:2] + fields[6:7] + fields[19:20]
    return fields if len(numbers) == 3 and all(map(_is_number, numbers)) else None


def parse_status(text: bytes) -> dict[str, list[str]]:
    """The words of each line of a ``status``, by key; of two lines with a key the first counts.

    Only a newline ends a line: it is the one letter, beside the backslash, that the kernel
    escapes in the name of a process, and others (a form feed) pass for line ends elsewhere.
    """
    found: dict[str, list[str]] = {}
    for line in text.decode("utf-8", "replace").split("\n"):
        key, _, value = line.partition(":")
        found.setdefault(key, value.split())
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def describe(holder: Holder) -> bool:
    """Fill in who this process is; False if it is gone. What cannot be read stays unknown."""
    fields = stat_fields(holder.pid)
    if fields is None:
        return False
    holder.state, holder.ppid, holder.start = fields[0], int(fields[1]), int(fields[19])
    holder.name = _printable(_read(holder.pid, "comm").rstrip("\n"))
    status = parse_status(read_bytes("/proc/%d/status" % holder.pid))
    uid, ns_pid = status.get("Uid", [])[:1], status.get("NSpid", [])[-1:]
    holder.uid = int(uid[0]) if uid and _is_number(uid[0]) else None
    holder.ns_pid = int(ns_pid[0]) if ns_pid and _is_number(ns_pid[0]) else holder.pid
    holder.state = (status.get("State") or [holder.state])[0]
    holder.cgroup = _cgroup(holder.pid) or None
    holder.namespaces = owners.pid_namespaces(holder.pid)
    if holder.state != "D" and not holder.blocks:
        # The command line lies in the process's memory, whose lock a stuck process may hold.
        # A process whose main thread has exited shows it only at its other tasks.
        tasks = _live_tasks(str(holder.pid))
        texts = (_read(holder.pid, "task/%s/cmdline" % task) for task in tasks)
        holder.command = command_of(next((text for text in texts if text), ""))
    return True


def command_of(cmdline: str) -> str:
    """The beginning of a command line, from the text of ``/proc/PID/cmdline``.

    It goes into reports and logs, so what an option says of a key or a password is left out.
    """
    words = [word for word in cmdline.split("\0") if word.strip(" ")]
    if not words[1:]:  # A title, of which the words are not told apart, but for the blanks.
        words = cmdline.strip("\0 ").split(" ")
    return _printable(" ".join(words[:1] + _without_secrets(words[1:])).strip(" ")[:300])


def _without_secrets(words: list[str]) -> list[str]:
    """The same with stars for what follows ``--api-key`` and the like, or is in an address."""
    found = []
    named = False
    for word in words:
        name, equals, _ = word.partition("=")
        if named and not word.startswith("-"):
            found.append(STARS)
        elif equals and SECRET.search(name):
            found.append(name + equals + STARS)
        else:
            found.append(IN_ADDRESS.sub("//%s@" % STARS, word))
        named = not equals and word.startswith("-") and bool(SECRET.search(name))
    return found


def _printable(text: str) -> str:
    """Any process can be called anything; what is no letter of some script becomes a ``?``."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read(pid: int, name: str) -> str:
    return read_bytes("/proc/%d/%s" % (pid, name)).decode("utf-8", "replace")


def read_bytes(path: str) -> bytes:
    """A file of the kernel's; nothing if it is gone or not for us.

    :raises OSError: no file can be opened at all any more, which must not pass for a process that
        is gone.
    """
    try:
        with open(path, "rb", 0) as file:
            return file.read()
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return b""


def base_name(command: str) -> str:
    """The name of the program of a command line, without its folder."""
    return command.partition(" ")[0].rpartition("/")[2].rstrip(":")


def mps_directory(pid: int) -> str:
    """Where this MPS process has its pipes: as its environment says, else the default.

    ``""`` where that cannot be told to a shell in a line, or depends on where the process stands.
    """
    for entry in _read(pid, "environ").split("\0"):
        key, _, value = entry.partition("=")
        if key == "CUDA_MPS_PIPE_DIRECTORY" and value:
            plain = value.startswith("/") and value.strip() == value and "\n" not in value
            return value if plain else ""
    return "/tmp/nvidia-mps"


def mps_within_reach(mps: Holder, directory: str, writer: int) -> bool:
    """Does what is written to this directory reach the daemon of this MPS, and no other?

    Only if the process ``writer`` sees the same directory there, and it belongs to whom the daemon
    runs as: the name and the environment of a process may be anything.
    """
    place = _directory_seen_by(mps.pid, directory)
    if not place or place != _directory_seen_by(writer, directory):
        return False
    # A server runs as the user of its clients, and is a child of the daemon.
    daemon = Holder(mps.ppid)
    service = [mps, daemon] if describe(daemon) and daemon.is_mps else [mps]
    return int(place.split()[2]) in [each.uid for each in service]


def _directory_seen_by(pid: int, directory: str) -> bytes:
    """Device, inode and owner of a directory of this process's; nothing where they are not told.

    In a copy of this program: links must lead where they do for that process, and the file system
    may belong to a mount that does not answer.
    """

    def look() -> bytes:
        os.chroot("/proc/%d/root" % pid)
        found = os.stat(directory)
        return b"%d %d %d" % (found.st_dev, found.st_ino, found.st_uid)

    return deadline.in_a_copy(look, MPS_PATIENCE)


def user_name(uid: int | None) -> str:
    """The node's name for a user id, or the number where it has none."""
    if uid is None:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ticks_since_boot() -> int:
    """Now, in the unit of a process's start time."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def family(pid: int) -> list[int]:
    """A process and its ancestors, nearest first, as far as this namespace shows them."""
    line = []
    while pid > 0 and pid not in line:
        line.append(pid)
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return line
