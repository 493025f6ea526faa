"""Lab: build it, take it down, hold GPUs in it, break it, run commands in its network."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

from . import container as lxc
from . import faults, freezer, linux, node, stuck
from . import podman as podman_files
from . import systemd as init_systemd
from .plan import (
    PREFIX,
    STATE_ROOT,
    BadValue,
    Container,
    Host,
    LabError,
    Paths,
    Plan,
    check_name,
    make_plan,
)
from .wish import Wish

# There when a lab had to make ~/.ssh, as a place to mount its own on; the last lab removes it.
MADE_SSH = STATE_ROOT / ".made-ssh-directory"
REPOSITORY = Path(__file__).parents[2]
MODEL_COMMAND = (
    "-m",
    "sglang.launch_server",
    "--model-path",
    "/models/DeepSeek-V3",
    "--tp",
    "8",
    "--host",
    "0.0.0.0",
    "--port",
    "30000",
)
# Which file of such a mount stops a holder of this kind.
STUCK_FILES = {"unkillable": "file", "hung-exit": "unsaved"}
SESSION = "user.slice/user-0.slice/session-1.scope"
SSH_SERVICE = "system.slice/ssh.service"
INSIDE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN_SCRIPT = """\
#!/bin/sh
# A command in the lab's network, with its names, keys and inventory. Not `ip netns exec`: that
# mounts another /sys. The mount namespace keeps the real /etc/hosts and ~/.ssh untouched.
echo 0 > {cgroup}/controller/cgroup.procs
export GPUOPS_LAB={name} ANSIBLE_INVENTORY={state}/inventory.yml
# Every lab has the same addresses: a kept connection must never lead into another lab.
export ANSIBLE_SSH_CONTROL_PATH_DIR={state}/cp
exec nsenter --net={state}/netns unshare --mount sh -c '
    mount --bind {state}/hosts.txt /etc/hosts && mount --bind {state}/ssh {home}/.ssh || exit 125
    exec "$@"' sh "$@"
"""


class DriverGone(LabError):
    """The simulated driver of a host was killed, or does not answer."""


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll a cheap condition; its value when it is true, LabError when it never is."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise LabError(f"gave up after {seconds:g} s waiting for {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def listening(init: int) -> bool:
    """Whether the host or container with that process 1 has its sshd ready.

    Its title is the last that sshd sets; the file with its number is there before, empty at first.
    """
    root = Path(f"/proc/{init}/root")
    try:
        number = int((root / "run/sshd.pid").read_text())
        return (root / f"proc/{number}/cmdline").read_bytes().startswith(b"sshd: ")
    except (OSError, ValueError):
        return False


def make_directory(path: Path) -> bool:
    """mkdir -p; False when another lab's end removed a parent meanwhile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        return False
    return True


def in_host(init: int, cgroup: Path, body: Callable[[], int]) -> int:
    """Run `body` in a child inside a host's or container's namespaces; its exit status.

    The child is a grandchild: entering a pid namespace takes a fork. Both are ours to wait for.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            (cgroup / "cgroup.procs").write_text("0")
            linux.enter(init)
            os.chdir("/")
            inner = os.fork()
            if inner == 0:
                try:
                    status = body()
                finally:
                    os._exit(status)
            _, code = os.waitpid(inner, 0)
            status = os.waitstatus_to_exitcode(code) & 255
        except OSError as error:
            os.write(2, f"entering the host: {error}\n".encode())
        finally:
            os._exit(status)
    _, code = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(code)


def kill_cgroup(cgroup: Path, seconds: float = PATIENCE) -> None:
    """End every process in a cgroup subtree and remove its directories.

    Again and again until both are done: children of a killed `up` may still be on their way in.
    Once the directory is gone they cannot enter, and end by themselves.
    """
    started = time.monotonic()
    while cgroup.exists():
        with contextlib.suppress(OSError):
            (cgroup / "cgroup.kill").write_text("1")
        try:
            remove_cgroup(cgroup)
            return
        except OSError:  # busy: processes are on their way out
            elapsed = time.monotonic() - started
        if elapsed > seconds:
            raise LabError(f"processes in {cgroup} do not end")
        if elapsed > 1:  # with its server dead a FUSE read ends by itself; if it did not:
            abort_fuse(cgroup)
        time.sleep(0.004)


def abort_fuse(cgroup: Path) -> None:
    """Abort the lab's FUSE connections that processes in a cgroup subtree can see."""
    connections = set()
    for file in cgroup.rglob("cgroup.procs"):
        for pid in file.read_text().split():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                    if f" - {stuck.TYPE} {stuck.SOURCE} " in line:
                        connections.add(line.split()[2].split(":")[1])
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            linux.unshare(linux.CLONE_NEWNS)
            linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
            linux.mount("fusectl", "/sys/fs/fuse/connections", "fusectl")
            for number in connections:
                Path(f"/sys/fs/fuse/connections/{number}/abort").write_text("1")
        os._exit(0)
    os.waitpid(child, 0)


def remove_cgroup(cgroup: Path) -> None:
    """rmdir a cgroup and all below it, innermost first; OSError while there are processes."""
    with contextlib.suppress(FileNotFoundError):
        for child in [entry for entry in cgroup.iterdir() if entry.is_dir()]:
            remove_cgroup(child)
        cgroup.rmdir()


