# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask nvidia-smi under a deadline and read its answer strictly.

A value that is not a plain number is *unknown* here, never zero: the tool prints
``[N/A]``, ``[GPU is lost]`` and the like in the middle of otherwise good rows and may
still exit 0. Facts (exit codes, texts on stdout, number of rows) were taken from the
real tool, driver 580.
"""

from __future__ import annotations

import _thread
import os
import re
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import commands, deadline, owners

GPU_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "memory.used",
    "memory.total",
    "memory.reserved",
    "utilization.gpu",
    "temperature.gpu",
    "pstate",
    "driver_version",
    # Last, so that a comma in a product name cannot shift the other columns.
    "name",
)
APP_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory")

# How the driver says that it does not tell a value at all, as on GPUs without memory of their own.
NOT_AVAILABLE = ("[N/A]", "N/A", "[Not Supported]")

NOT_TOLD = r"|\[[^]]*\]|N/A"
BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
PSTATE = re.compile(r"(P\d{1,2}" + NOT_TOLD + r")$")
DRIVER = re.compile(r"(\d+(\.\d+)+" + NOT_TOLD + r")$")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds that MPS gives its clients when it is told to quit, before it ends its server.
MPS_GRACE = 2

QUERY_GPUS = ["--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"]

# One shell per place of reading: it answers a question per line. Starting nvidia-smi through
# `pct exec` anew for each reading would pay the start of pct each time.
SESSION_SCRIPT = """\
echo gpuops-ready
while read -r question argument; do
  case $question in
    gpus) nvidia-smi {gpus} ;;
    apps) nvidia-smi --query-compute-apps={apps} --format=csv,noheader,nounits ;;
    minors) nvidia-smi -q ;;
    nodes) ls /dev ;;
    mps) echo quit -t {grace} | CUDA_MPS_PIPE_DIRECTORY=$argument \\
      timeout -s KILL {mps_limit} nvidia-cuda-mps-control ;;
  esac </dev/null 2>&1
  echo "MARK$?"
done
""".format(
    gpus=" ".join(QUERY_GPUS), apps=",".join(APP_FIELDS), grace=MPS_GRACE, mps_limit=MPS_GRACE + 3
)

# Milliseconds between the readings of a loop. With 20 the real driver takes twice as long to free
# memory, with 100 no longer than without (measured with driver 580).
LOOP_MS = 100

# No answer is longer, not even with a thousand processes; more is a tool gone mad.
MOST_BYTES = 4 << 20

# Seconds that the first reader of a batch is given before the others start, unless it sits in the
# kernel; a reading takes 25 ms.
HEAD_START = 1.0


class Gpu:
    """One GPU as one reading showed it. Memory in MiB; ``None`` means not readable."""

    def __init__(self, index: int, uuid: str) -> None:
        self.index = index
        self.uuid = uuid
        self.bus_id = ""
        self.name = ""
        self.minor: int | None = None
        self.used_mib: int | None = None
        # What the tool wrote, for the message when it is no number.
        self.used_text = ""
        self.total_mib: int | None = None
        self.reserved_mib: int | None = None
        self.utilisation: int | None = None
        self.temperature: int | None = None
        self.pstate = ""
        self.driver = ""

    def as_dict(self) -> dict[str, Any]:
        """The GPU as plain data, in the field names of the report."""
        return dict(self.__dict__)


class Reading:
    """One answer of nvidia-smi about all GPUs, with everything wrong in it named.

    ``not_told`` names the GPUs whose memory the driver does not tell, in rows that are good: some
    machines do that by design. Any other value that is no number is a problem. ``at``: monotonic
    seconds at which it was not there yet, so that it is no older.
    """

    def __init__(self, gpus: list[Gpu], problems: list[str]) -> None:
        self.at = time.monotonic()
        self.gpus = gpus
        self.problems = problems or ([] if gpus else ["nvidia-smi listed no GPU"])
        self.not_told = [
            "memory.used of GPU %d reads '%s'" % (gpu.index, gpu.used_text)
            for gpu in gpus
            if gpu.used_text in NOT_AVAILABLE
        ]

    def problem(self, holders_only: bool) -> str:
        """The first thing that is wrong with it, or ``""``.

        :param holders_only: memory that is not told is what this machine was declared to have.
        """
        problems = self.problems + ([] if holders_only else self.not_told)
        return problems[0] if problems else ""


class App:
    """A compute process as the driver lists it: its PID is that of the asker's namespace."""

    def __init__(self, gpu_uuid: str, pid: int, used_mib: int | None) -> None:
        self.gpu_uuid = gpu_uuid
        self.pid = pid
        self.used_mib = used_mib


