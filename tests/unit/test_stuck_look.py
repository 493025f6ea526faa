# SPDX-License-Identifier: GPL-3.0-or-later
"""A look that gets stuck in the kernel, where no signal ends it, on a file system of that kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.gpuops.gpu.plugins.plugin_utils import batch

# Runs in namespaces of its own, so that nobody else's look finds what stops it. Somebody has a file
# open of which nothing can be learned; then comes the program, as ssh would start it.
INSIDE = """
import os, subprocess, sys
point, program = sys.argv[1:]
def start(*command, **more):
    child = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, **more)
    assert child.stdout.readline() == "ready\\n"
    return child
space = os.open("/proc/self/ns/mnt", os.O_RDONLY)
server = start("-m", "tests.lab.stuck", str(space), point + "/models", point, pass_fds=[space])
hold = "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); print('ready', flush=True); "
start("-c", hold + "time.sleep(600)", point + "/models/nvidia-weights")
try:
    with open(program) as text:
        ran = subprocess.run(
            ["/usr/bin/python3", "-IS", "-"], stdin=text, capture_output=True, text=True, timeout=90
        )
    stats = [open(f"/proc/{pid}/stat").read() for pid in os.listdir("/proc") if pid.isdigit()]
    stuck = [stat for stat in stats if stat.rpartition(")")[2].split()[0] == "D"]
    print(len(stuck), ran.stdout, ran.stderr)
finally:
    server.terminate()
"""


@pytest.mark.lab
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="no FUSE here")
def test_a_copy_stuck_for_ever_keeps_nobody_from_the_answer(tmp_path: Path, root: Path) -> None:
    request = {"verb": "state", "targets": [{"name": "n1"}, {"name": "n2"}], "earlier": {}}
    program = tmp_path / "program.py"
    program.write_text(batch.program(request), encoding="utf-8")
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ran = subprocess.run(
        [*unshare, sys.executable, "-c", INSIDE, str(tmp_path), str(program)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    left = ran.stdout.split()[0]
    answer = json.loads(ran.stdout.partition(batch.SENTINEL)[2].splitlines()[0])
    assert set(answer["hosts"]) == {"n1", "n2"}
    # However many looks there were.
    assert left == "1"
