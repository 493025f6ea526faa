# SPDX-License-Identifier: GPL-3.0-or-later
"""What the wrapper costs, measured in pairs on the lab.

    python -m tests.wrapper.figures

Prints the ratio of a reset by ``gpuops`` to one by ``ansible-playbook`` on a lab that is held in
the same way before each, and the CPU time that the wrapper itself needs for each of 200 hosts.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from gpuops.events import Collector
from tests.lab import Lab
from tests.wrapper.conftest import EVENTS

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 9
BIN = Path(sys.executable).parent
TYPED = {
    "ansible-playbook": [
        *(str(BIN / "ansible-playbook"), "reset_gpus.yml", "-l", "ct129"),
        *("-e", "gpuops_profile=now"),
    ],
    "gpuops": [str(BIN / "gpuops"), "reset", "-l", "ct129", "--profile", "now", "--yes"],
}


def pairs(lab: Lab) -> list[float]:
    """Ratios of wall time; which of the two comes first alternates."""
    ratios = []
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        for number in range(PAIRS + 1):
            took = {}
            for name in sorted(TYPED, reverse=bool(number % 2)):
                lab.hold("ct129", gpus="0-7", mib=76115)
                began = time.perf_counter()
                done = lab.run(
                    TYPED[name], cwd=ROOT, env=environment, capture_output=True, text=True
                )
                took[name] = time.perf_counter() - began
                assert done.returncode == 0, done.stdout + done.stderr
            if number:  # the first pair warms up
                ratios.append(took["gpuops"] / took["ansible-playbook"])
                print({name: round(seconds, 2) for name, seconds in took.items()}, flush=True)
    return ratios


def cpu_for_each_host(hosts: int = 200) -> float:
    """Milliseconds of CPU a host for events, report and all renderings, as one run has them."""
    from gpuops.render import FORMATS, render

    run = json.loads((EVENTS / "reset-clean.json").read_text(encoding="utf-8"))
    mine = [event for event in run["events"] if event["event_data"].get("host") == "node1"]
    text = json.dumps(mine)
    fleet = [json.loads(text.replace("node1", f"node{number}")) for number in range(hosts)]
    began = resource.getrusage(resource.RUSAGE_SELF)
    collector = Collector("reset", False, lambda step: None)
    for events in fleet:
        for event in events:
            collector.take(event)
    report = collector.report()
    assert len(report.hosts) == hosts and report.clean
    for format in FORMATS:
        render(report, format)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    used = ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime
    return used * 1000 / hosts


def main() -> None:
    """Print both."""
    print(f"CPU a host, 200 hosts: {cpu_for_each_host():.2f} ms (without ansible-runner's own)")
    lab = Lab(os.environ.get("GPUOPS_LAB", "wrapper-figures"))
    lab.up(cts="129", nodes=0)
    try:
        ratios = pairs(lab)
    finally:
        lab.down()
    print(
        f"gpuops reset / ansible-playbook: {statistics.median(ratios):.2f} "
        f"(median of {PAIRS} pairs, {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
