# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the variables of one host to where to act for it. Pure functions, but for -l @FILE.

Everything that an operator can set is checked here, before anything is reached or signalled.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ansible.inventory.manager import split_host_pattern

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline

# What Proxmox accepts as the number of a guest.
VMIDS = range(100, 1_000_000_000)

# All variables that this collection knows: those of its roles, the hosts of its playbooks, and what
# plan_gpus.yml says of itself.
NAMES = {
    "gpuops_baseline_mib",
    "gpuops_expected_gpus",
    "gpuops_gpus",
    "gpuops_holders_only",
    "gpuops_hosts",
    "gpuops_ladder",
    "gpuops_mps",
    "gpuops_plan",
    "gpuops_plan_is_made",
    "gpuops_profile",
    "gpuops_profiles",
    "gpuops_protect",
    "gpuops_protect_more",
    "gpuops_proxmox_host",
    "gpuops_rungs",
    "gpuops_scope",
    "gpuops_smi_timeout",
    "gpuops_verify_delay",
    "gpuops_verify_fresh",
    "gpuops_verify_retries",
}


class RouteError(Exception):
    """Something that was set cannot be; the text says what to write instead."""


def route(
    name: str, variables: Mapping[str, Any], known: set[str], carriers: set[str]
) -> dict[str, Any]:
    """Where to act for a host, and what the modules need to know of it.

    :param variables: of this host, with the defaults of the play's roles.
    :param known: every host of the inventory.
    :param carriers: hosts that carry containers and are not reset themselves.

    Returns ``route`` (``node``, ``container`` or ``carrier``), ``acting`` (the host to act on)
    and ``target`` (an element of the argument ``targets`` of the modules).

    :raises RouteError: the variables contradict each other or name what is not there.
    """
    check_names(variables)
    vmid = whole(variables, "proxmox_vmid", 0)
    target = {
        "name": name,
        "vmid": vmid,
        "expected_gpus": whole(variables, "gpuops_expected_gpus", 0),
        "gpus": ranges(named(variables, "gpuops_gpus")),
        "baseline_mib": baseline(variables),
        "protect": [
            name
            for key in ("gpuops_protect", "gpuops_protect_more")
            for name in named(variables, key)
        ],
        "scope": scope(variables, vmid),
        "mps": choice(variables, "gpuops_mps", ("keep", "quit")),
        "holders_only": flag(variables, "gpuops_holders_only"),
        "smi_timeout": seconds(variables, "gpuops_smi_timeout", 10.0),
    }
    check_verify(variables)
    rungs(variables)
    if not vmid and variables.get("gpuops_proxmox_host"):
        raise RouteError(
            "gpuops_proxmox_host is set but proxmox_vmid is not; write the container's number, "
            "or leave out both for a machine that is no container"
        )
    if not vmid:
        kind = "carrier" if name in carriers else "node"
        return {"route": kind, "acting": name, "target": target}
    if vmid not in VMIDS:
        raise RouteError(f"proxmox_vmid is {vmid}; write the container's number, 100 or more")
    key, acting = carrier(variables)
    if not acting:
        raise RouteError(
            "proxmox_vmid is set but gpuops_proxmox_host is not; "
            "write the inventory name of the Proxmox host that carries the container"
        )
    if not isinstance(acting, str) or acting not in known:
        raise RouteError(f"{key} is '{acting}', which is not in the inventory; add it there")
    return {"route": "container", "acting": str(acting), "target": target}


def carrier(variables: Mapping[str, Any]) -> tuple[str, Any]:
    """The variable that names the Proxmox host of a container, and what it says (or nothing)."""
    key = "gpuops_proxmox_host" if variables.get("gpuops_proxmox_host") else "proxmox_node"
    return key, variables.get(key)


def check_names(variables: Mapping[str, Any]) -> None:
    """No variable may be mistyped: as one that is not set it would widen the run.

    :raises RouteError: a name like ours is none of ours.
    """
    for name in sorted(variables):
        if name.startswith("gpuops_") and name not in NAMES:
            known = sorted(each.removeprefix("gpuops_") for each in NAMES)
            # What all begin with makes none of them near.
            near = difflib.get_close_matches(name.removeprefix("gpuops_"), known, 1)
            hint = (
                f"did you mean gpuops_{near[0]}?" if near else "leave it out, or name it otherwise"
            )
            raise RouteError(f"there is no variable {name}; {hint}")


