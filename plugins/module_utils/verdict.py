# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From readings and holders to one of five verdicts, each with its reason and remedy.

``clean`` is proved, never assumed: whatever is not positively known to be clean is not.
"""

from __future__ import annotations

import fnmatch
import itertools

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline, holders, nvidia_smi

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLEAN, HELD, BLOCKED, UNKILLABLE, UNKNOWN = "clean", "held", "blocked", "unkillable", "unknown"

# The worst of a host's GPUs is the host's verdict.
SEVERITY = (CLEAN, BLOCKED, HELD, UNKILLABLE, UNKNOWN)

# MiB that a GPU may show because it is open, and nobody computes on it: CUDA opens every GPU that
# it can see, which takes 4 MiB of each, for one process as for eight (two H200, driver 580).
OPENED_MIB = 64

# Why a run that is about some GPUs spares a holder of others.
LEFT_OUT = "left out by gpuops_gpus"

# Why a run over a container spares what serves a holder of the machine's other GPUs.
NOT_THERE = "on GPUs that the container does not have"

# Why a process on the protect list is spared.
PROTECTED_BY_NAME = "protected by name"

# What to do about processes at which the look did not come to an end.
LATE = "see in /proc/PID/stack on the acting host what they wait for, and free that or end them"

# The kernel cuts a process's name after 15 characters.
COMM_LENGTH = 15


class TargetError(Exception):
    """A target is described in a way that cannot be; the text says what to write instead."""


class Target:
    """One GPU machine to be judged, as the route describes it.

    :param spec: ``name``; ``vmid`` (Proxmox container, 0 for the node itself);
        ``expected_gpus`` (0: as many as there are device nodes); ``gpus`` (indices, UUIDs or bus
        ids to look at, empty for all); ``baseline_mib`` (MiB that an idle GPU may show: one
        number, or by index, UUID or bus id); ``protect`` (names never to be signalled);
        ``scope`` (``container``, ``node``, ``job:NUMBER``, ``user:NAME`` or ``everything``);
        ``plan`` (holders, as :func:`plan_entry` writes them: nobody else may be signalled);
        ``mps`` (``keep``, or ``quit`` to tell it to);
        ``holders_only`` (the driver tells no memory here, so holders alone decide);
        ``smi_timeout`` (seconds an answer of nvidia-smi may take).
    :raises TargetError: one of these cannot be.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name = str(spec["name"])
        self.vmid = whole("vmid", spec.get("vmid") or 0)
        self.expected_gpus = whole("expected_gpus", spec.get("expected_gpus") or 0)
        self.gpus = [str(gpu) for gpu in spec.get("gpus") or []]
        self.baseline_mib = baselines(spec.get("baseline_mib") or 0)
        self.protect = [str(name) for name in spec.get("protect") or []]
        self.scope = scope(str(spec.get("scope") or ""), self.vmid)
        self.plan: list[dict[str, Any]] | None = spec.get("plan")
        self.quits_mps = spec.get("mps") == "quit"
        self.holders_only = bool(spec.get("holders_only"))
        self.smi_timeout = seconds("smi_timeout", deadline.smi_timeout(spec), above_zero=True)
        # Inside a container the memory of others is seen, but not the others.
        self.inside = False

    @property
    def place(self) -> str:
        """Where nvidia-smi is read for this target, in words."""
        return "container %d" % self.vmid if self.vmid else self.name

    @property
    def is_about_all(self) -> bool:
        """Is a run about whoever holds any NVIDIA device that is in scope?

        What a container sees is what it is about: the Proxmox host may have other GPUs, and with
        the scope ``everything`` their holders are in scope too.
        """
        return not self.gpus and not (self.vmid and self.scope != "container")

    def wants(self, gpu: nvidia_smi.Gpu) -> bool:
        """Is this GPU one of those to be looked at?"""
        return not self.gpus or any(is_called(gpu, name) for name in self.gpus)

    def baseline(self, gpu: nvidia_smi.Gpu) -> int:
        """MiB that this GPU may show when idle."""
        if not isinstance(self.baseline_mib, dict):
            return self.baseline_mib
        named = [mib for name, mib in self.baseline_mib.items() if is_called(gpu, name)]
        return named[0] if named else 0

    def is_zero(self, gpu: nvidia_smi.Gpu) -> bool:
        """Read, and not above the declared baseline? Where holders alone decide, always.

        From inside a container it is not seen whose memory it is, or who else holds the GPU:
        nothing but 0 MiB proves anything there.
        """
        if gpu.used_mib is None:
            return self.holders_only and not self.inside
        return gpu.used_mib <= (0 if self.inside else self.baseline(gpu))


