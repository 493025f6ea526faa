# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait for a descriptor, but never longer than said."""

from __future__ import annotations

import select


def readable(handle: int, seconds: float) -> bool:
    """Is there something to read (or an end) within ``seconds``? For pipes and pidfds.

    poll, not select: a batch of many containers has more descriptors than select can name.
    """
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def is_broken(handle: int) -> bool:
    """Has the other end of this pipe or socket gone away? Never true of a file or a terminal."""
    poller = select.poll()
    poller.register(handle, 0)
    return bool(poller.poll(0))
