"""The freezer of cgroup v1: who is frozen is in state D, and outlives SIGKILL until thawed.

The freezer of v2 is no use for that: there SIGKILL ends a frozen process.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import linux

SEEN_AT = "/sys/fs/cgroup/freezer"  # by those in a host, as on a machine with both versions


def show() -> int:
    """Called inside a host: its own view of the hierarchy, once."""
    Path(SEEN_AT).mkdir(exist_ok=True)
    if not Path(SEEN_AT, "cgroup.procs").exists() or not Path(SEEN_AT, "tasks").exists():
        linux.mount("freezer", SEEN_AT, "cgroup", data="freezer")
    return 0


def freeze(folder: Path, name: str, pids: list[int]) -> None:
    """Put processes into a frozen group; ``folder`` is where the hierarchy is (made) mounted."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tasks").exists():
        linux.mount("freezer", folder, "cgroup", data="freezer")
    group = folder / name
    group.mkdir(exist_ok=True)
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")


def thaw(folder: Path, name: str) -> None:
    """Let them go on, or end of what was sent to them."""
    group = folder / name
    if not group.exists():
        return
    (group / "freezer.state").write_text("THAWED")
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            (folder / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):  # somebody ends in it right now; it goes with the lab
        group.rmdir()
