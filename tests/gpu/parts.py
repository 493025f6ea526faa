# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests on a real GPU are built from: holders, a container, a stopwatch, the playbook.

Every process started here is remembered as (PID, start time) and only such are ever ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOLDER = Path(__file__).with_name("cuda_holder.py")
RUN = Path("/run/gpuops-gpu-test")
LOCAL_BIN = Path("/usr/local/bin")
CGROUPS = Path("/sys/fs/cgroup")

# The Python of the node side. The controller side runs in whatever runs these tests.
NODE_PYTHON = os.environ.get("GPU_TEST_PYTHON") or "/usr/bin/python3"

# MiB that the contexts of eight processes take besides what they allocate, and some to spare.
CONTEXTS_MIB = 5 << 10

# Does a Python have PyTorch, and does that see a GPU?
HAS_TORCH = "import sys, torch; sys.exit(not torch.cuda.is_available())"

# What stands in for Proxmox's way into a container. The reader of gpuops uses lxc-attach.
LXC_ATTACH = f"""#!/bin/sh
# gpuops gpu-test stand-in: lxc-attach -n VMID -- COMMAND
vmid=$2; shift 3
read -r pid < {RUN}/$vmid 2>/dev/null || {{ echo "container '$vmid' not running!" >&2; exit 1; }}
echo $$ > "$(cat {RUN}/cgroups)/lxc/$vmid/ns/cgroup.procs"
exec nsenter -t "$pid" -p -m -- "$@"
"""
PCT = """#!/bin/sh
# gpuops gpu-test stand-in: pct exec VMID -- COMMAND
vmid=$2; shift 3
exec lxc-attach -n "$vmid" -- "$@"
"""


def gpu_missing() -> str:
    """Why these tests cannot run here, or nothing."""
    if not Path("/dev/nvidiactl").exists() or not Path("/dev/nvidia0").exists():
        return "no NVIDIA GPU here (/dev/nvidia0 and /dev/nvidiactl do not both exist)"
    if os.geteuid() != 0:
        return f"not root (user id {os.geteuid()}); signals and namespaces need it"
    ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if ran.returncode:
        return f"nvidia-smi fails here: {ran.stdout.strip()[:200]}"
    used, apps = truth()
    if any(used) or apps:
        return f"the GPU is in use ({used} MiB, {apps}); these tests need it idle"
    return ""


def smi(*arguments: str) -> str:
    """The real tool's words; they are the only truth here."""
    ran = subprocess.run(
        ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def truth() -> tuple[list[int], list[str]]:
    """MiB in use per GPU, and the compute processes, as nvidia-smi says it right now."""
    used = [int(line) for line in smi("--query-gpu=memory.used").split()]
    apps = smi("--query-compute-apps=pid,used_memory,process_name").strip().splitlines()
    return used, apps


def too_small(gib: float) -> str:
    """Why a GPU cannot hold that much, or nothing."""
    total = int(smi("--query-gpu=memory.total").split()[0])
    if gib * 1024 + CONTEXTS_MIB <= total:
        return ""
    return f"the GPU has {total} MiB, too few for {gib:g} GiB and the contexts"


@cache
def torch_python() -> str:
    """A Python here that can use the GPU with PyTorch, or nothing."""
    for python in torch_candidates():
        with suppress(OSError, subprocess.TimeoutExpired):
            argv = [python, "-c", HAS_TORCH]
            if not subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode:
                return python
    return ""


def torch_candidates() -> list[str]:
    """The controller's Python is often .venv's, without it, while the system's has it."""
    found = [sys.executable, NODE_PYTHON, shutil.which("python3") or NODE_PYTHON]
    return list(dict.fromkeys(found))


def no_torch() -> str:
    """Why PyTorch cannot be played here, or nothing."""
    if torch_python():
        return ""
    return f"no PyTorch that can use the GPU in {' or '.join(torch_candidates())}"


def minors() -> tuple[dict[str, int], dict[str, int]]:
    """UUID to minor number, as the tool and as the driver's own files say it."""
    from ansible_collections.gpuops.gpu.plugins.module_utils import nvidia_smi

    text = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, check=True).stdout
    return nvidia_smi.parse_minors(text), nvidia_smi.minors_from_proc()


def utilisation() -> int:
    """Per cent, as nvidia-smi says it."""
    return int(smi("--query-gpu=utilization.gpu").split()[0])


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; nothing if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


