# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of gpu_state."""

from __future__ import annotations

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments
from ansible_collections.gpuops.gpu.plugins.plugin_utils.batch import BatchAction


class ActionModule(BatchAction):
    """Read a batch of targets, or take one host's reading."""

    VERB = "state"
    SPEC = arguments.STATE
