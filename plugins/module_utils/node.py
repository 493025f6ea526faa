# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all targets of an acting host share: device numbers, one scan, whose processes they are."""

from __future__ import annotations

import os
import threading
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    holders,
    nvidia_smi,
    owners,
    verdict,
)

# The inode of the kernel's first PID namespace, from include/linux/proc_ns.h.
FIRST_PID_NAMESPACE = 0xEFFFFFFC

# What marks a container: systemd's, docker's and podman's file, and what PID 1 has in its
# environment: of LXC, systemd-nspawn and podman, and of each pod (kubelet always sets it).
MARKS = ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")
TOLD = (b"container=", b"KUBERNETES_SERVICE_HOST=")

# Seconds for the command line of a process that waits in the kernel; most can be read at once.
COMMAND_TIMEOUT = 0.5


class Node:
    """What all targets of this host share: device numbers, one scan, the driver's list."""

    def __init__(self, smi_timeout: float, stuck: str) -> None:
        self.began = time.monotonic()
        self.devices = holders.read_devices()
        self.own_namespaces = owners.pid_namespaces(os.getpid())
        self.own_cgroup = _read_own_cgroup()
        self.own_owner = owners.owner_of(self.own_cgroup, self.own_namespaces, self.own_namespaces)
        self.own_family = set(holders.family(os.getpid()))
        self.in_container = _in_container()
        self.problems: list[str] = []
        self.minors = nvidia_smi.minors_from_proc()
        self.session = nvidia_smi.Session("the node", [], smi_timeout, stuck)
        self._apps_readable = True
        # (minor number, PID) of whom the driver lists and the last look did not find.
        self.ghosts: list[tuple[int | None, int]] = []
        self._lock = threading.Lock()
        self._scan: holders.Scan | None = None
        self._commands: dict[tuple[int, int, str], str] = {}
        self.stoppers = holders.Stoppers()
        self._tool_told_minors = False

    def minor_of(self, uuid: str) -> int | None:
        """The number of this GPU's device node, ``None`` if nothing tells it.

        The driver's files are read again, because they know a GPU only when it has been read once;
        where they do not know it even then, nvidia-smi is asked, once for all.
        """
        if uuid not in self.minors:
            with self._lock:  # the look asks the same reader
                self.minors = {**self.minors, **nvidia_smi.minors_from_proc()}
                if uuid not in self.minors and not self._tool_told_minors:
                    self._tool_told_minors = True
                    self.minors = {**self._minors_from_tool(), **self.minors}
        return self.minors.get(uuid)

    def _minors_from_tool(self) -> dict[str, int]:
        self.session.ask("minors")
        try:
            return nvidia_smi.parse_minors(self.session.answer()[0])
        except nvidia_smi.SmiError:
            return {}

    def look(self, since: float, deep: bool = False) -> holders.Scan:
        """A scan that began at or after ``since`` (monotonic seconds), shared where it can be."""
        with self._lock:
            last = self._scan
            if last is not None and last.started >= since and (last.deep or not deep):
                return last
            try:
                found = self._look_anew(deep)
            except OSError:
                # Else the answer to what was asked would pass for that to the next question.
                self.session.drop_answers()
                raise
            self._scan = found
            return found

    def _look_anew(self, deep: bool) -> holders.Scan:
        if self._apps_readable:
            self.session.ask("apps")
        found = holders.scan(self.devices, deep, stoppers=self.stoppers)
        if self._apps_readable and not self._add_driver_list(found) and not deep:
            # The driver names a process that the quick look did not find a device on.
            started = found.started
            found = holders.scan(self.devices, deep=True, stoppers=self.stoppers)
            found.started = started
            self.session.ask("apps")
            self._add_driver_list(found)
        for pid, holder in list(found.holders.items()):
            if not self.identify(holder) or self._is_own(holder):
                del found.holders[pid]
        return found

    def _add_driver_list(self, found: holders.Scan) -> bool:
        """Add what the driver says to holders that /proc confirms; False if it names others.

        The number in the driver's list is believed only where the process behind it really holds
        a device: drivers differ in whose PID numbers they report inside containers.
        """
        apps, problems = self.session.apps()
        if problems:
            self.do_without_list(problems[0])
            return True
        self.ghosts = []
        for app in apps:
            holder = found.holders.get(app.pid)
            minor = self.minors.get(app.gpu_uuid)
            if holder is None:
                self.ghosts.append((minor, app.pid))
            elif minor is not None:
                holder.evidence.setdefault("gpu%d" % minor, set()).add("driver list")
                holder.used_mib[minor] = app.used_mib
        return not self.ghosts

    def do_without_list(self, why: str) -> None:
        """Ask for the driver's list of processes no more."""
        self._apps_readable = False
        self.ghosts = []
        self.problems.append("the driver's list of processes: %s" % why)

    def unlisted(self, minors: set[int | None]) -> str:
        """What the driver's list says of these GPUs that no process bears out, or ``""``."""
        if not self._apps_readable:
            return self.problems[-1]
        pid = self.ghost(minors)
        return "the driver lists process %d, which is not there" % pid if pid else ""

    def ghost(self, minors: set[int | None]) -> int:
        """A process that the driver lists for these GPUs and that is not there, or 0."""
        for minor, pid in self.ghosts:
            if minor is None or minor in minors or None in minors:
                return pid
        return 0

    def identify(self, holder: holders.Holder) -> bool:
        """Find out who this is, and whose; False if it is gone."""
        if not holders.describe(holder):
            return False
        self._recall_command(holder)
        owner = owners.owner_of(holder.cgroup, holder.namespaces, self.own_namespaces)
        owner.detail = owners.container_name(owner.kind, owner.id) or owner.detail
        # Machines without systemd have groups of their own kind; ours is no stranger's.
        ours = (self.own_cgroup, self.own_namespaces)
        if owner.kind == "unknown" and holder.cgroup and (holder.cgroup, holder.namespaces) == ours:
            owner = owners.Owner("host", "", "the control group that gpuops runs in itself")
        holder.owner = owner
        return True

    def _recall_command(self, holder: holders.Holder) -> None:
        """The command, which may protect it, of one whose memory may be locked: known, or read now.

        Read once only, because a child that does so may be stuck for ever in its turn.
        """
        who = (holder.pid, holder.start, holder.name)
        if holder.command:
            self._commands[who] = holder.command
        elif holder.state == "D" or holder.blocks:
            if who not in self._commands:
                self._commands[who] = _command_of_stuck(holder.pid)
            holder.command = self._commands[who]

    def _is_own(self, holder: holders.Holder) -> bool:
        """A reader that we started: nvidia-smi itself opens the devices.

        By the parent that was read with its name: it may have ended since, and then has none.
        """
        return os.getpid() in holders.family(holder.ppid)

    def view(self, target: verdict.Target, found: holders.Scan, untold: bool) -> verdict.View:
        """Sort the holders by what may be done to them on behalf of this target.

        :param untold: whether memory may be in use that no reading would show.
        """
        view = verdict.View()
        unseen = self._unseen(target, found, untold)
        view.unreadable = [verdict.short(each) for each in unseen]
        waits = found.late | found.busy | found.ending
        view.late = any(each.pid in waits for each in unseen)
        view.ending = bool(unseen) and all(each.pid in found.ending for each in unseen)
        home = self.home(target)
        for holder in found.holders.values():
            why = self.why_not(target, holder, home)
            if not why:
                view.mine.append(holder)
                continue
            view.spared.append((holder, why))
            if why.startswith("protected"):
                view.protected.add(holder.pid)
        return view

    def _unseen(
        self, target: verdict.Target, found: holders.Scan, untold: bool
    ) -> list[holders.Holder]:
        """Those that could not be looked at, but for our own and those that may hold a GPU.

        Who maps a GPU uses memory of it; only where that is not told do mappings matter alone.
        """
        pids = found.skipped | (found.busy if untold else set())
        everyone = [holders.Holder(pid) for pid in sorted(pids)]
        stoppers = self.stoppers.known()
        for each in everyone:
            each.blocks = each.pid in stoppers or each.pid in found.late | found.ending
        unseen = [each for each in everyone if self.identify(each)]
        home = self.home(target)
        return [
            each
            for each in unseen
            if not self._is_own(each)
            and not self.why_not(target, each, home).startswith("protected")
        ]

    def home(self, target: verdict.Target) -> int | None:
        """The PID namespace of the target, ``None`` for a container that does not run."""
        return owners.container_namespace(target.vmid) if target.vmid else self.own_namespaces[0]

    def why_not(self, target: verdict.Target, holder: holders.Holder, home: int | None) -> str:
        """Why this holder must not be touched for this target, or ``""`` if it may be.

        :param home: as :meth:`home` says it.
        """
        if holder.pid in self.own_family:
            return "protected: gpuops itself or what it runs under"
        if self._is_init(holder, home):
            return "protected: it is PID 1"
        name = verdict.protected_by(holder, target.protect)
        if name and not (holder.is_mps and target.quits_mps):
            doubt = "" if holder.command else "; its command could not be read"
            return "%s (%s)%s" % (verdict.PROTECTED_BY_NAME, name, doubt)
        if target.vmid:
            self._ask_namespace(target.vmid, holder, home)
        return self._out_of_scope(target, holder)

    def _is_init(self, holder: holders.Holder, home: int | None) -> bool:
        """PID 1 of this node or of any LXC container here, with which all the others would end.

        Not that of a docker, podman or pod's container: there it is the server itself as a rule, so
        whoever has written out a scope that reaches into it wants exactly this process gone.
        """
        if holder.pid == 1:
            return True
        if holder.ns_pid != 1:
            return False
        deeper = [space for space in holder.namespaces if space not in self.own_namespaces]
        containers = owners.lxc_depth(holder.cgroup or "")
        return holder.namespaces[:1] == [home] or len(deeper) == containers > 0

    def _ask_namespace(self, vmid: int, holder: holders.Holder, home: int | None) -> None:
        """Have the container's PID namespace prove or disprove that this is the container's.

        A process can be put into any cgroup, but into no other PID namespace than those it is in.
        """
        inside = home in holder.namespaces and home not in self.own_namespaces
        owner = holder.owner
        if inside and owner.kind == "pidns":
            evidence = "PID namespace %s; it left the cgroup" % home
            holder.owner = owners.Owner("lxc", str(vmid), evidence, by_namespace=True)
        elif not inside and (owner.kind, owner.id) == ("lxc", str(vmid)):
            evidence = "%s, but not the PID namespace of container %d" % (owner.evidence, vmid)
            holder.owner = owners.Owner("unknown", "", evidence)

    def _out_of_scope(self, target: verdict.Target, holder: holders.Holder) -> str:
        """Why the scope of this run does not reach this holder, or ``""`` if it does.

        Every scope but ``everything`` needs proof; an unknown owner is nobody's to touch.
        """
        owner, scope = holder.owner, target.scope
        if scope == "everything":
            return ""
        foreign = "foreign: it belongs to %s" % owner
        if owner.kind == "unknown":
            return "foreign: %s" % owner.evidence
        if scope.startswith("job:"):
            return "" if (owner.kind, owner.id) == ("slurm", scope[4:]) else foreign
        if target.vmid:
            return "" if (owner.kind, owner.id) == ("lxc", str(target.vmid)) else foreign
        own = self.own_owner
        if owner.fenced and (owner.kind, owner.id) != (own.kind, own.id):
            return foreign
        if scope.startswith("user:") and holders.user_name(holder.uid) != scope[5:]:
            return "foreign: it belongs to user %s" % holders.user_name(holder.uid)
        return ""


def _command_of_stuck(pid: int) -> str:
    """The command line of such a process, ``""`` if it cannot be had within a moment.

    It lies in the process's memory, whose lock may be held until a mount answers.
    """
    path = "/proc/%d/cmdline" % pid
    text = deadline.in_a_copy(lambda: holders.read_bytes(path), COMMAND_TIMEOUT)
    return holders.command_of(text.decode("utf-8", "replace"))


def _read_own_cgroup() -> str | None:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as text:
            return text.read()
    except OSError:
        return None


def _in_container() -> bool:
    """Are we inside a container? Some leave a mark, others tell PID 1 in its environment.

    Never in the kernel's first PID namespace: a virtual machine made from a container's image
    bears the marks, but nothing is hidden from us there.
    """
    if os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE:
        return False
    told = holders.read_bytes("/proc/1/environ")
    # Who may not read it is no machine's own root.
    return not told or any(map(os.path.exists, MARKS)) or told_so(told)


def told_so(environment: bytes) -> bool:
    """Does this environment of PID 1 say that it is a container's?"""
    return any(line.startswith(TOLD) for line in environment.split(b"\0"))
