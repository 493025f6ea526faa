"""Whether there is something to read, and whether anybody still listens."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline
from tests.patience import PATIENCE


def test_waiting_ends_with_data_or_at_the_deadline() -> None:
    read, write = os.pipe()
    began = time.monotonic()
    assert not deadline.readable(read, 0.05)
    assert time.monotonic() - began >= 0.05
    os.write(write, b"x")
    assert deadline.readable(read, 5)
    os.close(write)
    os.close(read)


def test_a_pipe_whose_reader_is_gone_is_broken() -> None:
    read, write = os.pipe()
    assert not deadline.is_broken(write)
    os.close(read)
    assert deadline.is_broken(write)
    os.close(write)


def test_a_file_is_never_broken(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        assert not deadline.is_broken(file.fileno())


def test_a_request_has_an_end_after_everything_in_it_that_has_one() -> None:
    def target(smi_timeout: float = 10.0) -> dict[str, object]:
        return {"name": "node1", "smi_timeout": smi_timeout}

    own = deadline.LOOKS + deadline.SLACK
    assert deadline.of_request({"targets": []}) == 20 + deadline.SLACK
    assert deadline.of_request({"targets": [target()]}) == 40 + own
    assert deadline.of_request({"targets": [target(), target(60)]}) == 240 + own
    # Its own wait and the turn of another run.
    rung = {"name": "kill", "wait": 30.0}
    assert deadline.of_request({"targets": [target()], "rung": rung}) == 100 + own
    # What is refused is not waited for.
    for never in (-1.0, 1e300, float("inf"), float("nan")):
        refused = {"targets": [target(never)], "rung": {"name": "kill", "wait": never}}
        assert deadline.of_request(refused) == own
    # More targets than are worked on at once take their turns.
    many = {"targets": [target()] * (deadline.TARGETS_AT_ONCE + 1), "rung": rung}
    assert deadline.of_request(many) == 20 + 2 * (80 + deadline.LOOKS) + deadline.SLACK


def test_a_copy_that_gets_stuck_keeps_nothing_open_but_its_own_pipe() -> None:
    def open_now() -> list[str]:
        there = list(Path("/proc/self/fd").iterdir())
        return [str(each.readlink()) for each in there if each.exists()]

    read, write = os.pipe()
    before = open_now()
    [kept] = deadline.in_a_copy(lambda: " ".join(open_now()).encode(), 5).decode().split()
    assert kept.startswith("pipe:")
    assert kept not in before
    os.close(read)
    os.close(write)


def test_what_is_read_in_a_copy_arrives_whole_or_not_at_all() -> None:
    data = b"x" * 300_000
    assert deadline.in_a_copy(lambda: data, 5) == data
    assert deadline.in_a_copy(bytes, 5) == b""

    def stuck() -> bytes:
        time.sleep(60)
        return data

    began = time.monotonic()
    assert deadline.in_a_copy(stuck, 0.1) == b""
    assert 0.1 <= time.monotonic() - began < PATIENCE