class SmiError(Exception):
    """nvidia-smi could not be asked, or did not answer; the text is one sentence for people."""


def number(text: str) -> int | None:
    """A plain non-negative decimal number of sane length, or ``None`` for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def first_line(text: str) -> str:
    """The first line with something on it, shortened for a one-line reason."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()[:300]
    return ""


def parse_gpus(text: str, exit_code: int) -> Reading:
    """Read the rows of ``--query-gpu=GPU_FIELDS --format=csv,noheader,nounits``.

    Every line must be a row of exactly these fields; whatever is not becomes a problem, and a
    reading with a problem proves nothing.
    """
    if exit_code != 0:
        return Reading([], [failure(text, exit_code)])
    gpus: list[Gpu] = []
    problems: list[str] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",", len(GPU_FIELDS) - 1)]
        index = number(values[0])
        if index is None or not is_gpu_row(values):
            problems.append("nvidia-smi printed a line that is no GPU: '%s'" % line.strip()[:200])
            continue
        gpu = gpu_from_row(index, values)
        if gpu.used_mib is None and gpu.used_text not in NOT_AVAILABLE:
            problems.append("memory.used of GPU %d reads '%s'" % (index, gpu.used_text))
        if any(is_same_gpu(gpu, other) for other in gpus):
            problems.append("nvidia-smi lists GPU %d (%s) twice" % (index, gpu.uuid))
        gpus.append(gpu)
    return Reading(gpus, problems)


def is_same_gpu(one: Gpu, other: Gpu) -> bool:
    """Is anything the same in both that only one GPU of a machine can have?"""
    return (
        one.index == other.index
        or one.uuid == other.uuid
        or one.bus_id.lower() == other.bus_id.lower()
    )


def is_gpu_row(values: list[str]) -> bool:
    """Is each value where it belongs? A name may hold commas, so their number alone proves little.

    A bus id, a performance state and a driver version have shapes of their own (or are ``[N/A]``
    and the like).
    """
    return (
        len(values) == len(GPU_FIELDS)
        and values[1].startswith("GPU-")
        and BUS_ID.match(values[2]) is not None
        and PSTATE.match(values[8]) is not None
        and DRIVER.match(values[9]) is not None
    )


def gpu_from_row(index: int, values: list[str]) -> Gpu:
    """One row, already split, as a GPU."""
    gpu = Gpu(index, values[1])
    gpu.bus_id = values[2]
    gpu.used_mib, gpu.used_text = number(values[3]), values[3]
    gpu.total_mib = number(values[4])
    gpu.reserved_mib = number(values[5])
    gpu.utilisation = number(values[6])
    gpu.temperature = number(values[7])
    gpu.pstate = values[8]
    gpu.driver = values[9]
    gpu.name = values[10]
    return gpu


def parse_apps(text: str, exit_code: int) -> tuple[list[App], list[str]]:
    """Read the rows of ``--query-compute-apps=APP_FIELDS``."""
    if exit_code != 0:
        return [], [failure(text, exit_code)]
    apps: list[App] = []
    problems: list[str] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",")]
        pid = number(values[1]) if len(values) == len(APP_FIELDS) else None
        if pid is None or not values[0].startswith(("GPU-", "MIG-")):
            problems.append("the driver's list has a line that is no process: '%s'" % line[:200])
            continue
        apps.append(App(values[0], pid, number(values[2])))
    return apps, problems


def parse_minors(text: str) -> dict[str, int]:
    """UUID to minor number, from ``nvidia-smi -q``: /dev/nvidiaN counts minors, not indices.

    Names of processes are part of that text, and can have any letters: a GPU that has two numbers
    there has none.
    """
    minors: dict[str, int] = {}
    doubtful = set()
    uuid = ""
    for line in text.split("\n"):
        key, colon, value = line.partition(":")
        if not colon:
            continue
        if key.strip() == "GPU UUID":
            uuid = value.strip()
        elif key.strip() == "Minor Number" and uuid:
            minor = number(value.strip())
            if minor is not None and minors.setdefault(uuid, minor) != minor:
                doubtful.add(uuid)
    return {uuid: minor for uuid, minor in minors.items() if uuid not in doubtful}


