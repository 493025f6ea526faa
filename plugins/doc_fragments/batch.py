# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules that serve a batch of targets have in common, in their documentation."""

from __future__ import annotations


class ModuleDocFragment:
    """For ``extends_documentation_fragment: gpuops.gpu.batch``."""

    DOCUMENTATION = r"""
options:
  targets:
    description: The machines to look at, or to free, from this host.
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
        description:
          - The GPUs to free, by index, UUID or PCI address; empty for all. A process that computes on
            one of these is signalled even if it does on others too; one that has merely opened it is
            spared.
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
        description: Names of processes that must never be signalled. Shell wildcards work.
        type: list
        elements: str
        default: []
      scope:
        description:
          - Whose processes may be touched. V(container) (of O(targets[].vmid)), V(node) (running
            directly on the node), V(job:NUMBER) (of that Slurm job), V(user:NAME) (of that user, directly
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
        description: Seconds after which a call of nvidia-smi is abandoned; a day at most.
        type: float
        default: 10.0
  earlier:
    description:
      - For each target the actions of this run so far, to recognise a holder that is restarted each
        time it is ended, and in check mode what would be ended already. The roles fill it in.
    type: dict
    default: {}
notes:
  - Needs root on the host it acts on.
  - In a play, the action plugin of the same name sends the code over standard input. It also knows
    O(ignore:take), the registered result of a batch, out of which a host takes its own.
author:
  - the gpuops authors
"""
