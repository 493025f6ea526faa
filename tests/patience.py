# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a test waits for what must happen, so that a busy machine fails none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds: far more than anything that works takes, far less than the minute of sleep that stands
# for what never ends in these tests.
PATIENCE = 20.0


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    """Wait for a condition; whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