def whole(key: str, value: Any) -> int:
    """This value as a whole number of zero or more.

    :raises TargetError: it is none.
    """
    found = nvidia_smi.number(str(value))
    if found is None or isinstance(value, bool):
        raise TargetError("%s is '%.40s'; write a whole number of zero or more" % (key, value))
    return found


def seconds(key: str, value: Any, above_zero: bool = False) -> float:
    """This value as a number of seconds, of a day at most.

    :raises TargetError: it is none.
    """
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = -1.0
    if not 0 <= found <= deadline.LONGEST or (above_zero and not found):
        least = " above zero" if above_zero else ""
        raise TargetError(
            "%s is '%.40s'; write a number of seconds%s, %g at most"
            % (key, value, least, deadline.LONGEST)
        )
    return found


def baselines(value: Any) -> int | dict[str, int]:
    """MiB that an idle GPU may show: one number, or by the name of the GPU.

    :raises TargetError: one of them is no whole number.
    """
    if isinstance(value, dict):
        return {str(gpu): whole("baseline_mib[%s]" % gpu, mib) for gpu, mib in value.items()}
    return whole("baseline_mib", value)


def scope(value: str, vmid: int) -> str:
    """Whose processes may be touched: as this says, else those of the container or of the node.

    :raises TargetError: it is no scope, or none of this kind of target.
    """
    own = "container" if vmid else "node"
    kind, _, name = value.partition(":")
    # In a container all belong to the container; jobs and users can be told apart on a node.
    apart = kind == "user" or (kind == "job" and nvidia_smi.number(name) is not None)
    if value in ("", own, "everything") or (name and apart and not vmid):
        return value or own
    choices = "%s, everything" % own if vmid else "node, job:NUMBER, user:NAME, everything"
    raise TargetError("scope is '%.40s'; write one of %s" % (value, choices))


def is_called(gpu: nvidia_smi.Gpu, name: str) -> bool:
    """Is this the GPU's index, UUID or PCI address, in any notation?"""
    return short_bus(name) in (str(gpu.index), gpu.uuid.lower(), short_bus(gpu.bus_id))


def plan_entry(holder: holders.Holder) -> dict[str, Any]:
    """What a plan remembers of a holder: enough to know later that it is still the same."""
    return {
        "node_pid": holder.pid,
        "start": holder.start,
        "name": holder.name,
        "gpus": sorted(holder.gpus),
    }


def short_bus(bus_id: str) -> str:
    """A PCI address with a domain of four digits: tools write eight, four or none."""
    text = bus_id.lower()
    if text.count(":") == 1:
        text = "0000:" + text
    domain, colon, rest = text.partition(":")
    return domain.lstrip("0").rjust(4, "0") + colon + rest if colon else text


