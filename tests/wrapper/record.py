# SPDX-License-Identifier: GPL-3.0-or-later
"""Records the event streams of real runs on the lab, for the tests that need no lab.

    python -m tests.wrapper.record

Each situation becomes ``events/NAME.json``: what was asked for, and the events with what the
package reads of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuops import runner
from gpuops.api import PLAYBOOKS

FOLDER = Path(__file__).parent / "events"
HELD: dict[str, Any] = {"host": "ct129", "gpus": "0-1", "mib": 76115, "ignore_term": True}
ONCE = {"gpuops_verify_retries": 1}

# name: what is arranged, the verb, the limit, variables, check mode
SITUATIONS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any], bool]] = {
    "reset-held": ({"hold": [HELD]}, "reset", "ct129,node1,pve1", {}, False),
    "reset-clean": ({}, "reset", "ct129,ct130,node1", {}, False),
    "reset-check": ({"hold": [HELD]}, "reset", "ct129", {}, True),
    "reset-blocked": (
        {"hold": [HELD, {"host": "ct130", "gpus": "1", "mib": 900}]},
        "reset",
        "ct129",
        {"gpuops_profile": "now", **ONCE},
        False,
    ),
    "reset-unkillable": (
        {"hold": [{"host": "ct129", "gpus": "0", "kind": "unkillable"}]},
        "reset",
        "ct129,node1",
        {"gpuops_profile": "now", **ONCE},
        False,
    ),
    "reset-unreachable": (
        {"cut": "pve1", "hold": [{"host": "node1", "gpus": "0"}]},
        "reset",
        "ct129,ct130,node1",
        {},
        False,
    ),
    "reset-refused": ({}, "reset", "ct129,node1", {"gpuops_scope": "user:alice"}, False),
    "reset-no-hosts": ({}, "reset", "ct999", {}, False),
    "status-held": ({"hold": [HELD]}, "status", "ct129,ct130", {}, False),
    "status-unknown": (
        {"fault": ("ct129", "smi-error", "not_loaded")},
        "status",
        "ct129",
        {},
        False,
    ),
    "plan-held": ({"hold": [HELD]}, "plan", "ct129,node1", {}, False),
    "verify-held": ({"hold": [HELD]}, "verify", "ct129", ONCE, False),
    "verify-some": (
        {"hold": [{"host": "node1", "gpus": "0"}]},
        "verify",
        "ct129,node1",
        {"gpuops_gpus": "{{ [1] if inventory_hostname == 'node1' else [] }}"},
        False,
    ),
}
LEFT_OUT = ("diff", "earlier", "plan", "validate_args_context", "results", "exception")


def trimmed(event: Mapping[str, Any]) -> dict[str, Any]:
    """What the package reads of an event."""
    data = event.get("event_data") or {}
    kept = {
        name: data[name] for name in ("host", "resolved_action", "ignore_errors") if name in data
    }
    if isinstance(data.get("res"), dict):
        kept["res"] = {name: each for name, each in data["res"].items() if name not in LEFT_OUT}
    if event["event"] == "playbook_on_stats":
        kept = {name: data.get(name) for name in ("failures", "dark", "ok", "changed")}
    words = event.get("stdout", "") if not event["event"].startswith(("runner", "playbook")) else ""
    return {
        "event": event["event"],
        "created": event.get("created", ""),
        "stdout": words,
        "event_data": kept,
    }


def record(name: str) -> None:
    """Run one situation, inside the lab's network, and write its events."""
    _, verb, limit, variables, check = SITUATIONS[name]
    events: list[dict[str, Any]] = []
    runner.run(
        PLAYBOOKS[verb],
        lambda event: events.append(trimmed(event)),
        limit=limit,
        variables=variables,
        check=check,
    )
    whole = {"verb": verb, "check": check or verb == "plan", "limit": limit}
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    head = json.dumps(whole)[:-1]
    (FOLDER / f"{name}.json").write_text(f'{head}, "events": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """All situations, each on a lab of its own."""
    from tests.lab import Lab

    if len(sys.argv) > 1:
        record(sys.argv[1])
        return
    for name, (given, *_) in SITUATIONS.items():
        lab = Lab("wrapper-record")
        lab.up(gpus=2)
        try:
            for each in given.get("hold", []):
                options = dict(each)
                lab.hold(options.pop("host"), **options)
            if "fault" in given:
                lab.fault(*given["fault"])
            if "cut" in given:
                lab.cut(given["cut"])
            done = lab.run([sys.executable, "-m", "tests.wrapper.record", name])
            print(f"{name}: {done.returncode}", flush=True)
        finally:
            lab.down()


if __name__ == "__main__":
    main()
