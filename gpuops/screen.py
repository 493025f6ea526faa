# SPDX-License-Identifier: GPL-3.0-or-later
"""What people see: a live table on a terminal, plain lines on a pipe, and the result at the end.

Whatever reads the output may be slow, stopped or gone: the run goes on all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from gpuops.events import Step
from gpuops.report import SEVERITY, Gpu, Host, Report, Totals, signalled
from gpuops.text import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# So many hosts are shown one by one when they are clean; of more, only their number.
FEW = 20
# Seconds between two looks at whether the table has to be drawn again.
REDRAW = 0.25
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
    part = f" ({report.part})" if report.part else ""
    yield f"{sentence(report.totals, report.check)}{part} ({report.seconds:.1f} s)", "bold"


def _host_lines(host: Host, width: int) -> Iterator[tuple[str, str]]:
    part = f"{host.part}: " if host.part else ""
    text = f"{host.name:<{width}}  {host.verdict:<11}  {part}{host.reason}"
    yield text, COLOURS[host.verdict]
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

    A thread of its own writes, so that a terminal that is slow or stopped, or a reader that does
    not read, holds up nothing but itself.

    :param stream: where to write.
    """

    # Seconds after which `tick` is called again while there is nothing to write; None for never.
    pause: float | None = None

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.gone = False
        self.problem: OSError | None = None  # not that the reader has left
        self.queue: queue.Queue[Callable[[], Any]] = queue.Queue()
        threading.Thread(target=self._write, name="gpuops-screen", daemon=True).start()

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
        self.wait()

    def watch(self, step: Step) -> None:
        """A host has come further. Only rungs are worth a line: the result comes at the end."""
        if step.phase in QUIET or step.phase == "done" or step.verdict is None:
            return
        used = " ".join("?" if mib is None else str(mib) for mib in step.used_mib)
        self.say(f"{step.host}: {step.phase}, waits for {step.waits_for} (used MiB: {used})")

    def say(self, text: str, style: str = "") -> None:
        """One line."""
        self.queue.put(lambda: self._print(plain(text) + "\n"))

    def result(self, report: Report) -> None:
        """The result, in full."""
        for text, style in lines(report):
            self.say(text, style)

    def open(self) -> None:
        """Take the screen."""

    def close(self) -> None:
        """Leave the screen to others."""

    def tick(self) -> None:
        """Draw again what has changed."""

    def wait(self) -> None:
        """Return when all that was said so far has been written, however long that takes."""
        self.queue.join()

    def _print(self, text: str) -> None:
        self.stream.write(text)  # in one piece: other threads write to standard error too
        self.stream.flush()

    def _write(self) -> None:
        while True:
            try:
                write = self.queue.get(timeout=self.pause)
            except queue.Empty:
                self._safely(self.tick)
                continue
            self._safely(write)
            self.queue.task_done()

    def _safely(self, write: Callable[[], Any]) -> None:
        """Write, unless nobody reads any more."""
        if self.gone:
            return
        try:
            write()
        except (BrokenPipeError, ValueError):
            self.gone = True
        except OSError as error:
            self.gone = True
            if error.errno != errno.EIO:  # what a terminal says that has gone
                self.problem = error


class LiveScreen(Screen):
    """A table that is drawn anew as hosts come further, one line a host.

    :param live: whether there is a table at all; without it, only the result comes, in colour.
    """

    pause = REDRAW

    def __init__(self, stream: IO[str], live: bool = True) -> None:
        from rich.console import Console
        from rich.live import Live

        class Quiet(Console):
            """Rich would end the program, and point its standard output elsewhere."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        self.console: Console = Quiet(file=stream, highlight=False, emoji=False)
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.is_live = live
        self.steps: dict[str, Step] = {}
        self.drawn: dict[str, Step] = {}
        self.began = self.drawn_at = time.monotonic()
        super().__init__(stream)

    def open(self) -> None:
        """Show the table, until :meth:`close`."""
        if self.is_live:
            self.queue.put(self.live.start)

    def close(self) -> None:
        """Take the table away; what is said from then on stays."""
        self.queue.put(self.live.stop)

    def watch(self, step: Step) -> None:
        """Note it, for the next drawing."""
        self.steps[step.host] = step

    def say(self, text: str, style: str = "") -> None:
        """One line, above the table."""
        from rich.text import Text

        line = Text(plain(text), style=style)
        self.queue.put(lambda: self.console.print(line, soft_wrap=True))

    def tick(self) -> None:
        """Draw the table again if something has changed, and every second for the clock.

        A large table at most once a second: drawing it costs more than all else here.
        """
        steps, now = dict(self.steps), time.monotonic()
        passed = now - self.drawn_at
        changed = steps != self.drawn and passed >= len(steps) / 50
        if self.live.is_started and (changed or passed >= 1):
            self.drawn, self.drawn_at = steps, now
            self.live.update(self.table(steps.values()), refresh=True)

    def table(self, steps: Collection[Step]) -> RenderableType:
        """The hosts, those first that need a look; what does not fit is counted."""
        from rich.console import Group
        from rich.text import Text

        order = sorted(steps, key=_urgency)
        room = max(3, self.console.height - 4)
        names = max([4, *(len(step.host) for step in order[:room])])
        names = min(names, max(8, self.console.width // 3))
        gpus = max([4, *(len(step.used_mib) for step in order[:room])])
        rows = [Text(f"{'host':<{names}}  {'now':<11}  {'GPUs':<{gpus}}", style="bold")]
        rows += [self._row(step, names, gpus) for step in order[:room]]
        rows.append(Text(self.count(steps, order[room:]), style="dim"))
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return Group(*rows)

    def _row(self, step: Step, names: int, gpus: int) -> Text:
        from rich.text import Text

        done = step.phase == "done"
        now = str(step.verdict) if done else step.phase
        name = Text(f"{plain(step.host):<{names}}")
        name.truncate(names, overflow="ellipsis")
        row = name.append("  ")
        row.append(f"{now:<11}", style=COLOURS.get(now, "") if done else "bold").append("  ")
        steps = BLOCKS if "utf" in self.console.encoding.lower() else DIGITS
        marks = bars(step.used_mib, step.total_mib, steps)
        for colour, alike in groupby(marks, key=itemgetter(1)):
            row.append("".join(mark for mark, _ in alike), style=colour)
        if not done and step.waits_for:
            row.append(" " * (2 + gpus - len(step.used_mib)))
            row.append(f"waits for {plain(step.waits_for)}", style="dim")
        return row

    def count(self, steps: Collection[Step], left: Sequence[Step]) -> str:
        """What is not shown, and how far the whole is."""
        done = [step for step in steps if step.phase == "done"]
        text = f"{len(done)} of {len(steps)} hosts done, {time.monotonic() - self.began:.0f} s"
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


def screen(stream: IO[str], live: bool = True) -> Screen:
    """The screen that fits: colours on a terminal that has them, else plain lines.

    :param live: whether it may draw a table.
    """
    terminal = False
    with contextlib.suppress(ValueError, OSError):
        terminal = stream.isatty()
    if terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return LiveScreen(stream, live)
    return Screen(stream)
