# SPDX-License-Identifier: GPL-3.0-or-later
"""A signal reaches the process that was seen, or nobody."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, signals
from tests.patience import PATIENCE, until

Python = Callable[..., subprocess.Popen[str]]
Start = Callable[[int], int]

SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
DEAD_MAIN = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


@pytest.fixture(params=["pidfd", "no pidfd"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With handles, and as on a kernel or Python that has none."""
    if request.param == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    return str(request.param)


Take = Callable[[int, int], signals.Grip]


@pytest.fixture
def grip(way: str) -> Iterator[Take]:
    grips: list[signals.Grip] = []

    def take(pid: int, start: int) -> signals.Grip:
        grips.append(signals.Grip(pid, start))
        return grips[-1]

    yield take
    for each in grips:
        each.close()
        assert each.handle == -1


def state(pid: int) -> str:
    return (holders.stat_fields(pid) or ["gone"])[0]


@pytest.mark.parametrize("name", ["TERM", "INT", "KILL"])
def test_the_signal_reaches_the_process_that_was_seen(
    python: Python, start_of: Start, grip: Take, name: str
) -> None:
    # The default action of each: Python itself would turn INT into an exception.
    default = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    child, other = python(default + SLEEP), python(SLEEP)
    held = grip(child.pid, start_of(child.pid))
    assert held.same()
    assert not held.ended()
    assert held.send(name) == "sent"
    assert child.wait(PATIENCE) == -getattr(signal, f"SIG{name}")
    assert held.ended()
    assert held.send(name) == "gone"
    assert not held.same()
    assert other.poll() is None


def test_nobody_else_can_be_named(python: Python, start_of: Start, grip: Take) -> None:
    child = python(SLEEP)
    with pytest.raises(KeyError):
        grip(child.pid, start_of(child.pid)).send("STOP")
    assert set(signals.SIGNALS) == {"TERM", "INT", "KILL"}


@pytest.mark.parametrize("difference", [-1, 1, 100])
@pytest.mark.parametrize("name", ["TERM", "INT", "KILL"])
def test_another_start_time_is_another_process(
    python: Python, start_of: Start, grip: Take, name: str, difference: int
) -> None:
    child = python(SLEEP)
    held = grip(child.pid, start_of(child.pid) + difference)
    assert held.send(name) == "gone"
    assert not held.same()
    # The one that was seen has ended; the other lives.
    assert held.ended()
    # A signal would have ended it by now.
    time.sleep(0.05)
    assert child.poll() is None
    assert state(child.pid) in "SRD"


def test_a_number_that_nobody_has(grip: Take) -> None:
    held = grip(2**22 + 1, 1)
    assert held.send("KILL") == "gone"
    assert held.ended()


REUSE = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import holders, signals
if sys.argv[2] == "no pidfd":
    del os.pidfd_open

def start():
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    return pid

def start_of(pid):
    return int(holders.stat_fields(pid)[19])

first = start()
seen = start_of(first)
before = signals.Grip(first, seen)
os.kill(first, 9)
os.waitpid(first, 0)
ended = before.ended()
time.sleep(0.05)
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(first - 1))
second = start()
after = signals.Grip(first, seen)
later = start_of(second) > seen
outcomes = [grip.send(name) for grip in (before, after) for name in ("TERM", "KILL")]
# Even one that has started in the same tick of the clock is told apart by the handle.
before.start = start_of(second)
twin = before.send("KILL") if before.handle >= 0 else "gone"
time.sleep(0.05)
alive = os.waitpid(second, os.WNOHANG) == (0, 0)
print(first == second, later, ended, before.ended(), outcomes, twin, alive)
os.kill(second, 9)
os.waitpid(second, 0)
"""


@pytest.mark.parametrize("kind", ["pidfd", "no pidfd"])
def test_a_number_that_was_given_to_another_process(root: Path, kind: str) -> None:
    """In a PID namespace of its own, where the next number can be chosen."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ran = subprocess.run(
        [*unshare, sys.executable, "-c", REUSE, str(root / "collections"), kind],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert ran.stderr == ""
    if kind == "pidfd":
        assert ran.stdout == f"True True True True {['gone'] * 4} gone True\n"
    else:
        # Without a handle only the start time tells, and the test has just falsified that one.
        assert ran.stdout == f"True True True False {['gone'] * 4} gone True\n"


