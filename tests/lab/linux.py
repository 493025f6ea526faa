"""The few Linux calls that Python 3.11 lacks: mount, unshare, setns, pivot_root."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT = 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x20000000, 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
)
PR_SET_PDEATHSIG = 1
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432  # the same on every architecture
FSCONFIG_CMD_CREATE = 6

_ARM = platform.machine() == "aarch64"
SYS_PIVOT_ROOT = 41 if _ARM else 155
SYS_READ = 63 if _ARM else 0
SYS_EXIT = 93 if _ARM else 60  # ends one thread; exit_group would end the process

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(
    source: str | Path, target: str | Path, kind: str = "", flags: int = 0, data: str = ""
) -> None:
    """mount(2)."""
    _check(
        libc.mount(
            str(source).encode(), str(target).encode(), kind.encode(), flags, data.encode() or None
        ),
        f"mount {kind or source} on {target}",
    )


def bind(source: str | Path, target: str | Path) -> None:
    """Show `source` at `target` too."""
    mount(source, target, "", MS_BIND)


def detached_tmpfs() -> int:
    """A descriptor of the root of a new tmpfs that is mounted nowhere."""

    def call(number: int, *arguments: int | bytes | None) -> int:
        result: int = libc.syscall(number, *arguments)
        _check(min(result, 0), "making a file system")
        return result

    context = call(SYS_FSOPEN, b"tmpfs", 0)
    call(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
    tree = call(SYS_FSMOUNT, context, 0, 0)
    os.close(context)
    return tree


def umount(target: str | Path, flags: int = MNT_DETACH) -> None:
    """umount2(2), lazily unless told otherwise."""
    _check(libc.umount2(str(target).encode(), flags), f"umount {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2); with a pidfd it enters several namespaces at once (Linux 5.8)."""
    _check(libc.setns(fd, flags), "setns")


def enter(pid: int) -> None:
    """Enter the namespaces of a process; its user namespace as that one's root."""
    flags = ALL_NAMESPACES
    mine, its = (os.stat(f"/proc/{who}/ns/user").st_ino for who in ("self", pid))
    if mine != its:
        flags |= CLONE_NEWUSER
    setns(os.pidfd_open(pid), flags)
    if mine != its:
        os.setgroups([])
        os.setgid(0)
        os.setuid(0)


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _check(libc.syscall(SYS_PIVOT_ROOT, new.encode(), old.encode()), "pivot_root")


def die_with_parent(signal_number: int) -> None:
    """Ask for a signal when the parent dies, so that a killed `up` leaves no half-built host."""
    _check(libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def in_read(pid: int) -> bool:
    """Whether a process is in read(2); True where the kernel does not say."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(SYS_READ)
    except OSError:
        return True


def process_state(pid: int) -> str:
    """The state letter of a process, or an empty string when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def namespace_pids(pid: int) -> list[int]:
    """The process's numbers from this namespace inwards (NSpid)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    except OSError:
        pass
    return []


def cgroup2_mount() -> Path:
    """Where this machine has cgroup v2 (/sys/fs/cgroup, or .../unified on a hybrid machine)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[0] == "cgroup2":
            return Path(fields.split()[4])
    raise RuntimeError("this machine has no cgroup v2 mounted")
