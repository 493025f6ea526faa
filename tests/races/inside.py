# SPDX-License-Identifier: GPL-3.0-or-later
"""The race of PIDs, inside a PID namespace of its own. Run by ``pids.py`` only.

Process 1 is the crowd. It starts holders of the GPUs that fork, exec, let go and exit, and it
reaps them; the number of whoever has ended it gives at once to somebody who has done nothing
(``ns_last_pid``), beside many others who come and go through the few numbers that ``pid_max``
leaves. It learns from wait(2) how each of its children ended: nobody but gpuops sends signals
here, so an innocent that was ended by one was ended by gpuops, whatever gpuops says of it.

Its child is gpuops: the program of the acting host as it is, which climbs its ladder again and
again. Only pauses are put in, where a busy node would make them too, and what it sends is noted.
At a pause the crowd often strikes: some of the holders end, and others let go, in that moment.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import random
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PID_MAX = 420  # Linux keeps 300 for the system after the first lap, so 120 numbers go round
GPUS = 4
HOLDERS = 8
IDLERS = 6
MONITOR = "dcgm-exporter"
WRONG = ("innocent", "monitor")
HELD = ("holder", "letting go")
AIM = 0.1  # seconds; see Operator.aimed

os_open = os.open


class Crowd:
    """Process 1: holders, innocents, and who of them was signalled."""

    def __init__(self, seed: int, gpuops: int, commands: int, answers: int) -> None:
        self.random = random.Random(seed)
        self.commands = commands
        self.answers = answers
        self.kinds: dict[int, str] = {}
        self.let_go = mmap.mmap(-1, 8 * 40000)  # by PID: when it closed its device
        self.last_pid = os_open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY)
        self.churn_until = 0.0
        self.next_name = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.late: list[dict[str, Any]] = []  # let go, and then ended by a signal
        self.struck: set[int] = set()
        self.aimed = self.sure = False
        self.gpuops = gpuops

    def run(self) -> None:
        """Serve commands of the gpuops process until it ends."""
        waiter = select.poll()
        waiter.register(self.commands, select.POLLIN | select.POLLHUP)
        while True:
            for _, event in waiter.poll(1):
                if not event & select.POLLIN:
                    return
                for word in os.read(self.commands, 4096).decode().split():
                    self.obey(word)
            self.reap()
            if time.monotonic() < self.churn_until:
                while sum(kind in HELD for kind in self.kinds.values()) < HOLDERS:
                    self.holder()
            if self.churn_until and sum(kind in WRONG for kind in self.kinds.values()) < IDLERS:
                self.innocent(0)

    def obey(self, word: str) -> None:
        """``start`` a while of coming and going; ``strike``; or the ``truth`` of what was done.

        ``done`` is answered when those who were struck are gone and their numbers have passed on.
        """
        if word == "start":
            self.churn_until = time.monotonic() + self.random.uniform(0.2, 0.8)
            return
        if word == "strike":
            self.strike()
            return
        if word == "done":
            while self.struck:
                self.reap()
                time.sleep(0.001)
            os.write(self.answers, b"\n")
            return
        if word in ("aimed", "sure"):
            self.aimed, self.sure = word == "aimed", word == "sure"
            return
        holders = [pid for pid, kind in self.kinds.items() if kind in HELD and holds(pid)]
        answer = {
            "holders": holders,
            "churn_until": self.churn_until,
            "wrong": self.wrong,
            "late": self.late,
            "counts": self.counts,
        }
        os.write(self.answers, json.dumps(answer).encode() + b"\n")
        self.wrong, self.late, self.counts = [], [], Counter()

    def strike(self) -> None:
        """Some holders end, some let go. Children not yet waited for, so the numbers are theirs."""
        for pid, kind in self.kinds.items():
            if kind == "holder" and self.random.random() < 0.3:
                self.struck.add(pid)
                os.kill(pid, signal.SIGKILL)
            elif kind == "letting go" and self.random.random() < 0.5:
                os.kill(pid, signal.SIGUSR1)

    def reap(self) -> None:
        """Take note of how children ended, and give their numbers away."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            kind = self.kinds.pop(pid, "holder")  # a holder's child, an orphan now
            if os.WIFSIGNALED(status) and pid not in self.struck:
                self.signalled(pid, kind, os.WTERMSIG(status))
            self.struck.discard(pid)
            if kind in HELD and pid != self.gpuops and self.churn_until:
                self.innocent(pid)

    def signalled(self, pid: int, kind: str, number: int) -> None:
        """Somebody was ended by a signal."""
        (when,) = struct.unpack_from("d", self.let_go, 8 * pid)
        if kind in WRONG:
            self.wrong.append(f"{kind} {pid} was ended by {signal.Signals(number).name}")
        elif when:
            self.late.append({"pid": pid, "let_go": when})
        else:
            self.counts["holders ended by a signal"] += 1

    def fork(self, kind: str, wanted: int = 0) -> int:
        """Fork, if it can be as the number wanted; the child has the signals of a new process."""
        if wanted:
            os.pwrite(self.last_pid, str(wanted - 1).encode(), 0)
        try:
            pid = os.fork()
        except OSError:  # all the numbers are in use
            return -1
        if pid:
            self.kinds[pid] = kind
            self.counts[f"{kind}s started"] += 1
            if pid == wanted:
                self.counts["numbers of holders taken over at once"] += 1
        else:
            struct.pack_into("d", self.let_go, 8 * os.getpid(), 0.0)
        return pid

    # --- those who must never be signalled ---

    def innocent(self, wanted: int) -> None:
        """Somebody with nothing to do with it; now and then a monitor, which holds a GPU too."""
        monitor = self.random.random() < (0.5 if wanted else 0.2)
        choice = [0.01, 0.1, 0.3] if wanted else [0.002, 0.01, 0.05, 0.2]
        seconds = self.random.choice(choice) * self.random.uniform(0.5, 1.5)
        start = self.random.choice([0, 0.01, 0.04])
        if self.aimed and wanted:
            monitor, start, seconds = True, 2 * AIM, 10 * AIM
        if self.sure and wanted:
            monitor, start, seconds = True, 0, 10 * AIM
        runs = self.random.random() < 0.15
        if self.fork("monitor" if monitor else "innocent", wanted):
            return
        if monitor:
            time.sleep(start)  # like any process it is forked first and gets its name later
            rename(MONITOR)
            device(0)
        if runs:
            os.execv("/usr/bin/sleep", [MONITOR if monitor else "sleep", str(seconds)])
        time.sleep(seconds)
        os._exit(0)

    # --- holders ---

    def holder(self) -> None:
        """One of seven kinds of holder."""
        body = self.random.choice(
            [steady, stubborn, brief, forker, becomes_another, lets_go, lets_go_and_execs]
        )
        wait = self.random.uniform(0, 0.25)
        gpu = self.random.randrange(GPUS)
        self.next_name += 1
        if self.fork("letting go" if body in (lets_go, lets_go_and_execs) else "holder"):
            return
        rename(f"w{self.next_name}")  # one name twice would be one that comes back
        try:
            body(self, gpu, wait)
        finally:
            os._exit(0)

    def now_innocent(self) -> None:
        """This process has closed its device; it tells when."""
        struct.pack_into("d", self.let_go, 8 * os.getpid(), time.monotonic())


