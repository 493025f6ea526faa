"""The simulated NVIDIA driver: one process per Proxmox host or bare node, outside its namespaces.

Event driven: a holder registers over a socket, the driver checks in /proc that it really holds
the device nodes, keeps a pidfd of it, and frees its memory a while after its death, as the real
driver does. nvidia-smi asks over the same socket and gets the finished text. A second socket, not
visible in the hosts, is for the lab: faults, the list of holders.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import linux, smi

NS_GET_PARENT = 0xB702
NVIDIA_MAJOR = 195
ANSWER_AFTER = 0.020  # the real tool takes 22-31 ms, nearly all of it to get at the driver
ANSWER_AGAIN_AFTER = 0.002  # what one that loops (-lms) needs for each further answer
# Several holders of one GPU that die together are freed one after another: eight took 540 ms on
# real hardware, one 115 to 180 ms.
NEXT_RELEASE_AFTER = 0.055
# In the last part of a release the real driver lets nobody in and answers nobody until it is done;
# who comes right after the death still reads the memory as used. Seconds before the end.
QUERY_WAITS = 0.090
# MiB in use of a GPU that somebody has open and nobody computes on, however many they are, and
# seconds after a death until it is free (two H200).
OPENED_MIB = 4
CLOSE_TAKES = 0.047
# MiB that each process which computes adds to what is in use and in no process's figure.
UNLISTED_MIB = 5.5
# Queries of a tool that loops slow a release down when they follow each other in less than that: it
# takes nearly twice as long with -lms 20, a fifth to a half longer with 50, no longer with 100.
QUICK = 0.060
SLOWED_BY = 0.015
HANG_IN_D = 1000  # an exit code that tells nvidia-smi to hang in an uninterruptible read


@dataclass(eq=False)
class Holder:
    """A process that holds GPUs, or did until a moment ago."""

    id: str
    pid: int  # in the driver's (outer) pid namespace
    pidfd: int
    start_time: int
    gpus: list[int]
    opened: list[int]  # CUDA opens all that it can see, and is listed only where it computes
    mib: int
    kind: str
    host: str
    name: str
    busy: bool
    listed: bool
    numbers: dict[int, int]  # pid namespace inode -> pid there
    alive: bool = True
    release_at: dict[int, float] = field(default_factory=dict)


@dataclass
class Fault:
    """Something that is wrong with what one host or container sees."""

    host: str
    kind: str
    gpu: int | None = None
    value: str = ""


def pid_numbers(pid: int) -> dict[int, int]:
    """pid namespace inode -> the pid the process has there, from its own outwards."""
    inner_first = linux.namespace_pids(pid)[::-1]
    numbers: dict[int, int] = {}
    fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
    for number in inner_first:
        numbers[os.fstat(fd).st_ino] = number
        try:
            parent = fcntl.ioctl(fd, NS_GET_PARENT)
        except OSError:
            break  # the driver's own namespace: nothing further out can be seen
        os.close(fd)
        fd = parent
    os.close(fd)
    return numbers


def held_minors(pid: int) -> set[int]:
    """The GPU minors a process really holds: descriptors of any of its threads, or mappings."""
    held: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        directory = f"/proc/{pid}/task/{task}/fd"
        try:
            for name in os.listdir(directory):
                status = os.stat(f"{directory}/{name}")
                if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR:
                    held.add(os.minor(status.st_rdev))
        except OSError:
            continue
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith("/dev/nvidia") and path[0][11:].isdigit():
            held.add(int(path[0][11:]))
    return held


def in_no_figure(computing: int) -> int:
    """MiB that are in use and that the real driver puts into no process's figure.

    Measured: 9 for one process that computes, 15 for two, 48 for eight.
    """
    return int(OPENED_MIB + UNLISTED_MIB * computing) if computing else 0


def process_name(pid: int) -> str:
    """What nvidia-smi prints for a process: argv[0], or [No data] if there is none to read."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        name = ""
    return name or smi.NO_DATA


