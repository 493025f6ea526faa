# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The certificate of one host, or why there is none."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpuops.gpu.plugins.plugin_utils.batch import (
    NoResult,
    own_rounds,
    some_of,
)

# Verdicts that come of a reading.
CERTAIN = ("clean", "held", "blocked", "unkillable")


class ActionModule(ActionBase):
    """Say what a reading proves for this host; fail unless it proves it clean."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Entry point of Ansible."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "reading": {"type": "dict", "required": True},
                "record": {"type": "list", "elements": "str", "default": []},
            }
        )
        try:
            found = own_rounds(args["reading"], str((task_vars or {})["inventory_hostname"]))[-1]
        except NoResult as error:
            return dict(result, **error.result)
        result["verdict"] = found["verdict"]
        # In check mode nothing was done that could have made it clean; but it can be read, or not.
        tolerated = CERTAIN if self._task.check_mode else ("clean",)
        if found["verdict"] not in tolerated:
            done = some_of(args["record"])
            sentences = [f"{found['verdict']}: {found['reason']}", found["remedy"], *done]
            return dict(result, failed=True, msg="; ".join(sentences))
        used = " ".join(str(gpu["used_mib"]) for gpu in found["gpus"])
        return dict(
            result,
            msg=[
                f"{found['verdict']}: {found['reason']}",
                f"used MiB by GPU: {used}",
                *args["record"],
            ],
            # What it is for is to be read.
            _ansible_verbose_always=True,
        )
