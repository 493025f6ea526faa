"""A process that holds GPUs the way a real server does, one way per kind.

Installed in every host as sglang.launch_server and vllm.entrypoints.openai.api_server, so that
its command line is a real one. What to do comes in the environment (GPUOPS_HOLD, JSON); where to
report readiness is a descriptor named there, used once and closed. Standard library only.
"""

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any

# Seconds from the start of a server to its first GPU.
LOADING = 8.0
DRIVER = "/proc/driver/lab/driver.sock"
# What a process that computes has open and mapped besides its GPUs and nvidiactl.
UVM = "nvidia-uvm"
SYS_EXIT = 93 if os.uname().machine == "aarch64" else 60

Spec = dict[str, Any]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


def connect() -> socket.socket:
    """A connection to the driver."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(os.environ.get("GPUOPS_DRIVER", DRIVER))
    return client


def ask_driver(request: Spec) -> Spec:
    """One request to the driver, which knows this process by its socket credentials."""
    with connect() as client:
        client.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    parsed: Spec = json.loads(answer)
    return parsed


def report(spec: Spec, answer: Spec) -> None:
    """Tell the lab, once; a restarted holder finds the descriptor closed.

    One that has no descriptor of the lab's (a systemd unit) leaves an error with the driver.
    """
    fd = spec.get("report_fd")
    if fd is None:
        if "error" in answer:
            ask_driver({"op": "failed", "id": spec["claim"]["id"], "error": answer["error"]})
        return
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, json.dumps(answer).encode() + b"\n")
            os.close(fd)
    except OSError:
        pass


def rename(name: str, whole_line: bool) -> None:
    """Set comm, and with `whole_line` the command line as setproctitle does."""
    with open("/proc/self/comm", "w") as comm:
        comm.write(name[:15])
    if not whole_line:
        return
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    title = name.encode()[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def open_nodes(minors: list[int], *more: str) -> list[int]:
    """O_PATH: opening c 195:N for reading fails without the real driver (ENXIO)."""
    names = [*(f"nvidia{minor}" for minor in minors), "nvidiactl", *more]
    return [os.open(f"/dev/{name}", os.O_PATH) for name in names]


def open_as_monitor(minors: list[int]) -> list[int]:
    """As whoever asks NVML does, and a CUDA process does not."""
    caps = [os.open(f"/dev/nvidia-caps/nvidia-cap{n}", os.O_PATH) for n in (1, 2)]
    return open_nodes(minors, UVM) + caps


def open_standins(names: list[str]) -> list[int]:
    """Files that can be mapped and are called /dev/NAME; c 195:N cannot be without a driver."""
    with connect() as client:
        client.sendall(json.dumps({"op": "standins", "names": names}).encode() + b"\n")
        answer, fds, _, _ = socket.recv_fds(client, 4096, len(names))
    if len(fds) < len(names):
        raise OSError(f"the driver gives nothing to map: {answer.decode()}")
    return fds


def map_nodes(minors: list[int], *more: str) -> None:
    """The mappings of its GPUs and of nvidiactl, and what a CUDA process has besides: uvm."""
    names = [f"nvidia{minor}" for minor in minors]
    for fd in open_standins([*names, "nvidiactl", *more]):
        # Not Python's mmap: that keeps a duplicate of the descriptor.
        flags = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(None, 4096, flags, mmap.MAP_PRIVATE, fd, 0) == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        os.close(fd)


def become_user(spec: Spec) -> None:
    """Give up root, after what only root can do here."""
    if spec["uid"] != os.getuid():
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])


def forever() -> None:
    """Wait for signals."""
    while True:
        time.sleep(3600)


def load(spec: Spec) -> None:
    """Take a while before the first GPU is opened, as a server with its libraries does.

    Not in its first life: whoever starts it waits for that.
    """
    lived = f"/tmp/holder-{spec['claim']['id']}"
    if os.path.exists(lived):
        time.sleep(LOADING)
    with open(lived, "w"):
        pass


def register(spec: Spec) -> None:
    """Tell the driver what this process holds, and the lab that it does."""
    answer = ask_driver({"op": "register", **spec["claim"]})
    report(spec, answer)
    if "error" in answer:
        sys.exit(answer["error"])


def hold(spec: Spec) -> None:
    """The holder itself."""
    kind, minors = spec["claim"]["kind"], spec["minors"]
    if spec["ignore_term"]:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    rename(spec["name"], spec["whole_line"])
    if spec["mps_client"]:
        spec["connection"] = importlib.import_module("nvidia_cuda_mps").become_client()
    if spec["loads"]:
        load(spec)
    if kind == "dead-main-thread":
        main_thread_exits(spec)
    if kind == "open-only":
        open_as_monitor(minors)
    elif kind != "mapped-only":
        open_nodes(minors, UVM)
    if kind != "open-only":
        map_nodes(minors, UVM)
    if kind == "hung-exit":
        os.open(spec["stuck_file"], os.O_RDONLY)
    become_user(spec)
    register(spec)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "unkillable":
        with open(spec["stuck_file"], "rb", buffering=0) as file:
            file.read(1)
    forever()


def main_thread_exits(spec: Spec) -> None:
    """The main thread ends (not the process); another thread opens the devices and lives on."""

    def live_on() -> None:
        open_nodes(spec["minors"], UVM)
        map_nodes(spec["minors"], UVM)
        become_user(spec)
        register(spec)
        forever()

    threading.Thread(target=live_on).start()
    libc.syscall(SYS_EXIT, 0)  # exit of this thread only; exit_group would end all


def parent_that_never_waits(spec: Spec) -> None:
    """Fork the holder and ignore its death: it stays a zombie."""
    if os.fork() == 0:
        hold(spec)
    ask_driver({"op": "helper", "id": spec["claim"]["id"]})
    forever()


def mps_control(spec: Spec) -> None:
    """The control daemon of MPS, whose server is the holder: it has the GPUs, but not uvm."""
    rename("nvidia-cuda-mps-control\0-d", whole_line=True)
    opened = open_nodes(spec["minors"])
    map_nodes(spec["minors"])

    def serve(spec: Spec) -> None:
        """The server, forked off, has descriptors of its own."""
        for fd in opened:
            os.close(fd)
        hold(spec)

    control = importlib.import_module("nvidia_cuda_mps").Control(spec, serve)
    ask_driver({"op": "helper", "id": spec["claim"]["id"]})
    control.start_server()
    fd = spec.pop("report_fd", None)  # it is the server's; later servers report to nobody
    if fd is not None:
        os.close(fd)
    control.run()


def main() -> None:
    """Entry: see the module's text."""
    spec = json.loads(os.environ["GPUOPS_HOLD"])
    kind = spec["claim"]["kind"]
    if kind == "zombie-parent":
        parent_that_never_waits(spec)
    if kind == "orphan" and os.fork():
        os._exit(0)  # the launcher is gone; the worker is the holder
    try:
        if kind == "mps":
            mps_control(spec)
        hold(spec)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        report(spec, {"error": f"holder: {type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