def test_a_zombie_has_ended(python: Python, start_of: Start, grip: Take) -> None:
    child = python(SLEEP)
    held = grip(child.pid, start_of(child.pid))
    os.kill(child.pid, signal.SIGKILL)
    assert until(lambda: state(child.pid) == "Z")
    assert held.ended()
    # Taken only now, it is no different.
    assert grip(child.pid, start_of(child.pid)).ended()


def test_a_process_that_is_stopped_has_not_ended(
    python: Python, start_of: Start, grip: Take
) -> None:
    child = python(SLEEP)
    held = grip(child.pid, start_of(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    assert until(lambda: state(child.pid) == "T")
    assert not held.ended()
    assert held.send("KILL") == "sent"
    assert child.wait(PATIENCE) == -signal.SIGKILL
    assert held.ended()


def test_threads_that_live_on_keep_a_process_from_having_ended(
    python: Python, start_of: Start, grip: Take
) -> None:
    child = python(DEAD_MAIN)
    assert until(lambda: state(child.pid) == "Z")
    held = grip(child.pid, start_of(child.pid))
    assert held.same()
    assert not held.ended()
    assert held.send("KILL") == "sent"
    assert until(held.ended)
    assert child.wait(PATIENCE) == -signal.SIGKILL


def test_a_process_that_ignores_the_signal_has_not_ended(
    python: Python, start_of: Start, grip: Take
) -> None:
    child = python("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP)
    held = grip(child.pid, start_of(child.pid))
    assert held.send("TERM") == "sent"
    time.sleep(0.05)
    assert not held.ended()


def test_what_is_not_permitted_is_said(
    python: Python, start_of: Start, root: Path, way: str
) -> None:
    child = python(SLEEP)
    source = """
import os, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import signals
if sys.argv[2] == "no pidfd":
    del os.pidfd_open
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(signals.Grip(int(sys.argv[3]), int(sys.argv[4])).send("KILL"))
"""
    arguments = [str(root / "collections"), way, str(child.pid), str(start_of(child.pid))]
    ran = subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "not permitted\n"
    assert child.poll() is None


def test_a_handle_is_given_back(python: Python, start_of: Start) -> None:
    child = python(SLEEP)
    before = set(Path("/proc/self/fd").iterdir())
    held = signals.Grip(child.pid, start_of(child.pid))
    assert held.handle >= 0
    assert Path(f"/proc/self/fd/{held.handle}").is_symlink()
    held.close()
    held.close()
    assert {path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()} <= before


def test_what_a_sleeping_process_waits_for(python: Python) -> None:
    child = python(SLEEP)
    wchan = Path(f"/proc/{child.pid}/wchan")

    def asleep() -> bool:
        channel = wchan.read_text(encoding="ascii").removeprefix("0")
        why = signals.why_stuck(child.pid)
        return (why["state"], why["wait_channel"]) == ("S", channel)

    assert until(asleep)
    why = signals.why_stuck(child.pid)
    assert set(why) == {"state", "wait_channel", "stack", "mounts"}
    assert why["mounts"] == ""
    os.kill(child.pid, signal.SIGSTOP)
    assert until(lambda: signals.why_stuck(child.pid)["state"] == "T")


def test_the_thread_that_waits_may_not_be_the_main_one(python: Python) -> None:
    child = python(DEAD_MAIN)
    assert until(lambda: state(child.pid) == "Z")
    tasks = Path(f"/proc/{child.pid}/task")

    def named() -> bool:
        channels = {path.read_text(encoding="ascii") for path in tasks.glob("*/wchan")}
        why = signals.why_stuck(child.pid)
        assert why["state"] == "Z"
        return why["wait_channel"] in channels - {"0"} or channels == {"0"}

    assert until(named)


def test_what_nobody_waits_for() -> None:
    assert signals.why_stuck(2**22 + 1) == {
        "state": "gone",
        "wait_channel": "",
        "stack": "",
        "mounts": "",
    }


@pytest.mark.parametrize("name", ["models", "my models"])
def test_a_file_system_without_a_server_is_named(python: Python, tmp_path: Path, name: str) -> None:
    source = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
fuse = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
assert libc.mount(b"dead", sys.argv[1].encode(), b"fuse", 0, options) == 0
os.open(sys.argv[1], os.O_PATH)
os.open(sys.argv[1] + "2", os.O_PATH)  # an ordinary folder beside it
print("ready", flush=True)
time.sleep(60)
"""
    point = tmp_path / name
    point.mkdir()
    (tmp_path / f"{name}2").mkdir()
    child = python(source, str(point))
    assert signals.why_stuck(child.pid)["mounts"] == str(point)
    # The same mount matters to nobody who has nothing open on it.
    assert signals.why_stuck(os.getpid())["mounts"] == ""


MAPPED_ON = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
# Stands for a file system that is not known to be of this machine: here its name is no more known.
assert libc.mount(b"far", sys.argv[1].encode(), sys.argv[2].encode(), 0, None) == 0
path = sys.argv[1] + "/file"
with open(path, "wb") as file:
    file.truncate(4096)
handle = os.open(path, os.O_RDONLY)
if sys.argv[3] == "mapped":
    memory = mmap.mmap(handle, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)
    os.close(handle)
    libc.close(handle + 1)  # Python's mmap keeps a duplicate
elif sys.argv[3] == "cwd":
    os.close(handle)
    os.chdir(sys.argv[1])
elif sys.argv[3] == "not":
    os.close(handle)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("use", ["open", "mapped", "cwd", "not"])
@pytest.mark.parametrize("known", [True, False])
def test_a_mount_is_named_whatever_the_process_uses_there(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(signals, "LOCAL", signals.LOCAL.replace(" ramfs ", " "))
    child = python(MAPPED_ON, str(tmp_path), "ramfs", use)
    named = str(tmp_path) in signals.why_stuck(child.pid)["mounts"].split(", ")
    assert named is (use != "not" and not known)


def test_mappings_that_cannot_be_read_are_not_waited_for(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = python(SLEEP)
    read = holders.read_bytes

    def block(path: str) -> bytes:
        if path.endswith("/maps"):
            time.sleep(60)
        return read(path)

    monkeypatch.setattr(holders, "read_bytes", block)
    monkeypatch.setattr(signals, "MAPS_LIMIT", 0.2)
    began = time.monotonic()
    assert signals.why_stuck(child.pid)["state"] in "SRD"
    assert 0.15 < time.monotonic() - began < PATIENCE


REMOTE = (
    "lustre beegfs ceph gpfs 9p virtiofs smb3 wekafs fuse.glusterfs nfs nfs4 cifs afs orangefs "
    "pvfs2 ocfs2 gfs2 fuse fuseblk fuse.sshfs coda autofs tomorrows"
)


@pytest.mark.parametrize("kind", REMOTE.split())
def test_file_systems_that_wait_for_a_server_are_named(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = (
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"36 21 0:30 / /mnt/far rw,relatime shared:1 - {kind} server rw\n"
        "37 36 0:31 / /mnt/far/near rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(holders, "read_bytes", lambda _: table.encode())
    for file, mounts in (
        ("/mnt/far/a/b", ["/mnt/far"]),
        ("/mnt/far", ["/mnt/far"]),
        # The innermost mount decides, and a name that only begins alike is another's.
        ("/mnt/far/near/a", []),
        ("/mnt/farther", []),
        ("socket:[17]", []),
    ):
        monkeypatch.setattr(signals, "_files", lambda _, file=file: [file])
        assert signals._remote_mounts(1) == mounts


def test_a_root_from_the_network_is_named_only_if_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = "21 1 0:9 / / rw - nfs4 srv:/ rw\n36 21 0:30 / /mnt rw - lustre srv rw\n"
    monkeypatch.setattr(holders, "read_bytes", lambda _: table.encode())
    for files, mounts in ((["/usr/bin/x"], ["/"]), (["/usr/bin/x", "/mnt/y"], ["/mnt"])):
        monkeypatch.setattr(signals, "_files", lambda _, files=files: files)
        assert signals._remote_mounts(1) == mounts


@hypothesis.given(text=st.binary())
@hypothesis.example(b"1 2 3 4 /a - \n1 2 3 4 /a\\777 rw - x\n - \n\xff - \xff")
def test_no_bytes_of_mountinfo_raise(text: bytes) -> None:
    mounts = signals.parse_mountinfo(text)
    assert all(kind for _, kind in mounts)
    assert signals.mount_of("/a", mounts) in [("", ""), *mounts]


@hypothesis.given(name=st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1))
@hypothesis.example("a b\nc\\d\te\fg")
def test_any_mount_point_is_read_as_it_is(name: str) -> None:
    kernel = "".join(f"\\{ord(each):03o}" if each in " \t\n\\" else each for each in name)
    text = f"36 21 0:30 / /{kernel} rw shared:1 master:2 - fuse.x src rw\n"
    assert signals.parse_mountinfo(text.encode()) == [(f"/{name}", "fuse.x")]


V1 = "4:freezer:/lxc/129/ns\n2:cpu:/lxc/129\n0::/elsewhere\n"
V2 = "0::/lxc/129/ns\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "thaw"),
    [
        (V1, {"freezer/lxc/129/freezer.state": "FROZEN\n"}, "freezer/lxc/129/freezer.state"),
        (V1, {"freezer/lxc/129/ns/freezer.state": "FREEZING\n"}, "lxc/129/ns/freezer.state"),
        (
            V1,
            {
                "freezer/lxc/129/freezer.state": "FROZEN\n",
                "freezer/lxc/129/ns/freezer.state": "FROZEN\n",
            },
            "write THAWED to {root}/freezer/lxc/129/freezer.state",
        ),
        (V1, {"freezer/lxc/129/freezer.state": "THAWED\n"}, ""),
        (V1, {"freezer/lxc/130/freezer.state": "FROZEN\n"}, ""),
        (V2, {"lxc/129/cgroup.events": "populated 1\nfrozen 1\n"}, "lxc/129/cgroup.freeze"),
        (V2, {"unified/lxc/129/ns/cgroup.events": "frozen 1\n"}, "unified/lxc/129/ns/cgroup"),
        (V2, {"lxc/129/cgroup.events": "populated 1\nfrozen 0\n"}, ""),
        ("", {"lxc/129/cgroup.events": "frozen 1\n"}, ""),
        ("x\n::\n0:\n", {}, ""),
    ],
)
def test_a_frozen_group_is_named_with_how_to_thaw_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    thaw: str,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = holders.read_bytes
    monkeypatch.setattr(
        holders,
        "read_bytes",
        lambda path: cgroup.encode() if path == "/proc/7/cgroup" else read(path),
    )
    said = signals.frozen(7, str(tmp_path))
    assert bool(said) is bool(thaw)
    assert thaw.format(root=tmp_path) in said


def test_a_process_that_is_really_frozen(python: Python, start_of: Start) -> None:
    freezer = Path("/sys/fs/cgroup/freezer")
    if not freezer.is_dir():
        pytest.skip("no cgroup v1 here")
    child = python(SLEEP)
    group = freezer / f"gpuops-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        assert "frozen" not in signals.why_stuck(child.pid)["mounts"]
        (group / "freezer.state").write_text("FROZEN")
        assert until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        assert signals.Grip(child.pid, start_of(child.pid)).send("KILL") == "sent"
        time.sleep(0.1)
        assert child.poll() is None
        why = signals.why_stuck(child.pid)
        assert why["mounts"].startswith("its frozen control group: write THAWED to ")
        assert why["mounts"].endswith(f"{group.name}/freezer.state")
    finally:
        (group / "freezer.state").write_text("THAWED")
        assert child.wait(PATIENCE) == -signal.SIGKILL
        until(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()


def test_there_is_a_grip_on_everybody_or_on_nobody(
    python: Python, start_of: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal without a handle may hit another process, so it is not sent for want of one."""
    chosen = [holders.Holder(python("print('ready', flush=True); input()").pid) for _ in range(3)]
    for one in chosen:
        one.start = start_of(one.pid)
    before = len(list(Path("/proc/self/fd").iterdir()))
    grips = signals.grips_on(chosen)
    assert [grip.same() for grip in grips] == [True] * 3
    for grip in grips:
        grip.close()
    opened = os.pidfd_open

    def no_more(pid: int) -> int:
        if pid == chosen[2].pid:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", no_more)
    with pytest.raises(OSError, match="Too many open files"):
        signals.grips_on(chosen)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
