"""Runs take turns on a target, and whom one has told to end the next does not tell again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, owners, turns

from .conftest import Python


@pytest.fixture
def holder() -> Iterator[holders.Holder]:
    """A process that lives through the test."""
    child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(60)"])
    found = holders.Holder(child.pid)
    assert holders.describe(found)
    yield found
    child.kill()
    child.wait()


@pytest.fixture(params=["attribute", "file"])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, str]:
    """A root of control groups, with attributes or without, and a /run of the test's own."""
    if request.param == "file":

        def refuse(*_: object) -> None:
            raise OSError

        monkeypatch.setattr(os, "setxattr", refuse)
    (tmp_path / "cgroup" / "lxc" / "129" / "ns").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    return str(tmp_path / "cgroup"), str(tmp_path / "run")


def told(holder: holders.Holder, signal: str, result: str = "sent") -> dict[str, object]:
    return {
        "pid": holder.ns_pid,
        "node_pid": holder.pid,
        "start": holder.start,
        "signal": signal,
        "result": result,
        "at": 950,
    }


def test_a_turn_is_waited_for_and_no_longer_than_said(place: tuple[str, str]) -> None:
    first, second = turns.Turn(129, *place), turns.Turn(129, *place)
    assert first.take(0.0) is not None
    assert second.take(0.2) is None
    first.end()
    assert second.take(0.2) is not None
    second.end()


def test_a_container_that_stops_meanwhile_has_no_turn_to_take(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "container_cgroup", lambda *_: f"{place[0]}/lxc/130/ns")
    with pytest.raises(turns.TurnError, match=r"^container 130 is not running any more$") as caught:
        turns.Turn(130, *place)
    assert "pct start" in caught.value.remedy


@pytest.mark.parametrize("vmid", [0, 130])
def test_without_control_groups_there_are_no_turns(place: tuple[str, str], vmid: int) -> None:
    with pytest.raises(turns.TurnError, match=r"^there is no .*/nowhere on the acting host"):
        turns.Turn(vmid, f"{place[0]}/nowhere", place[1])


LOCK = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""


def test_who_has_the_turn_is_known(place: tuple[str, str], python: Python) -> None:
    """Anybody who may read the folder can take its lock, and not only a run of gpuops."""
    turn, other = turns.Turn(129, *place), turns.Turn(0, *place)
    assert turn.owner() == 0
    child = python(LOCK, f"{place[0]}/lxc/129/ns")
    assert turn.take(0.1) is None
    assert (turn.owner(), other.owner()) == (child.pid, 0)
    for each in (turn, other):
        each.end()


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


def test_a_turn_is_given_back_also_where_a_copy_of_the_run_does_not_end(
    place: tuple[str, str],
) -> None:
    first, second = turns.Turn(129, *place), turns.Turn(129, *place)
    assert first.take(0.0) is not None
    copy = subprocess.Popen(["sleep", "60"], pass_fds=[first._lock])
    try:
        first.end()
        assert second.take(0.0) is not None
        second.end()
    finally:
        copy.kill()
        copy.wait()


def test_who_was_told_is_remembered_by_the_next_run(
    place: tuple[str, str], holder: holders.Holder
) -> None:
    turns.Turn(129, *place).remember([told(holder, "TERM")])
    later = turns.Turn(129, *place)
    assert later.told_at(holder, "TERM")
    # Another signal, another container, another process with the number: none was told.
    assert not later.told_at(holder, "INT")
    assert not turns.Turn(0, *place).told_at(holder, "TERM")
    other = holders.Holder(holder.pid)
    other.start = holder.start + 1
    assert not later.told_at(other, "TERM")


@pytest.mark.parametrize(
    ("signal", "result"), [("KILL", "sent"), ("TERM", "gone"), ("quit", "sent")]
)
def test_what_may_be_repeated_or_was_not_sent_is_not_kept(
    place: tuple[str, str], holder: holders.Holder, signal: str, result: str
) -> None:
    turn = turns.Turn(129, *place)
    turn.remember([told(holder, signal, result)])
    assert not turn.told_at(holder, signal)
    turn.remember([told(holder, "INT")])
    assert turn.told_at(holder, "INT")
    assert not turn.told_at(holder, signal)


def test_only_the_newest_are_kept(
    place: tuple[str, str], holder: holders.Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MOST_TOLD", 2)
    turn = turns.Turn(129, *place)
    others = [holders.Holder(pid) for pid in (1, 2, 3)]
    for each in (*others, holder):
        turn.remember([told(each, "TERM")])
    turn.remember([])
    assert [turn.told_at(each, "TERM") for each in (*others, holder)] == [0, 0, 950, 950]


def test_as_many_as_are_kept_fit_into_an_attribute() -> None:
    entry = [2**22, 2**63, "TERM", 2**63]
    assert len(json.dumps([entry] * turns.MOST_TOLD)) < 64 << 10


def test_it_is_the_same_process_from_around_a_container_and_from_inside(
    place: tuple[str, str], holder: holders.Holder
) -> None:
    around = holders.Holder(90_010)
    around.ns_pid, around.start = holder.ns_pid, holder.start
    turns.Turn(129, *place).remember([told(around, "TERM")])
    assert turns.Turn(129, *place).told_at(holder, "TERM")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"7", b'{"a": 1}', b"\xff", b"[" * 50_000, b"[[], 7, [1]]"]
)
def test_a_damaged_memory_tells_nothing_and_is_written_anew(
    place: tuple[str, str], holder: holders.Holder, content: bytes
) -> None:
    turn = turns.Turn(129, *place)
    try:
        os.setxattr(f"{place[0]}/lxc/129/ns", turns.TOLD, content)
    except OSError:
        (Path(place[1]) / "gpuops-told-129.json").write_bytes(content)
    assert not turn.told_at(holder, "TERM")
    turn.remember([told(holder, "TERM")])
    assert turn.told_at(holder, "TERM")


INSIDE = """
import sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuops.gpu.plugins.module_utils import holders, turns
turn = turns.Turn(0, sys.argv[2], sys.argv[3])
found = holders.Holder(int(sys.argv[4]))
assert holders.describe(found)
print(turn.take(0.0), turn.told_at(found, "TERM"))
"""


def test_a_container_shares_its_turn_and_its_memory_with_the_node_around_it(
    holder: holders.Holder, tmp_path: Path, root: Path
) -> None:
    """On a real control group, which is the root of a mount in a cgroup namespace of its own."""
    tops = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    top = next((top for top in tops if Path(top, "cgroup.procs").exists()), None)
    if top is None:
        pytest.skip("no cgroup v2 here")
    vmid = os.getpid()
    group = Path(top) / f"lxc.payload.{vmid}"
    group.mkdir()
    try:
        turn = turns.Turn(vmid, top, str(tmp_path))
        assert turn.take(0.0) is not None
        turn.remember([told(holder, "TERM")])
        inside = tmp_path / "cgroup"
        inside.mkdir()
        mount = f'mount -t cgroup2 none {inside} && exec "$@"'
        enter = f'echo 0 >{group}/cgroup.procs && exec unshare --cgroup --mount sh -c "$0" sh "$@"'
        python3 = [sys.executable, "-c", INSIDE, str(root / "collections")]
        ran = subprocess.run(
            ["sh", "-c", enter, mount, *python3, str(inside), str(tmp_path), str(holder.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.stdout, ran.stderr) == ("None 950\n", "")
        turn.end()
    finally:
        group.rmdir()
