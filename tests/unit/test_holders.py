# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds a device, found on real processes that hold real device nodes.

A node of major 195 can be made without any driver and opened with O_PATH, which is all that the
scan looks at. For mappings stands /dev/zero's device: mapped privately it keeps its node's name.
"""

import contextlib
import functools
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import holders
from tests.patience import PATIENCE, until

Python = Callable[..., subprocess.Popen[str]]

DEVICES = holders.Device({238: "nvidia-uvm", 234: "nvidia-caps"})

# What the children's programs begin with.
BEGIN = """
import ctypes, mmap, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def hold(path):
    return os.open(path, os.O_PATH)
def ready():
    print("ready", flush=True)
def end_this_thread():
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit, not exit_group
"""
WAIT = "ready(); time.sleep(600)"


class Nodes:
    """Device nodes in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, name: str, major: int, minor: int) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        return str(path)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def found(pid: int, deep: bool = False, devices: holders.Device = DEVICES) -> dict[str, set[str]]:
    """The evidence against one process, seen in a scan of all of them."""
    scan = holders.scan(devices, deep=deep)
    assert pid not in scan.skipped
    assert scan.processes > 1
    return scan.holders[pid].evidence if pid in scan.holders else {}


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [
        (195, 0, "gpu0"),
        (195, 3, "gpu3"),
        (195, 253, "gpu253"),
        (195, 254, "modeset"),
        (195, 255, "ctl"),
        (238, 0, "nvidia-uvm"),
        (238, 1, "nvidia-uvm"),
        (234, 7, "nvidia-caps"),
        (1, 3, ""),
        (10, 195, ""),
    ],
)
def test_what_a_device_number_means(major: int, minor: int, name: str) -> None:
    assert DEVICES.name(os.makedev(major, minor)) == name


def test_the_drivers_other_numbers_are_read_from_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "devices"
    table.write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n"
        "234 nvidia-caps\n238 nvidia-uvm\n511 nvidia-caps-imex-channels\n\n"
        "Block devices:\n259 blkext\n",
        encoding="ascii",
    )
    devices = holders.read_devices(str(table))
    names = {
        (major, minor): devices.name(os.makedev(major, minor))
        for major, minor in ((195, 1), (195, 255), (234, 1), (238, 0), (511, 0), (1, 0), (259, 0))
    }
    assert names == {
        (195, 1): "gpu1",
        (195, 255): "ctl",
        (234, 1): "nvidia-caps",
        (238, 0): "nvidia-uvm",
        (511, 0): "nvidia-caps-imex-channels",
        (1, 0): "",
        (259, 0): "",
    }
    assert holders.read_devices(str(tmp_path / "none")).name(os.makedev(195, 2)) == "gpu2"


def test_descriptors_are_found_by_number_whatever_the_name(python: Python, nodes: Nodes) -> None:
    paths = [
        nodes.make("nvidia7", 195, 3),
        nodes.make("not-a-nvidia-gpu", 195, 4),
        nodes.make("nvidiactl", 195, 5),
        nodes.make("nvidia0", 195, 255),
        nodes.make("dev/nvidia-uvm", 238, 0),
    ]
    child = python(BEGIN + "list(map(hold, sys.argv[1:])); " + WAIT, *paths)
    evidence = found(child.pid)
    assert evidence == {
        device: {"descriptor"} for device in ("gpu3", "gpu4", "gpu5", "ctl", "nvidia-uvm")
    }
    assert holders.scan(DEVICES, pids=[child.pid]).holders[child.pid].gpus == {3, 4, 5}


def test_a_node_that_was_removed_is_still_held(python: Python, nodes: Nodes) -> None:
    path = nodes.make("nvidia2", 195, 2)
    child = python(BEGIN + "hold(sys.argv[1]); os.unlink(sys.argv[1]); " + WAIT, path)
    assert found(child.pid) == {"gpu2": {"descriptor"}}


def test_what_only_has_the_name_is_not_held(python: Python, nodes: Nodes) -> None:
    folder = nodes.folder
    (folder / "nvidia0").write_text("a file")
    (folder / "dev" / "nvidia1").mkdir(parents=True)
    (folder / "nvidia2").symlink_to("/dev/null")
    os.mkfifo(folder / "nvidia3")
    os.mknod(folder / "nvidia4", stat.S_IFBLK | 0o600, os.makedev(195, 4))
    other = nodes.make("nvidia5", 10, 229)
    names = ["nvidia0", "dev/nvidia1", "nvidia2", "nvidia3", "nvidia4"]
    paths = [*(str(folder / name) for name in names), other, "/dev/null"]
    gpu = nodes.make("nvidia6", 195, 6)
    child = python(BEGIN + "list(map(hold, sys.argv[1:])); " + WAIT, *paths)
    holding = python(BEGIN + "list(map(hold, sys.argv[1:])); " + WAIT, *paths, gpu)
    for deep in (False, True):
        assert found(child.pid, deep) == {}
        assert set(found(holding.pid, deep)) == {"gpu6"}


DEAD_MAIN = (
    BEGIN
    + """
hold(sys.argv[1])
threading.Thread(target=time.sleep, args=(60,)).start()
ready()
end_this_thread()
"""
)


def main_thread_is_dead(pid: int) -> bool:
    return (holders.stat_fields(pid) or [""])[0] == "Z"


