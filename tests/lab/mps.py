"""The control daemon of MPS: starts the server, counts its clients, listens for `quit`.

Installed in every host as nvidia_cuda_mps beside the holders; `hold --kind mps` runs it. The
server is a holder of its own. Clients keep their connection open while they live. What is said
over the socket is the lab's own; the command nvidia-cuda-mps-control (bin/) speaks it too.
Standard library only.
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import time
from typing import Any

PIPES = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
CONTROL, PID_FILE = f"{PIPES}/control", f"{PIPES}/nvidia-cuda-mps-control.pid"


def connect() -> socket.socket:
    """A connection to the control daemon of this host; OSError when there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(CONTROL)
    except OSError:
        connection.close()
        raise OSError(f"no MPS control daemon at {CONTROL}") from None
    return connection


def become_client() -> socket.socket:
    """Register as a client, which starts the server if there is none; to be kept open."""
    connection = connect()
    connection.sendall(b"client\n")
    if connection.recv(100) != b"ok\n":
        raise OSError("the MPS control daemon takes no more clients")
    return connection


class Control:
    """The daemon: one loop over its socket, its connections and the server's end."""

    def __init__(self, spec: dict[str, Any], hold: Any) -> None:
        self.spec, self.hold = spec, hold
        self.server = 0
        self.clients: dict[socket.socket, int] = {}
        self.quitting: list[socket.socket] = []
        self.deadline = float("inf")
        self.selector = selectors.DefaultSelector()
        self.listener = self.listen()

    def listen(self) -> socket.socket:
        """Take over the pipe directory, unless a living daemon has it."""
        os.makedirs(PIPES, mode=0o777, exist_ok=True)
        with contextlib.suppress(OSError):
            connect().close()
            raise SystemExit("An instance of this daemon is already running")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(CONTROL)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(CONTROL)
        os.chmod(CONTROL, 0o666)
        listener.listen(64)
        with open(PID_FILE, "w") as file:
            file.write(f"{os.getpid()}\n")
        self.selector.register(listener, selectors.EVENT_READ)
        return listener

    def start_server(self) -> None:
        """Fork the server, a holder that stays while clients come and go."""
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            self.listener.close()
            for connection in self.clients:
                connection.close()
            self.hold(self.spec)
        self.server = pid
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ)

    def server_ended(self, pidfd: int) -> None:
        """Forget the server; the next client starts another one."""
        self.selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(self.server, 0)
        self.server = 0

    def readable(self, connection: socket.socket) -> None:
        """A word from a client or from the command, or its end."""
        try:
            line = connection.recv(4096).decode()
        except OSError:
            line = ""
        words = line.split()
        if not words:
            self.selector.unregister(connection)
            self.clients.pop(connection, None)
            connection.close()
            return
        with contextlib.suppress(OSError):
            self.command(connection, words)

    def command(self, connection: socket.socket, words: list[str]) -> None:
        """Do what was asked; `quit` is answered by the end of the connection."""
        if words[0] == "client":
            if self.quitting:
                connection.sendall(b"no\n")
                return
            if not self.server:
                self.start_server()
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            self.clients[connection] = struct.unpack("3i", raw)[0]
            connection.sendall(b"ok\n")
        elif words[0] == "get_server_list":
            connection.sendall(f"{self.server}\n".encode() if self.server else b"\n")
        elif words[0] == "get_client_list":
            pids = sorted(self.clients.values())
            connection.sendall("".join(f"{pid}\n" for pid in pids).encode() or b"\n")
        elif words[0] == "quit":
            self.quitting.append(connection)
            if words[1:2] == ["-t"] and words[2:3] and words[2].isdigit():
                self.deadline = min(self.deadline, time.monotonic() + int(words[2]))
        else:
            connection.sendall(f"Unknown command {words[0]}\n".encode())

    def run(self) -> None:
        """Serve until told to quit and the clients are gone or the time is up."""
        while not (self.quitting and (not self.clients or time.monotonic() >= self.deadline)):
            timeout = max(0.0, self.deadline - time.monotonic()) if self.quitting else None
            for key, _ in self.selector.select(None if timeout == float("inf") else timeout):
                if key.fileobj is self.listener:
                    self.selector.register(self.listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):
                    self.server_ended(key.fileobj)
                elif isinstance(key.fileobj, socket.socket):
                    self.readable(key.fileobj)
        if self.server:
            os.kill(self.server, signal.SIGTERM)
            os.waitpid(self.server, 0)
        for path in (CONTROL, PID_FILE):
            os.unlink(path)
        os._exit(0)
