# SPDX-License-Identifier: GPL-3.0-or-later
"""A real process on a real GPU, one way per kind: CUDA and NVML through ctypes, nothing else.

``python3 cuda_holder.py KIND --ready FILE …`` writes its PID (and, for an exporter, the handle of
its memory) to FILE once it holds what the kind says, and then stays until it is ended.
Standard library only; starts in well under a second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

GIB = 1 << 30
SYS_EXIT = 93 if os.uname().machine == "aarch64" else 60
IPC_HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
LAUNCH_SECONDS = 0.2

# Spins until the GPU's own clock has advanced by the argument: busy, and yet every launch ends.
SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 length)
{
  .reg .pred %p;
  .reg .u64 %start, %now, %length;
  ld.param.u64 %length, [length];
  mov.u64 %start, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %p, %now, %length;
  @%p bra again;
  ret;
}
"""


class IpcHandle(ctypes.Structure):
    """What one process gives another to map its memory."""

    _fields_ = [("data", ctypes.c_char * IPC_HANDLE_BYTES)]


class Cuda:
    """The few calls of libcuda that a holder needs; any error ends the process with its number."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()

    def call(self, name: str, *arguments: object) -> None:
        """One call; CUDA's own number is the only explanation that it gives."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise SystemExit(f"{name} failed with CUDA error {code}")

    def start(self, device: int) -> None:
        """A context on one GPU, current in the calling thread."""
        handle = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, handle)

    def allocate(self, count: int) -> ctypes.c_uint64:
        """Plain device memory."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(count))
        return pointer

    def keep_busy(self) -> None:
        """Kernels back to back on every multiprocessor, for ever."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), SPIN)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        length = ctypes.c_uint64(int(LAUNCH_SECONDS * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(length), ctypes.c_void_p))
        while True:
            for _ in range(2):
                self.call(
                    "cuLaunchKernel", function, 1024, 1, 1, 128, 1, 1, 0, None, arguments, None
                )
            self.call("cuCtxSynchronize")


def rename(name: str) -> None:
    """The name that ``ps`` and the protect list see."""
    Path("/proc/self/comm").write_text(name[:15], encoding="ascii")


def say_ready(path: Path, more: str = "") -> None:
    """Tell whoever waits, all at once; the PID is the one of this process's own namespace."""
    part = path.with_suffix(".part")
    part.write_text(f"{os.getpid()} {more}\n", encoding="ascii")
    part.rename(path)


def stay() -> None:
    """Until a signal ends it."""
    while True:
        signal.pause()


def close_devices() -> None:
    """Close every descriptor of an NVIDIA device; the mappings of them stay."""
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        if descriptor.is_symlink() and str(descriptor.readlink()).startswith("/dev/nvidia"):
            os.close(int(descriptor.name))


def hold(options: argparse.Namespace) -> None:
    """Take the memory and stay, in the way that the kind says."""
    cuda = Cuda()
    for device in options.devices:
        cuda.start(device)
        if device != options.devices[-1]:
            cuda.allocate(int(options.gib * GIB))
    if options.kind == "ipc-importer":
        handle, pointer = IpcHandle(), ctypes.c_uint64()
        ctypes.memmove(
            ctypes.byref(handle), bytes.fromhex(os.environ["CUDA_HOLDER_IPC"]), IPC_HANDLE_BYTES
        )
        cuda.library.cuIpcOpenMemHandle_v2.argtypes = [
            ctypes.c_void_p,
            IpcHandle,
            ctypes.c_uint,
        ]
        cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, LAZY_PEER_ACCESS)
    else:
        pointer = cuda.allocate(int(options.gib * GIB))
    more = ""
    if options.kind == "ipc-exporter":
        handle = IpcHandle()
        cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        more = bytes(handle).hex()
    elif options.kind == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif options.kind == "mapped-only":
        close_devices()
    say_ready(options.ready, more)
    if options.kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if options.kind == "busy":
        cuda.keep_busy()
    while True:
        time.sleep(3600)


def monitor(options: argparse.Namespace) -> None:
    """Like an exporter of figures: NVML, no CUDA; reads the memory in use twice a second."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    for code in (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByIndex_v2(options.devices[0], ctypes.byref(handle)),
    ):
        if code:
            raise SystemExit(f"NVML failed with error {code}")
    say_ready(options.ready)
    while True:
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        time.sleep(0.5)


def become_orphan(options: argparse.Namespace) -> None:
    """A worker under another name, whose parent has gone: nothing in its argv says Python."""
    if os.fork():
        os._exit(0)
    os.setsid()
    argv = [options.name + "_TP0", str(Path(__file__)), "plain", "--name", options.name]
    argv += ["--gib", str(options.gib), "--ready", str(options.ready)]
    argv += ["--devices", *map(str, options.devices)]
    environment = dict(os.environ, PYTHONHOME=sys.base_prefix)
    python = str(Path(f"/proc/{os.getpid()}/exe").resolve())
    os.execve(python, argv, environment)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser()
    kinds = "plain ignore-term stopped orphan dead-main mapped-only ipc-exporter ipc-importer busy"
    parser.add_argument("kind", choices=[*kinds.split(), "nvml", "open-only", "idle"])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="the same on each")
    parser.add_argument("--name", default="")
    parser.add_argument("--ready", type=Path, required=True)
    options = parser.parse_args()
    if options.kind == "orphan":
        become_orphan(options)
    if options.name:
        rename(options.name)
    if options.kind == "nvml":
        monitor(options)
    elif options.kind == "open-only":
        os.open(f"/dev/nvidia{options.devices[0]}", os.O_RDWR)
        say_ready(options.ready)
        stay()
    elif options.kind == "idle":
        say_ready(options.ready)
        stay()
    elif options.kind == "dead-main":
        threading.Thread(target=hold, args=[options]).start()
        while not options.ready.exists():
            time.sleep(0.01)
        # The system call ends this one thread; exit() would end them all.
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)
    else:
        hold(options)


if __name__ == "__main__":
    main()
