# SPDX-License-Identifier: GPL-3.0-or-later
"""Is everything there that a reset needs: on this side, and on each machine of the inventory?"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator

from gpuops import runner
from gpuops.errors import GpuopsError
from gpuops.report import EXIT_CODES, READABLE, Host, Report, worst

OK, BAD, NOT_ASKED = "ok", "BAD", "--"
Finding = tuple[str, str, str]
"""One of these three, what was found, and what to do."""


def here() -> Iterator[Finding]:
    """What this side needs."""
    found = runner.versions()
    for name in ("ansible-core", "ansible-runner"):
        if name in found:
            yield OK, f"{name} {found[name]}", ""
        else:
            yield BAD, f"there is no {name}", f"pip install {name}"
    try:
        yield OK, runner.program("ansible-playbook")[0], ""
    except GpuopsError as error:
        yield BAD, error.what, error.remedy
    ssh = shutil.which("ssh")
    yield OK if ssh else BAD, ssh or "there is no ssh", "" if ssh else "install the OpenSSH client"


def there(report: Report) -> Iterator[Finding]:
    """What a status found out about each machine, and then what those acted on lack besides.

    What is lacking on the way to a machine hides what lies behind it.
    """
    besides: dict[str, None] = {}
    for host in report.hosts:
        if host.verdict in READABLE:
            part = f" ({host.part})" if host.part else ""
            text = f"{host.name}: reached{_way(host)}, {_gpus(host)}, {host.verdict}{part}"
            yield OK, text, ""
        else:
            yield BAD, f"{host.name}: {host.verdict}{_way(host)}: {host.reason}", host.remedy
        for problem in host.problems:
            if _way(host) or host.reason not in problem:
                besides[f"{host.route.partition(' ')[0] or host.name}: {problem}"] = None
    for text in besides:
        yield OK, text, ""
    for each in report.skipped:
        yield NOT_ASKED, f"{each.name}: not asked: {each.reason}", ""


def exit_code(report: Report) -> int:
    """0 if every machine that was asked can be reached and read, else the worst one's."""
    if report.ended == "interrupted":
        return 130
    bad = [host.verdict for host in report.hosts if host.verdict not in READABLE]
    return EXIT_CODES[worst(bad)] if bad or not report.hosts else 0


def _way(host: Host) -> str:
    return f" through {host.route}" if host.route not in ("", host.name) else ""


def _gpus(host: Host) -> str:
    kinds = Counter(gpu.name for gpu in host.after)
    named = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "no GPU"
    drivers = sorted({gpu.driver for gpu in host.after if gpu.driver})
    return f"{named} (driver {', '.join(drivers)})" if drivers else named
