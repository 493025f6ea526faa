#!/usr/bin/python3 -IS
# SPDX-License-Identifier: GPL-3.0-or-later
"""nvidia-smi of the race of PIDs: what it says is read off /proc at the moment it is asked.

A GPU has 1000 MiB in use for each process that has it open and is no monitor; the list of compute
processes is those. Memory is free the instant its holder is gone, and so is the PID.
"""

# ruff: noqa: PTH116, PTH123, PTH208
# It is started many times a second, and pathlib takes as long to import as Python takes to start.

import os
import sys

GPUS = 4
MAJOR = 195


def held():
    """Pairs of GPU and PID."""
    pairs = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/comm") as file:
                if file.read().startswith("dcgm"):
                    continue
            descriptors = os.listdir("/proc/" + name + "/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                device = os.stat("/proc/" + name + "/fd/" + descriptor).st_rdev
            except OSError:
                continue
            if os.major(device) == MAJOR and os.minor(device) < GPUS:
                pairs.append((os.minor(device), int(name)))
    return pairs


def main(argv):
    """The three questions of gpuops."""
    uuids = [f"GPU-00000000-0000-0000-0000-{gpu:012}" for gpu in range(GPUS)]
    if argv == ["-q"]:
        for gpu, uuid in enumerate(uuids):
            print(f"    GPU UUID : {uuid}\n    Minor Number : {gpu}")
    elif argv[0].startswith("--query-compute-apps"):
        for gpu, pid in held():
            print(f"{uuids[gpu]}, {pid}, 1000")
    else:
        pairs = held()
        for gpu, uuid in enumerate(uuids):
            used = 1000 * sum(1 for each, _ in pairs if each == gpu)
            bus = f"00000000:{gpu + 1:02X}:00.0"
            print(f"{gpu}, {uuid}, {bus}, {used}, 99999, 0, 0, 30, P0, 580.1, GPU of the race")


main(sys.argv[1:])
