# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of the wrapper share: recorded runs, made-up reports, and a lab."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuops.events import Collector, Step
from gpuops.report import Report
from tests import properties
from tests.lab import Lab
from tests.lab.node import which_missing

properties.load()

EVENTS = Path(__file__).parent / "events"
RECORDED = sorted(path.stem for path in EVENTS.glob("*.json"))

Replay = Callable[..., Report]


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], dict[str, Any]]:
    """A recorded run by name: what was asked for, and its events."""

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((EVENTS / f"{name}.json").read_text(encoding="utf-8"))
        return found

    return read


@pytest.fixture(scope="session")
def replay(recorded: Callable[[str], dict[str, Any]]) -> Replay:
    """The report of a recorded run; ``upto`` cuts it off before the first event of that kind."""

    def play(
        name: str,
        upto: Callable[[dict[str, Any]], bool] | None = None,
        ended: str = "",
        watch: Callable[[Step], None] | None = None,
    ) -> Report:
        run = recorded(name)
        collector = Collector(run["verb"], run["check"], watch)
        for event in run["events"]:
            if upto is not None and upto(event):
                break
            collector.take(event)
        return collector.report(
            limit=run["limit"],
            started="2026-11-29T16:00:00.000+00:00",
            seconds=3.5,
            ended=ended,
            versions={"ansible-core": "2.19.14", "ansible-runner": "2.4.3", "python": "3.11.7"},
        )

    return play


@pytest.fixture(scope="session")
def the_lab() -> Iterator[Lab]:
    """Two Proxmox hosts with three containers, and two bare nodes."""
    if os.geteuid() != 0 or which_missing():
        pytest.skip("needs root and LXC")
    made = Lab(f"wrapper-{os.getpid()}")
    made.up(cts="129,130,131@pve2", nodes=2)
    yield made
    made.down()


@pytest.fixture
def lab(the_lab: Lab) -> Iterator[Lab]:
    """The lab, with nobody on it before and after."""
    yield the_lab
    for name in ("pve1", "pve2", "node1", "node2"):
        the_lab.mend(name)
    the_lab.heal()
    the_lab.drop()
