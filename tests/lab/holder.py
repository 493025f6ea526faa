"""A process that holds GPUs the way a real server does, one way per kind.

Installed in every host as sglang.launch_server and vllm.entrypoints.openai.api_server, so that
its command line is a real one. What to do comes in the environment (GPUOPS_HOLD, JSON); where to
report readiness is a descriptor named there, used once and closed. Standard library only.
"""

import ctypes
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

DRIVER = "/proc/driver/lab/driver.sock"
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
SYS_EXIT = 93 if os.uname().machine == "aarch64" else 60

Spec = dict[str, Any]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


def ask_driver(request: Spec) -> Spec:
    """One request to the driver, which knows this process by its socket credentials."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(DRIVER)
        client.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    parsed: Spec = json.loads(answer)
    return parsed


def report(spec: Spec, answer: Spec) -> None:
    """Tell the lab, once; a restarted holder finds the descriptor closed."""
    fd = spec.get("report_fd")
    if fd is None:
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


def open_nodes(minors: list[int], control: bool) -> None:
    """O_PATH: opening c 195:N for reading fails without the real driver (ENXIO)."""
    for minor in minors:
        os.open(f"/dev/nvidia{minor}", os.O_PATH)
    if control:
        for name in ("/dev/nvidiactl", "/dev/nvidia-uvm"):
            os.open(name, os.O_PATH)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2)."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def map_nodes(minors: list[int]) -> None:
    """Only mappings named /dev/nvidiaN, no descriptor.

    c 195:N cannot be mapped without the driver, so a stand-in (c 1:5) is bound over the node in a
    mount namespace of this process alone, opened, mapped and closed.
    """
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("standin", "/mnt", "tmpfs", 0)
    for minor in minors:
        standin = f"/mnt/nvidia{minor}"
        os.mknod(standin, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        mount(standin, f"/dev/nvidia{minor}", "", MS_BIND)
        fd = os.open(f"/dev/nvidia{minor}", os.O_RDWR)
        # Not Python's mmap: that keeps a duplicate of the descriptor.
        flags = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(None, 4096, flags, mmap.MAP_PRIVATE, fd, 0) == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        os.close(fd)


def become_user(spec: Spec) -> None:
    """Give up root, after what only root can do here."""
    if spec["uid"]:
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])


def forever() -> None:
    """Wait for signals."""
    while True:
        time.sleep(3600)


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
    if kind == "dead-main-thread":
        main_thread_exits(spec)
    if kind == "mapped-only":
        map_nodes(minors)
    else:
        open_nodes(minors, control=kind != "open-only")
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
        open_nodes(spec["minors"], control=True)
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


def main() -> None:
    """Entry: see the module's text."""
    spec = json.loads(os.environ["GPUOPS_HOLD"])
    kind = spec["claim"]["kind"]
    if kind == "zombie-parent":
        parent_that_never_waits(spec)
    if kind == "orphan" and os.fork():
        os._exit(0)  # the launcher is gone; the worker is the holder
    try:
        hold(spec)
    except Exception as error:
        report(spec, {"error": f"holder: {type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
