#!/usr/bin/python
# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action plugin gpu_route, which runs on the controller only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_route
short_description: Decide where to act for every host of the play
version_added: 0.1.0
description:
  - Reads the routing variables of all hosts of the play, checks them, and groups the hosts by the
    host that has to be acted on - a node for itself, a Proxmox host for its containers.
  - Runs on the controller and reaches nobody. Use it with C(run_once), in the role
    P(gpuops.gpu.gpu_route#role), whose defaults document the variables.
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
- name: Decide where to act for every host of the play
  gpuops.gpu.gpu_route:
  run_once: true
  register: gpu_route_plan
"""

RETURN = r"""
hosts:
  description:
    - For each host of the play either error (one sentence), or route (V(node), V(container) or
      V(carrier)), acting (the host to act on), siblings (the hosts with the same one) and target (an
      element of the argument targets of M(gpuops.gpu.gpu_state)).
  returned: always
  type: dict
"""
