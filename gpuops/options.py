# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be typed after the verbs of the command: each option once, with its help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FORMATS = ("json", "jsonl", "markdown", "junit", "prometheus", "html")


# Options that set a variable of the collection. -e does not set these: they cannot be set twice.
SETTING = {
    "gpus": "gpuops_gpus",
    "scope": "gpuops_scope",
    "profile": "gpuops_profile",
    "plan": "gpuops_plan",
    "write": "gpuops_plan",
}


class Output(click.ParamType):  # type: ignore[type-arg]
    """``FORMAT`` or ``FORMAT=FILE``."""

    name = "FORMAT[=FILE]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path | None]:
        """Split it; an unknown format, or a folder that is not there, is wrong usage.

        ``/dev/stdout`` is standard output, so that what is for people goes elsewhere.
        """
        format, equals, file = str(value).partition("=")
        if format not in FORMATS:
            self.fail(f"there is no format '{format}'; write one of {', '.join(FORMATS)}")
        if equals and (not file or Path(file).is_dir() or not Path(file).parent.is_dir()):
            self.fail(f"'{file}' cannot be a file; name one in a folder that is there")
        return format, Path(file) if equals and file != "/dev/stdout" else None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The formats."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(each) for each in FORMATS if each.startswith(incomplete)]


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """How long, above zero."""

    name = "SECONDS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """A number; click's own would speak of ranges of floats."""
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not number > 0:
            self.fail(f"'{value}' is no number of seconds above zero")
        return number


class Variable(click.ParamType):  # type: ignore[type-arg]
    """``NAME=VALUE``, of a variable that no option of the verb sets."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """The name, and the value as YAML has it."""
        name, _, text = str(value).partition("=")
        if not name.isidentifier() or not text:
            self.fail(f"{name!r} is not NAME=VALUE, as in gpuops_mps=quit")
        for each in ctx.command.params if ctx else ():
            if SETTING.get(each.name or "") == name:
                self.fail(f"{name} is set by --{each.name}")
        try:
            return name, _data(text)
        except ValueError:
            self.fail(f"the value of {name} is no YAML of words, numbers, lists and mappings")


def _data(text: str) -> Any:
    """What a text says in YAML.

    :raises ValueError: it is none, or what it says cannot be given to Ansible as JSON.
    """
    import json

    import yaml

    try:
        found = yaml.safe_load(text)
        json.dumps(found, allow_nan=False)
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(text) from error
    return found


def options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of these names, in this order."""
    every = {
        "limit": click.option(
            "-l",
            "--limit",
            metavar="HOSTS",
            required=True,
            help="Hosts or groups of the inventory, with commas between; 'all' for all.",
        ),
        "inventory": click.option(
            "-i",
            "--inventory",
            metavar="FILE",
            multiple=True,
            help="Inventory file or folder. Default: what Ansible's configuration says, "
            "else inventory/hosts.yml.",
        ),
        "gpus": click.option(
            "--gpus",
            metavar="LIST",
            help="Only these GPUs: index, range (0-3), UUID or PCI address, with commas between.",
        ),
        "scope": click.option(
            "--scope",
            metavar="SCOPE",
            help="Whose processes count: job:NUMBER, user:NAME or everything. "
            "Default: the container's, or those that run directly on the node.",
        ),
        "profile": click.option(
            "--profile",
            metavar="NAME",
            help="Which steps are taken: gentle (SIGTERM first, the default) or now (SIGKILL).",
        ),
        "check": click.option(
            "--check", is_flag=True, help="Only say who would be signalled; change nothing."
        ),
        "yes": click.option("-y", "--yes", is_flag=True, help="Do not ask before signalling."),
        "plan": click.option(
            "--plan",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            help="Signal nobody who is not in this plan, written by gpuops plan --write.",
        ),
        "write": click.option(
            "--write",
            metavar="FILE",
            type=click.Path(dir_okay=False),
            help="Write the plan to a file, for gpuops reset --plan.",
        ),
        "extra": click.option(
            "-e",
            "--extra",
            type=Variable(),
            multiple=True,
            help="Set a variable of the roles, as gpuops_mps=quit; VALUE is YAML. No place for "
            "secrets. May be given several times.",
        ),
        "timeout": click.option(
            "--timeout",
            metavar="SECONDS",
            type=Seconds(),
            help="End the run after that long; hosts without an answer are unknown then.",
        ),
        "json": click.option(
            "--json",
            "json_",
            is_flag=True,
            help="The same as --output json: the report, on stdout.",
        ),
        "output": click.option(
            "--output",
            "outputs",
            type=Output(),
            multiple=True,
            help=f"Also write the report as {', '.join(FORMATS)}; without =FILE to stdout. "
            "May be given several times.",
        ),
        "log_dir": click.option(
            "--log-dir",
            metavar="DIR",
            type=click.Path(file_okay=False, path_type=Path),
            help="Where the history is kept. Default: $XDG_STATE_HOME/gpuops.",
        ),
        "verbose": click.option(
            "-v",
            "--verbose",
            count=True,
            help="Show Ansible's own output too, on stderr; more with -vv.",
        ),
    }

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            function = every[name](function)
        return function

    return add


RUN = ("extra", "timeout", "json", "output", "log_dir", "verbose")
