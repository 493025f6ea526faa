# SPDX-License-Identifier: GPL-3.0-or-later
"""A batch on the acting host: each target has its own answer, whatever becomes of the others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    node,
    nvidia_smi,
    program,
    work,
)


class Idle:
    """Stands for the readers and for what the targets share, where a test needs neither."""

    stuck = ""
    in_container = False

    def __init__(self, *_: object) -> None:
        self.session = SimpleNamespace(close=lambda: None)
        self.began = time.monotonic()

    def start_others(self) -> None:
        """Nothing to start."""

    def of(self, _: object) -> Any:
        """No reader."""
        return self.session


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "Readers", Idle)
    monkeypatch.setattr(node, "Node", Idle)


RUNG = {"name": "kill", "select": "devices", "signal": "KILL", "wait": 5.0}


def release(*specs: dict[str, Any], **more: Any) -> dict[str, dict[str, Any]]:
    """What comes of a release of these targets, by name."""
    request = {
        "verb": "release",
        "check": False,
        "targets": list(specs),
        "earlier": {},
        "rung": RUNG,
        **more,
    }
    hosts: dict[str, dict[str, Any]] = program.run(request)["hosts"]
    return hosts


@pytest.mark.usefixtures("idle")
def test_the_signals_of_a_work_that_is_given_up_stay_in_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def climb(self: work.Work, rung: dict[str, Any]) -> dict[str, Any]:
        self.actions.append({"rung": rung["name"], "result": "sent"})
        time.sleep(60)
        return {}

    monkeypatch.setattr(work.Work, "release", climb)
    monkeypatch.setattr(deadline, "of_request", lambda _: 0.5)
    answer = release({"name": "node1"})["node1"]
    assert answer["reason"] == "the work on node1 was given up after 0.5 s"
    assert (answer["verdict"], answer["changed"]) == ("unknown", True)
    assert answer["actions"] == [{"rung": "kill", "result": "sent"}]
