# SPDX-License-Identifier: GPL-3.0-or-later
"""What the wrapper costs, measured on the lab.

    python -m tests.wrapper.figures

Prints the ratio of a reset by ``gpuops`` to one by ``ansible-playbook`` on a lab that is held in
the same way before each, the ratio of ``gpuops --help`` to an empty Python, and the CPU time of
the process of the command (its threads, not Ansible) for each of 200 containers.
"""

from __future__ import annotations

import os
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuops import options
from tests.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 9
HOSTS = 200
BIN = Path(sys.executable).parent
GPUOPS = str(BIN / "gpuops")

# The command in this process, and at its end the CPU time that it used without its children.
MEASURED = """
import resource
from gpuops.cli import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(CPU_FILE, "w") as file:
        file.write(str(used.ru_utime + used.ru_stime))
"""


@contextmanager
def lab_of(**shape: Any) -> Iterator[Lab]:
    """A lab of that shape, which is gone afterwards."""
    lab = Lab(os.environ.get("GPUOPS_LAB", "wrapper-figures"))
    lab.up(**shape)
    try:
        yield lab
    finally:
        lab.down()


def told(name: str, ratios: list[float]) -> None:
    """Print a median and its spread."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name}: {statistics.median(ratios):.2f} (median of {len(ratios)} pairs, {spread})")


def pairs(one: Callable[[], float], other: Callable[[], float]) -> list[float]:
    """Ratios of one to the other; which of the two comes first alternates, one pair warms up."""
    ratios = []
    for number in range(PAIRS + 1):
        if number % 2:
            below = other()
            above = one()
        else:
            above = one()
            below = other()
        ratios.append(above / below)
    return ratios[1:]


def seconds(argv: list[str]) -> float:
    """How long a command takes that prints nothing of interest."""
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def reset(lab: Lab, argv: list[str]) -> float:
    """How long a reset of a held ct129 takes, which must succeed."""
    lab.hold("ct129", gpus="0-7", mib=76115)
    began = time.perf_counter()
    done = lab.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.perf_counter() - began


def cpu_a_host(lab: Lab, verb: str, folder: Path, terminal: bool) -> float:
    """Milliseconds of CPU a host of the process of a verb over the lab, with all outputs."""
    file = folder / "cpu"
    argv = [sys.executable, "-c", MEASURED.replace("CPU_FILE", repr(str(file)))]
    argv += [verb, "-l", "gpu_nodes", *(["--yes"] if verb == "reset" else [])]
    for format in options.FORMATS:
        argv += ["--output", f"{format}={folder / format}"]
    master, slave = pty.openpty() if terminal else os.pipe()
    run = lab.popen(
        argv,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        env={**os.environ, "TERM": "xterm-256color", "LINES": "50", "COLUMNS": "120"},
    )
    os.close(slave)
    shown: list[bytes] = []
    reader = threading.Thread(target=_read, args=(master, shown), daemon=True)
    reader.start()
    run.wait()
    reader.join()
    os.close(master)
    text = b"".join(shown)
    assert re.search(rb"200 hosts: 200 clean", text), text[-2000:]
    return float(file.read_text()) * 1000 / HOSTS


def _read(handle: int, into: list[bytes]) -> None:
    try:
        while part := os.read(handle, 1 << 16):
            into.append(part)
    except OSError:  # a terminal's way to say that it is over
        pass


def main() -> None:
    """Print them all."""
    told(
        "gpuops --help / python -c pass",
        pairs(lambda: seconds([GPUOPS, "--help"]), lambda: seconds([sys.executable, "-c", "pass"])),
    )
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        now = ("-e", "gpuops_profile=now")
        typed = [str(BIN / "ansible-playbook"), "reset_gpus.yml", "-l", "ct129", *now]
        ours = [GPUOPS, "reset", "-l", "ct129", "--profile", "now", "--yes"]
        with lab_of(cts="129", nodes=0) as lab:
            told(
                "gpuops reset / ansible-playbook reset_gpus.yml",
                pairs(lambda: reset(lab, ours), lambda: reset(lab, typed)),
            )
        # 50 containers on each of four Proxmox hosts.
        cts = ",".join(f"{100 * host + n}@pve{host}" for host in (1, 2, 3, 4) for n in range(1, 51))
        with lab_of(cts=cts, nodes=0) as lab:
            for verb in ("verify", "reset"):
                for terminal in (False, True):
                    used = cpu_a_host(lab, verb, Path(state), terminal)
                    where = "a terminal" if terminal else "a pipe"
                    print(f"CPU of gpuops {verb} on {where}: {used:.1f} ms a host, {HOSTS} hosts")


if __name__ == "__main__":
    main()
