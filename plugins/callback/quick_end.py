# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After the recap there is nothing left that would be worth looking through for garbage."""

from __future__ import annotations

import gc
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: quick_end
type: aggregate
short_description: Let Ansible end as soon as it has said everything
description:
  - When Python ends it looks for garbage among everything that Ansible has loaded, which takes some
    tenths of a second. This callback takes all that out of the search once the recap has been
    printed. It says nothing and changes nothing of the run.
  - What other plugins have to do at the end they do; only a file that one of them has neither
    closed nor flushed may lose its last words.
requirements:
  - enable it in the configuration, C(callbacks_enabled = gpuops.gpu.quick_end)
author:
  - the gpuops authors
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Does its work at the very end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpuops.gpu.quick_end"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Everything is said: https://docs.python.org/3/library/gc.html#gc.freeze."""
        gc.freeze()
