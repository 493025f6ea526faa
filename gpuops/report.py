# SPDX-License-Identifier: GPL-3.0-or-later
"""The report of one run, as typed and frozen records.

Units are part of the field names or stated beside them. Everywhere, ``None`` means "could not be
read"; it is never a stand-in for zero.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpuops._version import __version__
from gpuops.errors import NotCleanError, ReportError

SCHEMA = "gpuops.report/1"

Verdict = Literal["clean", "held", "blocked", "unkillable", "unknown", "unreachable", "refused"]

EXIT_CODES: dict[Verdict, int] = {
    "clean": 0,
    "held": 10,
    "blocked": 11,
    "unkillable": 12,
    "unknown": 13,
    "unreachable": 14,
    "refused": 2,
}
"""The exit code for each verdict, from the best to the worst; the worst host's is the run's."""

SEVERITY: tuple[Verdict, ...] = tuple(EXIT_CODES)

# Verdicts with which a machine could be reached and read, whoever holds its GPUs.
READABLE: tuple[Verdict, ...] = ("clean", "held", "blocked", "unkillable")

SIGNALLED = ("sent", "would be sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as the driver described it in one reading."""

    index: int
    """The driver's number for it where it was read; in a container that may be the container's."""
    uuid: str
    """The driver's lasting name, ``GPU-…``."""
    minor: int | None
    """N of ``/dev/nvidiaN``; not always the index."""
    name: str
    """Product name, such as ``NVIDIA H200``."""
    used_mib: int | None
    """Memory in use, MiB, without what the driver reserves for itself."""
    total_mib: int | None
    """All memory, MiB."""
    reserved_mib: int | None
    """Memory that the driver keeps for itself, MiB."""
    utilisation: int | None
    """Share of the last sampling period in which a kernel ran, percent."""
    temperature: int | None
    """Core temperature, degrees Celsius."""
    pstate: str | None
    """Performance state, ``P0`` (fastest) to ``P15``."""
    bus_id: str = ""
    """PCI address."""
    driver: str | None = None
    """Version of the driver."""
    verdict: Verdict | None = None
    """The verdict on this GPU alone; ``None`` where none was made (as before the first rung)."""
    unattributed_mib: int | None = None
    """MiB in use that the driver ascribes to no process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that holds GPUs, or that a rung considered."""

    pid: int
    """Process id in the namespace of its owner: what somebody inside the container sees."""
    node_pid: int
    """Process id on the host that acted; the same as ``pid`` on a bare node."""
    ppid: int
    """Parent's process id, in the numbering of ``node_pid``."""
    start: int
    """Start time in clock ticks since boot; together with ``node_pid`` it names one process."""
    state: str
    """State letter of the kernel: ``R``, ``S``, ``D``, ``Z``, …"""
    user: str
    """User name, or the number where it has none."""
    command: str
    """Command line, arguments joined with blanks."""
    owner: str
    """Whose it is, in the collection's words: a kind, its name, and what is known beyond that, as
    in ``lxc 129``, ``slurm 6 step batch``, ``unit ollama.service`` or ``user 0 session 1``;
    ``host`` for the node's own outside of these, ``unknown`` where nothing proves it."""
    owner_evidence: str
    """What showed the owner, such as the cgroup path."""
    name: str = ""
    """The kernel's name for it, 15 characters at most."""
    gpus: tuple[int, ...] = ()
    """Minor numbers of the GPUs it holds."""
    evidence: tuple[str, ...] = ()
    """What showed that it holds them, such as ``gpu4: descriptor`` or ``gpu4: driver list``."""
    used_mib: dict[str, int | None] = field(default_factory=dict)
    """MiB in use by minor number, as far as the driver tells it."""

    def __str__(self) -> str:
        """``python3 (pid 4, 16 on the node) on /dev/nvidia0,1``."""
        node = "" if self.pid == self.node_pid else f", {self.node_pid} on the node"
        where = ",".join(map(str, self.gpus))
        held = f"/dev/nvidia{where}" if where else "the driver's control nodes"
        return f"{self.name or self.command or '?'} (pid {self.pid}{node}) on {held}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One attempt to signal a process, or in check mode what would have been one."""

    process: Process
    signal: str
    """Name of the signal: ``TERM``, ``INT`` or ``KILL``; or ``quit``, which is none, but MPS told
    to by its own command."""
    rung: str
    """Name of the rung that sent it."""
    result: str
    """What came of it: ``sent``, ``gone`` (ended before), ``let go`` (held nothing any more),
    ``changed`` (nobody to be signalled any more), ``unreadable`` (could not be looked at again),
    ``not permitted``, ``out of reach`` (an MPS whose pipes are elsewhere), what MPS answered if it
    was told to quit in vain, or in check mode ``would be sent``."""

    def __str__(self) -> str:
        """``kill: KILL sent: python3 (pid 4) on /dev/nvidia0``."""
        return f"{self.rung}: {self.signal} {self.result}: {self.process}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """One process that holds a GPU and was left alive on purpose."""

    process: Process
    reason: str
    """Why it was left alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder, as it went on one host."""

    name: str
    seconds: float
    """How long it took where it ran, its waiting included, seconds: of all hosts with the same
    acting host together, which end a rung together."""
    verdict: Verdict
    """The host's verdict when the rung ended."""
    signalled: int = 0
    """How many processes it signalled, or in check mode would have."""
    zero: float | None = None
    """Seconds from the first signal to the first reading of zero; ``None`` if there was none."""
    second_zero: float | None = None
    """Seconds from the first signal to the second reading of zero in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What one run found, did and proved on one host of the inventory."""

    name: str
    """Its name in the inventory."""
    verdict: Verdict
    changed: bool
    """Whether anything was signalled, or in check mode would have been."""
    route: str
    """Where the run acted for it, such as ``pve1 for container 129``."""
    reason: str = ""
    """Why the verdict is what it is, in one sentence."""
    remedy: str = ""
    """What an operator can do about it; empty when clean."""
    before: tuple[Gpu, ...] = ()
    """The first reading."""
    after: tuple[Gpu, ...] = ()
    """The last reading."""
    holders: tuple[Process, ...] = ()
    """Who in scope held GPUs at the last look."""
    killed: tuple[Action, ...] = ()
    """Every attempt to signal somebody, in order; ``result`` says what came of it."""
    spared: tuple[Spared, ...] = ()
    rungs: tuple[Rung, ...] = ()
    """The rungs that had somebody to signal, in order."""
    scope: str = ""
    """Whose processes could be touched."""
    only_gpus: tuple[str, ...] = ()
    """The GPUs that the run was limited to here, as they were named on the command line or in the
    inventory, ranges written out: the verdict says nothing of the host's others. Empty for all."""
    problems: tuple[str, ...] = ()
    """What could not be read although it did not stand in the way."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds: ``total`` from the first to the last event, ``node`` of work on the acting host,
    ``scan`` of the last look at all processes."""

    @property
    def part(self) -> str:
        """What part of the host the verdict is about: ``only GPU 0, 1``; empty for all of it."""
        return only(self.only_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A host that the run was told of and that takes no part itself."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The run in numbers: hosts per verdict, then what was done."""

    hosts: int
    clean: int
    held: int
    blocked: int
    unkillable: int
    unknown: int
    unreachable: int
    refused: int = 0
    skipped: int = 0
    """Hosts that take no part themselves."""
    killed: int
    """Processes signalled, over all hosts; in check mode those that would have been."""
    spared: int
    """Holders left alive on purpose, over all hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run over one or many hosts."""

    schema: str = SCHEMA
    version: str = __version__
    """Version of gpuops that wrote the report."""
    verb: str = ""
    """What was asked for: ``status``, ``plan``, ``reset`` or ``verify``."""
    check: bool = False
    """Whether it was a run that only says what it would do."""
    limit: str = ""
    """The hosts that were asked for, in Ansible's words."""
    gpus: tuple[str, ...] = ()
    """The GPUs that were asked for. Empty where nothing was said of them: then each host's
    ``only_gpus`` says whether its inventory names some."""
    scope: str = ""
    """Whose processes were asked for; empty where nothing was said of it."""
    profile: str = ""
    """Which rungs were asked for; empty where nothing was said of it."""
    started: str = ""
    """When it began, ISO 8601 in UTC."""
    seconds: float = 0.0
    """How long it took."""
    ended: str = ""
    """Why it ended early: ``interrupted`` or ``timed out after … s``; empty if it did not."""
    totals: Totals
    part_of: int = 0
    """In a line of ``--output jsonl``, about one host: how many its run had. 0: here are all."""
    hosts: tuple[Host, ...]
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[str, ...] = ()
    """What Ansible warned of."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the tools on this side: ``ansible-core``, ``ansible-runner``, ``python``."""

    @property
    def clean(self) -> bool:
        """Whether every host was proved clean, of what was asked for (see ``part``).

        A run over no host has proved nothing.
        """
        return bool(self.hosts) and not self.ended and self.verdict == "clean"

    @property
    def verdict(self) -> Verdict:
        """The worst of all hosts' verdicts; ``unknown`` if there is no host."""
        return worst(host.verdict for host in self.hosts)

    @property
    def part(self) -> str:
        """Which part of the run or its hosts this is: ``only GPU 0, 1``; empty for all of all."""
        if self.part_of > len(self.hosts):
            return f"{len(self.hosts)} of the {self.part_of} hosts of its run"
        parts = {host.part for host in self.hosts}
        if len(parts) < 2:
            return "".join(parts)
        some = sum(bool(host.part) for host in self.hosts)
        return f"only some GPUs of {some} host{'' if some == 1 else 's'}"

    @property
    def exit_code(self) -> int:
        """What the command ends with: 0 for clean, else the worst host's."""
        if self.ended == "interrupted":
            return 130
        return EXIT_CODES["unknown" if self.ended and self.verdict == "clean" else self.verdict]

    def raise_for_verdict(self) -> None:
        """Do nothing if every host was proved clean.

        :raises NotCleanError: else, with the worst host's reason and remedy.
        """
        if self.clean:
            return
        bad = self.not_clean()
        if self.hosts and not bad:
            raise NotCleanError(self, f"the run {self.ended}", "run it again, with more time")
        if not bad:
            raise NotCleanError(self, "no host was looked at", "name some that are GPU machines")
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        first = bad[0]
        what = f"{first.name} is {first.verdict}{more}: {first.reason or self.ended}"
        raise NotCleanError(self, what, first.remedy or "run it again")

    def not_clean(self) -> list[Host]:
        """The hosts that were not proved clean, the worst first."""
        bad = [host for host in self.hosts if host.verdict != "clean"]
        return sorted(bad, key=lambda host: (-SEVERITY.index(host.verdict), host.name))

    def of(self, hosts: Iterable[Host]) -> Report:
        """This run with these hosts in place of its own."""
        hosts = tuple(hosts)
        return replace(self, hosts=hosts, totals=totals(hosts, len(self.skipped)))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """As one JSON document; with ``indent=None`` on one line."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read what :meth:`to_json` wrote, or lines of ``--output jsonl``, which it puts together.

        :raises ReportError: it is no report, or one of another schema, or lines of several runs.
        """
        try:
            return _joined([cls.from_dict(each) for each in _documents(text)])
        except ValueError as error:
            raise ReportError(
                f"this is no JSON ({error})", "give a file of --output json"
            ) from error
        except RecursionError as error:
            raise ReportError(
                "this is no report (it is nested too deeply)", "give a file of --output json"
            ) from error

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """Read what :meth:`to_dict` gave. Fields that this version does not know are left out.

        :raises ReportError: it is no report, or one of another schema.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ReportError(
                f"the schema is {json.dumps(schema)} and not {SCHEMA}",
                "give a file of --output json of this version",
            )
        report: Report = _decode(cls, data, "report")
        return report


def _documents(text: str | bytes) -> list[Any]:
    """What a file of JSON holds, or each line of a file of JSON lines that is not blank."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        lines = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        # Of bytes only at line feeds.
        return [json.loads(line) for line in lines.splitlines() if line.strip()]


def _joined(parts: list[Report]) -> Report:
    """One report of those about one host each that were made of it; one alone as it is.

    :raises ReportError: they are of several runs, or not all of one: what is missing may be held.
    """
    if not parts[1:]:
        return parts[0]
    whole = replace(parts[0].of(host for part in parts for host in part.hosts), part_of=0)
    names = {host.name for host in whole.hosts}
    runs = [replace(part, hosts=(), totals=whole.totals) for part in parts]
    if any(run != runs[0] for run in runs):
        wrong = "its lines are of more than one run"
    elif len(names) < len(whole.hosts):
        wrong = "a host is in it more than once"
    elif len(names) != parts[0].part_of:
        wrong = f"it has {len(names)} of the {parts[0].part_of} hosts of its run"
    else:
        return whole
    raise ReportError(wrong, "give all lines of one run, with the same 'started'")


def only(gpus: Iterable[str]) -> str:
    """Words for a limit to these GPUs; none where there is no limit."""
    names = ", ".join(gpus)
    return f"only GPU {names}" if names else ""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of these; ``unknown`` if there is none."""
    return max(verdicts, key=SEVERITY.index, default="unknown")


def totals(hosts: Iterable[Host], skipped: int = 0) -> Totals:
    """Count what these hosts say."""
    hosts = list(hosts)
    count = Counter(host.verdict for host in hosts)
    return Totals(
        hosts=len(hosts),
        clean=count["clean"],
        held=count["held"],
        blocked=count["blocked"],
        unkillable=count["unkillable"],
        unknown=count["unknown"],
        unreachable=count["unreachable"],
        refused=count["refused"],
        skipped=skipped,
        killed=sum(len(signalled(host)) for host in hosts),
        spared=sum(len(host.spared) for host in hosts),
    )


def signalled(host: Host) -> list[Process]:
    """Each process of the host that was, or in check mode would be, signalled; each once."""
    found = {
        (action.process.node_pid, action.process.start): action.process
        for action in host.killed
        if action.result in SIGNALLED
    }
    return list(found.values())


# --- reading and describing, from the types alone ---

# `X | None` is one of these, depending on what X is.
OPTIONAL = (UnionType, Union)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """A value of this type from plain data; anything else is an error that says where."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in OPTIONAL:
        return None if value is None else _decode(args[0], value, where)
    if origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_decode(args[0], each, f"{where}[{n}]") for n, each in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            return {str(k): _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    elif isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        if isinstance(value, dict):
            return _decode_record(kind, value, where)
    elif kind in (int, float):
        numbers = int if kind is int else int | float
        if isinstance(value, numbers) and not isinstance(value, bool) and _fits(value):
            return kind(value)
    elif isinstance(value, kind):
        return value
    shown = json.dumps(value, default=str)[:60]
    raise ReportError(f"{where} is {shown}, which it cannot be", "see gpuops report --schema")


def _fits(number: float) -> bool:
    """Whether it can be reckoned with: JSON has numbers of any length."""
    return isinstance(number, float) or abs(number) <= sys.float_info.max


def _decode_record(kind: type, value: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    known = {
        name: _decode(hints[name], value[name], f"{where}.{name}") for name in hints & value.keys()
    }
    try:
        return kind(**known)
    except TypeError as error:
        missing = sorted(set(hints) - set(value))
        raise ReportError(
            f"{where} lacks some of {', '.join(missing)}", "see gpuops report --schema"
        ) from error


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a report, made from these types."""
    parts: dict[str, Any] = {}
    top = _describe(Report, parts)
    top_part = parts.pop(top["$ref"].rpartition("/")[2])
    top_part["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        **top_part,
        "required": [each.name for each in fields(Report)],
        "$defs": parts,
    }


PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _describe(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin in OPTIONAL:
        return {"anyOf": [_describe(args[0], parts), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _describe(args[0], parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe(args[1], parts)}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind.__name__ not in parts:
        parts[kind.__name__] = {}
        hints = _hints(kind)
        parts[kind.__name__] = {
            "type": "object",
            "description": (kind.__doc__ or "").partition("\n")[0],
            "properties": {name: _describe(hint, parts) for name, hint in hints.items()},
            "required": list(hints),
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}