class View:
    """The holders that matter to one target, sorted by what may be done to them.

    ``mine``: in scope and not protected. ``spared``: (holder, why), protected or foreign.
    ``stuck``: of mine, those that outlived SIGKILL. ``unreadable``: who could not be looked at;
    ``late``: because a look at them did not come to an end, and not because it was refused.
    ``ending``: all of them because they have yet to end.
    """

    def __init__(self) -> None:
        self.mine: list[holders.Holder] = []
        self.spared: list[tuple[holders.Holder, str]] = []
        self.protected: set[int] = set()
        self.stuck: dict[int, dict[str, str]] = {}
        self.unreadable: list[str] = []
        self.late = False
        self.ending = False

    def holding(self, minor: int | None) -> list[holders.Holder]:
        """Mine on this GPU; a GPU whose minor number is not known may be held by any of them."""
        return [holder for holder in self.mine if minor is None or minor in holder.gpus]

    def in_the_way(self, gpu: nvidia_smi.Gpu, zero: bool) -> list[tuple[holders.Holder, str]]:
        """Spared ones that keep this GPU from being clean.

        A GPU that reads zero may be held by a protected process (a monitor), and by one that
        computes elsewhere only. On one that is not zero those count that can own the memory.
        """
        return [
            (holder, why)
            for holder, why in self.spared
            if (gpu.minor is None or gpu.minor in holder.gpus)
            and (not self.harmless(holder, gpu) if zero else explains(holder, gpu))
        ]

    def harmless(self, holder: holders.Holder, gpu: nvidia_smi.Gpu) -> bool:
        """May it hold a GPU of which nothing is in use?

        Where the driver tells no memory, what it lists a process for may be any amount.
        """
        if gpu.minor in holder.used_mib and gpu.used_mib is None:
            return False
        return holder.pid in self.protected or computes_elsewhere(holder, gpu.minor)

    def limit(self, asked: set[int | None]) -> None:
        """Spare those of mine that hold the GPUs asked for but are not known to compute there."""
        for holder in [each for each in self.mine if each.gpus & asked]:
            if holder.used_mib and not asked & set(holder.used_mib):
                why = "it computes on other GPUs only"
            elif not holder.used_mib and not holder.gpus <= asked:
                why = "it holds other GPUs too, and the driver does not say where it computes"
            else:
                continue
            self.mine.remove(holder)
            self.spared.append((holder, "%s: %s" % (LEFT_OUT, why)))

    def keep_shared_mps(self, left: list[holders.Holder], why_left: str) -> None:
        """Protect an MPS that serves somebody who is not to be touched: with it goes their work.

        :param left: of mine, those that the run is not about, for this reason.
        """
        served = [each for each in self.spared if each[0].pid not in self.protected]
        served += [(holder, why_left) for holder in left if not holder.is_mps]
        for service in [holder for holder in self.mine if holder.is_mps]:
            others = [each for each in served if each[0].gpus & service.gpus]
            if others:
                self.mine.remove(service)
                self.protected.add(service.pid)
                why = "protected: it may serve %s, %s" % (short(others[0][0]), others[0][1])
                self.spared.append((service, why))


def computes_elsewhere(holder: holders.Holder, minor: int | None) -> bool:
    """Does the driver list it, and not on this GPU? Then it has merely opened it."""
    return bool(holder.used_mib) and minor is not None and minor not in holder.used_mib


def explains(holder: holders.Holder, gpu: nvidia_smi.Gpu) -> bool:
    """May this holder own what is in use of the GPU?

    What the driver lists it for, it owns; what it has merely opened, a little of. If the driver
    lists it nowhere it still may, when it computes (has unified memory mapped) or holds the GPU
    without a descriptor of its own.
    """
    if computes_elsewhere(holder, gpu.minor):
        return gpu.minor in holder.gpus and (gpu.used_mib or 0) <= OPENED_MIB
    if holder.used_mib:
        return gpu.minor is None or holder.used_mib[gpu.minor] != 0
    how = holder.evidence.get("gpu%s" % gpu.minor, set())
    return holder.is_workload or (bool(how) and "descriptor" not in how)


def protected_by(holder: holders.Holder, names: list[str]) -> str:
    """The entry of the protect list that covers this process, or ``""``.

    Matched against the process's name and the base name of its command; shell wildcards work. A
    name as long as the kernel keeps it matches what begins with it. Where no command could be read
    it also matches a pattern that may go on to match what the kernel has cut off.
    """
    base = holders.base_name(holder.command)
    cut = len(holder.name) == COMM_LENGTH
    if base and base in names:
        return base
    for name in filter(None, names):
        if fnmatch.fnmatchcase(base, name) or fnmatch.fnmatchcase(holder.name, name):
            return name
        if cut and name.startswith(holder.name):
            return name
        if cut and not base and may_go_on(holder.name, name):
            return name
    return ""


def may_go_on(text: str, pattern: str) -> bool:
    """Might something that begins with this text match the pattern?"""
    return any(fnmatch.fnmatchcase(text, pattern[:length]) for length in range(1, len(pattern) + 1))


