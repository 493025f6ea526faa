# SPDX-License-Identifier: GPL-3.0-or-later
"""The stopwatch: reads the memory in use with NVML every two milliseconds, in its own process.

Prints ``used SECONDS BYTES`` at each change and ``dying SECONDS PID`` as soon as a watched process
starts to exit (a flag of the kernel's), with the monotonic clock that all processes share. A line
``watch PID`` on standard input adds a process, which ``watching TASKS PID`` confirms. Standard
library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
from pathlib import Path

EXITING = 0x4  # PF_EXITING in include/linux/sched.h
PAUSE = 0.002
MEMORY_VERSION_2 = 2 << 24


class Memory(ctypes.Structure):
    """nvmlMemory_v2_t: the second version does not count the driver's reserve as used."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


def tasks_alive(pid: int) -> set[str]:
    """The tasks of a process that are not exiting; none if it is gone."""
    alive = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields and fields[0] not in "ZX" and not int(fields[6]) & EXITING:
                alive.add(task.name)
    except OSError:
        pass
    return alive


def main() -> None:
    """Entry; the argument is the index of the GPU."""
    Path("/proc/self/comm").write_text("dcgm-watch", encoding="ascii")
    nvml, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(
        int(sys.argv[1]), ctypes.byref(handle)
    )
    if failed:
        raise SystemExit(f"NVML failed with error {failed}")
    memory, last = Memory(), -1
    watched: dict[int, set[str]] = {}
    while True:
        memory.version = ctypes.sizeof(Memory) | MEMORY_VERSION_2
        failed = nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory))
        now = time.monotonic()
        if failed:
            raise SystemExit(f"NVML failed with error {failed}")
        if memory.used != last:
            last = memory.used
            print(f"used {now:.4f} {last}", flush=True)
        for pid, tasks in list(watched.items()):
            if not tasks or not tasks <= tasks_alive(pid):
                del watched[pid]
                print(f"dying {now:.4f} {pid}", flush=True)
        if select.select([0], [], [], PAUSE)[0]:
            text = os.read(0, 65536).decode()
            if not text:
                return
            for line in text.splitlines():
                pid = int(line.split()[1])
                watched[pid] = tasks_alive(pid)
                print(f"watching {len(watched[pid])} {pid}", flush=True)


if __name__ == "__main__":
    main()