def remove_tree(path: Path) -> None:
    """rm -r, also while an orphan of a killed `up` (ssh-keygen) writes its last file there."""

    def gone() -> bool:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
        return not path.exists()

    wait_until(gone, PATIENCE, f"the end of {path}")


@dataclass
class Builder:
    """A host that is being built: its process 1, and the pipes to its builder."""

    host: Host
    report: int
    go: int
    init: int

    def finish(self) -> None:
        """Wait until the host runs its init; LabError with the builder's text if it failed."""
        text = b""
        while part := os.read(self.report, 65536):
            text += part
        os.close(self.report)
        os.close(self.go)
        if text:
            raise LabError(f"{self.host.name}: " + text.decode().strip().splitlines()[-1])


def describe_inventory(plan: Plan, paths: Paths) -> str:
    """The Ansible inventory of the lab, as YAML (JSON is YAML)."""

    def address(item: Host | Container) -> dict[str, Any]:
        return {"ansible_host": item.address}

    containers = plan.containers()
    gpu_nodes: dict[str, Any] = {
        c.name: {**address(c), "proxmox_vmid": c.vmid, "gpuops_proxmox_host": c.host}
        for c in containers
    }
    gpu_nodes |= {h.name: address(h) for h in plan.hosts if not h.proxmox}
    ssh = f"-o UserKnownHostsFile={paths.state}/known_hosts -o StrictHostKeyChecking=yes"
    common = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": f"{paths.state}/id_ed25519",
        "ansible_ssh_common_args": ssh,
        "ansible_python_interpreter": "/usr/bin/python3",
        "gpuops_expected_gpus": plan.gpu_count,
    }
    groups = {
        "proxmox_hosts": {h.name: address(h) for h in plan.hosts if h.proxmox},
        "gpu_nodes": gpu_nodes,
        # The same containers reached by ssh only, in a group of their own so that -l ct129
        # never means these.
        "inside": {f"{c.name}-ssh": address(c) for c in containers},
    }
    lines = ["# Made by the lab.", "all:", "  vars:"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in common.items()]
    lines.append("  children:")
    for group, hosts in groups.items():
        if not hosts:
            lines.append(f"    {group}: {{}}")
            continue
        lines += [f"    {group}:", "      hosts:"]
        for name, variables in hosts.items():
            lines.append(f"        {name}:")
            lines += [f"          {key}: {json.dumps(value)}" for key, value in variables.items()]
    return "\n".join(lines) + "\n"


