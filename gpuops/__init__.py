# SPDX-License-Identifier: GPL-3.0-or-later
"""gpuops: take GPUs from whatever state they are in to a proved clean slate.

The work is done by the Ansible collection ``gpuops.gpu``, which this distribution installs next
to the package. The package is the thin wrapper around it: it turns what a run did into a report.

>>> import gpuops
>>> report = gpuops.reset("ct129", "inventory/hosts.yml")  # doctest: +SKIP
>>> report.raise_for_verdict()  # doctest: +SKIP

``gpuops.aio`` has the same functions for asyncio programs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpuops._version import __version__

if TYPE_CHECKING:
    from gpuops import aio
    from gpuops.api import plan, reset, status, verify
    from gpuops.errors import (
        AnsibleError,
        GpuopsError,
        Interrupted,
        NotCleanError,
        PlanError,
        ReportError,
        UsageError,
    )
    from gpuops.report import Report, json_schema

__all__ = [
    "AnsibleError",
    "GpuopsError",
    "Interrupted",
    "NotCleanError",
    "PlanError",
    "Report",
    "ReportError",
    "UsageError",
    "__version__",
    "aio",
    "json_schema",
    "plan",
    "reset",
    "status",
    "verify",
]

# Imported when first used: `gpuops --help` needs none of it.
_HOMES = {
    "api": ("plan", "reset", "status", "verify"),
    "errors": (
        "AnsibleError",
        "GpuopsError",
        "Interrupted",
        "NotCleanError",
        "PlanError",
        "ReportError",
        "UsageError",
    ),
    "report": ("Report", "json_schema"),
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module("gpuops.aio")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"gpuops.{home}"), name)
    raise AttributeError(f"module 'gpuops' has no attribute '{name}'")
