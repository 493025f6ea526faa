# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of gpu_state."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments, node  # noqa: F401
from ansible_collections.gpuops.gpu.plugins.plugin_utils.batch import BatchAction


class ActionModule(BatchAction):
    """Read a batch of targets, or take one host's reading."""

    VERB = "state"
    SPEC = arguments.STATE

    def take(self, batch: Any, name: str) -> dict[str, Any]:
        """Also who of the batch is held, so that these can choose who leads the release."""
        taken = super().take(batch, name)
        hosts = batch.get("hosts", {}) if isinstance(batch, dict) else {}
        taken["siblings_held"] = [
            other for other, result in hosts.items() if result["verdict"] == "held"
        ]
        return taken
