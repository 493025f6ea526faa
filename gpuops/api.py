# SPDX-License-Identifier: GPL-3.0-or-later
"""What programs call: one function a verb, each a run of one playbook that gives a report.

All are safe to call from several threads at once, and change nothing that is clean already.
"""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuops import runner
from gpuops.errors import AnsibleError, Interrupted, PlanError, UsageError
from gpuops.events import Collector, Step
from gpuops.report import Report
from gpuops.runner import Inventory

Watch = Callable[[Step], None]
Gpus = str | int | Iterable[str | int]

PLAYBOOKS = {
    "status": "gpu_status",
    "plan": "plan_gpus",
    "reset": "reset_gpus",
    "verify": "verify_gpus",
}


def status(
    limit: str | Iterable[str],
    inventory: Inventory | None = None,
    *,
    gpus: Gpus | None = None,
    scope: str | None = None,
    profile: str | None = None,
    check: bool = False,
    timeout: float | None = None,
    variables: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    verbosity: int = 0,
    output: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Who holds which GPU? Changes nothing.

    :param limit: hosts or groups of the inventory, as after ``-l``.
    :param inventory: files or folders; without it, what Ansible's configuration says.
    :param gpus: only these, by index, range of indices (``"0-3"``), UUID or PCI address.
    :param scope: whose processes count as the host's own: ``job:NUMBER``, ``user:NAME`` or
        ``everything``.
    :param profile: as for :func:`reset`, and like ``check`` of no effect here: all verbs take the
        same, so that a program can leave open which it calls.
    :param timeout: seconds after which the run is ended; hosts without an answer are ``unknown``.
    :param variables: further variables of the collection's roles. They are no place for secrets.
    :param watch: is called with each :class:`~gpuops.events.Step` as it happens; in the thread that
        called this function, or in one of its own with ``gpuops.aio``.
    :param verbosity: Ansible's ``-v``; its words go to ``output``.
    :param cancel: ends the run when it is set.

    :raises UsageError: what is asked for cannot be.
    :raises AnsibleError: Ansible ended without a result.
    :raises Interrupted: Ctrl-C or ``cancel``; holds the report so far.
    """
    asked = _variables(variables, gpus=gpus, scope=scope, profile=profile)
    collector = Collector("status", False, watch)
    return _run(collector, limit, inventory, asked, timeout, verbosity, output, cancel)


def plan(
    limit: str | Iterable[str],
    inventory: Inventory | None = None,
    *,
    gpus: Gpus | None = None,
    scope: str | None = None,
    profile: str | None = None,
    write: str | os.PathLike[str] | None = None,
    check: bool = False,
    timeout: float | None = None,
    variables: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    verbosity: int = 0,
    output: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Whom would :func:`reset` signal? Signals nobody, with or without ``check``.

    :param write: a file to write the plan to, for ``plan`` of :func:`reset`. One that is there
        stays as it is until the new one is there in full.

    The other parameters and the exceptions are those of :func:`status` and :func:`reset`.

    :raises PlanError: the plan was not written; holds the report.
    """
    asked = _variables(variables, gpus=gpus, scope=scope, profile=profile)
    collector = Collector("plan", True, watch)
    given = (limit, inventory, asked, timeout, verbosity, output, cancel)
    if write is None:
        return _run(collector, *given)
    file = Path(_file(write))
    with _beside(file) as folder:
        fresh = Path(folder, file.name)
        asked["gpuops_plan"] = str(fresh)
        report = _run(collector, *given)
        if fresh.exists():
            why = _moved(fresh, file)
        else:
            why = report.ended or next(reversed(collector.failures), "no host could be looked at")
    if why:
        raise PlanError(
            report,
            f"the plan was not written to {write} ({why})",
            "put that right and plan again, before a reset with --plan",
        )
    return report


def reset(
    limit: str | Iterable[str],
    inventory: Inventory | None = None,
    *,
    gpus: Gpus | None = None,
    scope: str | None = None,
    profile: str | None = None,
    plan: str | os.PathLike[str] | None = None,
    check: bool = False,
    timeout: float | None = None,
    variables: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    verbosity: int = 0,
    output: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """From whatever state the GPUs are in to a proved clean slate.

    :param profile: which rungs are climbed: ``gentle`` (the default) or ``now``.
    :param plan: a file of :func:`plan`: nobody is signalled who is not in it.
    :param check: only say whom it would signal.

    The other parameters and the exceptions are those of :func:`status`.
    """
    asked = _variables(variables, gpus=gpus, scope=scope, profile=profile)
    if plan is not None:
        asked["gpuops_plan"] = _file(plan)
    collector = Collector("reset", check, watch)
    return _run(collector, limit, inventory, asked, timeout, verbosity, output, cancel)


def verify(
    limit: str | Iterable[str],
    inventory: Inventory | None = None,
    *,
    gpus: Gpus | None = None,
    scope: str | None = None,
    profile: str | None = None,
    check: bool = False,
    timeout: float | None = None,
    variables: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    verbosity: int = 0,
    output: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Wait until the GPUs are proved clean, or say why they are not. Changes nothing.

    How often what may become clean by itself is read again, and after how many seconds, say
    ``gpuops_verify_retries`` and ``gpuops_verify_delay`` in ``variables``; 10 and 1 if they are not
    there.

    The parameters and the exceptions are those of :func:`status`.
    """
    asked = _variables(variables, gpus=gpus, scope=scope, profile=profile)
    collector = Collector("verify", False, watch)
    return _run(collector, limit, inventory, asked, timeout, verbosity, output, cancel)


def _hosts(limit: str | Iterable[str]) -> str:
    """The hosts that were asked for, as after ``-l``.

    Of what it cannot read Ansible makes no limit, so that ``,``, ``[`` or an ``@FILE`` without a
    name in it would mean every host. Whether a name is in the inventory, the collection looks.

    :raises UsageError: no host is named, or a part is no name, no pattern and no file of names.
    """
    what_to_do = "name hosts or groups of the inventory, as in -l ct129"
    if isinstance(limit, Iterable) and not isinstance(limit, str):
        given: list[Any] = list(limit)
    else:
        given = [limit]
    for each in given:
        if not isinstance(each, str):
            raise UsageError(f"the limit is or has in it {each!r}, which names no host", what_to_do)
    parts = ",".join(given).split(",")
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise UsageError("no hosts were named", what_to_do)
    for name in names:
        if not re.search(r"[\w*]", name) or name.count("[") != name.count("]"):
            raise UsageError(f"'{name}' is no host, group or pattern", what_to_do)
    hosts = ",".join(names)
    words = re.split("[,:]", hosts)  # a colon is Ansible's other way to write several
    if not any([_names_somebody(word) for word in words]):  # a list, so that each is looked at
        raise UsageError(f"-l {hosts} names no host", what_to_do)
    return hosts


def _names_somebody(word: str) -> bool:
    """Whether there is anything in it; of a file after ``@``, in the file.

    :raises UsageError: the file cannot be read, also not a second time, by Ansible, as a pipe.
    """
    if not word.startswith("@"):
        return bool(word)
    file = Path(word[1:])
    what_to_do = "name a file with names of hosts or groups in it, one a line"
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"the {file} of -l {word} is no file", what_to_do)
        return bool(file.read_text(encoding="utf-8", errors="replace").strip())
    except OSError as error:
        raise UsageError(
            f"the {file} of -l {word} cannot be read ({error.strerror})", what_to_do
        ) from error


def _file(path: str | os.PathLike[str]) -> str:
    """A plan's file for Ansible, wherever that runs; of a link, what it leads to.

    :raises UsageError: its folder is not there, or it is a pipe, a device or a folder.
    """
    file = Path(os.path.realpath(runner.here() / path))
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", "name a file in one that is there")
    # Ansible would put a file in its place, and read it once for each host.
    if file.exists() and not file.is_file():
        raise UsageError(f"{path} is no file", "name a file for the plan")
    return str(file)


def _beside(file: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for Ansible to write to: what is there in the end was written by this run.

    Of an old plan nobody could tell, since Ansible leaves a file alone that it finds as it should
    be.
    """
    try:
        return tempfile.TemporaryDirectory(
            prefix=f".{file.name}.", dir=file.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written ({error.strerror})", "name a file in another folder"
        ) from error


def _moved(fresh: Path, file: Path) -> str:
    """Put a file in its place, whole; what stands in the way, such as a mount."""
    try:
        fresh.replace(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _gpus(gpus: Gpus) -> list[str]:
    """The GPUs that were asked for, as words.

    :raises UsageError: none is named, which the collection would take for all of them, or
        something is named that is no word and no number.
    """
    what_to_do = "name GPUs by index, range, UUID or PCI address, or leave gpus out for all"
    if isinstance(gpus, str):
        named: list[Any] = [each for each in gpus.split(",") if each.strip()]
    elif isinstance(gpus, Iterable) and not isinstance(gpus, bytes | bytearray | memoryview):
        named = list(gpus)
    else:
        named = [gpus]
    for each in named:
        if not isinstance(each, str | int) or isinstance(each, bool):
            raise UsageError(f"gpus is or has in it {each!r}, which names no GPU", what_to_do)
    words = [str(each).strip() for each in named]
    if not any(words):
        raise UsageError("gpus names nothing", what_to_do)
    return words


def _variables(
    more: Mapping[str, Any] | None,
    gpus: Gpus | None = None,
    scope: str | None = None,
    profile: str | None = None,
) -> dict[str, Any]:
    """The collection's variables for what was asked; it checks them itself."""
    asked = dict(more or {})
    if gpus is not None:
        asked["gpuops_gpus"] = _gpus(gpus)
    if scope is not None:
        asked["gpuops_scope"] = scope
    if profile is not None:
        asked["gpuops_profile"] = profile
    return asked


def _said(value: Any) -> tuple[str, ...]:
    """The words of a variable; whether they are sound is for the collection to say."""
    words = value if isinstance(value, list | tuple) else str(value).split(",")
    return () if value is None else tuple(str(word).strip() for word in words)


def _run(
    collector: Collector,
    limit: str | Iterable[str],
    inventory: Inventory | None,
    variables: dict[str, Any],
    timeout: float | None,
    verbosity: int,
    output: Callable[[str], None] | None,
    cancel: threading.Event | None,
) -> Report:
    hosts = _hosts(limit)
    if timeout is not None and not timeout > 0:
        raise UsageError(f"the timeout is {timeout}", "give a number of seconds above zero")
    began, started = time.monotonic(), datetime.now(UTC)

    def take(event: Mapping[str, Any]) -> None:
        if output is not None and event.get("stdout"):
            output(str(event["stdout"]).replace("\r\n", "\n"))
        collector.take(event)

    def report(ended: str = "") -> Report:
        return collector.report(
            limit=hosts,
            gpus=_said(variables.get("gpuops_gpus")),
            scope=str(variables.get("gpuops_scope") or ""),
            profile=str(variables.get("gpuops_profile") or ""),
            started=started.isoformat(timespec="milliseconds"),
            seconds=time.monotonic() - began,
            ended=ended,
            versions=runner.versions(),
        )

    try:
        runner.run(
            PLAYBOOKS[collector.verb],
            take,
            limit=hosts,
            inventory=inventory,
            variables=variables,
            check=collector.check and collector.verb == "reset",
            words=output is not None,
            verbosity=verbosity,
            timeout=timeout,
            cancel=cancel,
        )
    except KeyboardInterrupt as error:
        raise Interrupted(report("interrupted")) from error
    except runner.Ended as error:
        if error.why == "interrupted":
            raise Interrupted(report(error.why)) from error
        return report(error.why)
    except AnsibleError:
        # It may fail in its last words, when everything has been said.
        if collector.stats is None:
            raise
    if collector.stats is None or not collector.hosts:
        said = _last_words(collector.text) or ["it said nothing"]
        # It ends on a host that it does not know, whatever it says.
        first = textwrap.shorten(said[0].replace(", ignoring:", ":"), 300, placeholder=" …")
        raise AnsibleError(
            f"Ansible ended without a result: {first}",
            "correct the inventory, what was given after -l, or Ansible's own settings "
            "(environment, ansible.cfg); -v shows all that Ansible says",
            " ".join(said),
        )
    return report()


def _last_words(said: list[str]) -> list[str]:
    """What Ansible itself says of why there is no result.

    First its errors, then its warnings, which may be what led to them; without any, all of it.
    """
    errors = [text for text in said if text.startswith("[ERROR]") or "ERROR!" in text]
    warnings = [text for text in said if text.startswith("[WARNING]")]
    return [text.removeprefix("[ERROR]: ") for text in [*errors, *warnings] or said]