def minors_from_proc(root: str = "/proc/driver/nvidia/gpus") -> dict[str, int]:
    """UUID to minor number as the driver's own files say; empty where there are none.

    They have question marks for the UUID of a GPU that nobody has used since the driver was loaded.
    """
    minors: dict[str, int] = {}
    try:
        buses = os.listdir(root)
    except OSError:
        return minors
    for bus in buses:
        try:
            with open(os.path.join(root, bus, "information"), "rb") as info:
                text = info.read().decode("utf-8", "replace")
        except OSError:
            continue
        lines = dict(line.partition(":")[::2] for line in text.split("\n"))
        minor = number(lines.get("Device Minor", "").strip())
        uuid = lines.get("GPU UUID", "").strip()
        if minor is not None and uuid and "?" not in uuid:
            minors[uuid] = minor
    return minors


def failure(text: str, exit_code: int) -> str:
    """One sentence for a call of nvidia-smi that failed."""
    said = first_line(text)
    if exit_code == 127:
        return "nvidia-smi is not installed there"
    return "nvidia-smi failed with exit code %d: %s" % (exit_code, said or "it said nothing")


def last_silence(handle: int, before: float) -> float:
    """Now if nothing is there to be read, else ``before``: what comes is printed after that."""
    now = time.monotonic()
    return before if deadline.readable(handle, 0) else now


class Session:
    """A shell at the place of reading that runs nvidia-smi on demand.

    :param place: words for messages, such as ``container 129``.
    :param prefix: how to get there: ``[]`` for here, ``["pct", "exec", "129", "--"]``.
    :param timeout: seconds that one answer may take, the start included.
    :param stuck: why no nvidia-smi may be started at all, or ``""``.

    A shell that does not answer in time is abandoned: killed, but never waited for, because a
    process stuck in the driver does not die.
    """

    def __init__(self, place: str, prefix: list[str], timeout: float, stuck: str = "") -> None:
        self.place = place
        self.prefix = prefix
        self.timeout = timeout
        self.lost = "%s: %s" % (place, stuck) if stuck else ""
        # Lost because nvidia-smi hangs, which is the driver's fault and not this place's.
        self.hung = bool(stuck)
        self.pid = 0
        self._ready = False
        self._buffer = b""
        self._asked: list[float] = []
        self._answered = 0.0
        # When the question of the last answer was put: it cannot be older.
        self._asked_at = 0.0
        self._write = self._read = -1
        # Different each time: a process can have any name, and `nvidia-smi -q` prints names.
        self._mark = "gpuops-%s " % os.urandom(8).hex()
        if not self.lost:
            script = SESSION_SCRIPT.replace("MARK", self._mark)
            argv = [*prefix, "sh", "-c", script]
            try:
                self.pid, self._write, self._read = commands.start(argv)
            except FileNotFoundError:
                self.lost = "there is no command '%s' to reach %s with" % (argv[0], place)
            except OSError as error:
                self.lost = "%s: '%s' could not be started: %s" % (place, argv[0], error.strerror)

    def ask(self, *questions: str) -> None:
        """Ask without waiting, so that the answer is made while other work goes on."""
        self._asked += [time.monotonic()] * len(questions)
        if not self.lost:
            try:
                os.write(self._write, "".join(word + "\n" for word in questions).encode())
            except OSError:
                pass  # The shell is gone; answer() finds its last words and says so.

    def drop_answers(self) -> None:
        """Wait for the answers to what was asked, and forget them."""
        while self._asked and not self.lost:
            self.gpus()

    def answer(self) -> tuple[str, int]:
        """The text and exit code of the oldest question not yet answered.

        :raises SmiError: the place cannot be reached, or did not answer before the deadline.
        """
        # An answer's time runs from its question, or from the answer before it.
        asked = self._asked.pop(0)
        until = max(asked, self._answered) + self.timeout
        while not self.lost:
            text, mark, rest = self._buffer.partition(self._mark.encode())
            if mark and b"\n" in rest:
                code, _, self._buffer = rest.partition(b"\n")
                self._answered = time.monotonic()
                self._asked_at = asked
                return self._after_ready(text.decode("utf-8", "replace")), int(code)
            if not self._receive(until - time.monotonic()):
                self.abandon_silent()
        raise SmiError(self.lost)

    def has_answered(self, answers: int, seconds: float) -> bool:
        """Do so many answers wait to be taken, now or within ``seconds``?"""
        until = time.monotonic() + seconds
        while not self.lost and self._buffer.count(self._mark.encode()) < answers:
            if not self._receive(until - time.monotonic()):
                break
        return self._buffer.count(self._mark.encode()) >= answers

    def _receive(self, seconds: float) -> bool:
        """Take what the shell says within ``seconds``; False if it says nothing."""
        if not deadline.readable(self._read, seconds):
            return False
        data = os.read(self._read, 65536)
        self._buffer += data
        if not data:
            said = first_line(self._buffer.decode("utf-8", "replace"))
            self._abandon("cannot read there: %s" % (said or "the shell ended"))
        elif len(self._buffer) > MOST_BYTES:
            self._abandon("nvidia-smi does not stop printing")
        return True

    def _after_ready(self, text: str) -> str:
        """Drop what the way there printed (warnings of pct) before the shell's first word."""
        if self._ready:
            return text
        self._ready = True
        return text.partition("gpuops-ready\n")[2]

    def quit_mps(self, directory: str) -> str:
        """Tell the MPS daemon of this pipe directory to quit: ``sent``, or what went wrong."""
        self.ask("mps " + directory)
        try:
            text, code = self.answer()
        except SmiError as error:
            return str(error)
        # 124 and 137 are timeout's: a daemon that hangs must not take the reader with it.
        if code in (124, 137):
            return "MPS did not answer"
        return "sent" if code == 0 else first_line(text) or "exit code %d" % code

    def gpus(self) -> Reading:
        """The answer to ``gpus`` as a reading; a failure to answer is a reading with a problem."""
        try:
            text, code = self.answer()
        except SmiError as error:
            return Reading([], [str(error)])
        reading = parse_gpus(text, code)
        reading.at = self._asked_at
        return reading

    def apps(self) -> tuple[list[App], list[str]]:
        """The answer to ``apps``."""
        try:
            text, code = self.answer()
        except SmiError as error:
            return [], [str(error)]
        return parse_apps(text, code)

    def abandon_silent(self) -> None:
        """Ask here no more: nvidia-smi did not answer in time."""
        self.hung = True
        self._abandon("nvidia-smi did not answer within %g s" % self.timeout)

    def _abandon(self, why: str) -> None:
        self.lost = "%s: %s" % (self.place, why)
        commands.kill(self.pid)

    def close(self) -> None:
        """End the shell, and with it a call whose answer nobody needs; never wait.

        Such a call outlived this program otherwise, and the next rung's took it for a holder.
        """
        commands.kill(self.pid)
        commands.close(self.pid, self._write, self._read)