def hosts_file(plan: Plan) -> str:
    """/etc/hosts of the lab."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for host in plan.hosts:
        lines.append(f"{host.address} {host.name}")
        for c in host.containers:
            lines.append(f"{c.address} {c.name} {c.name}-ssh")
    return "\n".join(lines) + "\n"


class Lab:
    """One lab, by name (GPUOPS_LAB). Methods have the names of the command line's verbs."""

    def __init__(self, name: str | None = None) -> None:
        self.name = check_name(name or os.environ.get("GPUOPS_LAB", "lab"))
        if os.geteuid() != 0:
            raise LabError("the lab needs root: it makes namespaces and mounts")
        self.paths = Paths(self.name, linux.cgroup2_mount() / "gpuops-lab" / self.name)

    # --- up and down ---

    def up(
        self,
        cts: str = "129,130",
        nodes: int = 1,
        gpus: int = 8,
        minor_shift: int = 0,
        delay_ms: int = 150,
        own_nodes: str = "none",
        systemd: str = "none",
        unprivileged: str = "none",
    ) -> dict[str, Any]:
        """Build the lab, in place of one with other arguments; with the same, just answer."""
        started = time.monotonic()
        plan = make_plan(cts, nodes, gpus, minor_shift, delay_ms, own_nodes, systemd, unprivileged)
        missing = node.which_missing()
        if missing:
            raise LabError(f"missing programs: {' '.join(missing)} (see tests/lab/packages.txt)")
        if systemd != "none" and not Path(init_systemd.INIT).exists():
            raise LabError("there is no systemd to install (see tests/lab/packages.txt)")
        with self.locked():
            current = self.current_plan()
            if current and current.arguments == plan.arguments and self.healthy(current):
                return self.summary(plan, started, already=True, replaced=False)
            self.clean()
            try:
                self.build(plan)
            except BaseException:
                self.clean()
                raise
            return self.summary(plan, started, already=False, replaced=current is not None)

    def down(self) -> dict[str, Any]:
        """Take everything of this lab away, also what a crash left."""
        started = time.monotonic()
        with self.locked():
            self.clean()
            if MADE_SSH.exists() and not any(path.is_dir() for path in STATE_ROOT.iterdir()):
                with contextlib.suppress(OSError):  # somebody put something there: leave it
                    (Path.home() / ".ssh").rmdir()
                MADE_SSH.unlink()
            self.paths.lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            STATE_ROOT.rmdir()
        return {"lab": self.name, "seconds": round(time.monotonic() - started, 3)}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One up or down of this lab at a time."""
        while True:
            STATE_ROOT.mkdir(mode=0o755, exist_ok=True)
            try:
                file = self.paths.lock.open("w")
            except FileNotFoundError:
                continue
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    # The one who held it before may have removed it.
                    if os.fstat(file.fileno()).st_ino != self.paths.lock.stat().st_ino:
                        continue
                except FileNotFoundError:
                    continue
                yield
                return

    def clean(self) -> None:
        """Remove the lab's processes, mounts, cgroups and files; finds them by name, not memory."""
        frozen = list(self.paths.state.glob(f"freezer/{self.frozen_group('*')}"))
        for group in frozen:
            freezer.thaw(group.parent, group.name)
        kill_cgroup(self.paths.cgroup)
        with contextlib.suppress(OSError):
            self.paths.cgroup.parent.rmdir()
        for group in frozen:
            if group.exists():
                group.rmdir()
        if not self.paths.state.exists():
            return
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            point = line.split()[4]
            if Path(point).is_relative_to(self.paths.state):
                linux.umount(point)
        remove_tree(self.paths.state)

    def build(self, plan: Plan) -> None:
        """Make everything, in an order that lets the slow parts overlap."""
        paths = self.paths
        # The cgroup first: whatever happens later, it is how `down` finds the processes.
        for name in ("controller", "helpers", "drivers"):
            wait_until(partial(make_directory, paths.cgroup / name), PATIENCE, "a cgroup")
        self.write_state(plan)
        for host in plan.hosts:
            self.start_driver(host, plan.delay_ms)
        self.make_network()
        builders = [self.start_host(host) for host in plan.hosts]
        try:
            self.connect(plan, [builder.init for builder in builders])
        except subprocess.CalledProcessError:
            for builder in builders:
                if not Path(f"/proc/{builder.init}").exists():
                    builder.finish()  # has the reason
            raise
        for builder in builders:
            os.write(builder.go, b"+")
        for builder in builders:
            builder.finish()
        with_containers = [b for b in builders if b.host.containers]
        for builder in with_containers:
            self.start_containers(builder.host, builder.init)
        for builder in builders:
            self.wait_ready(builder.host, builder.init)
        inits = {builder.host.name: builder.init for builder in builders}
        state = {**plan.to_json(), "inits": inits}
        temporary = paths.plan.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.rename(paths.plan)

    def write_state(self, plan: Plan) -> None:
        """Keys, inventory, names: all that hosts and controller commands need as files."""
        state = self.paths.state
        (state / "ssh").mkdir(parents=True)
        for name in ("id_ed25519", "host_ed25519"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {self.name}"]
            subprocess.run([*command, "-f", str(state / name)], check=True)
        host_key = (state / "host_ed25519.pub").read_text()
        (state / "known_hosts").write_text(f"* {host_key}")
        (state / "hosts.txt").write_text(hosts_file(plan))
        (state / "inventory.yml").write_text(describe_inventory(plan, self.paths))
        for name in ("id_ed25519", "id_ed25519.pub", "known_hosts"):
            shutil.copy(state / name, state / "ssh" / name)
        (state / "ssh/config").write_text(
            "Host *\n  User root\n  StrictHostKeyChecking yes\n  BatchMode yes\n  LogLevel ERROR\n"
        )
        (state / "ssh").chmod(0o700)
        home = Path.home()
        if not (home / ".ssh").exists():
            (home / ".ssh").mkdir(mode=0o700)
            MADE_SSH.touch()
        script = RUN_SCRIPT.format(cgroup=self.paths.cgroup, name=self.name, state=state, home=home)
        node.write(state / "run", script, 0o755)
        for host in plan.hosts:
            self.paths.driver(host.name).mkdir(parents=True)
            node.proc_driver(self.paths.driver(host.name), host)

    def start_driver(self, host: Host, delay_ms: int) -> None:
        """Start the host's driver process."""
        cgroup = "/" + str(self.paths.host_cgroup(host.name).relative_to(linux.cgroup2_mount()))
        config = {
            "host": host.name,
            "cgroup": cgroup,
            "helpers": str(self.paths.cgroup / "helpers"),
            "containers": {str(c.vmid): c.name for c in host.containers},
            "gpus": [vars(gpu) for gpu in host.gpus],
            "delay_ms": delay_ms,
            "socket": str(self.paths.driver(host.name) / "lab/driver.sock"),
            "admin": str(self.paths.admin(host.name)),
        }
        log = (self.paths.host(host.name) / "driver.log").open("w")
        # It enters its cgroup before it is the driver, so that a killed `up` leaves none outside.
        enter = f'echo 0 > {self.paths.cgroup}/drivers/cgroup.procs && exec "$@"'
        subprocess.Popen(
            ["sh", "-c", enter, "sh", sys.executable, "-m", "tests.lab.driver", json.dumps(config)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def make_network(self) -> None:
        """The lab's network namespace, kept by a mount, with a bridge for all hosts."""
        self.paths.netns.touch()
        commands = "link set lo up\nlink add br0 type bridge\nlink set br0 up\n"
        commands += f"addr add 10.77.0.1/{PREFIX} dev br0\n"
        pid = os.fork()
        if pid == 0:
            try:
                linux.die_with_parent(signal.SIGKILL)
                linux.unshare(linux.CLONE_NEWNET)
                linux.bind("/proc/self/ns/net", self.paths.netns)
                subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            raise LabError("cannot make the lab's network namespace")

    def connect(self, plan: Plan, inits: list[int]) -> None:
        """One cable from the bridge to each host."""
        lines = []
        for host, init in zip(plan.hosts, inits, strict=True):
            lines.append(f"link add {host.name} type veth peer name eth0 netns {init}")
            lines.append(f"link set {host.name} master br0")
            lines.append(f"link set {host.name} up")
        self.ip("\n".join(lines) + "\n")

    def ip(self, batch: str) -> None:
        """Run ip commands in the lab's network namespace."""
        subprocess.run(
            ["nsenter", f"--net={self.paths.netns}", "ip", "-batch", "-"],
            input=batch,
            text=True,
            check=True,
        )

    def start_host(self, host: Host) -> Builder:
        """Fork the builder of a host; returns when its process 1 exists."""
        report_read, report_write = os.pipe()
        go_read, go_write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(report_read)
            os.close(go_write)
            node.build(host, self.paths, report_write, go_read, parent)
        os.close(report_write)
        os.close(go_read)
        text = b""
        while not text.endswith(b"\n"):
            part = os.read(report_read, 1)
            if not part:
                raise LabError(f"{host.name}: the builder ended at once")
            text += part
        if not text.strip().isdigit():
            text += os.read(report_read, 65536)
            raise LabError(f"{host.name}: " + text.decode().strip().splitlines()[-1])
        return Builder(host, report_read, go_write, int(text))

    def start_containers(self, host: Host, init: int, vmids: list[int] | None = None) -> None:
        """lxc-start on the Proxmox host, as pve-guests.service does at boot."""
        cgroup = self.paths.host_cgroup(host.name) / "system.slice/pve-guests.service"
        cgroup.mkdir(parents=True, exist_ok=True)
        wanted = vmids or [c.vmid for c in host.containers]
        read, write = os.pipe()

        def body() -> int:
            os.environ["PATH"] = INSIDE_PATH
            errors = lxc.start_all(wanted)
            os.write(write, "\n".join(errors).encode())
            return 1 if errors else 0

        status = in_host(init, cgroup, body)
        os.close(write)
        text = os.read(read, 65536).decode()
        os.close(read)
        if status:
            raise LabError(text.splitlines()[0] if text else f"{host.name}: lxc-start failed")

    def wait_ready(self, host: Host, init: int) -> None:
        """Wait for the sshd of a host and of its containers, and for its driver."""
        wait_until(lambda: listening(init), PATIENCE, f"sshd on {host.name}")
        for c in host.containers:
            self.wait_container(c)
        wait_until(lambda: self.admin_ready(host), PATIENCE, f"the driver of {host.name}")

    def wait_container(self, container: Container) -> None:
        """Wait for the sshd in a container."""
        cgroup = self.paths.ct_cgroup(container)
        wait_until(lambda: listening(lxc.init_pid(cgroup)), PATIENCE, f"sshd in {container.name}")

    def admin_ready(self, host: Host) -> bool:
        """Whether the host's driver answers."""
        try:
            self.ask(host.name, {"op": "status"})
        except DriverGone:
            return False
        return True

    # --- what there is ---

    def current_plan(self) -> Plan | None:
        """The plan of the lab that is up, or None."""
        try:
            state = json.loads(self.paths.plan.read_text())
        except (OSError, ValueError):
            return None
        state.pop("inits")
        return Plan.from_json(state)

    def plan(self) -> Plan:
        """The plan of the lab that is up."""
        plan = self.current_plan()
        if plan is None:
            raise LabError(f"lab {self.name} is not up (python -m tests.lab up)")
        return plan

    def healthy(self, plan: Plan) -> bool:
        """Whether all hosts, drivers and containers of the plan are alive."""
        for host in plan.hosts:
            if not self.init(host.name) or not self.admin_ready(host):
                return False
            if any(not lxc.init_pid(self.paths.ct_cgroup(c)) for c in host.containers):
                return False
        return True

    def init(self, name: str) -> int:
        """The outer pid of process 1 of a host or container; 0 when it does not run."""
        container = self.plan().container(name)
        if container:
            return lxc.init_pid(self.paths.ct_cgroup(container))
        return lxc.init_pid(self.paths.host_cgroup(self.plan().host(name).name))

    def running_init(self, name: str) -> int:
        """Like init, but an error when it does not run."""
        pid = self.init(name)
        if not pid:
            stopped = f"; run: start {name}" if self.plan().container(name) else ""
            raise LabError(f"{name} is not running{stopped}")
        return pid

    def ask(self, host: str, request: dict[str, Any]) -> dict[str, Any]:
        """One request to a host's driver."""
        try:
            answer = self.exchange(self.paths.admin(host), json.dumps(request).encode() + b"\n")
            data: dict[str, Any] = json.loads(answer)
        except (OSError, ValueError) as error:
            reason = f"the driver of {host} is gone ({error})"
            raise DriverGone(f"{reason}; run: python -m tests.lab down") from None
        if "error" in data:
            raise LabError(data["error"])
        return data

    def exchange(self, path: Path, request: bytes) -> bytes:
        """What whoever listens at `path` answers to a request."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(str(path))
            client.sendall(request)
            answer = b""
            while part := client.recv(1 << 20):
                answer += part
        return answer

    def summary(self, plan: Plan, started: float, already: bool, replaced: bool) -> dict[str, Any]:
        """What `up` answers."""
        return {
            "lab": self.name,
            "already_up": already,
            "replaced": replaced,
            "seconds": round(time.monotonic() - started, 3),
            "state": str(self.paths.state),
            "inventory": str(self.paths.inventory),
            "hosts": {h.name: h.address for h in plan.hosts},
            "containers": {c.name: c.address for c in plan.containers()},
        }

    def status(self) -> dict[str, Any]:
        """Hosts, containers, holders, faults, and the memory as the driver has it."""
        plan = self.plan()
        hosts = {}
        for host in plan.hosts:
            entry: dict[str, Any] = {
                "address": host.address,
                "proxmox": host.proxmox,
                "init": self.init(host.name),
                "gpus": [vars(gpu) for gpu in host.gpus],
                "containers": {
                    c.name: {
                        "vmid": c.vmid,
                        "address": c.address,
                        "running": bool(lxc.init_pid(self.paths.ct_cgroup(c))),
                    }
                    for c in host.containers
                },
            }
            try:
                entry["driver"] = self.ask(host.name, {"op": "status"})
            except DriverGone:
                entry["driver"] = None  # it was killed
            hosts[host.name] = entry
        return {"lab": self.name, "inventory": str(self.paths.inventory), "hosts": hosts}

    # --- holders ---

    def hold(self, host: str, **options: Any) -> dict[str, Any]:
        """Start one process that holds GPUs; see `hold_many` for the options."""
        return self.hold_many(host, 1, **options)[0]

    def hold_many(self, host: str, count: int = 1, **options: Any) -> list[dict[str, Any]]:
        """Start processes that hold GPUs and return when they do; the options are Wish's."""
        wish = Wish(**options)
        wish.check(count)
        if wish.service() and not self.has_systemd(host):
            raise LabError(f"{host} has no systemd (up --systemd 131,node9)")
        if wish.podman and not shutil.which("podman"):
            raise LabError("there is no podman to install (see tests/lab/packages.txt)")
        where = self.plan().host(host)
        init = self.running_init(host)
        self.ask(where.name, {"op": "status"})  # nobody can hold anything without a driver
        started: list[Callable[[], dict[str, Any]]] = []
        for _ in range(count):
            spec = wish.spec(host, where)
            if wish.kind in STUCK_FILES:
                self.start_stuck_files(where.name, init, spec)
            started.append(self.start_holder(host, init, spec, wish))
        return [self.await_state(wish.kind, wait()) for wait in started]

    def start_holder(
        self, host: str, init: int, spec: dict[str, Any], wish: Wish
    ) -> Callable[[], dict[str, Any]]:
        """Start one holder the way it is wished for; returns how to wait for it."""
        spec["uid"] = uid_of(spec["user"], Path(f"/proc/{init}/root"))
        if wish.service():
            self.launch_service(host, init, spec, wish)
        elif wish.podman:
            self.launch_podman(host, init, spec, wish.podman, wish.restart)
        else:
            place = wish.place(spec["claim"]["id"])
            return partial(self.await_report, self.launch(host, init, spec, wish.respawn, place))
        return partial(self.await_registration, self.plan().host(host).name, spec)

    def start_stuck_files(self, host: str, init: int, spec: dict[str, Any]) -> None:
        """A mount in the host whose files stop those that use them, served from outside it."""
        point = f"/mnt/models-{spec['claim']['id']}"
        spec["stuck_file"] = f"{point}/{STUCK_FILES[spec['claim']['kind']]}"
        namespace = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY)
        helpers = str(self.paths.cgroup / "helpers")
        log = (self.paths.host(host) / "stuck.log").open("a")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.stuck", str(namespace), point, helpers],
            pass_fds=[namespace],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,  # not ours: who waits for our output to end would wait for this server
            cwd=REPOSITORY,
            start_new_session=True,
        )
        os.close(namespace)
        log.close()
        assert server.stdout
        if not server.stdout.readline():
            raise LabError("cannot mount the file system that never answers")
        server.stdout.close()
        claim = spec["claim"]["id"]
        self.ask(host, {"op": "helper", "id": claim, "pid": server.pid, "stuck": True})

    def launch(
        self, host: str, init: int, spec: dict[str, Any], respawn: int, cgroup: str | None
    ) -> int:
        """Start a holder, detached, inside the host; returns the descriptor it reports on."""
        place = self.holder_cgroup(host, cgroup)
        place.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        spec["report_fd"] = write
        os.set_inheritable(write, True)
        title = "python3" if "::" in spec["name"] else spec["name"]
        root = Path(f"/proc/{init}/root")
        command = [title, *MODEL_COMMAND]
        program = "/usr/bin/python3"
        if respawn:
            link_program(title, root)
            program = "/usr/local/bin/serve-forever"
            command = [program, str(respawn), *command]

        def body() -> int:
            if os.fork():
                return 0  # the holder's parent is gone: it belongs to process 1
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            for target in (0, 1, 2):
                os.dup2(null, target)
            os.execve(program, command, holder_environment(spec))

        status = in_host(init, place, body)
        os.close(write)
        if status:
            os.close(read)
            raise LabError(f"cannot start a process in {host}")
        return read

    def launch_service(self, host: str, init: int, spec: dict[str, Any], wish: Wish) -> None:
        """Start a holder as a systemd service of the host, or of a user there."""
        name, uid = wish.service(), spec["uid"] if wish.user_session else None
        self.announce(host, spec, init_systemd.stop_command(name, uid))
        root = Path(f"/proc/{init}/root")
        command = [spec["name"], *MODEL_COMMAND]
        environment = holder_environment(spec)
        text = init_systemd.service(name, "/usr/bin/python3", command, environment, wish.restart)
        (root / init_systemd.unit_file(name, uid)).write_text(text)
        start = ["sh", "-c", init_systemd.start_command(name, uid)]
        self.start_managed(host, spec, start)

    def launch_podman(
        self, host: str, init: int, spec: dict[str, Any], name: str, restart: str
    ) -> None:
        """Start a holder as process 1 of a podman container in the host."""
        self.announce(host, spec, podman_files.stop_command(name))
        root = Path(f"/proc/{init}/root")
        link_program(spec["name"], root)
        environment = {**holder_environment(spec), "GPUOPS_DRIVER": podman_files.DRIVER}
        start = podman_files.run_command(
            name,
            podman_files.make_root(root, name, os.stat(f"/proc/{init}").st_uid),
            [spec["name"], *MODEL_COMMAND],
            environment,
            "always" if restart == "loading" else restart,
        )
        self.start_managed(host, spec, start)

    def announce(self, host: str, spec: dict[str, Any], ending: str) -> None:
        """Tell the driver what will end a holder that something else starts, before it is there."""
        claim, where = spec["claim"]["id"], self.plan().host(host).name
        known = self.ask(where, {"op": "status"})["endings"].values()
        if {"host": host, "command": ending} in known:
            raise LabError(f"{host} already has a holder of that name")
        self.ask(where, {"op": "ending", "id": claim, "host": host, "command": ending})

    def start_managed(self, host: str, spec: dict[str, Any], start: list[str]) -> None:
        """Have a holder started by something else in the host."""
        result = self.inside(host, start)
        if result.returncode:
            self.drop(spec["claim"]["id"])
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise LabError(f"{host}: {reason}")

    def has_systemd(self, name: str) -> bool:
        """Whether process 1 of a host or container is systemd."""
        container = self.plan().container(name)
        return container.systemd if container else self.plan().host(name).systemd

    def holder_cgroup(self, host: str, wanted: str | None) -> Path:
        """Where a holder runs: below the container's or host's root, or with a leading / below
        the Proxmox host's root, which for a container is an escape from its cgroup."""
        if wanted and ".." in wanted.split("/"):
            raise BadValue(f"--cgroup {wanted}: no .. in it")
        root = self.paths.host_cgroup(self.plan().host(host).name)
        container = self.plan().container(host)
        if container and not (wanted or "").startswith("/"):
            default = SESSION if container.systemd else ""
            return self.paths.ct_cgroup(container) / (wanted or default)
        return root / (wanted or SESSION).lstrip("/")

    def await_registration(self, host: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Wait until a holder is known to the driver, where it has no descriptor to report on."""
        id: str = spec["claim"]["id"]

        def known() -> dict[str, Any]:
            status = self.ask(host, {"op": "status"})
            if id in status["failures"]:
                raise LabError(status["failures"][id])
            found = (holder for holder in status["holders"] if holder["id"] == id)
            return next(found, {})

        holder: dict[str, Any] = wait_until(known, PATIENCE, "the holder")
        return holder

    def await_report(self, fd: int) -> dict[str, Any]:
        """Wait until a holder reports on the descriptor it was given."""
        with os.fdopen(fd, "rb") as file:
            if not select.select([file], [], [], PATIENCE)[0]:
                raise LabError(f"the holder did not report within {PATIENCE:g} s")
            line = file.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the holder ended at once"}
        if "error" in answer:
            raise LabError(answer["error"])
        return answer

    def await_state(self, kind: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Wait until a holder is in the state that its kind is about."""
        wanted = {"stopped": "T", "unkillable": "D", "dead-main-thread": "Z"}.get(kind)
        if wanted:
            pid = answer["outer_pid"]
            wait_until(lambda: linux.process_state(pid) == wanted, PATIENCE, f"state {wanted}")
        if kind == "unkillable":  # opening the file is state D too, but it ends
            pid = answer["outer_pid"]
            wait_until(lambda: linux.in_read(pid), PATIENCE, "a read without end")
        return answer

    def holders(self) -> list[dict[str, Any]]:
        """All holders the drivers know, newest last."""
        found = []
        for host in self.plan().hosts:
            found += self.ask(host.name, {"op": "status"})["holders"]
        return found

    def alive(self, *ids: str) -> dict[str, bool]:
        """Which holders are alive; a respawned one counts."""
        said = [self.ask(host.name, {"op": "status"}) for host in self.plan().hosts]
        known = {id for status in said for id in (*status["homes"], *status["dropped"])}
        if unknown := sorted(set(ids) - known):
            raise BadValue(f"no holder {', '.join(unknown)} was ever here; status lists them all")
        living = {each["id"] for status in said for each in status["holders"] if each["alive"]}
        return {id: id in living for id in ids}

    def drop(self, which: str = "all") -> dict[str, Any]:
        """End holders (an id, all of a host or container, or all) and wait until they are gone."""
        plan = self.plan()
        places = {host.name for host in plan.hosts} | {c.name for c in plan.containers()}
        dropped: list[str] = []
        for host in plan.hosts:
            status = self.ask(host.name, {"op": "status"})
            homes: dict[str, str] = status["homes"]
            ids = {*homes, *status["helpers"], *status["endings"]}
            wanted = sorted(id for id in ids if which in ("all", id, homes.get(id)))
            for id in wanted:
                self.drop_one(host.name, id)
            dropped += wanted
        if not dropped and which != "all" and which not in places:
            raise BadValue(f"no holder, host or container {which}")
        return {"dropped": dropped}

    def drop_one(self, host: str, id: str) -> None:
        """Supervisors first, then the holder, then what keeps it from dying."""
        for group in self.paths.state.glob(f"freezer/{self.frozen_group('*')}"):
            freezer.thaw(group.parent, group.name)
        status = self.ask(host, {"op": "status"})
        ending = status["endings"].get(id)
        if ending and self.init(ending["host"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.inside(ending["host"], ["sh", "-c", ending["command"]], timeout=20)
        helpers = status["helpers"].get(id, [])
        waiting: list[tuple[int, int]] = []
        for helper in helpers:
            if not helper["stuck"]:
                kill_exactly(helper["pid"], helper["start_time"], signal.SIGKILL)
                waiting.append((helper["pid"], helper["start_time"]))
        # Read again: until its supervisor died, a new holder could come.
        for holder in self.ask(host, {"op": "status"})["holders"]:
            if holder["id"] == id and holder["alive"]:
                kill_exactly(holder["outer_pid"], holder["start_time"], signal.SIGKILL)
                waiting.append((holder["outer_pid"], holder["start_time"]))
        for helper in helpers:
            if helper["stuck"]:
                kill_exactly(helper["pid"], helper["start_time"], signal.SIGTERM)
        wait_until(
            lambda: not any(is_there(pid, start) for pid, start in waiting),
            PATIENCE,
            f"the end of {id}",
        )
        self.ask(host, {"op": "forget", "id": id})

    # --- faults ---

    def fault(self, target: str, kind: str, value: str = "") -> dict[str, Any]:
        """Break something on HOST or HOST:GPU."""
        host, _, gpu = target.partition(":")
        where = self.plan().host(host)
        value = faults.check(where, gpu, kind, value)
        if kind == "smi-missing":
            self.hide_smi(host, hide=True)
        if kind == "frozen":
            self.freeze(host, where.name)
        scope = where.name if kind in ("slow-release", "stuck", "busy", "ghost") else host
        request = {"op": "fault", "host": scope, "kind": kind, "value": value}
        self.ask(where.name, {**request, "gpu": int(gpu) if gpu else None})
        return {"host": scope, "gpu": gpu or None, "kind": kind, "value": value}

    def heal(self, host: str | None = None) -> dict[str, Any]:
        """Undo the faults of a host or container, or all."""
        plan = self.plan()
        for where in plan.hosts:
            if host and plan.host(host) != where:
                continue
            for fault in self.ask(where.name, {"op": "status"})["faults"]:
                if host not in (None, fault["host"]):
                    continue
                if fault["kind"] == "smi-missing":
                    self.hide_smi(fault["host"], hide=False)
                if fault["kind"] == "frozen":
                    freezer.thaw(self.paths.state / "freezer", self.frozen_group(fault["host"]))
            self.ask(where.name, {"op": "heal", "host": host})
        return {"healed": host or "all"}

    def freeze(self, name: str, host: str) -> None:
        """Freeze the holders of a host or container."""
        held = self.ask(host, {"op": "status"})["holders"]
        pids = [each["outer_pid"] for each in held if each["host"] == name and each["alive"]]
        in_host(self.running_init(host), self.paths.host_cgroup(host), freezer.show)
        freezer.freeze(self.paths.state / "freezer", self.frozen_group(name), pids)

    def frozen_group(self, name: str) -> str:
        """The name of the frozen group of a host or container of this lab."""
        return f"gpuops-lab-{self.name}-{name}"

    def hide_smi(self, name: str, hide: bool) -> None:
        """Move nvidia-smi away on a host (and in its containers), or back."""
        plan = self.plan()
        where = plan.host(name)
        names = [name]
        if name == where.name:
            names += [c.name for c in where.containers]
        for item in names:
            if not (init := self.init(item)):
                continue
            binary = Path(f"/proc/{init}/root/usr/bin/nvidia-smi")
            away = binary.with_name(".nvidia-smi.away")
            source, target = (binary, away) if hide else (away, binary)
            if source.exists():
                source.rename(target)

    # --- hosts and containers ---

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a container at once; LabError after 5 s when something in it cannot be killed."""
        container = self.need_container(name)
        self.running_init(name)
        init = self.running_init(container.host)
        cgroup = self.paths.host_cgroup(container.host)

        def body() -> int:
            argv = ["timeout", "-s", "KILL", "5", "lxc-stop", "-n", str(container.vmid), "-k"]
            return subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode & 255

        if in_host(init, cgroup, body):
            raise LabError(f"{name} does not stop; is something in it that cannot be killed?")
        return {"stopped": name}

    def start(self, name: str) -> dict[str, Any]:
        """Start a container that was stopped."""
        container = self.need_container(name)
        if self.init(name):
            raise LabError(f"{name} is running; to start it anew, first: stop {name}")
        host = self.plan().host(name)
        init = self.running_init(host.name)
        rootfs = Path(f"/proc/{init}/root/var/lib/lxc/{container.vmid}/rootfs")
        (rootfs / "run/sshd.pid").unlink(missing_ok=True)  # of its former life
        self.start_containers(host, init, [container.vmid])
        self.wait_container(container)
        return {"started": name}

    def need_container(self, name: str) -> Container:
        """The container of that name."""
        container = self.plan().container(name)
        if container is None:
            raise BadValue(f"no container {name} in this lab")
        return container

    def ssh_cgroup(self, name: str) -> Path:
        """Where the sshd of a host or container runs."""
        container = self.plan().container(name)
        if container:
            root = self.paths.ct_cgroup(container)
            return root / SSH_SERVICE if container.systemd else root
        return self.paths.host_cgroup(self.plan().host(name).name) / SSH_SERVICE

    def entry_cgroup(self, name: str) -> Path:
        """Where the lab's own commands run in a host or container; it exists."""
        if not self.has_systemd(name):
            return self.ssh_cgroup(name)
        place = self.holder_cgroup(name, SESSION)
        place.mkdir(parents=True, exist_ok=True)
        return place

    def cut(self, name: str, silent: bool = False) -> dict[str, Any]:
        """Make a host unreachable: end its sshd, or with silent take its cable away."""
        self.running_init(name)
        if silent:
            self.set_link(name, "down")
            return {"cut": name, "silent": True}
        if self.has_systemd(name):
            self.inside(name, ["systemctl", "stop", "ssh"])
        processes = self.ssh_cgroup(name) / "cgroup.procs"
        for pid in processes.read_text().split() if processes.exists() else []:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "sshd":
                    os.kill(int(pid), signal.SIGKILL)
        Path(f"/proc/{self.running_init(name)}/root/run/sshd.pid").unlink(missing_ok=True)
        return {"cut": name, "silent": False}

    def mend(self, name: str) -> dict[str, Any]:
        """Make a host reachable again."""
        init = self.running_init(name)
        self.set_link(name, "up")
        if not listening(init):
            argv = ["systemctl", "start", "ssh"] if self.has_systemd(name) else ["/usr/sbin/sshd"]
            cgroup = self.entry_cgroup(name)
            in_host(init, cgroup, lambda: subprocess.run(argv, check=False).returncode)
            wait_until(lambda: listening(init), PATIENCE, f"sshd on {name}")
        return {"mended": name}

    def set_link(self, name: str, state: str) -> None:
        """Plug a host's or container's cable in or out."""
        container = self.plan().container(name)
        if container is None:
            self.ip(f"link set {self.plan().host(name).name} {state}\n")
            return
        init = self.running_init(container.host)
        argv = ["ip", "link", "set", f"veth{container.vmid}i0", state]
        subprocess.run(["nsenter", f"--net=/proc/{init}/ns/net", *argv], check=True)

    # --- controller commands ---

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in the lab's network."""
        script = self.paths.state / "run"
        if not script.exists():
            raise LabError(f"lab {self.name} is not up (python -m tests.lab up)")
        return ["/bin/sh", str(script), *argv]  # /run may be mounted noexec

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run in the lab's network, with its names, keys and inventory."""
        return subprocess.run(self.command(argv), **{"check": False, **options})

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen in the lab's network."""
        return subprocess.Popen(self.command(argv), **options)

    def inside(
        self, name: str, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host or container without ssh (as root, through its namespaces)."""
        cgroup = self.entry_cgroup(name)
        # The cgroup too, which nsenter does not enter: it says whose process this is.
        enter = ["sh", "-c", f'echo 0 > {cgroup}/cgroup.procs && exec "$@"', "sh"]
        enter += ["nsenter", "--target", str(self.running_init(name)), "--all", "--root", "--wd"]
        defaults: dict[str, Any] = {"check": False, "capture_output": True, "text": True}
        environment = {"PATH": INSIDE_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        return subprocess.run([*enter, *argv], **{**defaults, "env": environment, **options})


def holder_environment(spec: dict[str, Any]) -> dict[str, str]:
    """What a server has in its environment, and what the holder has to do."""
    return {
        "PATH": INSIDE_PATH,
        "HOME": "/",
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": ",".join(
            str(n) for n in [*spec["claim"]["gpus"], *spec["claim"]["opened"]]
        ),
        **spec["environment"],
        "GPUOPS_HOLD": json.dumps(spec),
    }


def is_there(pid: int, start: int) -> bool:
    """Whether that very process still exists (a zombie does)."""
    try:
        return linux.start_time(pid) == start
    except (OSError, IndexError):
        return False


def kill_exactly(pid: int, start: int, number: int) -> None:
    """Signal that very process, or nobody."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if is_there(pid, start):
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def link_program(name: str, root: Path) -> None:
    """Make python3 known in the host at `root` by another name, where nothing else sets argv[0]."""
    if name != "python3":
        with contextlib.suppress(FileExistsError):
            (root / "usr/local/bin" / name).symlink_to("/usr/bin/python3")


def uid_of(user: str, root: Path) -> int:
    """The uid of a user in the host at `root`, made if there is none."""
    if user == "root":
        return 0
    path = root / "etc/passwd"
    uids = {}
    for line in path.read_text().splitlines():
        name, _, uid, *_ = line.split(":")
        uids[name] = int(uid)
    if user not in uids:
        uids[user] = max([1000, *(uid for uid in uids.values() if uid < 60000)]) + 1
        with path.open("a") as file:
            file.write(f"{user}:x:{uids[user]}:{uids[user]}::/home/{user}:/bin/bash\n")
    return uids[user]
