# SPDX-License-Identifier: GPL-3.0-or-later
"""Write timings and the recap as JSON lines to the file that BENCH_RECORD names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: bench_record
type: notification
short_description: Record timings and the recap as JSON lines
description: Writes to the file that the environment variable BENCH_RECORD names.
"""


class CallbackModule(CallbackBase):
    """One line for each released host and each failure, and one for the recap."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "bench_record"

    def _write(self, **event: Any) -> None:
        with Path(os.environ["BENCH_RECORD"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        """A host's own outcome of the ladder: how long each rung took on the node."""
        if "rungs" in result.result and "verdict" in result.result:
            self._write(host=result.host.get_name(), rungs=result.result["rungs"])

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Why a host failed."""
        self._write(host=result.host.get_name(), failed=str(result.result.get("msg", "")))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Why a host could not be reached."""
        self._write(host=result.host.get_name(), unreachable=str(result.result.get("msg", "")))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The recap."""
        self._write(recap={host: stats.summarize(host) for host in sorted(stats.processed)})