def test_a_process_whose_main_thread_has_exited_still_holds(python: Python, nodes: Nodes) -> None:
    child = python(DEAD_MAIN, nodes.make("nvidia1", 195, 1))
    assert until(lambda: main_thread_is_dead(child.pid))
    assert list(Path(f"/proc/{child.pid}/fd").iterdir()) == []
    assert found(child.pid) == {"gpu1": {"task descriptor"}}
    assert found(child.pid, deep=True) == {"gpu1": {"task descriptor"}}
    holder = holders.scan(DEVICES, pids=[child.pid]).holders[child.pid]
    assert holders.describe(holder)
    assert (holder.state, holder.gpus) == ("Z", {1})


def test_a_task_with_descriptors_of_its_own_is_found_by_the_deep_look(
    python: Python, nodes: Nodes
) -> None:
    source = """
def work():
    assert libc.unshare(0x400) == 0  # CLONE_FILES
    hold(sys.argv[1])
    ready()
    time.sleep(60)
threading.Thread(target=work).start()
"""
    child = python(BEGIN + source, nodes.make("nvidia1", 195, 1))
    assert found(child.pid) == {}
    assert found(child.pid, deep=True) == {"gpu1": {"task descriptor"}}


MAPPED = (
    BEGIN
    + """
handle = os.open(sys.argv[1], os.O_RDWR)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
assert libc.mmap(None, 4096, 1, mmap.MAP_PRIVATE, handle, 0) != ctypes.c_void_p(-1).value
os.close(handle)
"""
)


# Threads that wait; those of even numbers make a table of their own and open a device in it.
TASKS = (
    BEGIN
    + """
os.set_blocking(0, True)
[os.dup(0) for _ in range(int(sys.argv[2]))]
started = threading.Barrier(int(sys.argv[1]) + 1)
def work(number):
    if sys.argv[3:] and number % 2 == 0:
        assert libc.unshare(0x400) == 0
        hold(sys.argv[3])
    started.wait()
    time.sleep(60)
for number in range(int(sys.argv[1])):
    threading.Thread(target=work, args=(number,), daemon=True).start()
started.wait()
"""
    + WAIT
)


@pytest.fixture
def stays_here() -> Iterator[None]:
    """A look moves about in /proc."""
    folder = Path.cwd()
    yield
    os.chdir(folder)


@pytest.mark.usefixtures("stays_here")
def test_tables_that_tasks_share_are_read_once(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nodes.make("nvidia6", 195, 6)
    child = python(TASKS, "8", "100", path)
    read: list[str] = []
    open_devices = holders._open_devices

    def remember(folder: str, devices: holders.Device) -> tuple[int, set[str]]:
        read.append(folder)
        return open_devices(folder, devices)

    monkeypatch.setattr(holders, "_open_devices", remember)

    def look() -> tuple[int, list[set[str]]]:
        del read[:]
        found = list(holders._look_at(str(child.pid), DEVICES, True))
        return len(read), [held for how, held in found if how == "task descriptor" and held]

    assert look() == (9, [{"gpu6"}] * 4)
    monkeypatch.setattr(holders, "MANY_DESCRIPTORS", 50)
    assert look() == (5, [{"gpu6"}] * 4)
    # Where the kernel does not tell, all are read.
    monkeypatch.setattr(holders, "KCMP", {})
    assert look() == (9, [{"gpu6"}] * 4)


@pytest.mark.usefixtures("stays_here")
def test_tables_are_shared_by_those_left_when_the_main_thread_has_exited(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nodes.make("nvidia6", 195, 6)
    source = TASKS.replace(WAIT, "hold(sys.argv[3]); ready(); end_this_thread()")
    child = python(source.replace("sys.argv[3:] and", "False and"), "6", "100", path)
    assert until(lambda: main_thread_is_dead(child.pid))
    monkeypatch.setattr(holders, "MANY_DESCRIPTORS", 50)
    found = list(holders._look_at(str(child.pid), DEVICES, False))
    assert [held for how, held in found if how == "task descriptor"] == [{"gpu6"}]


def test_a_process_that_is_long_to_read_is_not_taken_for_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch, workers: list[int]
) -> None:
    def slow(*_: object) -> Iterator[tuple[str, set[str]]]:
        for _ in range(25):
            time.sleep(0.1)
            yield "task descriptor", set()
        yield "task descriptor", {"gpu1"}

    monkeypatch.setattr(holders, "_look_at", slow)
    monkeypatch.setattr(holders, "LOOK_PATIENCE", 2.0)
    scan = holders.scan(DEVICES, pids=[1])
    assert (set(scan.holders), scan.skipped, len(workers)) == ({1}, set(), 1)


def test_a_mapping_is_held_without_any_descriptor(python: Python, nodes: Nodes) -> None:
    child = python(MAPPED + WAIT, nodes.make("dev/nvidia4", 1, 5))
    assert found(child.pid) == {}
    # By number where the number is known, whatever the name; else by name.
    known = holders.Device({1: "nvidia-uvm"})
    assert found(child.pid, deep=True, devices=known) == {"nvidia-uvm": {"mapping"}}
    assert found(child.pid, deep=True) == {"gpu4": {"mapping"}}


def test_a_mapping_of_a_node_that_was_removed(python: Python, nodes: Nodes) -> None:
    path = nodes.make("dev/nvidia4", 1, 5)
    child = python(MAPPED + "os.unlink(sys.argv[1]); " + WAIT, path)
    assert found(child.pid, deep=True) == {"gpu4": {"mapping"}}


def test_a_mapping_survives_the_death_of_the_main_thread(python: Python, nodes: Nodes) -> None:
    source = "threading.Thread(target=time.sleep, args=(60,)).start(); ready(); end_this_thread()"
    child = python(MAPPED + source, nodes.make("dev/nvidia4", 1, 5))
    assert until(lambda: main_thread_is_dead(child.pid))
    assert found(child.pid, deep=True) == {"gpu4": {"mapping"}}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("dev/nvidiactl", "ctl"),
        ("dev/nvidia-modeset", "nvidia-modeset"),
        ("dev/nvidia-uvm", "nvidia-uvm"),
        ("dev/nvidia12", "gpu12"),
        ("dev/zero5", ""),
        ("dev/dri", ""),
    ],
)
def test_mappings_whose_number_is_not_known_go_by_name(
    python: Python, nodes: Nodes, name: str, device: str
) -> None:
    child = python(MAPPED + WAIT, nodes.make(name, 1, 5))
    assert set(found(child.pid, deep=True)) == {device} - {""}


