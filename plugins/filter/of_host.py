# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a batch says of one host, for templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DOCUMENTATION = r"""
name: of_host
author: the gpuops authors
version_added: 0.1.0
short_description: Reduce the registered result of a batch to what one host takes from it
description:
  - A template renders everything that it returns. Without this, each of the many hosts of a batch
    would render the results of all of them.
  - Of the other hosts it keeps the verdict and the time of its proof.
positional: name
options:
  _input:
    description: The registered result of M(gpuops.gpu.gpu_state) or M(gpuops.gpu.gpu_release).
    type: dict
    required: true
  name:
    description: The host, by its name in the inventory.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Take this host's own reading
  gpuops.gpu.gpu_state:
    take: "{{ hostvars[gpu_route_leader].gpu_state_batch
      | gpuops.gpu.of_host(inventory_hostname) }}"
"""

RETURN = r"""
_value:
  description: A batch of the same form.
  type: dict
"""

# Of a whole batch, besides its hosts: why there may be none.
ABOUT_ALL = ("ended_at", "msg", "skipped", "unreachable")
ABOUT_OTHERS = ("proved_at", "verdict")


def of_host(batch: Any, name: str) -> Any:
    """A registered batch with everything of this host, and of the others whether they are clean."""
    if not isinstance(batch, Mapping):
        return batch
    if "results" in batch:
        return {"results": [of_host(each, name) for each in batch["results"]]}
    found = _some(batch, ABOUT_ALL)
    if "hosts" in batch:
        # Key by key: to go through the items of what is not rendered yet renders them all.
        hosts = batch["hosts"]
        found["hosts"] = {
            each: hosts[each] if each == name else _some(hosts[each], ABOUT_OTHERS)
            for each in hosts
        }
    return found


def _some(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


class FilterModule:
    """The filters of this file, for Ansible to find."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"of_host": of_host}
