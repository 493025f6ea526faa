# SPDX-License-Identifier: GPL-3.0-or-later
"""Play every scenario on the lab, and keep the table of them true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.scenarios import docs
from tests.scenarios.runner import World
from tests.scenarios.scenario import Scenario, load_all

SCENARIOS = load_all()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One lab for all scenarios, with bystanders that live through them."""
    world = World(Lab(f"scenarios-{os.getpid()}"))
    world.record = tmp_path_factory.mktemp("scenarios") / "record.jsonl"
    try:
        yield world
    finally:
        world.down()


@pytest.mark.lab
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_scenario(world: World, scenario: Scenario) -> None:
    """What the file says comes true, and nothing else."""
    world.play(scenario)


def test_at_least_sixty() -> None:
    """The matrix of issue 3."""
    assert len(SCENARIOS) >= 60


def test_table_is_current(root: Path) -> None:
    """docs/scenarios.md is what the files say (python -m tests.scenarios --write-docs)."""
    assert (root / "docs/scenarios.md").read_text(encoding="utf-8") == docs.table(SCENARIOS)
