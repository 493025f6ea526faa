# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what the tasks of a play said of each host as JSON lines, for the tests on a real GPU."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: gpu_record
type: notification
short_description: Record results as JSON lines
description: Writes to the file that the environment variable GPU_RECORD names.
"""


class CallbackModule(CallbackBase):
    """One line per result."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "gpu_record"

    def _write(self, event: str, result: Any) -> None:
        # Up to ansible-core 2.18 these have an underscore.
        line = {
            "event": event,
            "at": time.monotonic(),
            "host": result.host.get_name(),
            "task": result.task.get_name(),
            "result": result.result,
        }
        with open(os.environ["GPU_RECORD"], "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(line, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        """A result."""
        self._write("ok", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A failure that ends the host's play, or one that is ignored."""
        self._write("ignored" if ignore_errors else "failed", result)
