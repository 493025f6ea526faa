# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of gpu_release: one rung a call, and who is still to be climbed for."""

from __future__ import annotations

import time
from typing import Any

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments
from ansible_collections.gpuops.gpu.plugins.plugin_utils.batch import (
    BatchAction,
    NoResult,
    some_of,
)


class ActionModule(BatchAction):
    """Climb one rung for the targets that are not settled yet, or take one host's outcome."""

    VERB = "release"
    SPEC = arguments.RELEASE
    CONTROLLER_ONLY = ("after",)

    def prepare(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        """Leave out who is settled after the step before; pass on what was done so far."""
        args = super().prepare(task_vars)
        if "after" not in self._task.args:
            return args
        after = self._task.args["after"].get("hosts", {})
        hosts = {name: host for name, host in after.items() if not host["settled"]}
        args["targets"] = [target for target in args["targets"] if target["name"] in hosts]
        args["earlier"] = {
            name: host.get("earlier", []) + host["actions"] for name, host in hosts.items()
        }
        return args

    def request(self, args: dict[str, Any]) -> dict[str, Any]:
        """Check mode travels with the request: the node then only says whom it would signal."""
        return dict(super().request(args), check=self._task.check_mode)

    def execute(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """As any batch; what was done so far stays with each host for the next rung."""
        answer = super().execute(args, task_vars)
        answer["ended_at"] = time.time()
        for name, host in answer.get("hosts", {}).items():
            host["earlier"] = args["earlier"].get(name, [])
            host["rung"] = args["rung"]["name"]
            host["proved_at"] = answer["ended_at"] - (answer["seconds"] - host.get("done", 0.0))
        return answer

    def take(self, batch: Any, name: str) -> dict[str, Any]:
        """Also whether the batch proved all its hosts clean, and how old that was at its end."""
        taken = super().take(batch, name)
        rounds = batch.get("results", [batch]) if isinstance(batch, dict) else []
        last = {host: each for one in rounds for host, each in one.get("hosts", {}).items()}
        taken["proved"] = bool(last) and all(each["verdict"] == "clean" for each in last.values())
        # The oldest proof and the end of the batch are the same for all its hosts: so they agree on
        # whether it is fresh, and one of them reads for all if it is not.
        oldest = min((each.get("proved_at", 0.0) for each in last.values()), default=0.0)
        taken["age"] = max((one.get("ended_at", 0.0) for one in rounds), default=0.0) - oldest
        return taken

    def lost(self, error: NoResult) -> dict[str, Any]:
        """Whom it has signalled before the acting host was lost is said all the same."""
        if not error.rounds:
            return error.result
        merged = self.merge(error.rounds)
        done = {key: merged[key] for key in ("actions", "changed", "record", "rungs")}
        sentences = [str(error.result["msg"]), *some_of(merged["record"])]
        return {**done, **error.result, "msg": "; ".join(sentences)}

    def merge(self, rounds: list[dict[str, Any]]) -> dict[str, Any]:
        """The last state, with everything that was done on the way to it, and a diff."""
        merged = dict(rounds[-1])
        merged["before"] = rounds[0].get("before", rounds[0]["gpus"])
        merged["actions"] = [action for each in rounds for action in each["actions"]]
        merged["changed"] = any(each["changed"] for each in rounds)
        merged["rungs"] = [
            {
                "name": each["rung"],
                "verdict": each["verdict"],
                "signalled": sum(
                    action["result"] in ("sent", "would be sent") for action in each["actions"]
                ),
                "timings": each["timings"],
            }
            for each in rounds
            if each["actions"]
        ]
        merged["plan"] = rounds[0]["plan"]
        if merged["refused"]:
            return {"failed": True, "msg": f"{merged['name']}: {merged['refused']}"}
        merged["record"] = [_sentence(action) for action in merged["actions"]]
        # In check mode they are all still there; the diff shows what would be.
        gone = {
            action["node_pid"]
            for action in merged["actions"]
            if action["result"] == "would be sent"
        }
        held = [_line(holder) for holder in rounds[0]["holders"]]
        left = [_line(holder) for holder in rounds[-1]["holders"] if holder["node_pid"] not in gone]
        merged["diff"] = {
            "before_header": f"holders of {merged['name']}",
            "after_header": f"holders of {merged['name']}",
            "before": "".join(held),
            "after": "".join(left),
        }
        return merged


def _line(holder: dict[str, Any]) -> str:
    gpus = ",".join(str(minor) for minor in holder["gpus"])
    return f"{holder['node_pid']} {holder['name']} ({holder['owner']}) on GPU {gpus or '-'}\n"


def _sentence(action: dict[str, Any]) -> str:
    node = "" if action["pid"] == action["node_pid"] else f", {action['node_pid']} on the node"
    gpus = ",".join(str(minor) for minor in action["gpus"]) or "-"
    return (
        f"{action['rung']}: {action['signal']} {action['result']}: "
        f"{action['name']} (pid {action['pid']}{node}) on /dev/nvidia{gpus}"
    )
