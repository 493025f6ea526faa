# SPDX-License-Identifier: GPL-3.0-or-later
"""The race of PIDs: start it in namespaces of its own, add up what came of it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
# Everything that is entered with them ends with this process, which ends with us.
UNSHARE = "unshare --pid --fork --mount --mount-proc --ipc --cgroup --net --kill-child"


@dataclass
class Result:
    """All rounds together."""

    rounds: int = 0
    wrong: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    let_go_after_check: int = 0
    ladders: int = 0

    def add(self, played: dict[str, Any]) -> None:
        """One round more."""
        self.rounds += 1
        self.wrong += [f"round {self.rounds}: {each}" for each in played["wrong"]]
        self.outcomes.update(played["outcomes"])
        self.counts.update(played["counts"])
        self.let_go_after_check += played["let go between check and signal"]
        self.ladders += played["runs of the ladder"]


def own_pid_max() -> bool:
    """Has each PID namespace its own pid_max? Since Linux 6.14; before it is the machine's."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return bool(numbers) and tuple(map(int, numbers.groups())) >= (6, 14)


def rungs() -> list[dict[str, Any]]:
    """The ladder as the role has it; only the grace after TERM is cut, to play more rounds."""
    text = (ROOT / "roles/gpu_release/defaults/main.yml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    names = defaults["gpuops_profiles"]["gentle"]
    ladder = [dict(rung) for rung in defaults["gpuops_ladder"] if rung["name"] in names]
    for rung in ladder:
        rung["wait"] = min(rung["wait"], 0.4) if rung["signal"] == "TERM" else rung["wait"]
    return ladder


def race(
    rounds: int,
    guards: str = "all",
    seed: int = 3,
    until_first: bool = False,
    aimed: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Result:
    """Play rounds; with ``until_first`` no more after the first wrong one.

    With ``aimed`` it is always the hardest moment at which a number changes hands.
    """
    order = {
        "rounds": rounds,
        "guards": guards,
        "seed": seed,
        "first": until_first,
        "aimed": aimed,
        "rungs": rungs(),
        "pid_max": own_pid_max(),
    }
    # No site-packages and not Python's own bookkeeping of children: a small process forks fast.
    argv = [*UNSHARE.split(), sys.executable, "-IS", str(Path(__file__).parent / "inside.py")]
    result = Result()
    with subprocess.Popen(
        [*argv, json.dumps(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                result.add(json.loads(line))
                tell(f"{result.rounds} rounds, wrong {len(result.wrong)}")
        finally:
            process.kill()
    if not until_first and result.rounds != rounds:
        result.wrong.append(f"ended after {result.rounds} of {rounds} rounds")
    return result