def test_a_zombie_holds_nothing(python: Python, nodes: Nodes) -> None:
    child = python(
        BEGIN + "hold(sys.argv[1]); ready(); sys.stdin.read()", nodes.make("nvidia1", 195, 1)
    )
    assert found(child.pid) == {"gpu1": {"descriptor"}}
    assert child.stdin is not None
    child.stdin.close()
    assert until(lambda: main_thread_is_dead(child.pid))
    for deep in (False, True):
        assert found(child.pid, deep) == {}
    child.wait()
    assert found(child.pid) == {}
    child.stdin = None


@pytest.fixture
def storm(python: Python) -> Iterator[subprocess.Popen[str]]:
    """A child that makes and ends processes as fast as it can, until its input ends."""
    source = """
import select
ready()
while not select.select([0], [], [], 0)[0]:
    if os.fork() == 0:
        os._exit(0)
    os.waitpid(-1, os.WNOHANG)
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        break
"""
    child = python(BEGIN + source)
    yield child
    assert child.stdin is not None
    child.stdin.close()
    child.stdin = None
    assert child.wait(PATIENCE) == 0


@pytest.mark.parametrize(("deep", "times"), [(False, 50), (True, 15)])
def test_processes_may_vanish_during_the_look(
    python: Python, nodes: Nodes, storm: subprocess.Popen[str], deep: bool, times: int
) -> None:
    child = python(BEGIN + "hold(sys.argv[1]); " + WAIT, nodes.make("nvidia1", 195, 1))
    for _ in range(times):
        assert "descriptor" in found(child.pid, deep)["gpu1"]
    assert storm.poll() is None


