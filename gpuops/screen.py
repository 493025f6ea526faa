# SPDX-License-Identifier: GPL-3.0-or-later
"""What people see: a live table on a terminal, plain lines on a pipe, and the result at the end.

Whatever reads the output may be slow, or gone: then nothing more is shown, and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from gpuops.events import Step
from gpuops.report import SEVERITY, Gpu, Host, Report, Totals, signalled, totals
from gpuops.text import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# So many hosts are shown one by one when they are clean; of more, only their number.
FEW = 20
# Seconds between two drawings of the table.
REDRAW = 0.1
# Phases that are no rung of the ladder.
QUIET = ("route", "look", "verify")

COLOURS = {
    "clean": "green",
    "held": "yellow",
    "blocked": "magenta",
    "unkillable": "red",
    "unknown": "red",
    "unreachable": "red",
    "refused": "red",
}
BLOCKS = "▁▂▃▄▅▆▇█"
DIGITS = "123456789"


def bars(
    used: Sequence[int | None], total: Sequence[int | None], steps: str = BLOCKS
) -> Iterator[tuple[str, str]]:
    """One character and its colour for each GPU: how full its memory is."""
    for mib, whole in zip(used, total, strict=False):
        if mib is None:
            yield "?", "red"
        elif mib == 0:
            yield "·" if steps == BLOCKS else "0", "green"
        else:
            share = min(1.0, mib / whole) if whole else 1.0
            yield steps[min(len(steps) - 1, int(share * len(steps)))], "yellow"


def sentence(count: Totals, check: bool = False) -> str:
    """The run in numbers: ``5 hosts: 3 clean, 2 held; 4 processes signalled, 1 spared``."""
    hosts = "1 host" if count.hosts == 1 else f"{count.hosts} hosts"
    counts = [f"{getattr(count, word)} {word}" for word in SEVERITY if getattr(count, word)]
    text = f"{hosts}: {', '.join(counts)}" if counts else hosts
    done = []
    if count.killed:
        processes = "process" if count.killed == 1 else "processes"
        done.append(f"{count.killed} {processes} {'to be signalled' if check else 'signalled'}")
    if count.spared:
        done.append(f"{count.spared} spared")
    return f"{text}; {', '.join(done)}" if done else text


def lines(report: Report, few: int = FEW) -> Iterator[tuple[str, str]]:
    """The result as lines with a colour each: the worst hosts first, many clean ones counted."""
    clean = [host for host in report.hosts if host.verdict == "clean"]
    quiet = len(clean) > few
    shown = report.not_clean() + [host for host in clean if not quiet or host.changed]
    width = max((len(host.name) for host in shown), default=0)
    for host in shown:
        yield from _host_lines(host, width)
    if quiet:
        rest = sum(not host.changed for host in clean)
        if rest:
            yield f"{rest} more are clean, and nobody was signalled there", "green"
    for each in report.skipped:
        yield f"{each.name}: left out; {each.reason}", "dim"
    for warning in report.warnings:
        yield f"warning: {warning}", "yellow"
    if report.ended:
        yield f"the run {report.ended}" if report.ended != "interrupted" else "interrupted", "red"
    yield f"{sentence(report.totals, report.check)} ({report.seconds:.1f} s)", "bold"


def _host_lines(host: Host, width: int) -> Iterator[tuple[str, str]]:
    yield f"{host.name:<{width}}  {host.verdict:<11}  {host.reason}", COLOURS[host.verdict]
    indent = " " * (width + 2)
    if any(_used(host.before)) or any(_used(host.after)):
        text = _memory(host.before)
        if _used(host.before) != _used(host.after):
            text += f" -> {_memory(host.after)}"
        yield f"{indent}used MiB by GPU: {text}", ""
    for action in host.killed:
        yield f"{indent}{action}", ""
    told = {(each.process.node_pid, each.process.start) for each in host.killed}
    for process in host.holders:
        if (process.node_pid, process.start) not in told:
            yield f"{indent}held by {process}, {process.owner}: {process.command}", ""
    for each in host.spared:
        yield f"{indent}spared {each.process}: {each.reason}", "dim"
    if host.remedy:
        yield f"{indent}to do: {host.remedy}", ""


def _used(gpus: Sequence[Gpu]) -> list[int | None]:
    return [gpu.used_mib for gpu in gpus]


def _memory(gpus: Sequence[Gpu]) -> str:
    return " ".join("?" if gpu.used_mib is None else str(gpu.used_mib) for gpu in gpus)


def whom(report: Report) -> Iterator[str]:
    """Whom a plan would signal, host by host."""
    for host in report.hosts:
        for process in signalled(host):
            yield f"{host.name}: {process}, {process.user}, {process.owner}: {process.command}"


class Screen:
    """Plain lines, for pipes and files; the base of the live table.

    :param stream: where to write.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.gone = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def watch(self, step: Step) -> None:
        """A host has come further. Only rungs are worth a line: the result comes at the end."""
        if step.phase in QUIET or step.phase == "done" or step.verdict is None:
            return
        used = " ".join("?" if mib is None else str(mib) for mib in step.used_mib)
        self.say(f"{step.host}: {step.phase} (used MiB: {used}; {step.waits_for})")

    def say(self, text: str, style: str = "") -> None:
        """One line."""
        self._safely(lambda: print(plain(text), file=self.stream, flush=True))

    def result(self, report: Report) -> None:
        """The result, in full."""
        for text, style in lines(report):
            self.say(text, style)

    def open(self) -> None:
        """Take the screen."""

    def close(self) -> None:
        """Leave the screen to others."""

    def _safely(self, write: Callable[[], Any]) -> None:
        """Write, unless nobody reads any more."""
        if self.gone:
            return
        try:
            write()
        except (OSError, ValueError):
            self.gone = True


