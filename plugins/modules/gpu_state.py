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
  - Serves a batch of targets in one execution on the host that it acts on, so that forty containers
    of one Proxmox host cost one connection.
options:
  targets:
    description: The machines to look at from this host.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The name in the result, usually the inventory name.
        type: str
        required: true
      vmid:
        description: The number of a Proxmox container of this host; V(0) is this host itself.
        type: int
        default: 0
      expected_gpus:
        description: How many GPUs must be listed; V(0) is as many as there are device nodes.
        type: int
        default: 0
      gpus:
        description: The GPUs to look at, by index, UUID or PCI address; empty for all.
        type: list
        elements: str
        default: []
      baseline_mib:
        description:
          - MiB that an idle GPU of this target may show as used - one number for all, or a dictionary
            by index, UUID or PCI address.
        type: raw
        default: 0
      protect:
        description:
          - Names of processes that must never be signalled, matched against the process name and the
            base name of the command. Shell wildcards work.
        type: list
        elements: str
        default: []
      scope:
        description:
          - Whose processes may be touched. V(container) (of O(targets[].vmid)), V(node) (running
            directly on the node), V(job:ID) (of that Slurm job), V(user:NAME) (of that user, directly
            on the node), or V(everything), which still spares the protected. Empty is V(container) or
            V(node), whichever the target is.
        type: str
        default: ""
      plan:
        description:
          - Holders (node_pid, start, name, gpus) that alone may be signalled. If another holder in scope
            is there, nobody is signalled and the result says so in refused.
        type: list
        elements: dict
      mps:
        description:
          - V(keep) spares NVIDIA's Multi-Process Service as the protect list says. V(quit) takes it off that
            list, so that a rung that selects V(mps) can tell it to quit.
        type: str
        default: keep
        choices: [keep, quit]
      holders_only:
        description:
          - The driver tells no memory on this machine (it prints V([N/A])), so holders alone decide. The
            result says so.
        type: bool
        default: false
      smi_timeout:
        description: Seconds after which a call of nvidia-smi is abandoned.
        type: float
        default: 10.0
  earlier:
    description:
      - For each target the actions of this run so far, to recognise a holder that is restarted each
        time it is ended, and in check mode what would be ended already. The roles fill it in.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
notes:
  - Needs root on the host it acts on.
  - In a play, the action plugin of the same name sends the code over standard input. It also knows
    O(ignore:take), the registered result of a batch, out of which a host takes its own.
author:
  - the gpuops authors
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
        - The GPUs with index, uuid, minor (as in /dev/nvidiaN), bus_id, name, used_mib, total_mib,
          reserved_mib, utilisation (percent), temperature (degrees Celsius), pstate, driver, verdict
          and unattributed_mib (used, but by no process that the driver names). A value that could
          not be read is null.
      type: list
    holders:
      description:
        - Processes in scope that hold a GPU, with pid (in their own namespace), node_pid, ppid, start
          (clock ticks since boot), state, user, name, command, owner, owner_evidence, gpus (minor
          numbers), used_mib and evidence.
      type: list
    spared:
      description: Protected and foreign holders, each with why it must not be touched.
      type: list
    settled:
      description: True if a further rung of the ladder has nothing to do here.
      type: bool
    scan:
      description: How long the look at all processes took, at how many, and whether it was deep.
      type: dict
settled:
  description: True if a further rung of the ladder has nothing to do for any target.
  returned: when the host it acts on answered
  type: bool
waiting:
  description: True if any target is held but may become clean by itself.
  returned: when the host it acts on answered
  type: bool
seconds:
  description: How long the work took on the host.
  returned: when the host it acts on answered
  type: float
  sample: 0.09
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments, node


def main():
    module = AnsibleModule(argument_spec=arguments.STATE, supports_check_mode=True)
    module.exit_json(**node.run(dict(module.params, verb="state")))


if __name__ == "__main__":
    main()
