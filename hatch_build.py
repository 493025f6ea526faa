# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts galaxy.yml beside the collection in the wheel, where Ansible reads its version."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GalaxyFile(BuildHookInterface):  # type: ignore[type-arg]
    """What `sources` cannot do, because it moves directories only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file; in an editable install a copy would hide the checkout's collection."""
        if version != "editable":
            build_data["force_include"]["galaxy.yml"] = "ansible_collections/gpuops/gpu/galaxy.yml"
