# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans, for templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gpuops.gpu.plugins.plugin_utils import plans

DOCUMENTATION = r"""
name: plan
author: the gpuops authors
version_added: 0.1.0
short_description: Make a plan out of what a check run found
description:
  - Adds a schema and a digest, so that the role P(gpuops.gpu.gpu_route#role) can tell a plan that
    was altered. Given to a reset as C(gpuops_plan), nobody is signalled who is not in it.
options:
  _input:
    description: For each host the list plan of its result of M(gpuops.gpu.gpu_release).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Write a plan
  ansible.builtin.copy:
    content: "{{ {inventory_hostname: gpu_release_result.plan} | gpuops.gpu.plan | to_nice_json }}"
    dest: plan.json
    mode: "0600"
  delegate_to: localhost
"""

RETURN = r"""
_value:
  description: The plan, with schema, digest and hosts.
  type: dict
"""


class FilterModule:
    """The filters of this file, for Ansible to find."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"plan": plans.make}
