# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long anything may take: a descriptor that is waited for, and a whole request."""

from __future__ import annotations

import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# So many targets of one host are worked on at once.
TARGETS_AT_ONCE = 32

# Seconds, a day: whoever would wait longer has mistyped, and no clock goes on for ever.
LONGEST = 86400.0

# Seconds that an answer of nvidia-smi may take where nothing was said of it.
SMI_TIMEOUT = 10.0

# Seconds for the looks at all processes, and for everything that has no deadline of its own.
LOOKS = 30.0
SLACK = 10.0


def of_request(request: dict[str, Any]) -> float:
    """Seconds after which a node's program gives up whoever of its targets has no answer yet.

    Each target may have to wait for the turn of another run before it climbs a rung of its own,
    and before any of them the first reader and the driver's numbers may have used up their time.
    """
    targets = request["targets"]
    wait = _granted((request.get("rung") or {}).get("wait") or 0)
    smi = max([_granted(smi_timeout(each)) for each in targets], default=SMI_TIMEOUT)
    rounds = -(-len(targets) // TARGETS_AT_ONCE)
    return 2 * smi + rounds * (2 * (wait + smi) + LOOKS) + SLACK


def smi_timeout(spec: dict[str, Any]) -> Any:
    """Seconds that an answer of nvidia-smi may take for the target that is described so."""
    said = spec.get("smi_timeout")
    return SMI_TIMEOUT if said is None else said


def _granted(seconds: Any) -> float:
    """So many seconds; none where the node refuses to wait as long, at once."""
    return float(seconds) if 0 <= float(seconds) <= LONGEST else 0.0


def readable(handle: int, seconds: float) -> bool:
    """Is there something to read (or an end) within ``seconds``? For pipes and pidfds.

    poll, not select: a batch of many containers has more descriptors than select can name.
    """
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def in_a_copy(read: Callable[[], bytes], seconds: float) -> bytes:
    """What ``read`` returns, made in a forked copy of this program; nothing if it takes longer.

    For what may block in the kernel: the copy is killed then, but never waited for.
    """
    until = time.monotonic() + seconds
    pipe, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            let_go(write_end)
            data = read()
            while data:
                data = data[os.write(write_end, data) :]
        finally:
            os._exit(0)
    os.close(write_end)
    found = b""
    ended = False
    while not ended and readable(pipe, until - time.monotonic()):
        more = os.read(pipe, 65536)
        found += more
        ended = not more
    os.close(pipe)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0 if ended else os.WNOHANG)
    return found if ended else b""


def let_go(kept: int) -> None:
    """Close every descriptor of this process but one, first thing in a forked copy.

    One that gets stuck would keep open for ever what ssh waits for, and the lock of a turn.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # The listing's own.


def is_broken(handle: int) -> bool:
    """Has the other end of this pipe or socket gone away? Never true of a file or a terminal."""
    poller = select.poll()
    poller.register(handle, 0)
    return bool(poller.poll(0))
