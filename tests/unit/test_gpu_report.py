# SPDX-License-Identifier: GPL-3.0-or-later
"""The figures of docs/real-gpu.md: what is counted from when, and what is called met."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tests.commit
from tests.gpu import parts, report

BEGAN = 1000.0  # by the stopwatch's clock


class Watcher:
    """A stopwatch that saw these processes go, and zero at the end."""

    def __init__(self, dying: dict[int, float], zero: float) -> None:
        self.dying, self.zero = dying, zero

    def zero_after(self, _when: float) -> float:
        """The first zero that lasted."""
        return self.zero


def action(rung: str, after: float, signal: str = "KILL") -> dict[str, Any]:
    """A signal, as the product notes it: in ticks since boot."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    at = round((BEGAN + after + since_boot) / report.TICK)
    return {"rung": rung, "signal": signal, "name": "python3", "at": at}


def measured(
    actions: list[dict[str, Any]], second_zero: float, dying: dict[int, float], zero: float
) -> report.Row:
    """A scenario in which this was done and seen, in seconds after it began."""
    names = list(dict.fromkeys(each["rung"] for each in actions))
    rungs = [{"name": name, "timings": {}} for name in names]
    rungs[-1]["timings"] = {"second_zero": second_zero}
    result = {"record": [], "actions": actions, "rungs": rungs, "verdict": "clean", "reason": ""}
    played = parts.Played("gpu1", 0, 1.0, BEGAN, [{"host": "gpu1", "result": result}], "")
    row = report.Row("a scenario", played, {}, 8719, 0, [])
    victims: Any = [parts.Process("victim", pid) for pid in dying]
    watcher: Any = Watcher({pid: BEGAN + at for pid, at in dying.items()}, BEGAN + zero)
    row.measure(watcher, victims)
    return row


def test_one_rung() -> None:
    row = measured([action("kill", 0.0), action("kill", 0.01)], 0.15, {-1: 0.001, -2: 0.002}, 0.101)
    assert row.driver_seconds == pytest.approx(0.1)
    assert row.from_first_signal == pytest.approx(0.15, abs=2 * report.TICK)
    assert row.ratio == pytest.approx(1.5)


def test_the_wait_of_a_gentle_rung_is_in_the_time_from_the_first_signal_and_not_in_the_ratio() -> (
    None
):
    row = measured([action("terminate", 0.0), action("kill", 5.0)], 0.12, {-1: 5.001}, 5.101)
    assert row.from_first_signal == pytest.approx(5.12, abs=2 * report.TICK)
    assert row.ratio == pytest.approx(1.2, rel=0.01)


def test_who_went_before_the_last_rung_is_not_in_the_drivers_time() -> None:
    quit_then_term = [action("mps", 0.0, "quit"), action("terminate", 0.4, "TERM")]
    row = measured(quit_then_term, 0.12, {-1: 0.05, -2: 0.402}, 0.502)
    assert row.driver_seconds == pytest.approx(0.1)
    assert row.ratio == pytest.approx(1.2)
    assert row.from_first_signal is None


def test_where_mps_alone_was_told_to_quit_nothing_can_be_counted() -> None:
    row = measured([action("mps", 0.0, "quit")], 2.4, {-1: 0.0}, 0.1)
    assert row.ratio is row.from_first_signal is None


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (None, "-"),
        (1.5, "must and aim met"),
        (2.08, "must met, aim missed"),
        (3.01, "must missed"),
    ],
)
def test_what_is_missed_is_said(ratio: float | None, said: str) -> None:
    assert report.judged(ratio) == said


def test_the_document_names_what_missed_the_aim_and_what_was_not_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPU_TEST_COMMIT", "abc123")
    monkeypatch.setattr(parts, "smi", lambda *_: "NVIDIA H200, 580.159.04, 143771\n")
    monkeypatch.setattr(parts, "NODE_PYTHON", sys.executable)
    figures = report.Figures()
    figures.not_played["PyTorch, 8 GiB"] = "no PyTorch"
    row = measured([action("kill", 0.0)], 0.208, {-1: 0.001}, 0.101)
    row.expected, row.seen = "clean", {"scan": {"seconds": 0.01}, "program_seconds": 0.1}
    figures.rows.append(row)
    text = figures.document()
    assert "| commit | abc123 |" in text
    assert "met in 0 of 1; missed: a scenario (2.08)" in text
    assert "| 0.208 | 0.208 | 0.100 | 2.08 | must met, aim missed |" in text
    assert "with the expected verdict 1; not played: 1 |" in text
    assert "- PyTorch, 8 GiB: no PyTorch" in text


def test_the_commit_is_told_where_there_is_no_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GPU_TEST_COMMIT", raising=False)
    monkeypatch.setattr(tests.commit, "ROOT", tmp_path)
    assert "GPU_TEST_COMMIT is not set" in tests.commit.commit()
    monkeypatch.setenv("GPU_TEST_COMMIT", "abc123")
    assert tests.commit.commit() == "abc123"


def test_changes_since_the_commit_are_marked_but_those_of_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GPU_TEST_COMMIT", raising=False)
    monkeypatch.setattr(tests.commit, "ROOT", tmp_path)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/real-gpu.md").touch()
    clean = tests.commit.commit()
    assert len(clean) == 12
    (tmp_path / "code.py").touch()
    assert tests.commit.commit() == f"{clean}, with changes that are in no commit"
