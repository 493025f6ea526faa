# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Routes: from the variables of the inventory to who acts for whom. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The host variables that a route and its target are made of; documented in the role gpu_route.
VARIABLES = (
    "proxmox_vmid",
    "proxmox_node",
    "gpuops_proxmox_host",
    "gpuops_expected_gpus",
    "gpuops_gpus",
    "gpuops_baseline_mib",
    "gpuops_protect",
    "gpuops_protect_more",
    "gpuops_smi_timeout",
)

# What Proxmox accepts as the number of a guest.
VMIDS = range(100, 1_000_000_000)


class RouteError(Exception):
    """The inventory of one host is unsound; the text says what to write instead."""


def plan(
    hosts: Mapping[str, Mapping[str, Any]], known: set[str], carriers: set[str]
) -> dict[str, Any]:
    """Who acts for whom.

    :param hosts: for each host of the play its routing variables (:data:`VARIABLES`).
    :param known: every host of the inventory.
    :param carriers: hosts that are known to carry containers.

    Returns ``hosts``: for each host ``route`` (``node``, ``container`` or ``carrier``),
    ``acting`` (the host to act on), ``siblings`` (all hosts with that acting host, itself
    included, in order) and ``target`` (the argument of the modules), or only ``error``.
    """
    routed: dict[str, dict[str, Any]] = {}
    for name, variables in hosts.items():
        try:
            routed[name] = route(name, variables, known)
        except RouteError as error:
            routed[name] = {"error": f"{name}: {error}"}
    carriers = carriers | {
        each["acting"] for each in routed.values() if each.get("route") == "container"
    }
    for name, each in routed.items():
        if name in carriers and each.get("route") == "node":
            each["route"] = "carrier"
    if routed and all(each.get("route") == "carrier" for each in routed.values()):
        for name, each in routed.items():
            each["error"] = (
                f"{name} carries containers and is not reset itself: name the containers "
                f"(for example -l ct129)"
            )
    groups: dict[str, list[str]] = {}
    for name, each in routed.items():
        if each.get("route") in ("node", "container") and "error" not in each:
            groups.setdefault(each["acting"], []).append(name)
    for each in routed.values():
        each["siblings"] = groups.get(each.get("acting", ""), [])
    return {"hosts": routed}


def route(name: str, variables: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The route of one host.

    :raises RouteError: its variables contradict each other or name what is not there.
    """
    vmid = whole(variables, "proxmox_vmid", 0)
    target = {
        "name": name,
        "vmid": vmid,
        "expected_gpus": whole(variables, "gpuops_expected_gpus", 0),
        "gpus": words(variables, "gpuops_gpus"),
        "baseline_mib": whole(variables, "gpuops_baseline_mib", 0),
        "protect": words(variables, "gpuops_protect") + words(variables, "gpuops_protect_more"),
        "smi_timeout": seconds(variables, "gpuops_smi_timeout", 10.0),
    }
    if not vmid:
        return {"route": "node", "acting": name, "target": target}
    if vmid not in VMIDS:
        raise RouteError(f"proxmox_vmid is {vmid}; write the container's number, 100 or more")
    carrier = variables.get("gpuops_proxmox_host") or variables.get("proxmox_node")
    if not carrier:
        raise RouteError(
            "proxmox_vmid is set but gpuops_proxmox_host is not; "
            "write the inventory name of the Proxmox host that carries the container"
        )
    if carrier not in known:
        raise RouteError(
            f"gpuops_proxmox_host is '{carrier}', which is not in the inventory; add it there"
        )
    return {"route": "container", "acting": str(carrier), "target": target}


def whole(variables: Mapping[str, Any], key: str, default: int) -> int:
    """A variable that must be a whole number of zero or more."""
    value = variables.get(key)
    if value in (None, ""):
        return default
    if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit():
        raise RouteError(f"{key} is '{value}'; write a whole number of zero or more")
    return int(str(value))


def seconds(variables: Mapping[str, Any], key: str, default: float) -> float:
    """A variable that must be a number of seconds above zero."""
    value = variables.get(key)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise RouteError(f"{key} is '{value}'; write a number of seconds above zero")
    return number


def words(variables: Mapping[str, Any], key: str) -> list[str]:
    """A variable that is a list of words; a single word or number stands for a list of one."""
    value = variables.get(key)
    if value is None:
        return []
    if isinstance(value, (str, int)):
        return [part.strip() for part in str(value).split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        return [str(part) for part in value]
    raise RouteError(f"{key} is '{value}'; write a list")