@dataclass
class Process:
    """A process that we started; ``pid`` is the host's number for it."""

    label: str
    pid: int
    start: str = ""
    ready: str = ""
    ready_file: Path = Path()
    popen: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        fields = stat_fields(self.pid)
        self.start = fields[19] if fields else ""

    @property
    def alive(self) -> bool:
        """Still the same process, and not merely a zombie of it (other threads may live on)."""
        fields = stat_fields(self.pid)
        if not fields or fields[19] != self.start:
            return False
        return fields[0] not in "ZX" or len(list(Path(f"/proc/{self.pid}/task").iterdir())) > 1

    def end(self) -> None:
        """KILL it, if it is still the one that we started, and wait until it is gone."""
        if self.start and self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while self.alive and time.monotonic() < until:
            time.sleep(0.005)
        if self.popen:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(5)


def wait_for(what: str, condition: Any, seconds: float = 30.0) -> Any:
    """Until a condition is true; what it is that never came is said."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not after {seconds:g} s")
        time.sleep(0.005)
    return found


def children(pid: int) -> list[int]:
    """The children of a process's main thread."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


class Watcher:
    """The stopwatch process, and what it has said so far."""

    def __init__(self, device: int = 0) -> None:
        self.used: list[tuple[float, int]] = []
        self.dying: dict[int, float] = {}
        self.watching: set[int] = set()
        self.popen = subprocess.Popen(
            [sys.executable, str(HOLDER.with_name("watcher.py")), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = Process("stopwatch (NVML)", self.popen.pid)
        threading.Thread(target=self._listen, daemon=True).start()
        wait_for("the stopwatch", lambda: self.used)

    def _listen(self) -> None:
        assert self.popen.stdout
        for line in self.popen.stdout:
            word, when, value = line.split()
            if word == "used":
                self.used.append((float(when), int(value)))
            elif word == "watching":
                self.watching.add(int(value))
            else:
                self.dying[int(value)] = float(when)

    def watch(self, processes: list[Process]) -> None:
        """Note when these begin to exit; returns as soon as they are watched."""
        assert self.popen.stdin
        self.dying.clear()
        self.watching.clear()
        for process in processes:
            self.popen.stdin.write(f"watch {process.pid}\n")
        self.popen.stdin.flush()
        pids = {process.pid for process in processes}
        wait_for("the stopwatch watches", lambda: self.watching >= pids, 5)

    def died(self, process: Process) -> float:
        """When it began to exit."""
        when: float = wait_for(
            f"{process.label} is seen dying", lambda: self.dying.get(process.pid), 5
        )
        return when

    @property
    def mib(self) -> int:
        """In use at the moment."""
        return self.used[-1][1] >> 20

    def zero_after(self, when: float) -> float | None:
        """The first zero after this moment that lasted."""
        later = [(at, used) for at, used in self.used if at > when]
        return later[-1][0] if later and later[-1][1] == 0 else None

    def close(self) -> None:
        """End it by ending its input."""
        assert self.popen.stdin
        self.popen.stdin.close()
        self.popen.wait(5)


def seen(devices: tuple[int, ...] | None) -> dict[str, str]:
    """What makes CUDA see these GPUs only; it opens all that it sees."""
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


class Bench:
    """Starts holders and ends them all; everything that it started is in ``started``."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.started: list[Process] = []
        self.count = 0

    def ready_file(self) -> Path:
        """Where the next one reports."""
        self.count += 1
        return self.folder / f"ready-{self.count}"

    def start(
        self,
        kind: str,
        gib: float = 1.0,
        *,
        name: str = "sglang::sched",
        vmid: int = 0,
        devices: tuple[int, ...] = (0,),
        sees: tuple[int, ...] | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ) -> Process:
        """One holder of a kind, in a container or not, ready when this returns.

        :param devices: on which it computes, out of those that it sees (None: all), by index there.
        """
        ready = self.ready_file()
        argv = [NODE_PYTHON, str(HOLDER), kind, "--gib", str(gib), "--ready", str(ready)]
        argv += ["--devices", *map(str, devices)]
        return self.launch(
            f"{kind} {gib:g} GiB",
            [*argv, "--name", name],
            ready,
            vmid=vmid,
            environment={**seen(sees), **(environment or {})},
            wait=wait,
        )

    def launch(
        self,
        label: str,
        argv: list[str],
        ready: Path,
        *,
        vmid: int = 0,
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ) -> Process:
        """Start a command that reports its PID in a file."""
        way_in = ["lxc-attach", "-n", str(vmid), "--"] if vmid else []
        popen = subprocess.Popen(
            [*way_in, *argv],
            # Numbered as nvidia-smi does.
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(environment or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        process = Process(label, popen.pid, ready_file=ready, popen=popen)
        self.started.append(process)
        if wait:
            self.settle(process, vmid)
        return process

    def settle(self, process: Process, vmid: int = 0) -> None:
        """Wait until it holds what it should, and learn its PID."""
        assert process.popen
        popen = process.popen

        def ready() -> bool:
            # An orphan's launcher ends too, but without an error.
            failed = popen.poll()
            assert not failed, f"{process.label} has ended with exit code {failed}"
            return process.ready_file.exists()

        wait_for(f"{process.label} is ready", ready, 60)
        pid, _, more = process.ready_file.read_text().partition(" ")
        process.ready = more.strip()
        if vmid:
            process.pid = wait_for("its host PID", lambda: children(popen.pid))[0]
        else:
            process.pid = int(pid)
        process.__post_init__()
        assert process.alive, f"{process.label} has ended"

    def end_all(self) -> None:
        """KILL what is left of all that was started."""
        for process in self.started:
            process.end()
            if process.popen and process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait(5)
        self.started.clear()


def cgroup_base() -> Path:
    """The hierarchy in which gpuops looks for containers; version 2, or one of version 1."""
    for base in ("", "unified", "systemd", "pids"):
        if (CGROUPS / base / "cgroup.procs").exists():
            return CGROUPS / base
    raise AssertionError("no cgroup hierarchy is mounted below /sys/fs/cgroup")


class Container:
    """Processes in their own PID and mount namespace and in the control group of a container."""

    def __init__(self, vmid: int) -> None:
        self.vmid = vmid
        self.group = cgroup_base() / "lxc" / str(vmid) / "ns"
        self.group.mkdir(parents=True, exist_ok=True)
        join = f"echo $$ > {self.group}/cgroup.procs; exec "
        init = "while :; do sleep 86400; done"
        self.popen = subprocess.Popen(
            ["sh", "-c", join + f"unshare --pid --mount --fork --mount-proc sh -c '{init}'"],
            env={**os.environ, "container": "lxc"},
            start_new_session=True,
        )
        pid = wait_for(f"container {vmid}", lambda: children(self.popen.pid))[0]
        self.init = Process(f"PID 1 of container {vmid}", pid)
        wait_for("its sleep", lambda: children(pid))
        (RUN / str(vmid)).write_text(f"{pid}\n")

    def close(self) -> None:
        """End PID 1, with which the namespace goes, and remove the control group."""
        self.init.end()
        self.popen.wait(5)
        (RUN / str(self.vmid)).unlink()
        wait_for("its control group is empty", self.empty)
        self.group.rmdir()
        self.group.parent.rmdir()

    def empty(self) -> bool:
        """Has everyone left?"""
        return not (self.group / "cgroup.procs").read_text()


@contextmanager
def proxmox() -> Iterator[dict[int, Container]]:
    """Two running containers, 129 and a neighbour 130, and the commands to enter them."""
    stand_ins = {"lxc-attach": LXC_ATTACH, "pct": PCT}
    assert not Path("/etc/pve").exists(), "this is a real Proxmox host; these tests are not for it"
    RUN.mkdir(exist_ok=True)
    LOCAL_BIN.mkdir(exist_ok=True)
    (RUN / "cgroups").write_text(f"{cgroup_base()}\n")
    containers: dict[int, Container] = {}
    try:
        for name, text in stand_ins.items():
            assert not (LOCAL_BIN / name).exists(), f"{LOCAL_BIN / name} exists already"
            (LOCAL_BIN / name).write_text(text)
            (LOCAL_BIN / name).chmod(0o755)
        for vmid in (129, 130):
            containers[vmid] = Container(vmid)
        yield containers
    finally:
        for container in containers.values():
            container.close()
        with suppress(OSError):
            (cgroup_base() / "lxc").rmdir()
        for name in stand_ins:
            (LOCAL_BIN / name).unlink(missing_ok=True)
        for file in RUN.iterdir():
            file.unlink()
        RUN.rmdir()


@dataclass
class Mps:
    """NVIDIA's multi-process service with a private pipe folder."""

    folder: Path
    processes: list[Process] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process use this one and no other."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def start(self) -> None:
        """Start the control daemon; its server starts with the first client."""
        for name in ("pipe", "log"):
            (self.folder / name).mkdir()
        subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env={**os.environ, **self.environment}, check=True
        )

    def find(self) -> list[Process]:
        """Its daemon and server, known by the folder in their environment."""
        found = []
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdigit():
                continue
            try:
                comm = Path(f"/proc/{name}/comm").read_text().strip()
                environ = Path(f"/proc/{name}/environ").read_bytes()
                argv = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
            if comm == "nvidia-cuda-mps" and str(self.folder).encode() in environ:
                found.append(Process(argv, int(name)))
        return found

    def quit(self) -> None:
        """Tell it to quit."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["nvidia-cuda-mps-control"],
                env={**os.environ, **self.environment},
                input=b"quit -t 5\n",
                timeout=20,
                check=False,
                capture_output=True,
            )

    def close(self) -> None:
        """Quit, and end what is left of it."""
        self.quit()
        with suppress(AssertionError):
            wait_for("MPS has quit", lambda: not self.find(), 10)
        for process in self.find():
            process.end()


@dataclass
class Played:
    """One run of a playbook: what each task said of the host, and how long it took."""

    host: str
    exit_code: int
    seconds: float
    began: float
    events: list[dict[str, Any]]
    output: str

    def last(self, key: str) -> dict[str, Any]:
        """The last result of the host that has this key."""
        for event in reversed(self.events):
            if event["host"] == self.host and key in event["result"]:
                result: dict[str, Any] = event["result"]
                return result
        return {}

    @property
    def final(self) -> dict[str, Any]:
        """Its last result with a verdict and the reason for it."""
        return self.last("reason")

    @property
    def release(self) -> dict[str, Any]:
        """What the ladder did; empty if it was not climbed."""
        return self.last("record")


def play(
    host: str, *more: str, vmid: int = 0, playbook: str = "reset_gpus.yml", folder: Path
) -> Played:
    """Run a playbook as an operator would, over the connection ``local``.

    :param vmid: run all of Ansible inside this container, where only its processes are seen.
    """
    local = {"ansible_connection": "local", "ansible_python_interpreter": NODE_PYTHON}
    hosts = {
        "gpu1": local,
        "pve1": local,
        "ct129": {"proxmox_vmid": 129, "gpuops_proxmox_host": "pve1"},
    }
    inventory = folder / "inventory.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    record = folder / "record.jsonl"
    record.write_text("")
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_CALLBACK_PLUGINS": str(HOLDER.parent / "callback"),
        "ANSIBLE_CALLBACKS_ENABLED": "gpu_record",
        "ANSIBLE_NOCOLOR": "1",
        "GPU_RECORD": str(record),
    }
    argv = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), playbook]
    argv += ["-l", host, *more]
    if vmid:
        argv = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *argv]
        argv = ["lxc-attach", "-n", str(vmid), "--", *argv]
    began = time.monotonic()
    ran = subprocess.run(
        argv,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
    )
    seconds = time.monotonic() - began
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return Played(host, ran.returncode, seconds, began, events, ran.stdout)


def node_program(verb: str, arguments: dict[str, Any], vmid: int = 0) -> dict[str, Any]:
    """Run the product's node program directly, as the action plugin of the module sends it."""
    from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

    from ansible_collections.gpuops.gpu.plugins.module_utils import arguments as specs
    from ansible_collections.gpuops.gpu.plugins.plugin_utils import batch

    checked = ArgumentSpecValidator(getattr(specs, verb.upper())).validate(arguments)
    assert not checked.error_messages, checked.error_messages
    request = {"verb": verb, "check": False, **checked.validated_parameters}
    way_in = ["lxc-attach", "-n", str(vmid), "--"] if vmid else []
    ran = subprocess.run(
        [*way_in, NODE_PYTHON, "-IS", "-"],
        input=batch.program(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith(batch.SENTINEL)]
    assert lines, f"the node program gave no answer: {ran.stderr}"
    answer: dict[str, Any] = json.loads(lines[-1][len(batch.SENTINEL) :])
    assert answer["hosts"], f"the node program's answer is empty: {ran.stderr}"
    return answer


def protect_list() -> list[str]:
    """The names that the product never signals."""
    import yaml

    text = (ROOT / "roles/gpu_route/defaults/main.yml").read_text(encoding="utf-8")
    names: list[str] = yaml.safe_load(text)["gpuops_protect"]
    return names


def target(vmid: int = 0) -> dict[str, Any]:
    """A target for the node program."""
    return {"name": "direct", "vmid": vmid, "expected_gpus": 0, "protect": protect_list()}


def look(vmid: int = 0, **more: Any) -> dict[str, Any]:
    """Who holds what, as the product sees it from the host; changes nothing.

    :param more: of the target.
    """
    answer = node_program("state", {"targets": [target(vmid) | more]})
    result: dict[str, Any] = answer["hosts"]["direct"]
    result["program_seconds"] = answer["seconds"]
    return result


def is_workload(holder: dict[str, Any]) -> bool:
    """Does the product take it for one that computes?"""
    from ansible_collections.gpuops.gpu.plugins.module_utils import holders

    seen = holders.Holder(holder["node_pid"])
    seen.evidence = {device: set(how) for device, how in holder["evidence"].items()}
    return bool(seen.is_workload)


def temporary_folder() -> Path:
    """A folder that the containers see too."""
    return Path(tempfile.mkdtemp(prefix="gpuops-gpu-test-"))