class Loop:
    """One nvidia-smi that reads again and again, so that zero is seen as soon as it is true.

    A call that starts while the driver frees memory is let in only when that is done, and then
    needs 30 ms to start; one that is in already is answered at once (measured with driver 580).

    It only hurries: ``over`` says that nothing more comes of it, for whatever reason, and an
    ordinary reading then tells that reason.

    :param session: the reader of the same place.
    :param last: its last reading; another number of GPUs, or others, ends the loop.
    """

    def __init__(self, session: Session, last: Reading) -> None:
        self.over = bool(session.lost)
        self._session = session
        self._uuids = [gpu.uuid for gpu in last.gpus]
        self._buffer = b""
        self._answered = self._silent = self._before = time.monotonic()
        self._pid, self._write, self._read = 0, -1, -1
        if not self.over:
            argv = [*session.prefix, "nvidia-smi", *QUERY_GPUS, "-lms", str(LOOP_MS)]
            try:
                self._pid, self._write, self._read = commands.start(argv)
            except OSError:
                self.over = True

    def reading(self, seconds: float) -> Reading | None:
        """The next reading if it comes within ``seconds``.

        One that does not come before the session's deadline ends the session too.
        """
        silent = self._answered + self._session.timeout
        until = min(time.monotonic() + seconds, silent)
        while not self.over:
            lines = self._buffer.split(b"\n", len(self._uuids))
            if len(lines) > len(self._uuids):
                self._buffer = lines.pop()
                return self._checked(b"\n".join(lines).decode("utf-8", "replace"))
            self._silent = last_silence(self._read, self._silent)
            if deadline.readable(self._read, until - time.monotonic()):
                data = os.read(self._read, 65536)
                self._buffer += data
                self.over = not data
            elif time.monotonic() >= silent:
                self._session.abandon_silent()
                self.over = True
            else:
                break
        return None

    def _checked(self, text: str) -> Reading | None:
        self._answered = time.monotonic()
        found = parse_gpus(text, 0)
        # It was begun when the one before had been printed.
        found.at, self._before = self._before, self._silent
        self.over = bool(found.problems) or [gpu.uuid for gpu in found.gpus] != self._uuids
        return None if self.over else found

    def close(self) -> None:
        """End it; never wait."""
        commands.kill(self._pid)
        commands.close(self._pid, self._write, self._read)


