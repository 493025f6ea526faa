# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpuops``. What it needs it imports when it needs it, so that it starts at once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import click

from gpuops._version import __version__
from gpuops.options import RUN, options

EXIT_CODES = """\b
Exit codes (the worst of all hosts wins):
   0  clean: proved, whether or not anything had to be done
   1  a bug of gpuops
   2  refused: what was asked for, or the inventory, is wrong, or a file could not be written
      (if that is the history: only a warning)
  10  held: somebody in scope still holds a GPU
  11  blocked: somebody else holds it, and is named
  12  unkillable: a process outlived SIGKILL
  13  unknown: it could not be read, or not in time
  14  unreachable
 130  Ctrl-C; the report so far is shown
"""

DOCTOR_CODES = """\b
Exit codes (the worst of all machines wins):
   0  all that were asked can be reached and read, whoever holds their GPUs
   1  a bug of gpuops
   2  refused: what was asked for, or the inventory, is wrong
  13  unknown: one could not be read, or not in time
  14  unreachable
 130  Ctrl-C; what was found so far is shown
"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
    no_args_is_help=False,  # an error is two lines, this one too
)
@click.version_option(__version__, "--version", message="gpuops %(version)s")
def gpuops() -> None:
    """Take GPUs from whatever state they are in to a proved clean slate.

    \b
    gpuops status -l ct129       who holds which GPU? changes nothing
    gpuops plan -l ct129         whom would a reset signal?
    gpuops reset -l ct129        from held to clean, step by step
    gpuops verify -l ct129       wait some seconds until clean, or say why not

    To begin: gpuops init writes an inventory, gpuops doctor says whether it works.
    """


def run(verb: str, given: dict[str, Any], more: dict[str, Any], asks: bool = False) -> NoReturn:
    """Import what a run needs, and run."""
    from gpuops import verbs

    verbs.run(verb, given, more, asks)


@gpuops.command(epilog=EXIT_CODES)
@options("limit", "inventory", "gpus", "scope", *RUN)
def status(**given: Any) -> None:
    """Show who holds which GPU. Changes nothing.

    \b
    gpuops status -l ct129
    gpuops status -l gpu_nodes --json
    """
    run("status", given, {})


@gpuops.command(epilog=EXIT_CODES)
@options("limit", "inventory", "gpus", "scope", "profile", "write", *RUN)
def plan(write: str | None, **given: Any) -> None:
    """Show whom a reset would signal. Signals nobody.

    \b
    gpuops plan -l ct129
    gpuops plan -l ct129 --write ct129.plan
    gpuops reset -l ct129 --plan ct129.plan
    """
    run("plan", given, {"write": write})


@gpuops.command(epilog=EXIT_CODES)
@options("limit", "inventory", "gpus", "scope", "profile", "check", "yes", "plan", *RUN)
def reset(check: bool, yes: bool, plan: str | None, **given: Any) -> None:
    """Free the GPUs, step by step, until they are proved clean.

    On a terminal it shows whom it would signal, and asks. With --yes, or where nobody could
    answer, it does not ask. What is clean already is not touched.

    \b
    gpuops reset -l ct129
    gpuops reset -l gpu_nodes --yes --output junit=gpus.xml
    """
    asks = not (yes or check or plan) and sys.stdin.isatty() and sys.stderr.isatty()
    run("reset", given, {"check": check, "plan": plan}, asks)


@gpuops.command(epilog=EXIT_CODES)
@options("limit", "inventory", "gpus", "scope", *RUN)
def verify(**given: Any) -> None:
    """Wait until the GPUs are proved clean, or say why they are not. Changes nothing.

    What may become clean by itself is read again up to 10 times, with 1 second between
    (gpuops_verify_retries and gpuops_verify_delay of the roles); all else is told at once.

    \b
    gpuops verify -l gpu_nodes --output junit=gpus.xml
    gpuops verify -l ct129 -e gpuops_verify_retries=600      for ten minutes and more
    """
    run("verify", given, {})


@gpuops.command(epilog=EXIT_CODES)
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), required=False
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of reports, and nothing else.")
@options("json", "output")
def report(
    file: str | None, schema: bool, json_: bool, outputs: Iterable[tuple[str, Path | None]]
) -> None:
    """Show an old report, or turn it into another format.

    FILE is one that --json, --output json=FILE or --output jsonl=FILE wrote; - is standard input.
    The exit code is that of the report.

    \b
    gpuops report night.json
    gpuops report night.json --output markdown=night.md
    """
    from gpuops import verbs
    from gpuops.errors import UsageError
    from gpuops.report import Report, json_schema

    if schema:
        import json

        click.echo(json.dumps(json_schema(), indent=2))
        return
    if file is None:
        raise UsageError("no report was named", "write gpuops report FILE, or - for standard input")
    with click.open_file(file, "rb") as stream:
        found = Report.from_json(stream.read())
    targets = verbs.targets_of(json_, outputs)
    files, pipes = verbs.files_of(targets)
    problems = list(verbs.write_files(found, files))
    problems += verbs.show(found, targets, verbs.screen_for(targets, live=False))
    problems += verbs.write_files(found, pipes)
    for problem in problems:
        raise problem
    sys.exit(found.exit_code)


@gpuops.command()
@click.option(
    "-l",
    "--limit",
    metavar="HOSTS",
    default="all",
    help="Names of hosts that were in a run, with commas between; wildcards as in 'ct*'. "
    "Default: all.",
)
@options("log_dir")
@click.option(
    "--since",
    metavar="WHEN",
    help="Only runs since then: so long ago, as 7d, 12h or 30m, or a date, as 2026-11-01.",
)
@click.option("--json", "json_", is_flag=True, help="One JSON document a line instead of text.")
def history(limit: str, log_dir: Path | None, since: str | None, json_: bool) -> None:
    """Tell when hosts were last proved clean, and who held them before.

    Each run of status, plan, reset and verify is remembered. Groups of the inventory are not
    known here.

    \b
    gpuops history -l ct129 --since 7d
    gpuops history -l 'ct*' --since 2026-11-01 --json
    """
    from gpuops import history as log
    from gpuops.errors import UsageError
    from gpuops.text import plain

    try:
        moment = log.moment(since) if since is not None else None
    except ValueError as error:
        raise UsageError(
            f"--since is '{since}'", "write a time ago, as 7d or 12h, or a date, as 2026-11-01"
        ) from error
    names = ["*" if name == "all" else name for name in map(str.strip, limit.split(","))]
    if not any(names):
        raise UsageError("no hosts were named", "name some that were in a run, as in -l ct129")
    where = log_dir or log.folder()
    entries = log.read(where, names, moment)
    if json_:
        import json

        _print(json.dumps(each) for each in entries)
    elif not _print(plain(line) for line in log.tell(entries)):
        click.echo(
            f"no run on {limit} is remembered in {where}{f' since {since}' if since else ''}"
        )


def _print(lines: Iterable[str]) -> int:
    """Print lines until nobody reads them any more; how many there were."""
    count = 0
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            count += 1
            click.echo(line)
    return count


@gpuops.command(epilog=DOCTOR_CODES)
@options("limit", "inventory", "extra", "timeout", "verbose")
def doctor(
    limit: str,
    inventory: tuple[str, ...],
    extra: tuple[tuple[str, Any], ...],
    timeout: float | None,
    verbose: int,
) -> None:
    """Find out whether machines can be reached, what they lack, and which GPUs they have.

    Changes nothing. Who holds the GPUs does not matter here: the exit code is 0 if every machine
    that was asked can be reached and read. A Proxmox host marked -- was not asked itself: it counts
    only as the way to its containers. What is lacking on that way hides what lies behind it.

    \b
    gpuops doctor -l all
    """
    from gpuops import api
    from gpuops import doctor as findings
    from gpuops.errors import Interrupted
    from gpuops.screen import Screen
    from gpuops.text import plain

    def say(found: findings.Finding) -> None:
        mark, text, remedy = found
        line = f"{mark:4} {text}" + (f"; to do: {remedy}" if remedy else "")
        click.echo(plain(line))

    for each in findings.here():
        say(each)
    with Screen(sys.stderr) as words:
        try:
            report = api.status(
                limit,
                inventory or None,
                timeout=timeout,
                variables=dict(extra),
                verbosity=max(0, verbose - 1),
                output=words.say if verbose else None,
            )
        except Interrupted as error:
            report = error.report
    for each in findings.there(report):
        say(each)
    for warning in report.warnings:
        click.echo(f"warning: {plain(warning)}")
    sys.exit(findings.exit_code(report))


@gpuops.command()
@click.argument(
    "file", type=click.Path(dir_okay=False, path_type=Path), default=Path("inventory/hosts.yml")
)
def init(file: Path) -> None:
    """Write a commented inventory to start from; never over one that is there.

    FILE is inventory/hosts.yml if it is not given: there the other commands find it.

    \b
    gpuops init && $EDITOR inventory/hosts.yml && gpuops doctor -l all
    """
    from importlib.resources import files

    from gpuops.errors import UsageError

    text = files("gpuops").joinpath("hosts.yml").read_text(encoding="utf-8")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as out:
            try:
                out.write(text)
                out.flush()
            except OSError:
                file.unlink()  # half of it would be taken for an inventory
                raise
    except FileExistsError as error:
        raise UsageError(
            f"{file} is there already", "name another file, or edit that one"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written ({error.strerror})", "name another file"
        ) from error
    click.echo(f"wrote {file}: put your machines in, then type gpuops doctor -l all -i {file}")


SHELLS = ("bash", "zsh", "fish")


@gpuops.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes a shell complete gpuops.

    \b
    bash: eval "$(gpuops completion bash)"          in ~/.bashrc
    zsh:  eval "$(gpuops completion zsh)"           in ~/.zshrc
    fish: gpuops completion fish | source           in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(gpuops, {}, "gpuops", "_GPUOPS_COMPLETE").source())


# --- starting, and errors ---


def main() -> NoReturn:
    """Entry point: whatever goes wrong is a line of what, and one of what to do."""
    from gpuops.errors import GpuopsError

    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with contextlib.suppress(ValueError, OSError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
    code = 1
    try:
        code = gpuops.main(prog_name="gpuops", standalone_mode=False) or 0
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.Abort:
        code = _complain("interrupted", "gpuops status tells how things are", 130)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "gpuops"
        code = _complain(error.format_message().rstrip("."), f"see {path} --help", 2)
    except GpuopsError as error:
        code = _complain(error.what, error.remedy, 2)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except OSError as error:
        culprit = error.filename or "standard output or a file"
        what = f"{culprit} cannot be used ({error.strerror or error})"
        code = _complain(what, "see whether it is there, and the disk not full", 2)
    except Exception as error:
        what = f"internal error: {type(error).__name__}: {error}"
        code = _complain(" ".join(what.split()), "report this as a bug of gpuops", 1)
    _leave(code)


def _open_closed_streams() -> None:
    """Put nothing in the place of a standard stream that is closed, as after ``>&-``.

    Else the next file that is opened would take its number, and get what is written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _complain(what: str, remedy: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"gpuops: {what}\n        {remedy}", file=sys.stderr)
    return code


def _leave(code: int) -> NoReturn:
    """End, without words about a standard output that nobody reads."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    gc.freeze()  # Python would look through all of it for garbage before it ends
    sys.exit(code)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
