#!/usr/bin/python
# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Climb one rung of the ladder for a batch of targets."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_release
short_description: Free the GPUs of one or more machines, one rung of a ladder at a time
version_added: 0.1.0
description:
  - Looks at each target as M(gpuops.gpu.gpu_state) does. If its verdict is V(held), signals the
    holders that the rung selects, and polls on the host until the GPUs read zero twice or more
    waiting cannot help.
  - Signals only processes in scope - those of the container, or those that run directly on the node
    - and never one that O(targets) protects by name, one without proof of ownership, itself, its
    ancestors or PID 1. A process is signalled through a handle (pidfd), and only if at that moment it
    is still the process that was seen and still holds a device.
  - A target that cannot be read is V(unknown), and nobody is signalled there.
  - The module itself protects nobody by name; the role P(gpuops.gpu.gpu_route#role) hands it a long
    list (C(gpuops_protect)). Who uses the module without the roles names monitors and the driver's
    own services in O(targets).
extends_documentation_fragment:
  - gpuops.gpu.batch
options:
  rung:
    description: What to do to whom.
    type: dict
    required: true
    suboptions:
      name:
        description: What the record calls it.
        type: str
        required: true
      select:
        description:
          - V(mps), NVIDIA's Multi-Process Service.
          - V(workloads), holders that compute - the driver lists them, or they have unified memory
            mapped.
          - V(dirty_gpus), whoever holds a GPU that is not zero, by any evidence.
          - V(devices), whoever holds any NVIDIA device, by any evidence.
          - V(escaped), holders that left the container's control group but are still in its PID
            namespace.
        type: str
        required: true
        choices: [mps, workloads, dirty_gpus, devices, escaped]
      signal:
        description: The signal to send; V(quit) is no signal, but MPS told to by its own command.
        type: str
        required: true
        choices: [TERM, INT, KILL, quit]
      wait:
        description: Seconds to wait at most for the GPUs to read zero.
        type: float
        required: true
attributes:
  check_mode:
    support: full
    description: Names exactly whom it would signal.
  diff_mode:
    support: partial
    description:
      - The holders before and after are shown by the role, whose task takes one host's outcome. A task
        that climbs a rung shows none.
notes:
  - The action plugin also knows O(ignore:after), the registered result of the step before, whose settled
    hosts it leaves out. What it returns has then also, for each host, rung, earlier (the actions of the
    steps before) and proved_at, and for all of them ended_at (seconds since 1970, by the controller's
    clock).
  - The action plugin also knows O(ignore:take), the outcome of such a batch instead of O(targets), and
    returns what it says of the host itself over all rungs - one entry of RV(hosts), with record (a
    sentence for each of its actions), rungs (those on which somebody was to be signalled, each with
    name, verdict, signalled (how many) and timings), proved (whether the batch ended with all its hosts
    clean) and age (how old the oldest of their proofs was at the end of the batch, in seconds).
seealso:
  - module: gpuops.gpu.gpu_state
"""

EXAMPLES = r"""
- name: End whoever computes in container 129
  gpuops.gpu.gpu_release:
    targets:
      - name: ct129
        vmid: 129
        expected_gpus: 8
        protect: [nvidia-persistenced, "dcgm*", nv-hostengine]
    rung: {name: kill, select: workloads, signal: KILL, wait: 30}
  delegate_to: pve1
"""

RETURN = r"""
hosts:
  description: One entry for each target, by name; what M(gpuops.gpu.gpu_state) returns and this.
  returned: when the host it acts on answered
  type: dict
  contains:
    before:
      description: The GPUs before anything was done.
      returned: when anybody was signalled
      type: list
    actions:
      description:
        - Who was signalled (in check mode, who would be), each with all that identifies it, and with
          rung, signal, at (clock ticks since boot), restarted_by (the unit or container, in words, whose
          manager may start it again; empty without one), start (which tells it from a later process of
          the same number) and result (V(sent), V(gone), V(let go), V(changed), V(unreadable),
          V(not permitted), V(out of reach), V(would be sent)).
        - Where MPS was told to quit in vain, result is what it said, V(MPS did not answer), V(exit code 1)
          or another one, or why it could not be told.
      type: list
    plan:
      description: In check mode, the holders in scope as a plan remembers them.
      type: list
    refused:
      description: Why nobody was signalled although a plan was given; empty otherwise.
      type: str
    timings:
      description: Seconds from the first signal to the first and the second zero reading.
      type: dict
settled:
  description: True if a further rung of the ladder has nothing to do for any target.
  returned: when the host it acts on answered
  type: bool
waiting:
  description: True if any target is not clean but may become so by itself.
  returned: when the host it acts on answered
  type: bool
seconds:
  description: How long the work took on the host.
  returned: when the host it acts on answered
  type: float
  sample: 0.31
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments, program


def main():
    module = AnsibleModule(argument_spec=arguments.RELEASE, supports_check_mode=True)
    module.exit_json(**program.run(dict(module.params, verb="release", check=module.check_mode)))


if __name__ == "__main__":
    main()