class Verdict:
    """The verdict on a host: one word, one sentence why, and what to do."""

    def __init__(self, word: str, reason: str, remedy: str = "") -> None:
        self.word = word
        self.reason = reason
        self.remedy = remedy


def unreadable(target: Target, reading: nvidia_smi.Reading, nodes: int) -> str:
    """Why this reading proves nothing, or ``""`` if it is complete.

    :param nodes: how many GPUs the machine should have if the inventory does not say.
    """
    problem = reading.problem(target.holders_only)
    if problem:
        return problem
    expected = target.expected_gpus or nodes
    if expected and len(reading.gpus) != expected:
        return "nvidia-smi lists %d GPUs where %d are expected" % (len(reading.gpus), expected)
    for name in target.gpus:
        if not any(is_called(gpu, name) for gpu in reading.gpus):
            return "the GPU asked for (%s) is not listed" % name
    return ""


def judge_gpu(target: Target, gpu: nvidia_smi.Gpu, view: View) -> str:
    """The verdict on one GPU."""
    if gpu.used_mib is None and not target.holders_only:
        return UNKNOWN
    zero = target.is_zero(gpu)
    held = view.holding(gpu.minor)
    if any(holder.pid in view.stuck for holder in held):
        return UNKILLABLE
    if held:
        return HELD
    if view.in_the_way(gpu, zero):
        return BLOCKED
    if zero:
        return CLEAN
    return BLOCKED if target.inside else HELD


def judge(target: Target, readings: list[nvidia_smi.Reading], view: View, nodes: int) -> Verdict:
    """The verdict on a host.

    :param readings: in order of time; clean needs the last two.
    :param view: who holds what, looked at not before the first of the two.
    """
    for reading in readings[-2:]:
        problem = unreadable(target, reading, nodes)
        if problem:
            return Verdict(UNKNOWN, problem, remedy_for(problem))
    gpus = [gpu for gpu in readings[-1].gpus if target.wants(gpu)]
    words = [judge_gpu(target, gpu, view) for gpu in gpus]
    loose = [holder for holder in view.mine if not holder.gpus and target.is_about_all]
    if loose:
        words.append(UNKILLABLE if any(holder.pid in view.stuck for holder in loose) else HELD)
    word = max(words, key=SEVERITY.index)
    if word != CLEAN:
        return explain(target, word, gpus, view)
    if view.unreadable:
        return Verdict(
            UNKNOWN,
            "%d processes could not be looked at: %s"
            % (len(view.unreadable), ", ".join(view.unreadable[:3])),
            LATE if view.late else "run as root in the node's own namespaces",
        )
    earlier = readings[-2].gpus if len(readings) > 1 else []
    if [gpu.uuid for gpu in earlier if target.wants(gpu) and target.is_zero(gpu)] != [
        gpu.uuid for gpu in gpus
    ]:
        return Verdict(UNKNOWN, "only one of the two readings showed zero", "verify again")
    return Verdict(CLEAN, clean_reason(target, gpus, len(readings[-1].gpus), view))


def clean_reason(target: Target, gpus: list[nvidia_smi.Gpu], listed: int, view: View) -> str:
    """What was proved, in one sentence.

    :param gpus: those that were asked for, of so many that are listed.
    """
    nobody = nobody_but(left_alone_on(gpus, view))
    if any(gpu.used_mib is None for gpu in gpus):
        return "%s holds any of %d GPUs in two readings in %s; %s" % (
            nobody,
            len(gpus),
            target.place,
            "their memory cannot be read there, as gpuops_holders_only declares",
        )
    most = max(gpu.used_mib or 0 for gpu in gpus)
    level = "%d MiB or less, within the declared baseline" % most if most else "0 MiB"
    return "%d of %d GPUs at %s in two readings in %s, %s holds them" % (
        len(gpus),
        listed,
        level,
        target.place,
        nobody,
    )


def left_alone_on(gpus: list[nvidia_smi.Gpu], view: View) -> list[holders.Holder]:
    """The spared ones that hold any of these GPUs."""
    there = {gpu.minor for gpu in gpus}
    return [holder for holder, _ in view.spared if holder.gpus & there]


