"""What the simulated driver does with time, without waiting for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab import driver


@pytest.mark.parametrize(
    ("asked", "later"),
    [
        ([10.0], 0),
        ([10.0, 10.1, 10.2], 0),  # -lms 100
        ([10.0, 10.02, 10.04, 10.06], 3),  # -lms 20
        ([10.0, 10.2, 10.22], 1),
    ],
)
def test_only_quick_queries_of_a_loop_slow_a_release_down(asked: list[float], later: int) -> None:
    made: Any = driver.Driver.__new__(driver.Driver)
    made.asked_again = 0.0
    made.holders = [SimpleNamespace(release_at={0: 20.0, 3: 21.0}), SimpleNamespace(release_at={})]
    for now in asked:
        made.slow_releases(now)
    expected = {0: 20.0 + later * driver.SLOWED_BY, 3: 21.0 + later * driver.SLOWED_BY}
    assert made.holders[0].release_at == pytest.approx(expected)
    assert made.holders[1].release_at == {}
