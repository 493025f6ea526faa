# SPDX-License-Identifier: GPL-3.0-or-later
"""A verb of the command from beginning to end: ask, run, keep what was found, and show it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from gpuops import api, history, render, runner
from gpuops import screen as screens
from gpuops.errors import GpuopsError, Interrupted, PlanError, UsageError
from gpuops.options import SETTING
from gpuops.report import Host, Report, totals
from gpuops.screen import Screen

Targets = list[tuple[str, Path | None]]
"""What is to be written where; ``None`` is standard output."""

# Hosts with these verdicts are in a plan; the others could not be looked at.
PLANNED = ("clean", "held", "blocked")


def run(verb: str, given: dict[str, Any], more: dict[str, Any], asks: bool = False) -> NoReturn:
    """Run a verb, show what came of it, and end with its exit code.

    :param given: the options that all verbs have, by name.
    :param more: those of this verb alone.
    :param asks: show whom it would signal, and ask, before it signals anybody.
    """
    targets = targets_of(given.pop("json_"), given.pop("outputs"))
    verbosity, log_dir = given.pop("verbose"), given.pop("log_dir")
    limit, inventory = given.pop("limit"), given.pop("inventory") or None
    variables = dict(given.pop("extra"))
    screen = screen_for(targets, live=not verbosity)
    words = Screen(sys.stderr)
    options = {
        **given,
        "variables": variables,
        "watch": screen.watch,
        "verbosity": max(0, verbosity - 1),
        "output": words.say if verbosity else None,
    }
    problems: list[GpuopsError] = []
    with words, screen:
        try:
            if asks:
                found = _ask_and_reset(limit, inventory, options, screen, words)
            else:
                found = getattr(api, verb)(limit, inventory, **options, **more)
        except Interrupted as error:
            found = error.report
        except PlanError as error:
            found = error.report
            problems.append(error)
        found = in_options(found, [name for name in SETTING if (given | more).get(name)])
        files, pipes = files_of(targets)
        # Before anything is shown: whoever reads it may have stopped to.
        problems += _keep(found, files, log_dir)
        screen.close()
        try:
            problems += show(found, targets, screen)
            _tell(problems, words)
            # At the very end: a pipe that nobody opens is waited for until Ctrl-C.
            late = list(write_files(found, pipes))
            _tell(late, words)
            problems += late
            words.wait()
        except KeyboardInterrupt:
            os._exit(130)  # all is kept, and a thread may be in the middle of a write for ever
    sys.exit(2 if any(isinstance(each, UsageError) for each in problems) else found.exit_code)


def in_options(report: Report, typed: Iterable[str]) -> Report:
    """The report in the words of whoever typed these options, where they set variables."""

    def words(text: str) -> str:
        for name in typed:
            text = re.sub(rf"\b{SETTING[name]}\b", f"--{name}", text)
        return text

    def advice(text: str) -> str:
        text = re.sub(r"\bset (gpuops_\w+=)", r"add -e \1", words(text))
        return re.sub(r"\bgpuops_(gpus|scope)\b", r"\g<0> (--\1)", text)

    def host_of(host: Host) -> Host:
        spared = tuple(replace(each, reason=words(each.reason)) for each in host.spared)
        return replace(host, reason=words(host.reason), remedy=advice(host.remedy), spared=spared)

    return replace(report, hosts=tuple(map(host_of, report.hosts)))


def targets_of(json_: bool, outputs: Iterable[tuple[str, Path | None]]) -> Targets:
    """What ``--json`` and ``--output`` ask for.

    :raises UsageError: more than one document for standard output.
    """
    targets = [*outputs, *([("json", None)] if json_ else [])]
    if sum(file is None for _, file in targets) > 1:
        raise UsageError(
            "more than one format is to go to standard output", "write --output FORMAT=FILE"
        )
    return targets


def screen_for(targets: Targets, live: bool) -> Screen:
    """For people: on stderr if stdout is for a program."""
    stream = sys.stderr if any(file is None for _, file in targets) else sys.stdout
    return screens.screen(stream, live)


def show(report: Report, targets: Targets, screen: Screen) -> Iterator[GpuopsError]:
    """The result for people, then for the program that reads standard output.

    What stands in the way of that is told, as a full disk; not that the reader has left.
    """
    screen.result(report)
    screen.wait()
    error = screen.problem if screen.stream is sys.stdout else None
    for format, file in targets:
        if file is None:
            error = _to_stdout(render.render(report, format))
    if error is not None:
        yield UsageError(
            f"standard output cannot be written ({error.strerror})", "write --output FORMAT=FILE"
        )


def _to_stdout(document: str) -> OSError | None:
    """In UTF-8 as in a file, whatever the locale; what stands in the way, unless nobody reads."""
    try:
        sys.stdout.buffer.write(document.encode("utf-8", "replace"))
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        return error
    return None


def files_of(targets: Targets) -> tuple[Targets, Targets]:
    """The files that can be written at once, and the pipes and devices, whose readers may be slow.

    Looked at once, so that none is lost whose kind changes meanwhile.
    """
    files: Targets = []
    pipes: Targets = []
    for format, file in targets:
        if file is not None:
            (pipes if render.waits(file) else files).append((format, file))
    return files, pipes


def write_files(report: Report, targets: Targets) -> Iterator[GpuopsError]:
    """Write each file that was asked for; what could not be written is no reason to stop."""
    for format, file in targets:
        if file is not None:
            try:
                render.write(report, format, file)
            except UsageError as error:
                yield error


def _tell(problems: Iterable[GpuopsError], words: Screen) -> None:
    for problem in problems:
        words.say(f"gpuops: {problem.what}\n        {problem.remedy}")


def _keep(report: Report, targets: Targets, log_dir: Path | None) -> Iterator[GpuopsError]:
    """Add the run to the history, and write the files."""
    where = log_dir or history.folder()
    try:
        history.append(report, where)
    except OSError as error:
        yield GpuopsError(
            f"the history in {where} cannot be written ({error.strerror})",
            "name another folder with --log-dir",
        )
    yield from write_files(report, targets)


def _ask_and_reset(
    limit: str, inventory: Any, options: dict[str, Any], screen: Screen, words: Screen
) -> Report:
    """Show whom a reset would signal, ask, and then signal these and nobody else.

    :param words: where the question is asked; these are shown there too, if not on a terminal.
    """
    asking = screen if screen.stream.isatty() else words
    with runner.temporary("gpuops-plan-") as folder:
        file = Path(folder, "plan.json")
        try:
            planned = api.plan(limit, inventory, write=file, **options)
        except PlanError as error:
            if names_of(error.report) and not error.report.ended:
                raise
            return error.report  # which says why nobody could be looked at
        names = names_of(planned)
        if planned.ended or not names:
            return planned
        if planned.totals.killed:
            screen.close()
            for line in screens.whom(planned):
                asking.say(line)
            asking.wait()
            count = "this process" if planned.totals.killed == 1 else "these processes"
            try:
                if not click.confirm(f"End {count}?", err=True):
                    asking.say("nobody was signalled")
                    return planned
            except click.Abort as error:
                raise Interrupted(replace(planned, ended="interrupted")) from error
        screen.open()
        try:
            done = api.reset(names, inventory, plan=file, **options)
        except Interrupted as error:
            raise Interrupted(joined(error.report, planned, limit)) from error
        return joined(done, planned, limit)


def names_of(planned: Report) -> list[str]:
    """The hosts of a plan that a reset could go to."""
    return [host.name for host in planned.hosts if host.verdict in PLANNED]


def joined(done: Report, planned: Report, limit: str) -> Report:
    """A reset's report, with the hosts that its plan could not look at and that it left out."""
    names = {host.name for host in done.hosts}
    hosts = (*done.hosts, *(_left(host) for host in planned.hosts if host.name not in names))
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


def _left(host: Host) -> Host:
    """A host of the plan that the reset's report lacks: the reset was ended too early for it."""
    if host.verdict not in PLANNED:
        return host
    return replace(
        host,
        verdict="unknown",
        changed=False,
        reason="the run was ended before it came to it",
        remedy="run it again",
        killed=(),
        rungs=(),
    )
