# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what each host's results carry as JSON lines, for the runner of the scenarios."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: scenario_record
type: notification
short_description: Record verdicts, failures and the recap as JSON lines
description: Writes to the file that the environment variable SCENARIO_RECORD names.
"""


class CallbackModule(CallbackBase):
    """One line per event that a scenario is judged by."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "scenario_record"

    def _write(self, **event: Any) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        with open(os.environ["SCENARIO_RECORD"], "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps({"at": now, **event}, default=str) + "\n")

    def _host(self, event: str, result: Any, **more: Any) -> None:
        self._write(
            event=event,
            host=result.host.get_name(),
            task=result.task.get_name(),
            result=result.result,
            **more,
        )

    def v2_runner_on_ok(self, result: Any) -> None:
        """A verdict, or the words of an assertion or a debug."""
        if "verdict" in result.result:
            self._host("verdict", result)
        elif "msg" in result.result:
            self._host("message", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A failure; one that is ignored is judged by a later task."""
        self._host("failed", result, ignored=ignore_errors)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Unreachable, likewise."""
        self._host("unreachable", result, ignored=bool(result.task.ignore_unreachable))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The recap."""
        self._write(
            event="recap", hosts={host: stats.summarize(host) for host in sorted(stats.processed)}
        )