def nobody_but(some: list[holders.Holder]) -> str:
    """``nobody``, or ``nobody but`` these, cut after the first."""
    if not some:
        return "nobody"
    more = " and %d more" % (len(some) - 1) if some[1:] else ""
    return "nobody but %s%s" % (short(some[0]), more)


def explain(target: Target, word: str, gpus: list[nvidia_smi.Gpu], view: View) -> Verdict:
    """Reason and remedy of a host that is not clean."""
    if word == UNKILLABLE:
        stuck = [holder for holder in view.mine if holder.pid in view.stuck]
        return Verdict(
            word,
            "; ".join(stuck_sentence(holder, view.stuck[holder.pid]) for holder in stuck[:3]),
            "free what it waits for, or restart the container or the node",
        )
    bad = [gpu for gpu in gpus if judge_gpu(target, gpu, view) == word]
    if word == UNKNOWN:
        return Verdict(word, "no memory in use was read of " + memory_sentence(bad), remedy_for(""))
    return explain_blocked(target, bad, view) if word == BLOCKED else explain_held(bad, view)


def explain_blocked(target: Target, bad: list[nvidia_smi.Gpu], view: View) -> Verdict:
    """Who must not be touched and is in the way, or that nobody can be seen from in here."""
    where = memory_sentence(bad)
    others = {}
    remedies: dict[str, None] = {}
    for gpu in bad:
        for holder, why in view.in_the_way(gpu, target.is_zero(gpu)):
            others[holder.pid] = "%s, %s" % (short(holder), why)
            remedies[way_out(target, holder, why)] = None
    if others:
        reason = "%s, held by %s" % (where, "; ".join(list(others.values())[:3]))
        return Verdict(BLOCKED, reason, "; ".join(remedies))
    return Verdict(
        BLOCKED,
        "%s, and no process visible in this container holds it" % where,
        "act from the Proxmox host: set proxmox_vmid and gpuops_proxmox_host for this host",
    )


def explain_held(bad: list[nvidia_smi.Gpu], view: View) -> Verdict:
    """Who in scope holds it; else that the driver has not freed it, and who is there besides.

    :param bad: the GPUs that are held; none where only the driver's control nodes are.
    """
    where = memory_sentence(bad) if bad else "the driver's control nodes are held"
    there = {gpu.minor for gpu in bad}
    mine = [holder for holder in view.mine if not bad or None in there or holder.gpus & there]
    if mine:
        names = "; ".join(short(holder) for holder in mine[:3])
        more = " and %d more" % (len(mine) - 3) if len(mine) > 3 else ""
        return Verdict(HELD, "%s, held by %s%s" % (where, names, more), "run reset_gpus.yml")
    seen = " that could be looked at" if view.unreadable else ""
    # Who draws is not in the driver's list of those that compute, but maps the GPU as they do.
    beside = sorted(left_alone_on(bad, view), key=lambda holder: not holder.maps)
    nobody = nobody_but(beside) if beside else "no process"
    first = "stop %s, " % (beside[0].name or "it") if beside else ""
    return Verdict(
        HELD,
        "%s, and %s%s holds it" % (where, nobody, seen),
        "wait for the driver to release it; if it stays, %sreset the GPU or reboot the node"
        % first,
    )


def way_out(target: Target, holder: holders.Holder, why: str) -> str:
    """What to do about one that is in the way and must not be touched for this reason."""
    if holder.is_mps and why.startswith("protected") and not target.quits_mps:
        return "set gpuops_mps=quit to have MPS told to quit"
    if why.startswith(PROTECTED_BY_NAME):
        name = holder.name or "it"
        return "stop %s, or take its name off gpuops_protect or gpuops_protect_more" % name
    if LEFT_OUT in why:
        return (
            "name its other GPUs in gpuops_gpus too, or set gpuops_baseline_mib "
            "where what it has merely opened may stay"
        )
    return "stop it where it belongs, or widen gpuops_scope or -l to include its owner"


def busy(target: Target, by: str) -> Verdict:
    """Another run acts on the target, and did not get done in time.

    :param by: who has its lock, in words, or ``""``.
    """
    return Verdict(
        UNKNOWN,
        "another run of gpuops is at work on %s and does not get done%s"
        % (target.place, ": its lock is held by %s" % by if by else ""),
        "wait for it, or end it, and try again",
    )


