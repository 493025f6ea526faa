# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other programs, started so that whoever hangs can be left behind."""

from __future__ import annotations

import os
import signal
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline

# `pct exec` keeps the node's environment by default, and a foreign locale would translate the
# texts of the shell.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "HOME": "/",
}


# No answer of a few lines is longer; more is a command gone mad.
MOST_BYTES = 1 << 16


def start(argv: list[str]) -> tuple[int, int, int]:
    """Start a command in a session of its own: its PID, its input, and its output with its errors.

    :raises OSError: there is no such command, or no process or descriptor to be had.
    """
    ask_end, write = os.pipe()
    try:
        read, answer_end = os.pipe()
    except OSError:
        close(0, ask_end, write)
        raise
    try:
        pid = os.posix_spawnp(
            argv[0],
            argv,
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, ask_end, 0),
                (os.POSIX_SPAWN_DUP2, answer_end, 1),
                (os.POSIX_SPAWN_DUP2, answer_end, 2),
            ],
            setsid=True,
            # Python ignores SIGPIPE, and children would inherit that.
            setsigdef=[signal.SIGPIPE],
        )
    except OSError:
        close(0, write, read)
        raise
    finally:
        os.close(ask_end)
        os.close(answer_end)
    return pid, write, read


def kill(pid: int) -> None:
    """Kill a command and what it started; a call that hangs in the driver does not die of it."""
    if pid:
        try:
            os.killpg(pid, signal.SIGKILL)
        except OSError:
            pass


def close(pid: int, *ends: int) -> None:
    """Close the pipes of a command; reap it if it is already gone, never wait."""
    for end in ends:
        if end >= 0:
            os.close(end)
    if pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except OSError:
            pass


def answer_of(argv: list[str], seconds: float) -> str:
    """What a command says, if it ends within ``seconds`` and is not too long, else ``""``.

    If not it is killed, and not waited for.
    """
    try:
        pid, write, read = start(argv)
    except OSError:
        return ""
    until = time.monotonic() + seconds
    answer = b""
    while len(answer) <= MOST_BYTES and deadline.readable(read, until - time.monotonic()):
        more = os.read(read, 4096)
        if not more:
            break
        answer += more
    else:
        answer = b""
        kill(pid)
    close(pid, write, read)
    return answer.decode("utf-8", "replace")
