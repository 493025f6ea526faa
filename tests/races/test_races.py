# SPDX-License-Identifier: GPL-3.0-or-later
"""The races with few rounds, and that each of them would notice what it is there for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab
from tests.patience import until
from tests.races import pids
from tests.races.operators import WORKLOADS, Played, Site, signalled
from tests.scenarios.runner import Process, Run

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A lab for the races that need one."""
    with Site(f"races-{os.getpid()}") as site:
        yield site


# --- PIDs that change hands ---


def test_numbers_change_hands() -> None:
    """Nobody but the process that was seen is ever signalled."""
    result = pids.race(5)
    assert result.wrong == []
    assert result.outcomes["sent"] > 10
    assert result.counts["numbers of holders taken over at once"] > 20
    assert result.outcomes["gone"] + result.outcomes["let go"] > 3  # the guards were needed


def test_number_changes_hands_before_it_is_read() -> None:
    """Evidence of one process, identity of the next, which is somebody else again by then."""
    result = pids.race(2, aimed=True)
    assert result.wrong == []
    assert result.counts["numbers of holders taken over at once"] > 3


@pytest.mark.parametrize(
    ("guards", "aimed"),
    [
        ("no start time", False),
        ("no handle", False),
        ("no re-check", False),
        ("no second reading", True),
    ],
)
def test_race_of_numbers_notices(guards: str, aimed: bool) -> None:
    """Each guard is needed: without it somebody is signalled who must not be."""
    result = pids.race(60, guards=guards, until_first=True, aimed=aimed)
    assert any("was ended" in each for each in result.wrong), result


# --- the whole command ---


def test_two_operators(site: Site) -> None:
    """Both end with the truth, and nobody is signalled twice."""
    assert site.two_operators(3).wrong == []


def test_controller_killed(site: Site) -> None:
    """Nothing of ours stays on the node, and the next run ends clean."""
    assert site.interrupted(4, site.kill_controller).wrong == []


def test_connection_cut(site: Site) -> None:
    """Likewise where sshd's processes for the connection are killed."""
    played = site.interrupted(2, site.cut_connection)
    assert played.wrong == []
    assert played.counts["connections cut"] > 0


# --- that these would notice ---


def test_notices_memory_and_harm(site: Site) -> None:
    """A holder that is still there, and a bystander that is not."""
    played = Played(rounds=1)
    site.truth(played)
    assert played.wrong == []
    site.arrange(WORKLOADS[0])
    site.world.bystanders["nobody"] = Process("nobody", os.getpid(), 1)
    try:
        site.truth(played)
    finally:
        site.clear()
    assert ["NOT CLEAN" in each or "HARMED: nobody" in each for each in played.wrong] == [True] * 2


def test_notices_what_is_left(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of ours that goes on running on the node."""
    monkeypatch.setattr("tests.races.operators.PATIENCE", 0.3)
    played = Played(rounds=1)
    process = Lab(site.lab.name).popen(
        ["ssh", "pve1", "timeout 60 python3 -IS -"], stdin=-1, start_new_session=True
    )
    try:
        # The shell that starts it has these words too, and is gone a moment later.
        assert until(lambda: any(each.endswith(": python3 -IS -") for each in site.world.ours()))
        site.gone(played, 0)
    finally:
        process.communicate()  # its input ends, and so does it
    assert "still on the node" in played.wrong[0]


def test_notices_a_rung_climbed_twice() -> None:
    """The same signal for the same process by both, or by one."""
    action = {"node_pid": 7, "start": 1, "rung": "kill", "result": "sent"}
    result = {"verdict": "clean", "actions": [action]}
    run = Run(0, "", 1.0, [{"event": "verdict", "host": "ct129", "result": result}], {})
    assert signalled(run) == [(7, 1, "kill")]
    played = Played(rounds=1)
    Site.twice(None, played, [run, run])  # type: ignore[arg-type]
    assert played.wrong == ["round 1: climbed twice: both signalled (7, 1, 'kill')"]
    twice = {"verdict": "clean", "actions": [action, action]}
    other = Run(0, "", 1.0, [{"event": "verdict", "host": "ct129", "result": twice}], {})
    nobody = Run(0, "", 1.0, [], {})
    played = Played(rounds=1, counts=Counter())
    Site.twice(None, played, [nobody, other])  # type: ignore[arg-type]
    assert played.wrong == ["round 1: one operator signalled (7, 1, 'kill') 2 times"]