def check_limit(limit: Any, known: Collection[str], words: str) -> None:
    """Each host and group that a run is limited to must be there: Ansible may only warn of it.

    Also one that is left out: mistyped, it would not be.

    :param limit: what was typed: patterns with commas, or a list of them; nothing is no limit.
    :param known: the hosts and groups of the inventory.
    :param words: where it was typed, such as ``-l``.
    :raises RouteError: one that is written out is not; patterns are left to Ansible.
    """
    patterns = split_host_pattern(limit or [])
    parts = [part for each in patterns for part in _listed(each.strip(), words)]
    if limit is not None and not any(parts):
        raise RouteError(
            f"{words} is '{limit}', which names nothing and means every host; name some"
        )
    for part in parts:
        name = part.lstrip("!&")
        plain = name and not re.search(r"[*?\[\]~@]", name)
        if plain and name not in known and name not in ("all", "localhost"):
            reason = f"there is no host or group '{name}' in the inventory"
            raise RouteError(f"{reason}; correct {words}")


def _listed(part: str, words: str) -> list[str]:
    """The patterns in the file behind ``@``, or the one pattern itself."""
    if not part.startswith("@"):
        return [part]
    try:
        lines = Path(part[1:]).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise RouteError(f"the file of {words} {part} cannot be read; correct it") from error
    return [line.strip() for line in lines if line.strip()] or [""]


def baseline(variables: Mapping[str, Any]) -> int | dict[str, int]:
    """MiB that an idle GPU may show: one number, or one for each GPU that is named.

    :raises RouteError: something in it is no whole number.
    """
    value = variables.get("gpuops_baseline_mib")
    if isinstance(value, Mapping):
        named = {f"gpuops_baseline_mib[{gpu}]": mib for gpu, mib in value.items()}
        return {str(gpu): whole(named, f"gpuops_baseline_mib[{gpu}]", 0) for gpu in value}
    return whole(variables, "gpuops_baseline_mib", 0)


def scope(variables: Mapping[str, Any], vmid: int) -> str:
    """Whose processes may be touched.

    :raises RouteError: it is none of the scopes, or not one of this kind of host.
    """
    own = "container" if vmid else "node"
    value = str(own if variables.get("gpuops_scope") is None else variables["gpuops_scope"])
    kind, colon, name = value.partition(":")
    known = {"everything": "", own: ""}
    if not vmid:
        # In a container all belong to the container; jobs and users can be told apart on a node.
        known.update(job=":NUMBER", user=":NAME")
    sound = kind in known and bool(known[kind]) is bool(name) is bool(colon)
    if not sound or (kind == "job" and not name.isdigit()):
        choices = ", ".join(word + what for word, what in known.items())
        raise RouteError(f"gpuops_scope is '{value}'; write one of {choices}, or leave it out")
    return value


def choice(variables: Mapping[str, Any], key: str, words: tuple[str, ...]) -> str:
    """A variable that is one of a few words, the first by default.

    :raises RouteError: it is none of them.
    """
    value = str(variables.get(key) or words[0])
    if value not in words:
        raise RouteError(f"{key} is '{value}'; write one of {', '.join(words)}")
    return value


def flag(variables: Mapping[str, Any], key: str) -> bool:
    """A variable that is true or false.

    :raises RouteError: it is neither.
    """
    value = variables.get(key, False)
    if str(value).lower() in ("true", "yes", "1"):
        return True
    if str(value).lower() in ("false", "no", "0", "none", ""):
        return False
    raise RouteError(f"{key} is '{value}'; write true or false")