def rename(name: str) -> None:
    """Another name for this process."""
    Path("/proc/self/comm").write_text(name)


def device(gpu: int) -> int:
    """Hold a GPU as far as this can be done without a driver."""
    return os_open(f"/dev/nvidia{gpu}", os.O_PATH)


def holds(pid: int) -> bool:
    """Does that process have a GPU open right now?"""
    folder = Path(f"/proc/{pid}/fd")
    try:
        return any(os.major(each.stat().st_rdev) == 195 for each in folder.iterdir())
    except OSError:
        return False


def steady(crowd: Crowd, gpu: int, wait: float) -> None:
    """Holds until it is told to end."""
    device(gpu)
    time.sleep(600)


def stubborn(crowd: Crowd, gpu: int, wait: float) -> None:
    """Does not listen to TERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    device(gpu)
    time.sleep(600)


def brief(crowd: Crowd, gpu: int, wait: float) -> None:
    """Ends by itself, and its number goes to somebody else."""
    device(gpu)
    time.sleep(wait)


def forker(crowd: Crowd, gpu: int, wait: float) -> None:
    """Moves from number to number: a child inherits the GPU, the parent ends."""
    device(gpu)
    for generation in range(4):
        time.sleep(wait)
        if os.fork():
            return
        struct.pack_into("d", crowd.let_go, 8 * os.getpid(), 0.0)
        rename(f"f{generation}-{os.getpid()}-{time.monotonic_ns() % 9999}")
    time.sleep(600)


def becomes_another(crowd: Crowd, gpu: int, wait: float) -> None:
    """The same process with another program, still holding."""
    handle = device(gpu)
    time.sleep(wait)
    os.set_inheritable(handle, True)
    os.execv("/usr/bin/sleep", [f"sleep-{os.getpid()}-{time.monotonic_ns()}", "600"])


def lets_go_when_told(crowd: Crowd, gpu: int) -> None:
    """Hold until the crowd strikes."""
    handle = device(gpu)
    signal.sigwait([signal.SIGUSR1])
    os.close(handle)
    crowd.now_innocent()


def lets_go(crowd: Crowd, gpu: int, wait: float) -> None:
    """Closes its device and lives on, an innocent now."""
    lets_go_when_told(crowd, gpu)
    time.sleep(0.5)


def lets_go_and_execs(crowd: Crowd, gpu: int, wait: float) -> None:
    """The same process with another program, holding nothing any more."""
    lets_go_when_told(crowd, gpu)
    os.execv("/usr/bin/sleep", ["sleep", "0.5"])


# --- gpuops ---


class Operator:
    """The process that runs the program of the acting host, round by round."""

    def __init__(self, seed: int, guards: str, aimed: bool, commands: int, answers: int) -> None:
        sys.path.insert(0, str(ROOT / "collections"))
        from ansible_collections.gpuops.gpu.plugins.module_utils import (
            holders,
            node,
            program,
            signals,
            work,
        )

        self.random = random.Random(seed + 1)
        self.program = program
        self.commands = commands
        # Always the hardest moment: holders end after the scan, before it is read who they are.
        # That then reads somebody just forked, who is a protected monitor when it is signalled.
        self.aimed = aimed
        # Where a guard is missing that has to show on a slow machine too, whose crowd needs longer
        # for a change of hands than a pause takes.
        self.sure = guards != "all" and not aimed
        self.answers = os.fdopen(answers, encoding="utf-8")
        self.checked = 0.0  # when the last re-check of the holders to be signalled began
        self.sends: list[tuple[int, float]] = []
        self.starts: dict[int, int] = {}
        self.signalling = False
        self.looked: dict[int, Any] = {}  # what the last look found
        node._in_container = lambda: False  # whatever the machine below is
        self.watch(holders, node.Node, work.Work, signals, guards)

    def pause(self) -> None:
        """What a busy node may do to us anywhere: nothing, or some milliseconds."""
        if self.random.random() < 0.5:
            os.write(self.commands, b"strike done\n" if self.sure else b"strike\n")
            if self.sure:
                self.answers.readline()
        time.sleep(self.random.choice([0.0, 0.0, 0.005, 0.03, 0.06]))

    def watch(self, holders: Any, node: Any, work: Any, signals: Any, guards: str) -> None:
        """Pauses at the four places where a race is, a note of what is sent; no guard changed.

        ``guards`` other than ``all`` takes some away, to see that this test would notice: the
        pidfd; the start times (and with them that scope and protection are read again, which would
        save a monitor too); that alone; whether the device is still held; or all of these.
        """
        operator, scan, grip = self, holders.scan, signals.Grip
        signal_all = work.signal_all
        identify, why_not = node.identify, node.why_not

        def paused_signal_all(part: Any, *args: Any) -> Any:
            operator.pause()
            time.sleep(4 * AIM if operator.aimed else 0)
            operator.signalling = True
            try:
                return signal_all(part, *args)
            finally:
                operator.signalling = False

        def deceived_identify(host: Any, holder: Any) -> Any:
            there = identify(host, holder)
            if operator.signalling and guards in ("no start time", "none"):
                holder.start = operator.starts[holder.pid]
                return True
            return there

        def deceived_why_not(host: Any, *args: Any) -> Any:
            if operator.signalling and guards in ("no start time", "no second reading", "none"):
                return ""
            return why_not(host, *args)

        def paused_scan(devices: Any, deep: bool = False, pids: Any = None, **more: Any) -> Any:
            if pids is None:
                found = scan(devices, deep, pids, **more)
                operator.looked = copy.deepcopy(found.holders)
                operator.pause()  # before it is read who they are
                if operator.aimed:
                    os.write(operator.commands, b"strike\n")
                    time.sleep(AIM)
                return found
            operator.pause()
            operator.checked = time.monotonic()
            found = scan(devices, deep, pids, **more)
            if guards in ("no re-check", "none"):
                found.holders = {
                    pid: copy.deepcopy(operator.looked.get(pid, holders.Holder(pid)))
                    for pid in pids
                }
            operator.pause()
            return found

        class Grip(grip):  # type: ignore[misc, valid-type]
            def __init__(self, pid: int, start: int) -> None:
                super().__init__(pid, start)
                operator.starts[pid] = start
                if guards in ("no handle", "none"):
                    self.close()

            def same(self) -> bool:
                same: bool = super().same()
                if guards == "no handle":
                    operator.pause()
                return same or guards in ("no start time", "none")

            def send(self, name: str) -> str:
                outcome: str = super().send(name)
                if outcome == "sent":
                    operator.sends.append((self.pid, operator.checked))
                return outcome

        work.signal_all = paused_signal_all
        node.identify = deceived_identify
        node.why_not = deceived_why_not
        holders.scan = paused_scan
        signals.Grip = Grip

    def ask(self) -> dict[str, Any]:
        """The truth, from process 1."""
        os.write(self.commands, b"truth\n")
        answer: dict[str, Any] = json.loads(self.answers.readline())
        return answer

    def ladder(self, rungs: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any], float]:
        """Climb as the role does; the last result, all actions, when the last look began."""
        earlier: list[Any] = []
        result: dict[str, Any] = {}
        began = 0.0
        for rung in rungs:
            spec = {
                "name": "race",
                "expected_gpus": GPUS,
                "protect": [MONITOR],
                "smi_timeout": 10,
            }
            began = time.monotonic()
            answer = self.program.run(
                {
                    "verb": "release",
                    "targets": [spec],
                    "earlier": {"race": list(earlier)},
                    "rung": rung,
                    "check": False,
                }
            )
            result = answer["hosts"]["race"]
            earlier += result["actions"]
            if result["settled"]:
                break
        return result, earlier, began

    def play(self, rungs: list[dict[str, Any]]) -> dict[str, Any]:
        """One round: climb while they come and go, and again until nobody is left."""
        os.write(self.commands, b"aimed\n" if self.aimed else b"sure\n" if self.sure else b"")
        os.write(self.commands, b"start\n")
        time.sleep(self.random.uniform(0.01, 0.1))
        self.sends = []
        outcomes: Counter[str] = Counter()
        verdicts = []
        late: list[dict[str, Any]] = []
        wrong: list[str] = []
        counts: Counter[str] = Counter()
        for _ in range(8):
            result, actions, began = self.ladder(rungs)
            reap_readers()
            outcomes.update(action["result"] for action in actions)
            verdicts.append(result["verdict"])
            if "internal error" in result["reason"]:
                wrong.append(result["reason"])
            truth = self.ask()
            wrong += truth["wrong"]
            late += truth["late"]
            counts.update(truth["counts"])
            if result["verdict"] != "clean" or truth["churn_until"] > began:
                continue
            if truth["holders"]:
                wrong.append(f"FALSE CLEAN: {truth['holders']} hold")
            break
        else:
            wrong.append(f"never clean: {verdicts}, {result['reason']}")
        in_between = 0
        for each in late:
            checks = [check for pid, check in self.sends if pid == each["pid"]]
            if any(check < each["let_go"] for check in checks):
                in_between += 1
            else:
                wrong.append(f"{each['pid']} had let go before it was checked, and was ended")
        return {
            "wrong": wrong,
            "outcomes": outcomes,
            "counts": counts,
            "let go between check and signal": in_between,
            "runs of the ladder": len(verdicts),
        }


def reap_readers() -> None:
    """gpuops ends after each answer and leaves ended readers to process 1; here it goes on."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def prepare(pid_max: bool) -> None:
    """Device nodes, nvidia-smi and few numbers, in namespaces that are ours alone."""
    if os.getpid() != 1:
        raise SystemExit("this runs as process 1 of a namespace only")
    for place in ("/dev", "/usr/local/bin", "/usr/local/sbin"):
        subprocess.run(["mount", "-t", "tmpfs", "race", place], check=True)
    nodes = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9)}
    nodes |= {f"nvidia{gpu}": (195, gpu) for gpu in range(GPUS)} | {"nvidiactl": (195, 255)}
    for name, (major, minor) in nodes.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    tool = Path("/usr/local/bin/nvidia-smi")
    tool.write_bytes((Path(__file__).parent / "smi.py").read_bytes())
    tool.chmod(0o755)
    if pid_max:
        Path("/proc/sys/kernel/pid_max").write_text(str(PID_MAX))


def main() -> None:
    """Fork gpuops, be the crowd, and end when it has played all rounds."""
    order = json.loads(sys.argv[1])
    prepare(order["pid_max"])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # by inheritance in all others too
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    gpuops = os.fork()
    if gpuops == 0:
        os.close(command_read)
        os.close(answer_write)
        operator = Operator(
            order["seed"], order["guards"], order["aimed"], command_write, answer_read
        )
        for _ in range(order["rounds"]):
            played = operator.play(order["rungs"])
            sys.stdout.write(json.dumps(played) + "\n")
            sys.stdout.flush()
            if order["first"] and played["wrong"]:
                break
        os._exit(0)
    os.close(command_write)
    os.close(answer_read)
    Crowd(order["seed"], gpuops, command_read, answer_write).run()


if __name__ == "__main__":
    main()
