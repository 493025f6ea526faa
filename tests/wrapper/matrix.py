# SPDX-License-Identifier: GPL-3.0-or-later
"""What the package makes of a scenario: the runner of the scenarios asks it after each command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuops.api import PLAYBOOKS
from gpuops.events import Collector
from gpuops.report import Report
from tests.wrapper.parsers import PARSERS, parse

VERBS = {playbook: verb for verb, playbook in PLAYBOOKS.items()}


def report_of(typed: str, events: list[dict[str, Any]]) -> Report | None:
    """The report of a typed ``ansible-playbook``; ``None`` if Ansible ended without a result."""
    words = shlex.split(typed)
    verb = next(VERBS[Path(word).stem] for word in words if Path(word).stem in VERBS)
    collector = Collector(verb, "--check" in words or verb == "plan")
    for event in events:
        collector.take(event)
    return None if collector.stats is None else collector.report()


def problems(
    typed: str, events: list[dict[str, Any]], verdicts: Mapping[str, str]
) -> Iterator[str]:
    """Where its report disagrees with the scenario, or a rendering of it with the report."""
    report = report_of(typed, events)
    found = {host.name: host.verdict for host in report.hosts} if report else {}
    for name, word in verdicts.items():
        if found.get(name, "absent") != word:
            yield f"gpuops calls {name} {found.get(name, 'absent')} and not {word}"
    if report is None:
        return
    for format in PARSERS:
        try:
            parse(report, format)
        except Exception as error:  # whatever the parser raises
            yield f"gpuops' {format}: {type(error).__name__}: {error}"