class Driver:
    """State and event loop."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.host: str = config["host"]
        self.cgroup: str = config["cgroup"]  # outer cgroup path of the host, for attribution
        self.helpers: str = config["helpers"]
        self.names: dict[str, str] = config["containers"]  # vmid -> container name
        self.gpus: list[dict[str, Any]] = config["gpus"]
        self.delay = config["delay_ms"] / 1000
        self.holders: list[Holder] = []
        # holder id -> supervisors and the like, with start time: pid, start_time, stuck
        self.helpers_of: dict[str, list[dict[str, Any]]] = {}
        self.homes: dict[str, str] = {}  # holder id -> host or container name
        # holder id -> what ends whatever starts it again: host, command (for sh, inside that host)
        self.endings: dict[str, dict[str, str]] = {}
        self.dropped: set[str] = set()  # holder ids that the lab has dropped
        self.failures: dict[str, str] = {}  # holder id -> why it could not hold
        self.faults: list[Fault] = []
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.hanging: list[socket.socket] = []
        self.asked_again = 0.0  # when a tool that loops asked last
        self.stuck_servers: list[subprocess.Popen[bytes]] = []
        self.standins = self.make_standins()
        self.selector = selectors.DefaultSelector()
        self.listen(Path(config["socket"]), 0o666, self.on_host_request)
        self.listen(Path(config["admin"]), 0o600, self.on_admin_request)

    # --- plumbing ---

    def listen(
        self, path: Path, mode: int, handler: Callable[[socket.socket, bytes], None]
    ) -> None:
        """Accept one-line requests on a socket."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        path.chmod(mode)
        server.listen(1024)
        server.setblocking(False)
        self.selector.register(server, selectors.EVENT_READ, lambda: self.accept(server, handler))

    def accept(
        self, server: socket.socket, handler: Callable[[socket.socket, bytes], None]
    ) -> None:
        """A new connection: wait for its line without blocking anyone."""
        try:
            client, _ = server.accept()
        except OSError:
            return
        client.setblocking(False)
        received = bytearray()

        def readable() -> None:
            try:
                part = client.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            received.extend(part)
            if b"\n" in received or not part:
                self.selector.unregister(client)
                if not part:
                    client.close()
                    return
                client.setblocking(True)
                client.settimeout(2)
                self.handle(handler, client, bytes(received).partition(b"\n")[0])

        self.selector.register(client, selectors.EVENT_READ, readable)

    def handle(
        self, handler: Callable[[socket.socket, bytes], None], client: socket.socket, line: bytes
    ) -> None:
        """Call a handler; its error is the answer."""
        try:
            handler(client, line)
        except Exception as error:  # one bad request must not end the driver
            self.reply(client, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    def reply(self, client: socket.socket, data: bytes) -> None:
        """Answer and hang up; the asker may be gone."""
        with contextlib.suppress(OSError):
            client.sendall(data)
        client.close()

    def after(self, when: float, action: Callable[[], None]) -> None:
        """Run an action at a monotonic time."""
        self.sequence += 1
        heapq.heappush(self.timers, (when, self.sequence, action))

    def run(self) -> None:
        """Serve for ever."""
        while True:
            while self.timers and self.timers[0][0] <= time.monotonic():
                heapq.heappop(self.timers)[2]()
            timeout = self.timers[0][0] - time.monotonic() if self.timers else None
            for key, _ in self.selector.select(None if timeout is None else max(0, timeout)):
                key.data()

    # --- holders ---

    def make_standins(self) -> int:
        """A directory of what holders map instead of the real nodes: c 1:5 under their names.

        It is the /dev of a file system mounted nowhere, so that a mapping reads /dev/NAME for
        everybody, while nobody's own /dev is another one.
        """
        tree = linux.detached_tmpfs()
        os.mkdir("dev", dir_fd=tree)
        directory = os.open("dev", os.O_PATH | os.O_DIRECTORY, dir_fd=tree)
        os.close(tree)
        for name in [*(f"nvidia{gpu['minor']}" for gpu in self.gpus), "nvidiactl", "nvidia-uvm"]:
            os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, 5), dir_fd=directory)
        return directory

    def give_standins(self, client: socket.socket, names: list[str]) -> None:
        """Open stand-ins for a holder, which need not be allowed to."""
        opened = [os.open(name, os.O_RDWR, dir_fd=self.standins) for name in names]
        socket.send_fds(client, [b"{}"], opened)
        for fd in opened:
            os.close(fd)
        client.close()

    def register(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        """A process says that it holds GPUs; believe only what /proc shows."""
        opened = request.get("opened", [])
        minors = {self.gpus[index]["minor"] for index in [*request["gpus"], *opened]}
        missing = minors - held_minors(peer)
        if missing:
            return {"error": f"pid {peer} does not hold minor(s) {sorted(missing)}"}
        holder = Holder(
            id=request["id"],
            pid=peer,
            pidfd=os.pidfd_open(peer),
            start_time=linux.start_time(peer),
            gpus=request["gpus"],
            opened=opened,
            mib=request["mib"],
            kind=request["kind"],
            host=request["host"],
            name=request["name"],
            busy=request.get("busy", False),
            listed=request["listed"],
            numbers=pid_numbers(peer),
        )
        self.holders.append(holder)
        self.homes[holder.id] = holder.host
        if request.get("helper_parent"):
            parent = int(Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[1])
            self.add_helper(holder.id, parent)
        self.selector.register(holder.pidfd, selectors.EVENT_READ, lambda: self.died(holder))
        return {"outer_pid": peer, "start_time": holder.start_time, **self.describe(holder)}

    def add_helper(self, holder_id: str, pid: int, stuck: bool = False) -> None:
        """Remember a process that belongs to a holder but holds nothing."""
        helper = {"pid": pid, "start_time": linux.start_time(pid), "stuck": stuck}
        helpers = self.helpers_of.setdefault(holder_id, [])
        if helper not in helpers:
            helpers.append(helper)

    def died(self, holder: Holder) -> None:
        """The last thread of a holder is gone: free its memory a little later."""
        now = time.monotonic()
        self.selector.unregister(holder.pidfd)
        os.close(holder.pidfd)
        holder.alive = False
        self.after(now + CLOSE_TAKES, holder.opened.clear)
        for index in holder.gpus:
            pending = [h.release_at[index] for h in self.holders if index in h.release_at]
            slow = self.fault(self.host, "slow-release", index)
            delay = float(slow.value) / 1000 if slow else self.delay
            at = max(now + delay, max(pending, default=0.0) + NEXT_RELEASE_AFTER)
            holder.release_at[index] = at
            self.after(at, partial(self.release, holder, index))

    def release(self, holder: Holder, index: int) -> None:
        """The memory on one GPU is free now, if nothing has slowed that down."""
        at = holder.release_at.get(index, 0.0)
        if at > time.monotonic():
            self.after(at, partial(self.release, holder, index))
            return
        holder.release_at.pop(index, None)
        holder.gpus.remove(index)
        if not holder.gpus:
            self.holders.remove(holder)

    def describe(self, holder: Holder) -> dict[str, Any]:
        """A holder as the lab reports it."""
        inner_first = list(holder.numbers.values())
        return {
            "id": holder.id,
            "host": holder.host,
            "kind": holder.kind,
            "name": holder.name,
            "alive": holder.alive,
            "pid": inner_first[0],
            # Outermost is the driver's own namespace; the host's is the next one inwards.
            "node_pid": inner_first[-2] if len(inner_first) > 1 else inner_first[-1],
            "outer_pid": holder.pid,
            "start_time": holder.start_time,
            "gpus": list(holder.gpus),
            "mib": holder.mib,
            "helpers": [helper["pid"] for helper in self.helpers_of.get(holder.id, [])],
        }

    def used(self, index: int) -> int:
        """MiB in use on a GPU, the same from wherever one looks."""
        total = sum(h.mib for h in self.holders if index in h.gpus)
        if not total and any(index in h.opened for h in self.holders):
            total = OPENED_MIB
        stuck = self.fault(self.host, "stuck", index)
        return total + (int(stuck.value) if stuck else 0)

    def listed(self, holder: Holder, index: int) -> int:
        """MiB on a GPU in a holder's own figure: all that it was asked to hold but its share of
        what is in none. The one that came first has the GPU's own 4 MiB in its share."""
        there = [h for h in self.holders if index in h.gpus and h.mib]
        before = there.index(holder) if holder in there else 0
        return max(0, holder.mib - in_no_figure(before + 1) + in_no_figure(before))

    # --- nvidia-smi ---

    def fault(self, host: str, kind: str, gpu: int | None = None) -> Fault | None:
        """The newest fault of a kind that a caller on `host` meets (the host's own count too)."""
        for fault in reversed(self.faults):
            on_gpu = fault.gpu is None or gpu is None or fault.gpu == gpu
            if fault.kind == kind and fault.host in (host, self.host) and on_gpu:
                return fault
        return None

    def caller_host(self, pid: int) -> str:
        """The container a process is in, by its cgroup, or the host."""
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return self.host
        mark = f"{self.cgroup}/lxc/"
        for line in text.splitlines():
            if line.startswith("0::") and mark in line:
                return self.names.get(line.split(mark)[1].split("/")[0], self.host)
        return self.host

    def view(self, pid: int, host: str, minors: set[int]) -> smi.View:
        """What a caller sees: its GPUs, and the processes its pid namespace has numbers for."""
        gpus = []
        count = self.fault(host, "wrong-count")
        for gpu in self.gpus:
            index = gpu["index"]
            if gpu["minor"] not in minors or (count and index >= int(count.value)):
                continue
            busy = any(h.busy and h.alive and index in h.gpus for h in self.holders)
            busy = busy or bool(self.fault(host, "busy", index))
            values = {}
            for fault in self.faults:
                here = fault.host in (host, self.host) and fault.gpu in (None, index)
                if fault.kind == "value" and here:
                    name, _, text = fault.value.partition(" ")
                    values[name] = text
            gpus.append(
                smi.GpuView(
                    **gpu,
                    used=self.used(index),
                    utilization=100 if busy else 0,
                    lost=any(
                        f.kind == "gpu-lost" and f.host in (host, self.host) and f.gpu == index
                        for f in self.faults
                    ),
                    values=values,
                )
            )
        return smi.View(gpus, self.processes(pid), time.time())

    def processes(self, caller: int) -> list[smi.ProcessView]:
        """The driver's process list for a caller; without a number there, a process is dropped."""
        namespace = os.stat(f"/proc/{caller}/ns/pid").st_ino
        rows = []
        for holder in self.holders:
            number = holder.numbers.get(namespace)
            if not holder.alive or not holder.listed or number is None:
                continue
            name = process_name(holder.pid)
            rows += [
                smi.ProcessView(index, number, name, self.listed(holder, index))
                for index in holder.gpus
            ]
        for fault in self.faults:
            if fault.kind == "ghost":
                number, mib = (int(word) for word in fault.value.split())
                rows.append(smi.ProcessView(fault.gpu or 0, number, smi.NO_DATA, mib))
        return sorted(rows, key=lambda row: (row.gpu, row.pid))

    def answer(self, client: socket.socket, peer: int, words: list[str]) -> None:
        """Sample now and answer one nvidia-smi."""
        ctl, minor_list, *arguments = words
        host = self.caller_host(peer)
        error = self.fault(host, "smi-error")
        if error:
            answer = smi.error_answer(error.value)
        elif ctl != "ok":
            answer = smi.error_answer("no_ctl" if ctl == "missing" else "nobody_devmode")
        else:
            minors = {int(word) for word in minor_list.split(",") if word}
            try:
                answer = smi.render(arguments, self.view(peer, host, minors))
            except FileNotFoundError:  # the caller is gone
                client.close()
                return
        self.reply(client, f"{answer.rc} {answer.loop_ms}\n{answer.text}".encode())

    def answer_at(self, now: float, wait: float, again: bool) -> float:
        """When a query of now is answered: after the tool's own time, not while memory is freed.

        A tool that has answered before is in the driver already, a new one gets in first.
        """
        ends = [at for holder in self.holders for at in holder.release_at.values()]
        freeing = [at for at in ends if 0 < at - now < QUERY_WAITS]
        return max([now + wait, *freeing]) if again else max([now, *freeing]) + wait

    def slow_releases(self, now: float) -> None:
        """A tool that loops asks again: what is being freed takes longer if it is quick."""
        if now - self.asked_again < QUICK:
            for holder in self.holders:
                for index in holder.release_at:
                    holder.release_at[index] += SLOWED_BY
        self.asked_again = now

    def hang_in_d(self, client: socket.socket, peer: int) -> None:
        """Give the caller a file whose read never returns and that SIGKILL does not end."""
        fd = os.open(f"/proc/{peer}/ns/mnt", os.O_RDONLY)
        argv = [sys.executable, "-m", "tests.lab.stuck", str(fd), "/proc/driver/lab/stuck"]
        server = subprocess.Popen(
            [*argv, self.helpers],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        os.close(fd)
        self.stuck_servers.append(server)
        assert server.stdout
        if server.stdout.readline():
            self.reply(client, f"{HANG_IN_D} 0\n".encode())

    def on_host_request(self, client: socket.socket, line: bytes) -> None:
        """A line from nvidia-smi or from a holder."""
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        peer = struct.unpack("3i", raw)[0]
        if not line.startswith((b"smi\x1f", b"smi-again\x1f")):
            request = json.loads(line)
            if request["op"] == "standins":
                self.give_standins(client, request["names"])
                return
            if request["op"] == "helper":
                self.add_helper(request["id"], peer)
                self.reply(client, b"{}")
                return
            if request["op"] == "failed":
                self.failures[request["id"]] = request["error"]
                self.reply(client, b"{}")
                return
            self.reply(client, json.dumps(self.register(peer, request)).encode())
            return
        question, *words = line.decode(errors="replace").split("\x1f")
        host = self.caller_host(peer)
        if self.fault(host, "smi-hang"):
            self.hanging.append(client)
        elif self.fault(host, "smi-hang-d"):
            self.hang_in_d(client, peer)
        else:
            slow = self.fault(host, "smi-slow")
            again = question == "smi-again"
            if again:
                self.slow_releases(time.monotonic())
            usual = ANSWER_AGAIN_AFTER if again else ANSWER_AFTER
            wait = float(slow.value) / 1000 if slow else usual
            at = self.answer_at(time.monotonic(), wait, again)
            self.after(
                at,
                lambda: self.handle(lambda who, _: self.answer(who, peer, words), client, b""),
            )

    # --- the lab's own requests ---

    def on_admin_request(self, client: socket.socket, line: bytes) -> None:
        """A line from the lab."""
        request = json.loads(line)
        operation = getattr(self, "op_" + request.pop("op"))
        self.reply(client, json.dumps(operation(**request)).encode())

    def op_status(self) -> dict[str, Any]:
        """Holders, faults, used memory."""
        return {
            "used": [self.used(gpu["index"]) for gpu in self.gpus],
            "holders": [self.describe(holder) for holder in self.holders],
            "helpers": self.helpers_of,
            "homes": self.homes,
            "dropped": sorted(self.dropped),
            "endings": self.endings,
            "failures": self.failures,
            "faults": [vars(fault) for fault in self.faults],
        }

    def op_helper(self, id: str, pid: int, stuck: bool) -> dict[str, Any]:
        """The lab started a helper of a holder outside the host."""
        self.add_helper(id, pid, stuck)
        return {}

    def op_ending(self, id: str, host: str, command: str) -> dict[str, Any]:
        """The lab starts a holder through something that would start it again."""
        self.homes[id] = host
        self.endings[id] = {"host": host, "command": command}
        return {}

    def op_forget(self, id: str) -> dict[str, Any]:
        """The lab dropped a holder."""
        self.dropped.add(id)
        self.helpers_of.pop(id, None)
        self.homes.pop(id, None)
        self.endings.pop(id, None)
        self.failures.pop(id, None)
        return {}

    def op_fault(self, host: str, kind: str, gpu: int | None, value: str) -> dict[str, Any]:
        """Something goes wrong from now on; the same fault again replaces its value."""
        if kind != "value":
            self.faults = [f for f in self.faults if (f.host, f.kind, f.gpu) != (host, kind, gpu)]
        self.faults.append(Fault(host, kind, gpu, value))
        return {}

    def op_heal(self, host: str | None) -> dict[str, Any]:
        """All is well again; who hung is let go with an error."""
        self.faults = [f for f in self.faults if host and f.host != host]
        if not any(f.kind == "smi-hang" for f in self.faults):
            for client in self.hanging:
                client.close()
            self.hanging.clear()
        if not any(f.kind == "smi-hang-d" for f in self.faults):
            for server in self.stuck_servers:
                server.terminate()
                server.wait()
            self.stuck_servers.clear()
        return {}


def main() -> None:
    """Entry: the configuration comes as JSON in the first argument."""
    config = json.loads(sys.argv[1])
    for name in (signal.SIGHUP, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    Driver(config).run()


if __name__ == "__main__":
    main()
