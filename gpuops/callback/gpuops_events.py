# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-runner's own callback, without the events of which :mod:`gpuops.events` makes nothing.

Two thirds of all events say that a task began or was skipped, and each costs as much as a result.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import callback_loader

DOCUMENTATION = """
name: gpuops_events
type: stdout
short_description: Hand the results of gpuops.gpu to ansible-runner
description: What ansible-runner's awx_display does, for the events that the package reads.
extends_documentation_fragment: [default_callback]
"""

OURS = "gpuops.gpu."
# By its name, not by import: Ansible may run in another Python than ansible-runner.
Everything: Any = callback_loader.get("awx_display", class_only=True)


class CallbackModule(Everything):  # type: ignore[misc]
    """The first sight of each host, the results of our modules, all failures, and the recap."""

    CALLBACK_NAME = "gpuops_events"

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Said by the results."""

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """That a host takes part, even if it never answers."""
        if host.get_name() not in self._host_start:
            super().v2_runner_on_start(host, task)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Ours; of a loop each turn has been said already."""
        if result.task.resolved_action.startswith(OURS) and not result.task.loop:
            super().v2_runner_on_ok(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Nothing."""

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        """Nothing."""
