# SPDX-License-Identifier: GPL-3.0-or-later
"""A signal reaches the process that was seen, or nobody."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, signals

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


def until(true: Callable[[], bool], seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


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
    assert child.wait(2) == -getattr(signal, f"SIG{name}")
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
    assert state(child.pid) in "SR"


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
        timeout=20,
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
    assert child.wait(2) == -signal.SIGKILL
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
    assert child.wait(2) == -signal.SIGKILL


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
    why = signals.why_stuck(child.pid)
    assert why["state"] == "Z"
    channels = {
        path.read_text(encoding="ascii") for path in Path(f"/proc/{child.pid}/task").glob("*/wchan")
    }
    assert why["wait_channel"] in channels - {"0"} or channels == {"0"}


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
