#!/usr/bin/python
# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action plugin gpu_route, which runs on the controller only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_route
short_description: Decide where to act for a host, and check everything that is set for it
version_added: 0.1.0
description:
  - Reads the public variables of this collection for the host (the roles' defaults document them),
    checks them, and says where to act - on the node itself, or on the Proxmox host of a container.
  - Fails with one sentence that says what to write instead, before anybody is reached or signalled.
  - Puts hosts that run this same task, and have the same acting host, ladder and patience, into a
    group, as M(ansible.builtin.group_by) does, so that one of them can act for all. A host that a
    condition keeps from running the task is in no group, so that nobody acts for it.
  - Runs on the controller and reaches nobody.
options: {}
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
author:
  - the gpuops authors
"""

EXAMPLES = r"""
- name: Decide where to act, and check everything that is set
  gpuops.gpu.gpu_route:
  register: gpu_route_mine
"""

RETURN = r"""
route:
  description: V(node), V(container), or V(carrier) for a Proxmox host, which is left out itself.
  returned: success
  type: str
acting:
  description: The inventory name of the host to act on.
  returned: success
  type: str
target:
  description: An element of the argument targets of M(gpuops.gpu.gpu_state).
  returned: success
  type: dict
rungs:
  description: The rungs of the ladder that are to be climbed, in order.
  returned: success
  type: list
plan_file:
  description: The file of C(gpuops_plan), as an absolute path.
  returned: success, when one is given
  type: str
group:
  description: The group of the hosts that are acted for together.
  returned: success, when the host takes part
  type: str
"""
