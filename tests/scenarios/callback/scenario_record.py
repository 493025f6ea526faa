# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what each host's results carry as JSON lines, for the runner of the scenarios.

Beside the events that a scenario is judged by there are those of ansible-runner, as far as the
package gpuops reads them: its report of each scenario is looked at as well.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
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

    def _as_runner(self, kind: str, data: dict[str, Any]) -> None:
        self._write(event=kind, created=datetime.now(UTC).isoformat(), event_data=data)

    def _result(self, kind: str, result: Any, **more: Any) -> None:
        action = result.task.resolved_action
        data = {"host": result.host.get_name(), "resolved_action": action, "res": result.result}
        self._as_runner(kind, {**data, **more})

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """Who takes part."""
        self._as_runner("runner_on_start", {"host": host.get_name()})

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """A rung, of a batch of hosts."""
        self._result("runner_item_on_ok", result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """The same, failed."""
        self._result("runner_item_on_failed", result)

    def v2_runner_on_ok(self, result: Any) -> None:
        """A verdict, or the words of an assertion or a debug."""
        self._result("runner_on_ok", result)
        if "verdict" in result.result:
            self._host("verdict", result)
        elif "msg" in result.result:
            self._host("message", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A failure; one that is ignored is judged by a later task."""
        self._result("runner_on_failed", result, ignore_errors=ignore_errors)
        self._host("failed", result, ignored=ignore_errors)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Unreachable, likewise."""
        self._result("runner_on_unreachable", result)
        self._host("unreachable", result, ignored=bool(result.task.ignore_unreachable))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The recap."""
        self._as_runner(
            "playbook_on_stats", {"failures": dict(stats.failures), "dark": dict(stats.dark)}
        )
        self._write(
            event="recap", hosts={host: stats.summarize(host) for host in sorted(stats.processed)}
        )
