# SPDX-License-Identifier: GPL-3.0-or-later
"""One scenario as data, read strictly: a word that nobody reads is a mistake in the file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent

VERDICTS = ("clean", "held", "blocked", "unkillable", "unknown", "unreachable", "refused", "absent")
RUNGS = ("mps", "terminate", "kill", "targeted", "fuser", "host")

# What can be arranged beforehand, or between the two times; most are verbs of the lab.
EVENTS = {
    "hold": "a process that holds GPUs; `as` is its name in this file",
    "fault": "something that is broken; {label} in its value is the number of a plain process",
    "heal": "everything that was broken on a host is well again",
    "stop": "a container is stopped",
    "cut": "a host's sshd is gone",
    "drop": "a process of this file ends by itself",
    "kill": "a process of this file is sent SIGKILL, by somebody else than gpuops",
    "user": "somebody else than root who may log in",
    "plain": "a process that holds no GPU",
    "watch": "somebody reads the GPUs again and again with nvidia-smi",
    "program": "an executable file: `host`, `path`, `text`",
    "vars": "what the inventory says of a host besides, by host",
    "escape": "a process of this file leaves its container's control group",
    "freeze": "the process that looks after one of this file (the daemon of MPS) is stopped",
    "type": "another command, which must go well and signals nobody",
    "alter": "a file is edited: `file`, `from`, `to`",
}


class ScenarioError(Exception):
    """A scenario file is wrong; the text says where and how."""


@dataclass(frozen=True)
class Outcome:
    """What must come of one typed command. Whatever is not named must not happen.

    ``exit``: the exit code. ``verdict``: by host: one of the five verdicts, ``unreachable``,
    ``refused`` (failed without a verdict; where all are, nobody may have been reached, unless
    ``executions`` are stated), or ``absent`` (took no part).
    ``killed``: who is gone afterwards, by the rung that did it; everybody else is alive.
    ``survives``: who was signalled at that rung and is still there.
    ``would_kill``: in check mode, who would be signalled, by rung.
    ``spares``: who is reported as seen and left alone. ``says``: words in the output, ``silent``:
    words that are not. ``changed``: hosts counted as changed. ``executions``: by host, remote
    commands at most. ``within``: seconds at most, on an idle machine. ``used_mib``: by machine,
    what the driver has in use afterwards on its GPUs (else a clean machine must have none).
    ``leaves``: processes of ours that may stay behind because nothing can end them, and how many
    at most.
    """

    exit: int = 0
    verdict: dict[str, str] = field(default_factory=dict)
    killed: dict[str, str] = field(default_factory=dict)
    survives: dict[str, str] = field(default_factory=dict)
    would_kill: dict[str, str] = field(default_factory=dict)
    spares: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    changed: int | None = None
    executions: dict[str, int] = field(default_factory=dict)
    within: float | None = None
    used_mib: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """One file: ``title``, ``seen`` (where it comes from), ``lab`` (another shape than the
    usual), ``given``, ``typed``, ``then``, and for the same command typed a second time
    ``meanwhile`` (what happened between) and ``again``. Files in /tmp that a command names are
    kept apart for each run of the suite.
    """

    name: str
    title: str
    typed: str
    then: Outcome
    seen: str = ""
    lab: dict[str, Any] = field(default_factory=dict)
    given: list[dict[str, Any]] = field(default_factory=list)
    meanwhile: list[dict[str, Any]] = field(default_factory=list)
    again: Outcome | None = None


def build(kind: type, data: Any, where: str) -> Any:
    """A dataclass from a mapping; refuses keys that it does not have."""
    known = [each.name for each in fields(kind)]
    if not isinstance(data, dict):
        raise ScenarioError(f"{where}: write a mapping of {', '.join(known)}")
    unknown = set(data) - set(known)
    if unknown:
        raise ScenarioError(f"{where}: no such key: {', '.join(sorted(unknown))}")
    return kind(**data)


def load(path: Path) -> Scenario:
    """Read one file.

    :raises ScenarioError: there is something in it that nobody would read.
    """
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    where = path.name
    for key in ("then", "again"):
        if key in data:
            data[key] = build(Outcome, data[key], f"{where}, {key}")
            check_outcome(data[key], f"{where}, {key}")
    scenario: Scenario = build(Scenario, {"name": path.stem, **data}, where)
    if scenario.meanwhile and scenario.again is None:
        raise ScenarioError(f"{where}: meanwhile without again")
    for event in [*scenario.given, *scenario.meanwhile]:
        if len(event) != 1 or next(iter(event)) not in EVENTS:
            raise ScenarioError(f"{where}: {event} is none of {', '.join(EVENTS)}")
    return scenario


def check_outcome(outcome: Outcome, where: str) -> None:
    """Words that are none would make a check that never fails, or never passes."""
    for word in outcome.verdict.values():
        if word not in VERDICTS:
            raise ScenarioError(f"{where}: verdict {word}: write one of {', '.join(VERDICTS)}")
    for rungs in (outcome.killed, outcome.survives, outcome.would_kill):
        for rung in rungs.values():
            if rung not in RUNGS:
                raise ScenarioError(f"{where}: rung {rung}: write one of {', '.join(RUNGS)}")


def load_all(folder: Path = HERE) -> list[Scenario]:
    """All scenarios, those of the usual lab first, then by shape, so that a lab is built once."""
    found = [load(path) for path in sorted(folder.glob("*.yml"))]
    return sorted(found, key=lambda each: (str(sorted(each.lab.items())), each.name))
