"""A FUSE file system that never answers a read: its readers sit in state D, whatever is sent.

Of a file called nvidia-something it does not even tell what it is: it can be opened, but whoever
asks what a descriptor of it is about (stat) sits in state D as well. A file called unsaved cannot
be closed: whoever has it open hangs while he ends, before anything that he had open is let go.

    python -m tests.lab.stuck MNT_NS_FD MOUNT_POINT CGROUP

Runs outside the host, like the server of a hung network mount: nothing on the host can free its
readers. SIGTERM unmounts and aborts the connection, which frees them; SIGKILL frees them too.
Prints one line when it is ready.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
from pathlib import Path

from . import linux

LOOKUP, FORGET, GETATTR, OPEN, READ, FLUSH, INIT = 1, 2, 3, 14, 15, 25, 26
OPENDIR, INTERRUPT, BATCH_FORGET = 27, 36, 42
FOPEN_DIRECT_IO = 1
ENOSYS, EIO = 38, 5
ROOT, FILE, SILENT, UNSAVED = 1, 2, 3, 4
TYPE, SOURCE = "fuse.sshfs", "storage:/models"  # how the mount looks in /proc/mounts


def attributes(inode: int) -> bytes:
    """struct fuse_attr."""
    mode, size = (0o40755, 0) if inode == ROOT else (0o100644, 4096)
    return struct.pack(
        "<QQQQQQIIIIIIIIII", inode, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
    )


class Server:
    """The kernel's side of the connection is /dev/fuse; this is the other."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.primed = False
        self.first_read = 0

    def reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        """Answer one request; it may have been interrupted away."""
        with contextlib.suppress(OSError):
            os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)

    def serve_one(self) -> None:
        """Read and treat one request. READ gets no answer."""
        request = os.read(self.fd, 1 << 17)
        _, operation, unique, node = struct.unpack("<IIQQ", request[:24])
        if operation == INIT:
            body = struct.pack(
                "<IIIIHHIIHHI7I", 7, 31, 65536, 0, 12, 10, 65536, 1, 0, 0, 0, *[0] * 7
            )
            self.reply(unique, body[:64].ljust(64, b"\0"))
        elif operation == GETATTR and node == SILENT:
            pass  # never answered
        elif operation == GETATTR:
            self.reply(unique, struct.pack("<QII", 60, 0, 0) + attributes(node))
        elif operation == LOOKUP:
            name = request[40:].rstrip(b"\0")
            found, seconds = UNSAVED if name == b"unsaved" else FILE, 60
            if name.startswith(b"nvidia-"):
                found, seconds = SILENT, 0
            entry = struct.pack("<QQQQII", found, 0, 60, seconds, 0, 0)
            self.reply(unique, entry + attributes(found))
        elif operation in (OPEN, OPENDIR):
            self.reply(unique, struct.pack("<QII", 0, FOPEN_DIRECT_IO, 0))
        elif operation == FLUSH and node == UNSAVED:
            pass  # never answered
        elif operation == FLUSH:
            self.reply(unique)  # "not known here" would spare it to the other file as well
        elif operation == READ and not self.primed:
            self.first_read = unique
        elif operation == READ:
            pass  # never answered
        elif operation == INTERRUPT and not self.primed:
            # "Interrupts are not known here": from now on the kernel waits for answers without
            # listening to signals, so readers are in D at once and not only once killed.
            self.reply(unique, error=ENOSYS)
            self.reply(self.first_read, error=EIO)
            self.primed = True
        elif operation not in (FORGET, BATCH_FORGET, INTERRUPT):
            self.reply(unique, error=ENOSYS)


def prime(server: Server, path: str) -> None:
    """Let a child be interrupted in a first read, so that the kernel learns about interrupts."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its end needs answers too: no waiting for it
    if os.fork() == 0:
        signal.signal(signal.SIGALRM, lambda *_: None)
        file = os.open(path, os.O_RDONLY)
        # A reader that keeps the server's own end open could never be freed.
        os.close(server.fd)
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        with contextlib.suppress(OSError):
            os.read(file, 1)  # Python repeats an interrupted read; EIO ends it
        os._exit(0)
    while not server.primed:
        server.serve_one()


def main() -> None:
    """Mount, prime, say so, serve for ever."""
    namespace, point, cgroup = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    (cgroup / "cgroup.procs").write_text("0")  # by which `down` finds this process
    fd = os.open("/dev/fuse", os.O_RDWR)
    os.chdir("/")
    linux.setns(namespace, linux.CLONE_NEWNS)
    Path(point).mkdir(parents=True, exist_ok=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    linux.mount(SOURCE, point, TYPE, 0, options)

    def end(*_: object) -> None:
        with contextlib.suppress(OSError):
            linux.umount(point)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    server = Server(fd)
    prime(server, f"{point}/file")
    print("ready", flush=True)
    os.close(1)
    while True:
        try:
            server.serve_one()
        except OSError:
            end()


if __name__ == "__main__":
    main()
