# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments of the modules, as data: the modules and their action plugins share them."""

from __future__ import annotations

TARGETS = {
    "type": "list",
    "elements": "dict",
    "options": {
        "name": {"type": "str", "required": True},
        "vmid": {"type": "int", "default": 0},
        "expected_gpus": {"type": "int", "default": 0},
        "gpus": {"type": "list", "elements": "str", "default": []},
        "baseline_mib": {"type": "raw", "default": 0},
        "protect": {"type": "list", "elements": "str", "default": []},
        "scope": {"type": "str", "default": ""},
        "plan": {"type": "list", "elements": "dict"},
        "mps": {"type": "str", "default": "keep", "choices": ["keep", "quit"]},
        "holders_only": {"type": "bool", "default": False},
        "smi_timeout": {"type": "float", "default": 10.0},
    },
}

RUNG = {
    "type": "dict",
    "options": {
        "name": {"type": "str", "required": True},
        "select": {
            "type": "str",
            "required": True,
            "choices": ["mps", "workloads", "dirty_gpus", "devices", "escaped"],
        },
        "signal": {"type": "str", "required": True, "choices": ["TERM", "INT", "KILL", "quit"]},
        "wait": {"type": "float", "required": True},
    },
}

EARLIER = {"type": "dict", "default": {}}

STATE = {"targets": dict(TARGETS, required=True), "earlier": EARLIER}

RELEASE = {
    "targets": dict(TARGETS, required=True),
    "rung": dict(RUNG, required=True),
    "earlier": EARLIER,
}
