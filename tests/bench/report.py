# SPDX-License-Identifier: GPL-3.0-or-later
"""What was measured: one row for each figure, a table and a JSON document of them."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build/bench.json"


@dataclass
class Row:
    """A figure in pairs, or a count. A row without ``must`` is only told, not asked for."""

    figure: str
    what: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)  # empty: ours are counts, not seconds
    must: float | None = None
    aim: float | None = None

    @property
    def values(self) -> list[float]:
        """The ratio of each pair, or the counts."""
        if not self.theirs:
            return self.ours
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def measured(self) -> float:
        """What is held against must and aim: the median of ratios, but the worst of counts."""
        return statistics.median(self.values) if self.theirs else max(self.values)

    def within(self, limit: float | None) -> bool | None:
        """Is the measured value within that limit, if there is one?"""
        return None if limit is None else self.measured <= limit

    def line(self) -> str:
        """The row as one line of progress."""
        if not self.theirs:
            return f"{self.figure}: " + " ".join(f"{value:g}" for value in self.values)
        low, high = min(self.values), max(self.values)
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        ratio = f"{self.measured:.2f} ({low:.2f} to {high:.2f})"
        return f"{self.figure}: {ratio}: {ours:.3f} s ÷ {theirs:.3f} s"

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        values = self.values
        row: dict[str, Any] = {
            "figure": self.figure,
            "what": self.what,
            "kind": "ratio" if self.theirs else "count",
            "min": min(values),
            "median": statistics.median(values),
            "max": max(values),
            "must": self.must,
            "aim": self.aim,
            "met": self.within(self.must),
            "aim_met": self.within(self.aim),
        }
        if self.theirs:
            return row | {"seconds": {"ours": self.ours, "theirs": self.theirs}}
        return row | {"counts": self.ours}


def table(rows: list[Row]) -> str:
    """The rows for people."""
    head = ("figure", "median", "min", "max", "must", "aim", "must met", "aim met", "seconds")
    lines = [head]
    for row in rows:
        data = row.as_dict()
        numbers = [f"{data[key]:.2f}" if row.theirs else f"{data[key]:.4g}" for key in head[1:4]]
        limits = ["" if limit is None else f"≤ {limit:g}" for limit in (row.must, row.aim)]
        answers = [{None: "", True: "yes", False: "NO"}[data[key]] for key in ("met", "aim_met")]
        seconds = ""
        if row.theirs:
            seconds = f"{statistics.median(row.ours):.3f} ÷ {statistics.median(row.theirs):.3f}"
        lines.append((row.figure, *numbers, *limits, *answers, seconds))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def conditions(pairs: int) -> dict[str, Any]:
    """Under what it was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "pairs": pairs,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ansible_core": version("ansible-core"),
        "load_before": os.getloadavg(),
    }


def document(about: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "conditions": about | {"load_after": os.getloadavg()},
        "figures": [row.as_dict() for row in rows if row.must is not None],
        "extra": [row.as_dict() for row in rows if row.must is None],
    }
