"""Runs take turns on a target, and whom one has told to end the next does not tell again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, turns


@pytest.fixture
def holder() -> Iterator[holders.Holder]:
    """A process that lives through the test."""
    child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(60)"])
    found = holders.Holder(child.pid)
    assert holders.describe(found)
    yield found
    child.kill()
    child.wait()


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """A root of control groups and a /run of the test's own."""
    (tmp_path / "cgroup" / "lxc" / "129" / "ns").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    return str(tmp_path / "cgroup"), str(tmp_path / "run")


def told(holder: holders.Holder, signal: str, result: str = "sent") -> dict[str, object]:
    return {
        "node_pid": holder.pid,
        "start": holder.start,
        "signal": signal,
        "result": result,
    }


def test_a_turn_is_waited_for_and_no_longer_than_said(place: tuple[str, str]) -> None:
    first, second = turns.Turn(129, *place), turns.Turn(129, *place)
    assert first.take(0.0) is not None
    assert second.take(0.2) is None
    first.end()
    assert second.take(0.2) is not None
    second.end()


def test_containers_and_the_node_do_not_wait_for_each_other(place: tuple[str, str]) -> None:
    container, node = turns.Turn(129, *place), turns.Turn(0, *place)
    assert container.take(0.0) is not None
    assert node.take(0.0) is not None
    container.end()
    node.end()


def test_a_run_that_dies_gives_its_turn_back(place: tuple[str, str]) -> None:
    turn = turns.Turn(129, *place)
    child = os.fork()
    if child == 0:
        turns.Turn(129, *place).take(0.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert turn.take(0.0) is not None
    turn.end()


def test_who_was_told_is_remembered_by_the_next_run(
    place: tuple[str, str], holder: holders.Holder
) -> None:
    turns.Turn(129, *place).remember([told(holder, "TERM")])
    later = turns.Turn(129, *place)
    assert later.was_told(holder, "TERM")
    # Another signal, another container, another process with the number: none was told.
    assert not later.was_told(holder, "INT")
    assert not turns.Turn(0, *place).was_told(holder, "TERM")
    other = holders.Holder(holder.pid)
    other.start = holder.start + 1
    assert not later.was_told(other, "TERM")


@pytest.mark.parametrize(
    ("signal", "result"), [("KILL", "sent"), ("TERM", "gone"), ("quit", "sent")]
)
def test_what_may_be_repeated_or_was_not_sent_is_not_kept(
    place: tuple[str, str], holder: holders.Holder, signal: str, result: str
) -> None:
    turn = turns.Turn(129, *place)
    turn.remember([told(holder, signal, result)])
    assert not turn.was_told(holder, signal)
    assert list(Path(place[1]).iterdir()) == []


def test_nothing_is_kept_of_the_dead(place: tuple[str, str], holder: holders.Holder) -> None:
    gone = subprocess.Popen([sys.executable, "-ISc", "pass"])
    gone.wait()
    dead = holders.Holder(gone.pid)
    turn = turns.Turn(129, *place)
    turn.remember([told(dead, "TERM"), told(holder, "TERM")])
    (file,) = Path(place[1]).iterdir()
    assert json.loads(file.read_text()) == [[holder.pid, holder.start, "TERM"]]
    os.kill(holder.pid, 9)
    os.waitpid(holder.pid, 0)
    turn.remember([])
    assert list(Path(place[1]).iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "null"])
def test_a_damaged_memory_tells_nothing(
    place: tuple[str, str], holder: holders.Holder, content: str
) -> None:
    (Path(place[1]) / "gpuops-told-129.json").write_text(content)
    assert not turns.Turn(129, *place).was_told(holder, "TERM")
