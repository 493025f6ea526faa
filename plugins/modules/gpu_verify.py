#!/usr/bin/python
# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action plugin gpu_verify, which runs on the controller only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_verify
short_description: Certify that the GPUs of a host are clean, or fail with the reason
version_added: 0.1.0
description:
  - Takes what M(gpuops.gpu.gpu_state) found for this host and says what it proves. Fails, with the
    reason and what to do, unless the verdict is V(clean). In check mode it only says it.
  - Runs on the controller and reaches nobody; the role P(gpuops.gpu.gpu_verify#role) makes the
    reading, and repeats it until zero.
options:
  reading:
    description: The registered result of M(gpuops.gpu.gpu_state) of the host that leads.
    type: dict
    required: true
  record:
    description: Sentences about what was done before, to be shown with it.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Does not fail, since nothing was done that could have made it clean.
  diff_mode:
    support: none
    description: There is nothing to compare.
author:
  - the gpuops authors
"""

EXAMPLES = r"""
- name: Certify
  gpuops.gpu.gpu_verify:
    reading: "{{ hostvars[gpu_route_leader].gpu_verify_batch }}"
"""

RETURN = r"""
verdict:
  description: V(clean), V(held), V(blocked), V(unkillable) or V(unknown).
  returned: when the host it acts on answered
  type: str
msg:
  description:
    - What was proved, the used MiB of each GPU, and what was done before, in sentences.
    - Where it fails, one sentence with the reason and what to do.
  returned: always
  type: list
  elements: str
"""