class LiveScreen(Screen):
    """A table that is drawn anew as hosts come further, one line a host."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        class Quiet(Console):
            """Rich would end the program, and point its standard output elsewhere."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        self.console: Console = Quiet(file=stream, highlight=False, emoji=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.steps: dict[str, Step] = {}
        self.began = time.monotonic()
        self.drawn = 0.0

    def open(self) -> None:
        """Show the table, until :meth:`close`."""
        self._safely(self.live.start)

    def close(self) -> None:
        """Take the table away; what is said from then on stays."""
        self._safely(self.live.stop)

    def watch(self, step: Step) -> None:
        """Draw the table again, unless that was done a moment ago."""
        self.steps[step.host] = step
        now = time.monotonic()
        if now - self.drawn >= REDRAW:
            self.drawn = now
            self._safely(lambda: self.live.update(self.table(), refresh=True))

    def say(self, text: str, style: str = "") -> None:
        """One line, above the table."""
        from rich.text import Text

        self._safely(lambda: self.console.print(Text(plain(text), style=style), soft_wrap=True))

    def table(self) -> RenderableType:
        """The hosts, those first that need a look; what does not fit is counted."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        steps = BLOCKS if "utf" in self.console.encoding.lower() else DIGITS
        table = Table(box=None, pad_edge=False, show_edge=False, expand=False)
        for name, options in (
            ("host", {"no_wrap": True, "max_width": max(8, self.console.width // 3)}),
            ("now", {"no_wrap": True}),
            ("GPUs", {"no_wrap": True}),
            ("", {"no_wrap": True, "overflow": "ellipsis"}),
        ):
            table.add_column(name, **options)
        order = sorted(self.steps.values(), key=_urgency)
        room = max(3, self.console.height - 4)
        for step in order[:room]:
            gpus = Text()
            for character, colour in bars(step.used_mib, step.total_mib, steps):
                gpus.append(character, style=colour)
            done = step.phase == "done"
            colour = COLOURS.get(step.verdict or "", "")
            table.add_row(
                step.host,
                Text(str(step.verdict) if done else step.phase, style=colour if done else "bold"),
                gpus,
                "" if done else f"waits for {plain(step.waits_for)}" if step.waits_for else "",
            )
        return Group(table, Text(self.count(order[room:]), style="dim"))

    def count(self, left: Sequence[Step]) -> str:
        """What is not shown, and how far the whole is."""
        done = [step for step in self.steps.values() if step.phase == "done"]
        text = f"{len(done)} of {len(self.steps)} hosts done, {time.monotonic() - self.began:.0f} s"
        if left:
            clean = sum(step.phase == "done" and step.verdict == "clean" for step in left)
            text += f"; {len(left)} not shown here, {clean} of these clean"
        return text


def _urgency(step: Step) -> tuple[int, int, str]:
    """Bad ends first, then who is still held, then the rest, then the clean."""
    done = step.phase == "done"
    severity = SEVERITY.index(step.verdict) if step.verdict else 0
    if done:
        return (0 if severity else 3, -severity, step.host)
    return (1 if severity else 2, -severity, step.host)


def screen(stream: IO[str]) -> Screen:
    """The screen that fits: a table on a terminal that can draw one, else lines."""
    terminal = False
    with contextlib.suppress(ValueError, OSError):
        terminal = stream.isatty()
    if terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return LiveScreen(stream)
    return Screen(stream)


def final(stream: IO[str]) -> Screen:
    """For a result alone: in colour on a terminal, without a table."""
    found = screen(stream)
    found.close()
    return found


def joined(done: Report, planned: Report, limit: str) -> Report:
    """A reset's report, with the hosts that its plan could not look at and that it left out."""
    names = {host.name for host in done.hosts}
    hosts = (*done.hosts, *(host for host in planned.hosts if host.name not in names))
    return replace(
        done,
        limit=limit,
        started=planned.started,
        seconds=round(done.seconds + planned.seconds, 3),
        hosts=hosts,
        skipped=planned.skipped,
        warnings=tuple(dict.fromkeys([*planned.warnings, *done.warnings])),
        totals=totals(hosts, len(planned.skipped)),
    )
