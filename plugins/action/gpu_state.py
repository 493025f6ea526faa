# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of gpu_state."""

from __future__ import annotations

import time
from typing import Any

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments
from ansible_collections.gpuops.gpu.plugins.plugin_utils.batch import BatchAction


class ActionModule(BatchAction):
    """Read a batch of targets, or take one host's reading."""

    VERB = "state"
    SPEC = arguments.STATE

    def take(self, batch: Any, name: str) -> dict[str, Any]:
        """Also what the batch as a whole showed, so that its hosts can agree on what follows."""
        taken = super().take(batch, name)
        hosts = batch.get("hosts", {}) if isinstance(batch, dict) else {}
        verdicts = {host: each["verdict"] for host, each in hosts.items()}
        taken["siblings_held"] = [host for host, word in verdicts.items() if word == "held"]
        taken["siblings_clean"] = all(word == "clean" for word in verdicts.values())
        taken["taken"] = time.time()
        return taken
