# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where to act for a host: decided on the controller, before anybody is reached."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments
from ansible_collections.gpuops.gpu.plugins.plugin_utils import plans, routes


class ActionModule(ActionBase):
    """Check what is set for the host, and group it with those of the same acting host."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Entry point of Ansible."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        self.validate_argument_spec(argument_spec={})
        name = str(task_vars["inventory_hostname"])
        groups = task_vars["groups"]
        carriers = set(groups.get("proxmox_hosts", [])) - set(groups.get("gpu_nodes", []))
        names = ("proxmox_vmid", "proxmox_node", *(k for k in task_vars if k.startswith("gpuops_")))
        # Templates one by one: only these, out of all that the inventory says.
        own = {key: self._templar.template(task_vars[key]) for key in names if key in task_vars}
        try:
            self.check_strategy()
            if "gpuops_protect" not in own:
                raise routes.RouteError(
                    "the defaults of the role gpu_route are not known here; list that role before "
                    "this one under roles, or with import_role"
                )
            known = {*groups["all"], *groups}
            for key, words in (("ansible_limit", "-l"), ("gpuops_hosts", "gpuops_hosts")):
                routes.check_limit(own.get(key, task_vars.get(key)), known, words)
            found = routes.route(name, own, set(groups["all"]), carriers)
            found["rungs"] = checked_rungs(own)
            self.take_plan(name, own, found)
        except routes.RouteError as error:
            return dict(result, failed=True, msg=f"{name}: {error}")
        if found["route"] == "carrier":
            if self.asked_for(name, carriers, task_vars):
                reason = "it carries containers and is not reset itself"
                remedy = "name its containers instead, for example -l ct129"
                return dict(result, failed=True, msg=f"{name}: {reason}; {remedy}")
            return dict(result, **found)
        # A group for each acting host: the first of its hosts leads. Its ladder and patience are
        # the others', so only hosts with the same ones are in a group. And only those that run this
        # very task: nobody is acted for whom a condition leaves out.
        alike = [own.get(key) for key in sorted(own) if key.startswith("gpuops_verify_")]
        # The batch too: of several, each has a leader of its own.
        batch = task_vars["ansible_play_batch"]
        same = [self._task._uuid, batch, found["acting"], found["rungs"], alike]
        group = "gpuops_on_" + sha256(json.dumps(same, default=str).encode()).hexdigest()[:12]
        return dict(result, **self.group_by(group, task_vars), **found, group=group)

    def take_plan(self, name: str, own: dict[str, Any], found: dict[str, Any]) -> None:
        """Where the plan lies, if there is one, and whom it allows to be signalled.

        :raises RouteError: it cannot be used.
        """
        file = "".join(routes.named(own, "gpuops_plan"))
        if not file:
            return
        # From the folder where the command was typed; a task may have another.
        path = Path(file).expanduser().absolute()
        found["plan_file"] = str(path)
        if not own.get("gpuops_plan_is_made"):
            found["target"]["plan"] = plans.read(path, name)

    def check_strategy(self) -> None:
        """With another strategy a host would be judged before its leader has acted for it."""
        play = getattr(getattr(self._task, "_parent", None), "_play", None)
        strategy = str(getattr(play, "strategy", None) or "linear").rpartition(".")[2]
        if strategy not in ("linear", "debug"):
            raise routes.RouteError(f"the strategy is '{strategy}'; run this with linear")

    def asked_for(self, name: str, carriers: set[str], task_vars: dict[str, Any]) -> bool:
        """Is a carrier in the play for itself: without any of its containers, though it has some?

        One that has none, in a run over everything, is nobody's mistake.
        """
        played = task_vars["ansible_play_hosts_all"]
        if carriers.issuperset(played):
            return True

        def carries(host: str) -> bool:
            return bool(routes.carrier(task_vars["hostvars"][host])[1] == name)

        if any(carries(host) for host in played):
            return False
        return any(carries(host) for host in task_vars["groups"]["all"])

    def group_by(self, group: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        """Let Ansible's own action make the group: how it does differs between versions."""
        task = self._task.copy()
        task.args = {"key": group}
        action = self._shared_loader_obj.action_loader.get(
            "ansible.builtin.group_by",
            task=task,
            connection=self._connection,
            play_context=self._play_context,
            loader=self._loader,
            templar=self._templar,
            shared_loader_obj=self._shared_loader_obj,
        )
        done: dict[str, Any] = action.run(task_vars=task_vars)
        return done


def checked_rungs(own: dict[str, Any]) -> list[Any]:
    """The rungs to climb, each as the module takes it.

    :raises RouteError: one is none.
    """
    rungs = routes.rungs(own)
    for rung in rungs:
        checked = ArgumentSpecValidator(arguments.RUNG["options"]).validate(dict(rung))
        if checked.error_messages:
            words = "; ".join(checked.error_messages)
            raise routes.RouteError(f"rung '{rung['name']}' of gpuops_ladder: {words}")
    return rungs