def restarted(holder: holders.Holder, by: str, remedy: str) -> Verdict:
    """What was ended has come back: what starts it has to be stopped instead."""
    reason = "%s came back after it was ended, started by %s" % (short(holder), by)
    return Verdict(HELD, reason, remedy)


def restarting(holder: holders.Holder, by: str, remedy: str) -> Verdict:
    """What was ended is gone, but not for long."""
    reason = "%s was ended and is being started again: %s" % (short(holder), by)
    return Verdict(HELD, reason, remedy)


def memory_sentence(gpus: list[nvidia_smi.Gpu]) -> str:
    """``GPU 0-6: 76115 MiB each, GPU 7: 4 MiB``, cut after a few."""
    parts = []
    for used, alike in itertools.groupby(gpus, key=lambda gpu: gpu.used_mib):
        parts += [_memory_of(used, run) for run in _runs([gpu.index for gpu in alike])]
    return ", ".join(parts[:8]) + (" and %d more" % (len(parts) - 8) if len(parts) > 8 else "")


def _runs(indices: list[int]) -> list[list[int]]:
    """These numbers, in pieces of those that follow each other."""
    pieces: list[list[int]] = []
    for index in indices:
        if pieces and index == pieces[-1][-1] + 1:
            pieces[-1].append(index)
        else:
            pieces.append([index])
    return pieces


def _memory_of(used: int | None, indices: list[int]) -> str:
    name = "GPU %d" % indices[0] + ("-%d" % indices[-1] if indices[1:] else "")
    if used is None:
        return "%s: memory not told" % name
    return "%s: %d MiB%s" % (name, used, " each" if indices[1:] else "")


def short(holder: holders.Holder) -> str:
    """A holder in a few words."""
    return "%s (%s, %s)" % (holder.name or "?", pids(holder), holder.owner)


def pids(holder: holders.Holder) -> str:
    """Its PID, and that on the node where the two differ."""
    if holder.ns_pid == holder.pid:
        return "pid %d" % holder.pid
    return "pid %d, %d on the node" % (holder.ns_pid, holder.pid)


def stuck_sentence(holder: holders.Holder, why: dict[str, str]) -> str:
    """What is known of a process that outlived SIGKILL."""
    text = "%s outlived SIGKILL: state %s" % (short(holder), why["state"])
    if why["wait_channel"]:
        text += " in %s" % why["wait_channel"]
    return text + (", waiting on %s" % why["mounts"] if why["mounts"] else "")


def remedy_for(problem: str) -> str:
    """What to do about a reading that failed, from the words of the tool."""
    for words, remedy in REMEDIES:
        if words in problem:
            return remedy
    return "run nvidia-smi there by hand"


REMEDIES = (
    ("not running", "start the container (pct start), or leave it out with -l"),
    ("does not exist", "correct proxmox_vmid or gpuops_proxmox_host in the inventory"),
    (
        "could not be started",
        "see what the acting host lacks: memory, processes (ulimit -u), files",
    ),
    (
        "reads '[N/A]'",
        "where the driver never tells a GPU's memory set gpuops_holders_only=true; else run "
        "nvidia-smi there by hand",
    ),
    ("not installed", "install NVIDIA's user-space tools there, of the driver's version"),
    ("is stuck in the driver", "the node needs a reboot; nothing was read or signalled"),
    ("did not answer", "see whether nvidia-smi hangs there by hand; if so the node needs a reboot"),
    ("is not listed", "name GPUs in gpuops_gpus as nvidia-smi -L does there"),
    ("which is not there", "reset the GPU or reboot the node"),
    ("are expected", "see whether a GPU was lost (dmesg), or correct gpuops_expected_gpus"),
    ("version mismatch", "install the user-space tools of the version of the loaded driver"),
    ("blocked by the operating", "restart the container: it has lost access to its GPUs"),
    ("Insufficient Permissions", "allow the container the NVIDIA devices, or act as root"),
    ("No devices were found", "see whether /dev/nvidia* exist there and may be opened"),
    ("no command 'pct'", "set gpuops_proxmox_host to the Proxmox host that carries the container"),
)
