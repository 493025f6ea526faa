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

import os
import pwd
import signal
import stat
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline, owners

TYPE_CHECKING = False
if TYPE_CHECKING:
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

# From here on the scan is split over forked workers: below, a fork costs more than it saves.
PROCESSES_PER_WORKER = 1000
MOST_WORKERS = 4

# Stands in the place of a device for a process that may not be looked at.
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
        with open(path, encoding="ascii") as devices:
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

    @property
    def gpus(self) -> set[int]:
        """The minor numbers of the GPUs it holds."""
        return {int(device[3:]) for device in self.evidence if device.startswith("gpu")}

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


class Scan:
    """One look at all processes of the node, deep or quick."""

    def __init__(self, deep: bool) -> None:
        self.holders: dict[int, Holder] = {}
        self.started = time.monotonic()
        self.seconds = 0.0
        self.processes = 0
        self.deep = deep
        self.unreadable = 0


def scan(
    devices: Device, deep: bool = False, pids: list[int] | None = None, limit: float = 30.0
) -> Scan:
    """Find every process of this node that holds an NVIDIA device.

    :param deep: read the mappings of every process and every task's own descriptor table too. The
        quick look reads mappings only of a process that has a device open, and the tasks only of
        one whose main thread has exited; the caller asks for the deep one when what it found does
        not explain the memory in use.
    :param pids: look at these only; default all.
    :param limit: seconds; a look may block in the kernel on a process that is stuck there,
        so it is made in forked workers that can be abandoned.

    Never raises: a process that vanishes in the middle of a read is simply gone. How many could
    not be looked at is in ``unreadable``.
    """
    result = Scan(deep)
    if pids is None:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    else:
        names = [str(pid) for pid in pids]
    result.processes = len(names)
    count = min(MOST_WORKERS, os.cpu_count() or 1, 1 + len(names) // PROCESSES_PER_WORKER)
    workers = [_start_worker(names[part::count], devices, deep) for part in range(count)]
    for worker, pipe in workers:
        for pid, device, how in _collect_worker(worker, pipe, result.started + limit):
            if device == UNREADABLE:
                result.unreadable += 1
                continue
            holder = result.holders.setdefault(pid, Holder(pid))
            holder.evidence.setdefault(device, set()).add(how)
    result.seconds = time.monotonic() - result.started
    return result


def _start_worker(pids: list[str], devices: Device, deep: bool) -> tuple[int, int]:
    """Look at some processes in a forked copy of this program, which only reads and writes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lines = ["%d\t%s\t%s\n" % row for row in _look_at(pids, devices, deep)]
            data = "".join([*lines, "end\n"]).encode()
            while data:
                data = data[os.write(write_end, data) :]
        finally:
            os._exit(0)
    os.close(write_end)
    return child, read_end


def _collect_worker(child: int, pipe: int, until: float) -> list[tuple[int, str, str]]:
    """What a worker found; if it is not done in time, that it could not be read."""
    data = b""
    while deadline.readable(pipe, until - time.monotonic()):
        more = os.read(pipe, 65536)
        if not more:
            break
        data += more
    os.close(pipe)
    if not data.endswith(b"end\n"):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)  # never waited for: it may be stuck
        return [(child, UNREADABLE, "")]
    os.waitpid(child, 0)
    rows = [line.split("\t") for line in data.decode().split("\n")[:-2]]
    return [(int(pid), device, how) for pid, device, how in rows]


def _look_at(pids: list[str], devices: Device, deep: bool) -> list[tuple[int, str, str]]:
    """(PID, device, evidence) for these processes; moves about in /proc, so only for a worker."""
    found: list[tuple[int, str, str]] = []
    for name in pids:
        try:
            none_open, held = _open_devices("/proc/" + name + "/fd", devices)
        except PermissionError:
            found.append((int(name), UNREADABLE, ""))
            continue
        except OSError:
            continue  # It has ended, and what has ended holds nothing.
        rows = [(device, "descriptor") for device in held]
        if deep or (none_open and has_threads(name)):
            rows += [(device, "task descriptor") for device in _task_devices(name, devices)]
        if deep or (held and _state(name) != "D"):
            rows += [(device, "mapping") for device in _mapped_devices(name, devices)]
        found += [(int(name), device, how) for device, how in rows]
    return found


def _open_devices(folder: str, devices: Device) -> tuple[bool, set[str]]:
    """Is this descriptor folder empty, and which NVIDIA devices are open in it?

    Relative names from inside the folder: a third faster than absolute ones, because the
    kernel does not walk ``/proc/PID`` for each link again.
    """
    os.chdir(folder)
    descriptors = os.listdir(".")
    held: set[str] = set()
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
            if (target[:5] != "/dev/" and "nvidia" not in target) or target in COMMON:
                continue
            number = os.stat(descriptor)
        except OSError:
            continue
        if stat.S_ISCHR(number.st_mode):
            device = devices.name(number.st_rdev)
            if device:
                held.add(device)
    return not descriptors, held


def _state(name: str) -> str:
    fields = stat_fields(int(name))
    return fields[0] if fields else ""


def has_threads(name: str) -> bool:
    """More than one task? The link count of the folder says so without listing it."""
    try:
        return os.stat("/proc/" + name + "/task").st_nlink > 3
    except OSError:
        return False


def _task_devices(name: str, devices: Device) -> set[str]:
    """The devices open in any task's own descriptor table."""
    held: set[str] = set()
    try:
        tasks = os.listdir("/proc/" + name + "/task")
    except OSError:
        return held
    for task in tasks:
        try:
            held |= _open_devices("/proc/%s/task/%s/fd" % (name, task), devices)[1]
        except OSError:
            continue
    return held


def _mapped_devices(name: str, devices: Device) -> set[str]:
    """The devices mapped by a process, by number where the kernel lets us see it, else by name.

    ``maps`` gives a mapping's path and the number of the file system, not of the device;
    the number is behind ``map_files``, which a container without CAP_SYS_ADMIN cannot follow.
    """
    held: set[str] = set()
    for task in _live_tasks(name):
        try:
            with open("/proc/%s/task/%s/maps" % (name, task), "rb") as maps:
                lines = [line for line in maps if b"/dev/" in line]
        except OSError:
            continue
        for line in lines:
            span, _, rest = line.partition(b" ")
            path = rest[rest.index(b"/dev/") :].decode("utf-8", "replace").strip()
            device = _mapped_device(name, span.decode(), path, devices)
            if device:
                held.add(device)
        if lines:
            break  # Tasks of a process share their memory.
    return held


def _mapped_device(name: str, span: str, path: str, devices: Device) -> str:
    if path.startswith(("/dev/shm/", "/dev/zero")):
        return ""
    try:
        number = os.stat("/proc/%s/map_files/%s" % (name, span))
    except OSError:
        return _device_by_name(path)  # Not allowed here, or just unmapped.
    if not stat.S_ISCHR(number.st_mode):
        return ""
    # The name again where the number says nothing, as when /proc/devices could not be read.
    return devices.name(number.st_rdev) or _device_by_name(path)


def _device_by_name(path: str) -> str:
    """``gpu3`` for ``/dev/nvidia3`` and so on; ``""`` for what is not named like NVIDIA's."""
    base = path.partition(" ")[0].rpartition("/")[2]
    rest = base[6:]
    # Nothing but the driver's own way of naming: any user can map a file called nvidia-something.
    if base[:6] != "nvidia" or not rest.isascii() or not rest.replace("-", "").isalnum():
        return ""
    return "gpu" + rest if rest.isdigit() else rest if rest in ("ctl", "modeset") else base


def _live_tasks(name: str) -> list[str]:
    """The process itself and then its other tasks: the main thread may have exited."""
    try:
        tasks = os.listdir("/proc/" + name + "/task")
    except OSError:
        return []
    return sorted(tasks, key=lambda task: task != name)


def stat_fields(pid: int) -> list[str] | None:
    """``/proc/PID/stat`` from the state on, or ``None`` if the process is gone.

    Index 0 is the state, 1 the parent, 19 the start time in clock ticks since boot. The name
    before them may hold spaces and brackets, so the text is cut at the last bracket.
    """
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as text:
            return text.read().rpartition(")")[2].split()
    except OSError:
        return None


def describe(holder: Holder) -> bool:
    """Fill in who this process is; False if it is gone."""
    fields = stat_fields(holder.pid)
    if fields is None:
        return False
    holder.state, holder.ppid, holder.start = fields[0], int(fields[1]), int(fields[19])
    holder.name = _printable(_read(holder.pid, "comm").rstrip("\n"))
    for line in _read(holder.pid, "status").splitlines():
        key, _, value = line.partition(":")
        if key == "Uid":
            holder.uid = int(value.split()[0])
        elif key == "NSpid":
            holder.ns_pid = int(value.split()[-1])
        elif key == "State":
            holder.state = value.split()[0]
    holder.cgroup = _read(holder.pid, "cgroup") or None
    holder.namespaces = owners.pid_namespaces(holder.pid)
    if holder.state != "D":
        # The command line lies in the process's memory, whose lock a stuck process may hold.
        # A process whose main thread has exited shows it only at its other tasks.
        tasks = _live_tasks(str(holder.pid))
        texts = (_read(holder.pid, "task/%s/cmdline" % task) for task in tasks)
        words = next((text for text in texts if text), "").split("\0")
        holder.command = _printable(" ".join(words).strip()[:300])
    return True


def _printable(text: str) -> str:
    """Any process can be called anything; what is no letter of some script becomes a ``?``."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read(pid: int, name: str) -> str:
    try:
        with open("/proc/%d/%s" % (pid, name), encoding="utf-8", errors="replace") as text:
            return text.read()
    except OSError:
        return ""


def base_name(command: str) -> str:
    """The name of the program of a command line, without its folder."""
    return command.partition(" ")[0].rpartition("/")[2].rstrip(":")


def mps_directory(pid: int) -> str:
    """Where this MPS process has its pipes: as its environment says, else the default."""
    for entry in _read(pid, "environ").split("\0"):
        key, _, value = entry.partition("=")
        if key == "CUDA_MPS_PIPE_DIRECTORY" and value and "\n" not in value:
            return value
    return "/tmp/nvidia-mps"


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
