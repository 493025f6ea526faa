# SPDX-License-Identifier: GPL-3.0-or-later
"""The report of one run, as typed and frozen records.

Units are part of the field names or stated beside them. Everywhere, ``None`` means "could not be
read"; it is never a stand-in for zero.
"""

from dataclasses import dataclass
from typing import Literal

from gpuops._version import __version__

SCHEMA = "gpuops.report/1"

Verdict = Literal["clean", "held", "blocked", "unkillable", "unknown", "unreachable"]


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
    """Whose it is: ``container 129``, ``pod …``, ``job …``, ``unit …`` or ``node``."""
    owner_evidence: str
    """What showed the owner, such as the cgroup path."""
    gpus: tuple[int, ...] = ()
    """Minor numbers of the GPUs it holds."""
    evidence: tuple[str, ...] = ()
    """What showed that it holds them: descriptor, mapping, the driver's list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One signal that was sent, or in check mode would have been."""

    process: Process
    signal: str
    """Name of the signal: ``TERM`` or ``KILL``."""
    rung: str
    """Name of the rung that sent it."""
    result: str
    """What became of the process: ``exited``, ``survived``, ``gone before``, ``would signal``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """One process that holds a GPU and was left alive on purpose."""

    process: Process
    reason: str
    """Why it was left alive, and what to say to include it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder, as it went on one host."""

    name: str
    seconds: float
    """How long it took, its waiting included, seconds."""
    verdict: Verdict
    """The host's verdict when the rung ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What one run found, did and proved on one host of the inventory."""

    name: str
    """Its name in the inventory."""
    verdict: Verdict
    changed: bool
    """Whether anything was signalled."""
    route: str
    """Where the run acted for it, such as ``pve1 for container 129``."""
    reason: str = ""
    """Why the verdict is what it is, in one sentence; empty when clean."""
    remedy: str = ""
    """What an operator can do about it; empty when clean."""
    before: tuple[Gpu, ...] = ()
    """The first reading."""
    after: tuple[Gpu, ...] = ()
    """The last reading."""
    killed: tuple[Action, ...] = ()
    spared: tuple[Spared, ...] = ()
    rungs: tuple[Rung, ...] = ()
    """The rungs that ran, in order."""


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
    killed: int
    """Processes signalled, over all hosts."""
    spared: int
    """Holders left alive on purpose, over all hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run over one or many hosts."""

    hosts: tuple[Host, ...]
    totals: Totals
    schema: str = SCHEMA
    version: str = __version__
    """Version of gpuops that wrote the report."""

    @property
    def clean(self) -> bool:
        """Whether every host was proved clean. A run over no host has proved nothing."""
        return bool(self.hosts) and all(host.verdict == "clean" for host in self.hosts)
