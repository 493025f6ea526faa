# SPDX-License-Identifier: GPL-3.0-or-later
"""A report in the formats that other programs and people read, each from a template."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuops.errors import UsageError
from gpuops.report import SEVERITY, Report, signalled
from gpuops.text import plain

if TYPE_CHECKING:
    from jinja2 import Environment

# The folder where a process has its open files, to which /dev/fd and /dev/stdout lead.
DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")


def render(report: Report, format: str) -> str:
    """The report as text in one of :data:`FORMATS`.

    :raises UsageError: there is no such format.
    """
    if format not in FORMATS:
        raise UsageError(
            f"there is no output format '{format}'", f"write one of {', '.join(FORMATS)}"
        )
    return FORMATS[format](report)


def json_lines(report: Report) -> str:
    """One line a host, each the report of that host alone.

    In ASCII: some readers take other characters than the line feed for the end of a line.
    """
    count = max(report.part_of, len(report.hosts))  # A line that is rendered again stays a part.
    alone = (replace(report.of([host]), part_of=count) for host in report.hosts)
    return "".join(json.dumps(each.to_dict()) + "\n" for each in alone)


def prometheus(report: Report) -> str:
    """Metrics for the text file collector of the node exporter, or a push gateway."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gpuops_{name}", text, labels, registry=registry)

    verdict = gauge("verdict", "1 for the verdict on the host, 0 for the others", "host", "verdict")
    part = gauge(
        "some_gpus_clean", "1 if the GPUs that the run was limited to are clean", "host", "gpus"
    )
    used = gauge("gpu_used_bytes", "Memory in use at the last reading", "host", "gpu", "uuid")
    before = gauge(
        "gpu_used_before_bytes", "Memory in use at the first reading", "host", "gpu", "uuid"
    )
    killed = gauge("signalled_processes", "Processes that were signalled", "host")
    spared = gauge("spared_processes", "Holders left alive on purpose", "host")
    rungs = gauge(
        "rung_seconds",
        "How long a rung of the ladder took, for all hosts of the same acting host",
        "host",
        "rung",
    )
    for host in report.hosts:
        if host.only_gpus:
            part.labels(host.name, ",".join(host.only_gpus)).set(host.verdict == "clean")
        # No sample, since a query for clean hosts would not look at a further label. What is not
        # clean in part is not clean as a whole.
        if not (host.only_gpus and host.verdict == "clean"):
            for word in SEVERITY:
                verdict.labels(host.name, word).set(host.verdict == word)
        for metric, gpus in ((before, host.before), (used, host.after)):
            for gpu in gpus:
                if gpu.used_mib is not None:
                    metric.labels(host.name, str(gpu.index), gpu.uuid).set(gpu.used_mib * 2.0**20)
        killed.labels(host.name).set(0 if report.check else len(signalled(host)))
        spared.labels(host.name).set(len(host.spared))
        for rung in host.rungs:
            rungs.labels(host.name, rung.name).set(rung.seconds)
    if not (report.part and report.clean):
        gauge("run_clean", "1 if every host of the run was proved clean").set(report.clean)
    gauge("run_seconds", "How long the run took").set(report.seconds)
    with contextlib.suppress(ValueError, OverflowError):
        began = _timestamp(report.started)
        gauge("run_timestamp_seconds", "When the run began, seconds since 1970").set(began)
    return generate_latest(registry).decode()


def write(report: Report, format: str, path: Path) -> None:
    """Render into a file, which is there in full or not at all.

    What is no file, such as a pipe, a device or an open descriptor, is written into. That a reader
    has left is no error.

    :raises UsageError: it cannot be written, or there is no such format.
    """
    text = render(report, format)
    try:
        opened = _descriptor(path) if path.exists() else None  # which a loop of links does not
        if opened or waits(path):
            _append(opened or path, text)
        else:
            _replace(Path(os.path.realpath(path)), text)  # of a link, what it leads to
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror})", "name another file after --output"
        ) from error


def waits(path: Path) -> bool:
    """Whether a write may have to wait for a reader: it is there, and no regular file."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _descriptor(path: Path) -> Path | None:
    """What is open already, if this is a name for it, such as ``/dev/fd/3``, or a link to one.

    Links are followed one by one, since the last leads away, to the file itself.
    """
    folder = Path(os.path.realpath(path.parent))
    step = folder / path.name
    if not step.is_symlink():
        return None
    return step if DESCRIPTORS.fullmatch(str(folder)) else _descriptor(folder / step.readlink())


def _append(path: Path, text: str) -> None:
    """Write into what is there, at the end: others may write into it as well."""
    own = path.parent == Path(f"/proc/{os.getpid()}/fd")
    # Opened anew it would have a place of its own in the file, where our other words go too.
    file = os.dup(int(path.name)) if own else path
    with open(file, "a", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
        stream.write(text)


def _replace(path: Path, text: str) -> None:
    """Put a file in its place, whole."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    # There is no way to ask without setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _timestamp(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gpuops.render"),
        autoescape=lambda name: bool(name and name.endswith((".xml.j2", ".html.j2"))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(cell=_cell, plain=plain, code=_code)
    environment.globals.update(signalled=signalled)
    return environment


def _fill(template: str, report: Report) -> str:
    return _environment().get_template(template).render(report=report)


def _cell(text: Any) -> str:
    """For a cell of a Markdown table: on one line, and nothing in it is markup."""
    words = " ".join(plain(text).split())
    for mark in "\\`*_[]<>|#~&":
        words = words.replace(mark, "\\" + mark)
    return words


def _code(text: Any) -> str:
    """As code in Markdown, whatever is in it."""
    words = " ".join(plain(text).split()) or " "
    fence = "`"
    while fence in words:
        fence += "`"
    edge = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{edge}{words}{edge}{fence}"


# Each with what makes it.
FORMATS: dict[str, Callable[[Report], str]] = {
    "json": lambda report: report.to_json() + "\n",
    "jsonl": json_lines,
    "markdown": partial(_fill, "report.md.j2"),
    "junit": partial(_fill, "junit.xml.j2"),
    "prometheus": prometheus,
    "html": partial(_fill, "report.html.j2"),
}