def rungs(variables: Mapping[str, Any]) -> list[Any]:
    """The rungs to climb, in the order of the ladder: the profile's, or those named one by one.

    Empty where the play does not climb at all (there is no ladder among the variables).

    :raises RouteError: a profile or a rung that does not exist.
    """
    if "gpuops_ladder" not in variables:
        return []
    ladder = variables["gpuops_ladder"]
    if not isinstance(ladder, (list, tuple)) or not all(
        isinstance(rung, Mapping) and rung.get("name") for rung in ladder
    ):
        raise RouteError("gpuops_ladder is no list of rungs with a name each; write one, or none")
    profiles = variables.get("gpuops_profiles")
    if not isinstance(profiles, Mapping):
        raise RouteError("gpuops_profiles is no dictionary of lists of rungs; write one, or none")
    profile = str(variables.get("gpuops_profile"))
    if profile not in profiles:
        choices = ", ".join(str(name) for name in profiles)
        raise RouteError(f"gpuops_profile is '{profile}'; write one of {choices}")
    known = [str(rung["name"]) for rung in ladder]
    twice = [name for name in known if known.count(name) > 1]
    if twice or not known:
        wrong = f"has two rungs called '{twice[0]}'" if twice else "has no rung"
        raise RouteError(f"gpuops_ladder {wrong}; write one of each name, or leave it out")
    wanted = named(variables, "gpuops_rungs") or words(profiles, profile)
    for name in wanted:
        if name not in known:
            raise RouteError(f"there is no rung '{name}'; write some of {', '.join(known)}")
    # A rung is an execution, so one that would select nobody is left out.
    quits = variables.get("gpuops_mps") == "quit"
    chosen = [rung for rung in ladder if str(rung["name"]) in wanted]
    left = [rung for rung in chosen if quits or rung.get("select") != "mps"]
    if not left:
        hint = "set gpuops_mps=quit, or name others" if chosen else "name some of gpuops_ladder"
        raise RouteError(f"there is no rung to climb; {hint}")
    for rung in left:
        if "wait" in rung:
            seconds(rung, "wait", 1.0, f"wait of the rung '{rung['name']}'")
    return left


def check_verify(variables: Mapping[str, Any]) -> None:
    """What the verification needs; with no retry Ansible would never look at its condition.

    :raises RouteError: one of them cannot be.
    """
    whole(variables, "gpuops_verify_retries", 1, least=1)
    for key in ("gpuops_verify_delay", "gpuops_verify_fresh"):
        if variables.get(key) not in (0, "0", 0.0):
            seconds(variables, key, 1.0)


def whole(variables: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    """A variable that must be a whole number, and not below the least."""
    value = variables.get(key)
    if value is None:
        return default
    text = "" if isinstance(value, bool) or len(str(value)) > 18 else str(value)
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise RouteError(
            f"{key} is '{str(value)[:40]}'; write a whole number of {least or 'zero'} or more"
        )
    return int(text)


def seconds(variables: Mapping[str, Any], key: str, default: float, words: str = "") -> float:
    """A variable that must be a number of seconds above zero.

    :param words: what to call it, if not by its key.
    """
    value = variables.get(key)
    if value is None:
        return default
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number <= deadline.LONGEST:
        raise RouteError(
            f"{words or key} is '{value}'; write a number of seconds above zero, at most a day"
        )
    return number


def named(variables: Mapping[str, Any], key: str) -> list[str]:
    """A variable that holds a run back by what it names. An empty list is none; an empty word not.

    :raises RouteError: what should have been named is missing, as after ``-e key=$UNSET``; taken
        for none it would widen the run, or protect nobody.
    """
    found = words(variables, key)
    if "" in found or (not found and not isinstance(variables.get(key, []), (list, tuple))):
        raise RouteError(f"{key} is given and names nothing; name something, or leave it out")
    return found


def words(variables: Mapping[str, Any], key: str) -> list[str]:
    """A variable that is a list of words; one word or number, or words with commas, will do."""
    value = variables.get(key)
    if value is None:
        return []
    if is_word(value):
        return [part.strip() for part in str(value).split(",") if part.strip()]
    if isinstance(value, (list, tuple)) and all(map(is_word, value)):
        return [str(part).strip() for part in value]
    raise RouteError(f"{key} is '{value}'; write a list")


def is_word(value: Any) -> bool:
    """A text or a number; ``true`` is neither."""
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def ranges(gpus: list[str]) -> list[str]:
    """GPUs with ``0-3`` written out."""
    found: list[str] = []
    for gpu in gpus:
        ends = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", gpu)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        if ends and not numbers:
            raise RouteError(f"gpuops_gpus names '{gpu}'; write the smaller number first")
        found += map(str, numbers) if ends else [gpu]
    return found