# What a look at a target asks at once, before anything else is known: how many GPUs there should
# be, and the two readings that a proof of clean needs.
FIRST_QUESTIONS = ("nodes", "gpus", "gpus")


def open_session(target: dict[str, Any], stuck: str) -> Session:
    """Start the reader of one target and put the first questions to it.

    :param stuck: as :func:`stuck_call` says it.

    A running container is entered with lxc-attach, which is what ``pct exec`` does in the end,
    after loading half a second of Perl. For one that is not running pct is asked for the reason.
    """
    vmid = int(target.get("vmid") or 0)
    if not vmid:
        place, prefix = str(target["name"]), []
    elif owners.container_cgroup(vmid):
        place, prefix = "container %d" % vmid, ["lxc-attach", "-n", str(vmid), "--"]
    else:
        place, prefix = "container %d" % vmid, ["pct", "exec", str(vmid), "--"]
    session = Session(place, prefix, float(deadline.smi_timeout(target)), stuck)
    session.ask(*FIRST_QUESTIONS)
    return session


class Readers:
    """The readers of a batch of targets: started ahead, as many of them as are served at once.

    The first one alone at first: a call that gets stuck in the driver shows with one process that
    nothing can end, not with one for each target.
    """

    def __init__(self, targets: list[dict[str, Any]]) -> None:
        self.stuck = stuck_call()
        self._ahead = targets[: deadline.TARGETS_AT_ONCE]
        self._lock = _thread.allocate_lock()  # threading takes 5 ms to import
        self._open: dict[str, Session] = {}
        self._started: list[Session] = []
        for target in self._ahead[:1]:
            self._start(target)

    def _start(self, target: dict[str, Any]) -> None:
        session = open_session(target, self.stuck)
        self._started.append(session)
        self._open[str(target["name"])] = session

    def drop(self, name: str) -> None:
        """Close the reader of a target that is not worked on, if it was started."""
        session = self._open.pop(name, None)
        if session:
            session.close()

    def start_others(self) -> None:
        """Start the others when the first has answered, or cannot because of its own place only."""
        if len(self._ahead) > 1 and not self._first_answers():
            self.stuck = self.stuck or stuck_call()
        for target in self._ahead[1:]:
            if str(target["name"]) not in self._open:
                self._start(target)

    def _first_answers(self) -> bool:
        """Wait for the first answer of nvidia-smi; not long, unless it sits in the kernel."""
        first, began = self._started[0], time.monotonic()
        readings = 1 + FIRST_QUESTIONS.index("gpus")
        while not first.has_answered(readings, 0.05):
            waited = time.monotonic() - began
            if first.lost or waited > first.timeout:
                return False
            if waited > HEAD_START and not _calls_in_kernel():
                return False
        return True

    def of(self, target: dict[str, Any]) -> Session:
        """The reader of this target, started now if its turn has only come now."""
        name = str(target["name"])
        with self._lock:
            if name not in self._open:
                if not self.stuck and any(session.lost for session in self._started):
                    self.stuck = stuck_call()
                self._start(target)
            return self._open.pop(name)


def stuck_call(patience: float = 1.0) -> str:
    """A call of nvidia-smi that is stuck in the kernel on this node, in words, or ``""``.

    One more would get stuck as well, and each that does holds the driver's locks. A healthy call is
    in state D for moments only, so one that is found there is looked at again for ``patience``
    seconds.
    """
    found = _calls_in_kernel()
    # From the first look on: it may take longer than that, and one look alone tells nothing.
    until = time.monotonic() + patience
    last = False
    while found and not last:
        time.sleep(0.05)
        last = time.monotonic() >= until
        found &= _calls_in_kernel()
    pids = ", ".join(str(pid) for pid, _ in sorted(found))
    return "an earlier nvidia-smi (pid %s) is stuck in the driver" % pids if found else ""


def _calls_in_kernel() -> set[tuple[int, str]]:
    """(PID, start time) of every nvidia-smi that cannot be interrupted right now."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb") as text:
                stat = text.read()
        except OSError:
            continue
        # From the first bracket to the last: a process can be called "(nvidia-smi) D".
        called, _, rest = stat.partition(b"(")[2].rpartition(b")")
        fields = rest.split()
        if called == b"nvidia-smi" and fields[:1] == [b"D"] and len(fields) > 19:
            found.add((int(name), fields[19].decode()))
    return found