def test_several_workers_see_what_one_sees(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [nodes.make(f"nvidia{minor}", 195, minor) for minor in range(5)]
    children = [python(BEGIN + "hold(sys.argv[1]); " + WAIT, path) for path in paths]
    monkeypatch.setattr(holders, "PROCESSES_PER_WORKER", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    scan = holders.scan(DEVICES)
    assert [scan.holders[child.pid].gpus for child in children] == [{n} for n in range(5)]
    few = holders.scan(DEVICES, pids=[child.pid for child in children[:3]])
    assert sorted(few.holders) == sorted(child.pid for child in children[:3])
    assert few.processes == 3


def test_a_look_at_nobody(python: Python) -> None:
    scan = holders.scan(DEVICES, pids=[])
    assert (scan.holders, len(scan.skipped), scan.processes) == ({}, 0, 0)
    gone = holders.scan(DEVICES, pids=[2**22 + 1])
    assert (gone.holders, len(gone.skipped), gone.processes) == ({}, 0, 1)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The PIDs of the workers that a scan has started."""
    pids: list[int] = []

    class Remembered(holders._Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pids.append(self._child)

    monkeypatch.setattr(holders, "_Worker", Remembered)
    yield pids
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch, workers: list[int]) -> Callable[[], None]:
    """What a worker calls to get stuck. Nobody's patience begins before it has come as far."""
    stopped = mmap.mmap(-1, mmap.PAGESIZE)

    class Watched(holders._Worker):
        def __init__(self, *arguments: Any) -> None:
            stopped[0] = 0
            super().__init__(*arguments)
            assert until(lambda: stopped[0] or self._done[0] == len(self._names))

    def here() -> None:
        stopped[0] = 1
        time.sleep(60)

    monkeypatch.setattr(holders, "_Worker", Watched)
    monkeypatch.setattr(holders, "LOOK_PATIENCE", 0.1)
    return here


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_a_process_that_blocks_the_look_hides_nobody(
    python: Python,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    workers: list[int],
    stop: Callable[[], None],
    deep: bool,
    stuck: int,
) -> None:
    path = nodes.make("nvidia1", 195, 1)
    pids = [python(BEGIN + "hold(sys.argv[1]); " + WAIT, path).pid for _ in range(3)]
    mapped = holders._mapped_devices

    def block(name: str, devices: holders.Device) -> set[str] | None:
        if name == str(pids[stuck]):
            stop()  # stands for a read of maps that waits for the memory's lock
        return mapped(name, devices)

    monkeypatch.setattr(holders, "_mapped_devices", block)
    began = time.monotonic()
    scan = holders.scan(DEVICES, deep, pids)
    assert time.monotonic() - began < PATIENCE
    # Also the one that blocks it: its descriptors were seen before.
    assert {pid: holder.gpus for pid, holder in scan.holders.items()} == {pid: {1} for pid in pids}
    assert scan.skipped == scan.late == {pids[stuck]}
    assert [pid for pid in pids if scan.holders[pid].blocks] == [pids[stuck]]
    # Killed, so that nothing is left when what it was stuck in lets go of it.
    assert until(
        lambda: not Path(f"/proc/{workers[0]}").exists() or main_thread_is_dead(workers[0])
    )


def test_who_has_stopped_a_look_stops_no_other(
    python: Python,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    workers: list[int],
    stop: Callable[[], None],
) -> None:
    """A look that is stopped leaves a copy of this program behind that nothing can end."""
    path = nodes.make("nvidia1", 195, 1)
    pids = [python(BEGIN + "hold(sys.argv[1]); " + WAIT, path).pid for _ in range(2)]
    where = "_mapped_devices"

    def blocks(name: str, *more: Any, of: Any) -> Any:
        if str(pids[0]) in name:
            stop()
        return of(name, *more)

    def scan() -> holders.Scan:
        return holders.scan(DEVICES, True, pids, stoppers=stoppers)

    stoppers = holders.Stoppers()
    with monkeypatch.context() as patch:
        patch.setattr(holders, where, functools.partial(blocks, of=holders._mapped_devices))
        for _ in range(3):
            found = scan()
            # Whoever has to be signalled is still found by what can be looked at.
            assert {pid: holder.gpus for pid, holder in found.holders.items()} == {
                pid: {1} for pid in pids
            }
            assert found.skipped == found.late == {pids[0]}
            assert [pid for pid in pids if found.holders[pid].blocks] == [pids[0]]
    assert len(workers) == 4  # one more for those after it, the first time
    del workers[:]
    with monkeypatch.context() as patch:
        patch.setattr(holders, "_open_devices", functools.partial(blocks, of=holders._open_devices))
        for _ in range(3):
            found = scan()
            assert (set(found.holders), found.skipped) == ({pids[1]}, {pids[0]})
    # And where it stops a look that leaves them out, nothing is looked at.
    assert len(workers) == 4
    del workers[:]
    for _ in range(3):
        assert scan().skipped == {pids[0]}
    assert len(workers) == 3
    with monkeypatch.context() as patch:
        patch.setattr(holders, "_open_devices", functools.partial(blocks, of=holders._open_devices))
        stoppers = holders.Stoppers()
        del workers[:]
        for _ in range(3):
            assert (set(scan().holders), scan().skipped) == ({pids[1]}, {pids[0]})
    assert len(workers) == 7  # stopped at its descriptors, and so once


def test_two_looks_that_stop_at_its_mappings_say_nothing_of_its_descriptors() -> None:
    stoppers = holders.Stoppers()
    stoppers.add(os.getpid(), wholly=False)
    stoppers.add(os.getpid(), wholly=False)
    assert stoppers.known() == {os.getpid(): False}
    stoppers.add(os.getpid(), wholly=True)
    stoppers.add(os.getpid(), wholly=False)
    assert stoppers.known() == {os.getpid(): True}


@pytest.mark.parametrize("limit", [0.3, 30.0])
def test_who_stops_a_look_blocks_also_where_the_look_has_no_time_left(
    python: Python,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[], None],
    limit: float,
) -> None:
    path = nodes.make("nvidia1", 195, 1)
    pid = python(BEGIN + "hold(sys.argv[1]); " + WAIT, path).pid
    monkeypatch.setattr(holders, "LOOK_PATIENCE", 0.6)
    monkeypatch.setattr(holders, "_mapped_devices", lambda *_: stop())
    found = holders.scan(DEVICES, True, [pid], limit=limit)
    assert (found.late, found.holders[pid].blocks) == ({pid}, True)


def test_another_process_of_that_number_has_stopped_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stoppers = holders.Stoppers()
    stoppers.add(os.getpid(), wholly=True)
    stoppers.add(2**22 + 1, wholly=True)
    assert stoppers.known() == {os.getpid(): True}
    monkeypatch.setattr(holders, "stat_fields", lambda _: ["S"] * 19 + ["7"])
    assert stoppers.known() == {}


def test_the_memory_of_who_blocks_the_look_is_not_touched_again(python: Python) -> None:
    holder = holders.Holder(python(BEGIN + WAIT).pid)
    holder.blocks = True
    assert holders.describe(holder)
    assert (holder.command, holder.name != "") == ("", True)
    holder.blocks = False
    assert holders.describe(holder)
    assert holder.command != ""


def test_a_look_has_an_end_and_names_whom_it_did_not_reach(
    monkeypatch: pytest.MonkeyPatch, workers: list[int]
) -> None:
    monkeypatch.setattr(holders, "_look_at", lambda *_: time.sleep(60))
    began = time.monotonic()
    scan = holders.scan(DEVICES, pids=[1, 2, 3], limit=0.2)
    assert 0.15 < time.monotonic() - began < PATIENCE
    assert (scan.skipped, scan.late, scan.holders) == ({1, 2, 3}, {1, 2, 3}, {})
    assert len(workers) == 1


def test_a_worker_that_dies_has_looked_at_those_before(
    monkeypatch: pytest.MonkeyPatch, workers: list[int]
) -> None:
    def fail(name: str, *_: object) -> Iterator[tuple[str, set[str]]]:
        if name == "2":
            os._exit(1)
        yield "descriptor", {"gpu1"}

    monkeypatch.setattr(holders, "_look_at", fail)
    stoppers = holders.Stoppers()
    for number in (1, 2):  # which the next look is told by nobody to leave out
        scan = holders.scan(DEVICES, pids=[1, 2, 3], stoppers=stoppers)
        assert (scan.skipped, set(scan.holders)) == ({2}, {1, 3})
        assert len(workers) == 2 * number
    assert stoppers.known() == {}


def test_a_worker_that_gets_stuck_keeps_nothing_open_but_its_own_pipe(
    monkeypatch: pytest.MonkeyPatch, workers: list[int]
) -> None:
    def names(*_: object) -> Iterator[tuple[str, set[str]]]:
        there = list(Path("/proc/self/fd").iterdir())
        yield "descriptor", {str(each.readlink()) for each in there if each.exists()}

    monkeypatch.setattr(holders, "_look_at", names)
    scan = holders.scan(DEVICES, pids=[1])
    [kept] = scan.holders[1].evidence
    assert kept.startswith("pipe:")


@pytest.mark.parametrize("error", [PermissionError, OSError, RuntimeError])
def test_a_look_that_fails_is_not_taken_for_a_look_that_found_nobody(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("unforeseen")

    monkeypatch.setattr(holders, "_open_devices", fail)
    scan = holders.scan(DEVICES, pids=[1])
    assert (scan.skipped, scan.late, scan.holders) == ({1}, set(), {})


@pytest.mark.parametrize("times", [1, 100])
def test_who_is_in_the_kernel_is_looked_at_again(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int
) -> None:
    child = python(MAPPED + WAIT, nodes.make("dev/nvidia4", 1, 5))
    seen, state = tmp_path / "seen", holders._state

    def in_kernel(folder: str) -> str:
        with seen.open("a") as file:
            file.write("x")
        return "D" if len(seen.read_text()) <= times else state(folder)

    monkeypatch.setattr(holders, "_state", in_kernel)
    scan = holders.scan(DEVICES, deep=True, pids=[child.pid])
    if times == 1:
        assert (set(scan.holders), scan.skipped) == ({child.pid}, set())
    else:
        # Its mappings are never read: whoever holds their lock, the look does not wait for it.
        assert (set(scan.holders), scan.busy, scan.skipped) == (set(), {child.pid}, set())
        assert len(seen.read_text()) == 1 + holders.BUSY_LOOKS


def test_processes_that_may_not_be_looked_at_are_counted(root: Path) -> None:
    source = """
import os, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import holders
os.setgroups([]); os.setgid(65534); os.setuid(65534)
scan = holders.scan(holders.Device({}), pids=[1])
print(len(scan.skipped), scan.holders)
"""
    ran = subprocess.run(
        [sys.executable, "-c", source, str(root / "collections")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "1 {}\n"


NAMES = [
    "python",
    "a b",
    ") S 1 (",
    "((",
    "))",
    "a\nb",
    "\n",
    " ",
    "sglang::schedul",
    "\\n",
    "名字",
    "1 2 3 4 5 6",
]


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_read_whatever_the_process_calls_itself(
    python: Python, start_of: Callable[[int], int], name: str
) -> None:
    child = python(
        BEGIN + "ready(); sys.stdin.readline(); libc.prctl(15, sys.argv[1].encode()); " + WAIT, name
    )
    before = start_of(child.pid)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ready\n"
    fields = holders.stat_fields(child.pid)
    assert fields is not None
    assert fields[0] in ("S", "R")
    assert int(fields[1]) == os.getpid()
    assert int(fields[19]) == before
    assert len(fields) >= 40
    holder = holders.Holder(child.pid)
    assert holders.describe(holder)
    # Nothing that could end a line of a report; a last one cannot be told from the file's own.
    assert holder.name == name.rstrip("\n").replace("\n", "?")
    assert (holder.ppid, holder.start, holder.uid) == (os.getpid(), before, 0)


def test_fields_of_nobody() -> None:
    assert holders.stat_fields(2**22 + 1) is None


WITHOUT_PTRACE = """
import sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import holders
for deep in (False, True):
    print(holders.scan(holders.Device({}), deep, [int(sys.argv[2])]).skipped)
"""


@pytest.mark.parametrize("hold", ["descriptor", "mapping"])
def test_who_may_be_listed_but_not_looked_at_is_counted(
    python: Python, nodes: Nodes, root: Path, hold: str
) -> None:
    """Root without CAP_SYS_PTRACE, as Docker starts it, and a holder of another user."""
    user = "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    if hold == "descriptor":
        source, path = BEGIN + "hold(sys.argv[1]); ", nodes.make("nvidia4", 195, 4)
    else:
        source, path = MAPPED + "os.closerange(3, 9); ", nodes.make("dev/nvidia4", 1, 5)
    pid = python(source + user + WAIT, path).pid
    python3 = [sys.executable, "-c", WITHOUT_PTRACE, str(root / "collections"), str(pid)]
    ran = subprocess.run(
        ["setpriv", "--bounding-set=-sys_ptrace", *python3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{{{pid}}}\n" * 2


def test_refused_mappings_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(holders, "_mapped_devices", refuse)
    scan = holders.scan(DEVICES, deep=True, pids=[os.getpid()])
    assert scan.skipped == {os.getpid()}


@pytest.mark.parametrize(
    "name", ["a\vState:", "a\fUid:", "a\x1cUid: x", "a\x85NSpid:", "a\nUid:\t7", "b) R 7 x", "c:"]
)
def test_a_process_may_have_any_name(python: Python, name: str) -> None:
    source = "libc.prctl(15, sys.argv[1].encode('latin-1'), 0, 0, 0); "  # PR_SET_NAME
    holder = holders.Holder(python(BEGIN + source + WAIT, name).pid)
    assert holders.describe(holder)
    assert (holder.uid, holder.ns_pid, holder.ppid) == (0, holder.pid, os.getpid())
    assert holder.state in ("S", "R")
    assert holder.start > 100
    assert holder.name.isprintable()


@hypothesis.given(text=st.binary())
@hypothesis.example(b"7 (a) R 1")
@hypothesis.example("7 (a) R \u00b2 ".encode() * 20)
def test_no_bytes_of_a_stat_raise(text: bytes) -> None:
    fields = holders.parse_stat(text)
    assert fields is None or (int(fields[1]) >= 0 and int(fields[19]) >= 0)


@hypothesis.given(name=st.binary(max_size=15))
def test_no_name_shifts_the_fields_of_a_stat(name: bytes) -> None:
    rest = " ".join(["S", "77", *map(str, range(17)), "4711", "9"])
    assert holders.parse_stat(b"7 (" + name + b") " + rest.encode() + b"\n") == rest.split()
    assert holders.parse_stat(b"7 (" + name + b") S 77\n") is None


def escaped(name: bytes) -> bytes:
    """As the kernel writes a name in ``status`` (string_escape_str with ESCAPE_SPACE's newline)."""
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")


@hypothesis.given(name=st.binary(max_size=15))
@hypothesis.example(b"a\fUid:")
@hypothesis.example(b"a\nUid:\t7")
def test_no_name_shifts_the_lines_of_a_status(name: bytes) -> None:
    text = b"Name:\t%s\nState:\tS (sleeping)\nUid:\t5\t6\t7\t8\n" % escaped(name)
    found = holders.parse_status(text)
    assert (found["State"][0], found["Uid"][0]) == ("S", "5")


@hypothesis.given(text=st.binary())
@hypothesis.example(b"Uid:\nState:\nNSpid:\n")
@hypothesis.example("Uid:\t\u00b2\nNSpid:\tx\n".encode())
@hypothesis.example(b"Uid:\t" + b"9" * 5000)
def test_no_bytes_of_proc_keep_a_process_from_being_described(text: bytes) -> None:
    holder = holders.Holder(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holders, "read_bytes", bytes_but(text))
        assert holders.describe(holder)
    assert holder.uid is None or holder.uid >= 0


def bytes_but(text: bytes) -> Callable[[str], bytes]:
    """Everything in /proc reads like this but ``stat``, which says whether there is a process."""
    read = holders.read_bytes
    return lambda path: read(path) if path.endswith("/stat") else text


@hypothesis.given(text=st.binary())
@hypothesis.example(b"/dev/")
@hypothesis.example(
    b"1-2 r 0 0 0 /dev/nvidia0\n1-2 r-- 0 0 5  /x/dev/nvidia1 (deleted)\n\xff /dev/"
)
def test_no_bytes_of_maps_raise(text: bytes) -> None:
    for span, path in holders.parse_maps(text, b"/dev/"):
        assert span
        assert "/dev/" in path


def test_what_maps_say_of_devices() -> None:
    text = (
        b"1000-2000 rw-p 00000000 00:05 77   /dev/nvidia0\n"
        b"2000-3000 rw-p 00000000 00:05 78   /var/lib/lxc/129/rootfs/dev/nvidia-uvm (deleted)\n"
        b"3000-4000 rw-p 00000000 00:00 0    [anon:/dev/nvidia3 x]\n"
        b"4000-5000 rw-p 00000000 00:05 79   /usr/lib/libcuda.so\n"
        b"5000-6000 rw-p 00000000 00:00 0\n"
        b"6000-7000 rw-p 00000000 00:05 80   /tmp/a\v/dev/nvidia7\n"
    )
    assert holders.parse_maps(text, b"/dev/") == [
        ("1000-2000", "/dev/nvidia0"),
        ("2000-3000", "/var/lib/lxc/129/rootfs/dev/nvidia-uvm (deleted)"),
        ("6000-7000", "/tmp/a\v/dev/nvidia7"),
    ]


def test_who_a_process_is(python: Python, nodes: Nodes, start_of: Callable[[int], int]) -> None:
    child = python(
        BEGIN + "hold(sys.argv[1]); " + WAIT, nodes.make("nvidia1", 195, 1), "--model", "x y"
    )
    holder = holders.scan(DEVICES, pids=[child.pid]).holders[child.pid]
    assert holders.describe(holder)
    assert holder.start == start_of(child.pid)
    assert holder.state in ("S", "R")
    assert holder.command.startswith(f"{sys.executable} -ISc")
    assert len(holder.command) <= 300
    assert holder.ns_pid == holder.pid == child.pid
    assert holder.cgroup == Path("/proc/self/cgroup").read_text(encoding="utf-8")
    assert holder.namespaces[0] == Path("/proc/self/ns/pid").stat().st_ino
    data = holder.as_dict()
    assert data["user"] == "root"
    assert data["gpus"] == [1]
    assert data["evidence"] == {"gpu1": ["descriptor"]}


def test_a_process_of_another_namespace_has_two_numbers(request: pytest.FixtureRequest) -> None:
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-ISc", BEGIN + WAIT],
        stdout=subprocess.PIPE,
        text=True,
    )
    request.addfinalizer(outer.communicate)
    request.addfinalizer(outer.kill)
    assert outer.stdout is not None
    assert outer.stdout.readline() == "ready\n"
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text(encoding="ascii")
    holder = holders.Holder(int(children))
    assert holders.describe(holder)
    assert (holder.ns_pid, holder.ppid) == (1, outer.pid)
    assert holder.as_dict()["pid"] == 1
    assert holder.as_dict()["node_pid"] == int(children)


def test_who_has_vanished_is_not_described(python: Python) -> None:
    child = python(BEGIN + "ready()")
    child.wait()
    holder = holders.Holder(child.pid)
    assert holders.describe(holder) is False
    assert (holder.name, holder.start, holder.cgroup) == ("", 0, None)


def test_a_family_ends_with_the_first_process(python: Python) -> None:
    source = """
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""
    child = python(BEGIN + "ready()" + source)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        line = holders.family(grandchild)
    finally:
        os.kill(grandchild, 9)
    assert line[:3] == [grandchild, child.pid, os.getpid()]
    assert line[2:] == holders.family(os.getpid())
    assert len(set(line)) == len(line)
    last = holders.stat_fields(line[-1])
    assert last is not None
    assert last[1] == "0"


def test_a_family_of_nobody_ends_at_once() -> None:
    assert holders.family(2**22 + 1) == [2**22 + 1]
    assert holders.family(0) == []


@pytest.mark.parametrize(
    ("evidence", "computes"),
    [
        ({"gpu0": {"descriptor"}, "ctl": {"descriptor"}}, False),
        # A monitor opens unified memory too, but maps none of it (seen with driver 580).
        ({"gpu0": {"descriptor"}, "nvidia-uvm": {"descriptor"}}, False),
        ({"gpu0": {"descriptor"}, "nvidia-uvm": {"descriptor", "mapping"}}, True),
        ({"nvidia-uvm": {"mapping"}}, True),
        ({"ctl": {"descriptor"}, "nvidia-uvm": {"descriptor"}}, False),
        ({"gpu0": {"driver list"}}, True),
        ({"gpu0": {"mapping"}}, False),
        ({}, False),
    ],
)
def test_who_computes(evidence: dict[str, set[str]], computes: bool) -> None:
    holder = holders.Holder(1)
    holder.evidence = evidence
    assert holder.is_workload is computes


def test_names_of_users() -> None:
    assert holders.user_name(0) == "root"
    assert holders.user_name(100_000_000) == "100000000"
    assert holders.user_name(None) == ""


MAPPED_FILE = (
    BEGIN
    + """
handle = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(handle, 4096)
os.close(handle)
"""
)


@pytest.mark.parametrize(
    "name", ["nvidia0", "nvidiactl", "nvidia\tx", "nvidia\u2028x", "nvidia\u00b2", "nvidia\vx"]
)
def test_a_mapped_file_is_no_device_whatever_its_name(
    python: Python, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "dev" / name
    path.parent.mkdir()
    path.write_bytes(bytes(4096))
    child = python(MAPPED_FILE + WAIT, str(path))
    assert name.encode() in Path(f"/proc/{child.pid}/maps").read_bytes()
    assert found(child.pid, deep=True) == {}


def test_mappings_of_who_has_a_device_open_are_seen_at_once(python: Python, nodes: Nodes) -> None:
    mapped, held = nodes.make("dev/nvidia-uvm", 1, 5), nodes.make("nvidia1", 195, 1)
    child = python(MAPPED + "hold(sys.argv[2]); " + WAIT, mapped, held)
    assert found(child.pid) == {"gpu1": {"descriptor"}, "nvidia-uvm": {"mapping"}}
    assert holders.scan(DEVICES, pids=[child.pid]).holders[child.pid].is_workload


Block = Callable[[], contextlib.AbstractContextManager[None]]


def test_who_cannot_be_read_for_want_of_a_descriptor_is_not_taken_for_gone(
    no_descriptor_left: Block,
) -> None:
    holder = holders.Holder(os.getpid())
    assert holders.describe(holder)
    with no_descriptor_left():
        for read in (holders.describe, lambda one: holders._live_tasks(str(one.pid))):
            with pytest.raises(OSError, match="Too many open files"):
                read(holder)
        assert not Path("/proc/self/none").exists()
    assert holders.read_bytes("/proc/self/none") == b""


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("/dev/nvidia3", "gpu3"),
        ("/dev/nvidia-uvm (deleted)", "nvidia-uvm"),
        ("/dev/nvidia-caps/nvidia-cap2", "nvidia-cap2"),
        ("/home/eve/dev/nvidia3", ""),
        ("/dev/shm/eve/nvidia3", ""),
        ("/mnt/models/nvidia-Llama-70B", ""),
    ],
)
def test_a_file_that_its_mount_tells_nothing_of_is_a_device_only_where_devices_are(
    monkeypatch: pytest.MonkeyPatch, path: str, device: str
) -> None:
    """Every user can have a mount that refuses root, and a file of any name on it."""

    def refuse(_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "stat", refuse)
    assert holders._device_behind("7", path, DEVICES) == device
    assert holders._mapped_device("4242", "1000-2000", path, DEVICES) == device


def test_who_comes_during_the_look_is_looked_at_too(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may have what one had who has ended before it was his turn."""
    child = python(BEGIN + "hold(sys.argv[1]); " + WAIT, nodes.make("nvidia1", 195, 1))
    listed, listings = os.listdir, []

    def listdir(folder: str) -> list[str]:
        names = listed(folder)
        if folder == "/proc":
            listings.append(folder)
            names = [name for name in names if name != str(child.pid) or len(listings) > 1]
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    assert child.pid in holders.scan(DEVICES).holders
    assert 1 < len(listings) <= 1 + holders.NEW_LOOKS


@pytest.mark.parametrize(
    ("state", "flags", "wchan", "yet"),
    [
        ("D", holders.EXITING, "request_wait_answer", True),
        ("S", holders.EXITING, "request_wait_answer", True),
        ("R", holders.EXITING | 0x400500, "0", True),
        ("D", 0x400500, "request_wait_answer", False),
        ("Z", holders.EXITING, "0", False),
        ("S", holders.EXITING, "zap_pid_ns_processes", False),
        ("S", holders.EXITING, "do_wait", False),
    ],
)
def test_who_has_yet_to_end(
    monkeypatch: pytest.MonkeyPatch, state: str, flags: int, wchan: str, yet: bool
) -> None:
    """Without a signal the kernel waits for a mount in S, and the driver may poll a GPU in R."""
    line = f"1 (python3) {state} 1 1 1 0 -1 {flags} " + "0 " * 20

    def told(path: str) -> bytes:
        return (wchan if path.endswith("/wchan") else line).encode()

    monkeypatch.setattr(holders, "read_bytes", told)
    assert holders._has_yet_to_end(str(os.getpid())) == yet


def test_threads_of_the_kernel_have_nothing_that_could_be_looked_at(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = python(BEGIN + WAIT)
    monkeypatch.setattr(holders, "_open_devices", lambda *_: (0, set()))
    monkeypatch.setattr(holders, "KERNEL_THREAD", 0x400000)  # a flag that the child has
    for look_further in ("has_threads", "_mapped_devices", "_has_yet_to_end"):
        monkeypatch.setattr(holders, look_further, lambda *_: pytest.fail("looked at it"))
    assert list(holders._look_at(str(child.pid), DEVICES, deep=True)) == [("descriptor", set())]


def test_who_hangs_in_one_task_while_others_live_on_holds_what_they_have(
    python: Python, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who passed for one that cannot be looked at would never be ended."""
    child = python(DEAD_MAIN, nodes.make("nvidia1", 195, 1))
    assert until(lambda: main_thread_is_dead(child.pid))
    # The main thread waits for a mount, instead of having exited.
    as_told = holders.parse_stat
    monkeypatch.setattr(holders, "parse_stat", lambda text: as_told(text.replace(b") Z", b") D")))
    scan = holders.scan(DEVICES, pids=[child.pid])
    assert (set(scan.holders), scan.skipped) == ({child.pid}, set())


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_who_hangs_while_it_ends_could_not_be_looked_at(
    python: Python, monkeypatch: pytest.MonkeyPatch, deep: bool, for_good: bool
) -> None:
    """Whoever only takes a moment to end has ended, and holds nothing."""
    child = python(BEGIN + WAIT)
    until_then = time.monotonic() + (PATIENCE if for_good else 0.2)
    monkeypatch.setattr(holders, "ENDING_PATIENCE", 0.4 if for_good else PATIENCE)
    monkeypatch.setattr(holders, "_open_devices", lambda *_: (0, set()))
    monkeypatch.setattr(holders, "_has_yet_to_end", lambda _: time.monotonic() < until_then)
    scan = holders.scan(DEVICES, deep, pids=[child.pid])
    stays = {child.pid} if for_good else set()
    assert (scan.skipped, scan.ending, scan.holders) == (stays, stays, {})


def test_who_takes_a_moment_to_end_has_it_also_after_a_look_that_took_long(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = python(BEGIN + WAIT)
    monkeypatch.setattr(holders, "ENDING_PATIENCE", 1.0)
    monkeypatch.setattr(holders, "_open_devices", lambda *_: (0, set()))
    look_at_all, ends = holders._look_at_all, []

    def slowly(*args: Any) -> dict[str, str]:
        again = look_at_all(*args)
        if not ends:
            time.sleep(1.1)
            ends.append(time.monotonic() + 0.3)
        return again

    monkeypatch.setattr(holders, "_look_at_all", slowly)
    monkeypatch.setattr(
        holders, "_has_yet_to_end", lambda _: not ends or time.monotonic() < ends[0]
    )
    assert holders.scan(DEVICES, pids=[child.pid]).skipped == set()


@pytest.mark.parametrize("state", ["Z (zombie)", "S (sleeping)"])
def test_a_main_thread_that_ends_does_not_say_whose_the_process_is(
    python: Python, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """cgroup v1 has it in the root group, which is the node's own, as soon as it begins to end.

    It may be long until it has: where it waits for a mount it is no zombie.
    """
    child = python(
        BEGIN
        + "threading.Thread(target=time.sleep, args=(60,)).start(); ready(); end_this_thread()"
    )
    assert until(lambda: main_thread_is_dead(child.pid))
    read = holders.read_bytes

    def as_v1_tells(path: str) -> bytes:
        if not path.endswith("/cgroup"):
            return read(path).replace(b"Z (zombie)", state.encode())
        dead = path in (f"/proc/{child.pid}/cgroup", f"/proc/{child.pid}/task/{child.pid}/cgroup")
        return b"7:freezer:/\n" if dead else b"7:freezer:/slurm/uid_1000/job_987654/step_0\n"

    monkeypatch.setattr(holders, "read_bytes", as_v1_tells)
    holder = holders.Holder(child.pid)
    assert holders.describe(holder)
    assert "job_987654" in (holder.cgroup or "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["vllm", "serve", "--api-key", "sk-1", "--port", "1"],
            "vllm serve --api-key *** --port 1",
        ),
        (["vllm", "--hf-token=hf_1", "--tp", "8"], "vllm --hf-token=*** --tp 8"),
        (["a b --api_key sk-1 --max-tokens 512"], "a b --api_key *** --max-tokens 512"),
        (["x", "HF_TOKEN=1", "-password", "y z"], "x HF_TOKEN=*** -password ***"),
        (["x", "--token", "--tokenizer", "t"], "x --token --tokenizer t"),
        (["x", "--key=", "--max-num-batched-tokens=8"], "x --key=*** --max-num-batched-tokens=8"),
        (["x", "s3://me:secret@host/a@b", "git@host:r"], "x s3://***@host/a@b git@host:r"),
        (["api-key", "x", "--ssl-keyfile", "/k.pem"], "api-key x --ssl-keyfile /k.pem"),
    ],
)
def test_no_secret_of_a_command_line_is_told(words: list[str], told: str) -> None:
    assert holders.command_of("\0".join(words) + "\0") == told


@hypothesis.given(text=st.text())
def test_a_command_keeps_its_program(text: str) -> None:
    told = holders.command_of(text)
    first = text.strip("\0 ").replace("\0", " ").split(" ")[0]
    assert told.startswith(holders._printable(first[:300]))
    assert len(told) <= 300
