"""What a run remembers of itself: how often a command has come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import holders, restarts


def there(pid: int, start: int) -> holders.Holder:
    holder = holders.Holder(pid)
    holder.start, holder.name, holder.command = start, "python3", "python3 -m server"
    return holder


def done(pid: int, start: int, at: int, rung: str = "kill", result: str = "sent") -> dict[str, Any]:
    return {
        "node_pid": pid,
        "start": start,
        "at": at,
        "rung": rung,
        "result": result,
        "name": "python3",
        "command": "python3 -m server",
    }


@pytest.mark.parametrize(
    ("earlier", "times"),
    [
        ([], 0),
        # The same process, signalled before and still there, has not come back.
        ([done(9, 900, 950)], 0),
        ([done(5, 100, 800)], 1),
        # Told at two rungs, it was still one life.
        ([done(5, 100, 300, "terminate"), done(5, 100, 800)], 1),
        # Eight workers that ended together are one generation.
        ([done(pid, 100 + pid, 800) for pid in range(10, 18)], 1),
        ([done(5, 100, 300), done(6, 350, 800)], 2),
        ([done(5, 100, 200), done(6, 250, 400), done(7, 450, 800)], 3),
        # One that was there all along beside it is no life before.
        ([done(5, 100, 950)], 0),
        ([done(5, 100, 800, result="gone")], 0),
        ([dict(done(5, 100, 800), command="another")], 0),
        # A whole life within one tick of the clock.
        ([done(5, 900, 900)], 1),
    ],
)
def test_how_often_a_command_came_back(earlier: list[dict[str, Any]], times: int) -> None:
    assert restarts.times(there(9, 900), earlier) == times


@given(
    st.lists(
        st.builds(done, st.integers(2, 30), st.integers(0, 50), st.integers(0, 50)), max_size=30
    ),
    st.integers(0, 50),
)
def test_counting_ends_and_counts_no_more_than_there_were(
    earlier: list[dict[str, Any]], start: int
) -> None:
    assert 0 <= restarts.times(there(1, start), earlier) <= len(earlier)
