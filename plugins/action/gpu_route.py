# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where to act for every host of the play, decided once, on the controller."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpuops.gpu.plugins.plugin_utils import routes


class ActionModule(ActionBase):
    """Read the routing variables of all hosts of the play and group them by acting host."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Entry point of Ansible."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        self.validate_argument_spec(argument_spec={})
        hostvars = task_vars["hostvars"]
        # The role's documented defaults hold for every host whose inventory says nothing.
        defaults = self._task._role.get_default_vars() if self._task._role else {}

        def variables(name: str) -> dict[str, Any]:
            own = hostvars[name]
            return {key: own[key] if key in own else defaults.get(key) for key in routes.VARIABLES}

        result.update(
            routes.plan(
                {name: variables(name) for name in task_vars["ansible_play_batch"]},
                known=set(task_vars["groups"]["all"]),
                carriers=set(task_vars["groups"].get("proxmox_hosts", [])),
            )
        )
        return result
