#!/usr/bin/python
# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds which GPU of a batch of targets; changes nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_state
short_description: Show the GPUs of one or more machines and who holds them
version_added: 0.1.0
description:
  - Reads the GPUs with nvidia-smi under a deadline, and finds their holders by every evidence that
    the kernel and the driver give - the descriptors of all tasks, the mappings, and the driver's
    own list of processes - matched by device number.
  - Gives a verdict for each GPU and each target. Only what two readings proved is V(clean).
  - Who has been sent SIGKILL already is given five seconds to end; then the verdict is V(unkillable).
  - Where O(earlier) says that somebody was signalled, and all is zero, it is watched for a second, and
    systemd, docker or podman are asked whether they start him again.
  - Serves a batch of targets in one execution on the host that it acts on, so that forty containers
    of one Proxmox host cost one connection.
extends_documentation_fragment:
  - gpuops.gpu.batch
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Who holds the GPUs of this node?
  gpuops.gpu.gpu_state:
    targets:
      - name: "{{ inventory_hostname }}"
        expected_gpus: 8

- name: And those of containers 129 and 130, seen from their Proxmox host
  gpuops.gpu.gpu_state:
    targets:
      - {name: ct129, vmid: 129}
      - {name: ct130, vmid: 130}
  delegate_to: pve1
"""

RETURN = r"""
hosts:
  description: One entry for each target, by name.
  returned: when the host it acts on answered
  type: dict
  contains:
    name:
      description: The target.
      type: str
    place:
      description: Where it was read, in words, as in V(container 129).
      returned: when it was read, so not if it was refused, failed or was given up
      type: str
    inside:
      description: Whether it was read from inside a container, where the holders of others are hidden.
      returned: when it was read, so not if it was refused, failed or was given up
      type: bool
    scope:
      description: Whose processes are in scope.
      returned: when it was read, so not if it was refused, failed or was given up
      type: str
    holders_only:
      description: Whether memory counted as not told, so that only holders decided.
      returned: when it was read, so not if it was refused, failed or was given up
      type: bool
    verdict:
      description: V(clean), V(held), V(blocked), V(unkillable) or V(unknown).
      type: str
    reason:
      description: Why, in one sentence.
      type: str
    remedy:
      description: What to do about it; empty when clean.
      type: str
    gpus:
      description:
        - The GPUs with index, uuid, minor (as in /dev/nvidiaN), bus_id, name, used_mib, used_text (as
          the tool wrote it), total_mib, reserved_mib, utilisation (percent), temperature (degrees
          Celsius), pstate, driver, verdict and unattributed_mib (used, but by no process that the
          driver names). A value that could not be read is null.
      type: list
    holders:
      description:
        - Processes in scope that hold a GPU, with pid (in their own namespace), node_pid, ppid, start
          (clock ticks since boot), state, uid, user, name, command, owner, owner_evidence, gpus (minor
          numbers), used_mib and evidence.
      type: list
    spared:
      description: Protected and foreign holders, each with why it must not be touched.
      type: list
    stuck:
      description: For each holder that outlived SIGKILL its state, wait channel, stack and mounts.
      type: dict
    settled:
      description: True if a further rung of the ladder has nothing to do here.
      type: bool
    waiting:
      description: True if it is not clean but may become so by itself.
      type: bool
    restarting:
      description: True if it is clean, but what was ended is being started again.
      type: bool
    changed:
      description: True if anybody was signalled.
      type: bool
    actions:
      description: As M(gpuops.gpu.gpu_release) returns it; here empty.
      type: list
    plan:
      description: As M(gpuops.gpu.gpu_release) returns it; here empty.
      type: list
    refused:
      description: As M(gpuops.gpu.gpu_release) returns it; here empty.
      type: str
    timings:
      description: As M(gpuops.gpu.gpu_release) returns it; here empty.
      type: dict
    readings:
      description: How often the memory was read.
      returned: when it was read, so not if it was refused, failed or was given up
      type: int
    problems:
      description: What could not be read and was done without, in sentences.
      type: list
    done:
      description:
        - Seconds from the start of the work to the question of the first reading that counts. It may be
          negative, because readings begin before that.
      type: float
    scan:
      description: How long the look at all processes took, at how many, and whether it was deep.
      returned: when the processes were looked at
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
  sample: 0.09
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments, program


def main():
    module = AnsibleModule(argument_spec=arguments.STATE, supports_check_mode=True)
    module.exit_json(**program.run(dict(module.params, verb="state")))


if __name__ == "__main__":
    main()
