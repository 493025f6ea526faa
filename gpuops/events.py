# SPDX-License-Identifier: GPL-3.0-or-later
"""From the events of a run to its report.

Only the results that events carry are read, never what Ansible prints. A host is called clean only
if its own last task said so; whoever gave no answer is in the report all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpuops.report import (
    READABLE,
    SIGNALLED,
    Action,
    Gpu,
    Host,
    Process,
    Report,
    Rung,
    Skipped,
    Spared,
    Verdict,
    totals,
)
from gpuops.text import squeeze

OURS = "gpuops.gpu."
# Verbs whose last word on a host is the certificate of gpu_verify.
CERTIFIED = ("reset", "verify")
# What Ansible does first in each role, before anything is read, with what was set for it.
VALIDATION = "ansible.builtin.validate_argument_spec"
# True of one that has no container too.
LEFT_OUT = "it is in the group proxmox_hosts, so only its containers are looked at"
# How Ansible says that it has found no password for what is encrypted.
LOCKED = "no vault secrets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where a host is right now, for whoever watches."""

    host: str
    phase: str
    """``route``, ``look``, the name of a rung, ``verify`` or ``done``."""
    verdict: Verdict | None = None
    """What was found last; final if the phase is ``done``."""
    used_mib: tuple[int | None, ...] = ()
    """By GPU, in the last reading."""
    total_mib: tuple[int | None, ...] = ()
    waits_for: str = ""
    """Who is being waited for: the processes that were there last, and the acting host."""


@dataclass(slots=True)
class _Seen:
    """What the events have said of one host so far."""

    name: str
    acting: str = ""
    route: str = ""
    vmid: int = 0
    only_gpus: tuple[str, ...] = ()
    ladder: list[str] = field(default_factory=list)
    rung: str = ""
    """The rung that is climbed, as long as it has given no result."""
    look: dict[str, Any] = field(default_factory=dict)
    before: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    rungs: list[Rung] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    certificate: str = ""
    refused: str = ""
    failed: str = ""
    unreachable: str = ""
    first: str = ""
    last: str = ""
    node_seconds: float = 0.0


class Collector:
    """Takes the events of one run as they come; :meth:`report` says what they amount to.

    :param verb: ``status``, ``plan``, ``reset`` or ``verify``.
    :param watch: is told where each host is whenever that changes.
    """

    def __init__(self, verb: str, check: bool, watch: Callable[[Step], None] | None = None) -> None:
        self.verb = verb
        self.check = check
        self.watch = watch
        self.hosts: dict[str, _Seen] = {}
        self.stats: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self.text: list[str] = []
        self.failures: list[str] = []
        self.steps: dict[str, Step] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of ansible-runner."""
        kind = str(event.get("event", ""))
        data = event.get("event_data") or {}
        if kind == "playbook_on_stats":
            self.stats = data
        elif kind.startswith("runner_"):
            self._task(kind, data, str(event.get("created", "")))
        elif kind in ("verbose", "warning", "error", "deprecated", "system_warning"):
            self._words(str(event.get("stdout", "")))

    # --- what events say ---

    def _words(self, text: str) -> None:
        """Free text of Ansible: kept for the case that there is no result, warnings always."""
        plain = squeeze(text)
        if plain:
            self.text.append(plain)
        if plain.startswith("[WARNING]"):
            self.warnings.append(plain.removeprefix("[WARNING]").lstrip(": "))

    def _task(self, kind: str, data: Mapping[str, Any], created: str) -> None:
        name = str(data.get("host", ""))
        if not name:
            return
        seen = self.hosts.setdefault(name, _Seen(name))
        seen.first, seen.last = seen.first or created, created or seen.last
        action = str(data.get("resolved_action") or data.get("task_action") or "")
        ours = action.removeprefix(OURS) if action.startswith(OURS) else ""
        result = data.get("res")
        if name not in self.steps:
            self._tell(seen, "route")
        if not isinstance(result, Mapping):
            return
        if isinstance(result.get("hosts"), Mapping):
            self._batch(ours, result)
        elif kind == "runner_on_unreachable":
            # For a batch this is every host's own to say, and it overrules this one.
            words = squeeze(str(result.get("msg", ""))).removeprefix("Task failed: ")
            # What ssh itself says, where Ansible says at length that it has said something.
            seen.unreachable = words.partition("over ssh: ")[2] or words or "no connection"
            seen.own, seen.certificate = {}, ""
            self._tell(seen, "done")
        elif kind == "runner_on_failed" and not data.get("ignore_errors"):
            self._fails(seen, ours or action, result)
        elif kind == "runner_on_ok" and ours == "gpu_route":
            self._routed(seen, result)
        elif kind == "runner_on_ok" and ours and "verdict" in result:
            self._said(seen, ours, result)

    def _routed(self, seen: _Seen, result: Mapping[str, Any]) -> None:
        seen.route, seen.acting = str(result["route"]), str(result["acting"])
        target = result.get("target") or {}
        seen.vmid = int(target.get("vmid") or 0)
        seen.only_gpus = tuple(map(str, target.get("gpus") or ()))
        seen.ladder = [str(rung["name"]) for rung in result.get("rungs") or []]
        if seen.look:
            return  # the role gpu_verify routes once more
        if self.verb in ("plan", "reset"):
            seen.rung = next(iter(seen.ladder), "")
        self._tell(seen, seen.rung or ("verify" if self.verb == "verify" else "look"))

    def _batch(self, ours: str, result: Mapping[str, Any]) -> None:
        """What the acting host says of all hosts that it stands for."""
        seconds = float(result.get("seconds") or 0.0)
        step = result.get("gpu_release_rung")
        rung = str(step["name"]) if isinstance(step, Mapping) else ""
        for name, found in result["hosts"].items():
            seen = self.hosts.setdefault(str(name), _Seen(str(name)))
            seen.look = dict(found)
            seen.node_seconds += seconds
            if not seen.before:
                seen.before = list(found.get("before") or found.get("gpus") or [])
            if found.get("actions"):
                seen.actions += found["actions"]
                seen.rungs.append(_rung(rung, seconds, found))
            seen.rung = ""
            if ours == "gpu_release" and rung in seen.ladder and not found.get("settled"):
                seen.rung = next(iter(seen.ladder[seen.ladder.index(rung) + 1 :]), "")
            self._tell(seen, seen.rung or "verify")

    def _said(self, seen: _Seen, ours: str, result: Mapping[str, Any]) -> None:
        """A host's own result."""
        seen.failed = seen.unreachable = ""
        if ours == "gpu_verify":
            seen.certificate = str(result["verdict"])
        else:
            seen.own = dict(result)
            seen.look = seen.look or dict(result)
        last = ours == ("gpu_verify" if self.verb in CERTIFIED else last_action(self.verb))
        self._tell(seen, "done" if last else "verify")

    def _fails(self, seen: _Seen, ours: str, result: Mapping[str, Any]) -> None:
        message = squeeze(_text(_failed_turn(result).get("msg", "")))
        if ours == "gpu_verify" and "verdict" in result:
            self._said(seen, ours, result)
            return
        self.failures.append(message)
        if ours == "gpu_route" or (ours == VALIDATION and not seen.look):
            seen.refused = message.removeprefix("Validation of arguments failed: ")
        elif ours == "gpu_release" and seen.look.get("refused"):
            seen.refused = f"{seen.name}: {seen.look['refused']}"
        else:
            seen.failed = message or "a task failed without a message"
        if not seen.own:
            seen.certificate = ""
        self._tell(seen, "done")

    def _tell(self, seen: _Seen, phase: str) -> None:
        if self.watch is None:
            return
        gpus = seen.look.get("gpus") or []
        holders = dict.fromkeys(str(each.get("name")) for each in seen.look.get("holders") or [])
        step = Step(
            host=seen.name,
            phase=phase,
            verdict=self._verdict(seen)[0] if phase == "done" else seen.look.get("verdict"),
            used_mib=tuple(gpu.get("used_mib") for gpu in gpus),
            total_mib=tuple(gpu.get("total_mib") for gpu in gpus),
            waits_for=" on ".join(filter(None, [", ".join(holders), seen.acting])),
        )
        if step != self.steps.get(seen.name):
            self.steps[seen.name] = step
            self.watch(step)

    # --- what they amount to ---

    def report(
        self,
        *,
        limit: str = "",
        gpus: tuple[str, ...] = (),
        scope: str = "",
        profile: str = "",
        started: str = "",
        seconds: float = 0.0,
        ended: str = "",
        versions: Mapping[str, str] | None = None,
    ) -> Report:
        """Everything that was said, host by host in the order of the inventory."""
        hosts: list[Host] = []
        skipped: list[Skipped] = []
        for seen in self.hosts.values():
            if seen.route == "carrier":
                skipped.append(Skipped(name=seen.name, reason=LEFT_OUT))
            else:
                hosts.append(self._host(seen, ended))
        return Report(
            verb=self.verb,
            check=self.check,
            limit=limit,
            gpus=gpus,
            scope=scope,
            profile=profile,
            started=started,
            seconds=round(seconds, 3),
            ended=ended,
            totals=totals(hosts, len(skipped)),
            hosts=tuple(hosts),
            skipped=tuple(skipped),
            warnings=tuple(dict.fromkeys(self.warnings)),
            versions=dict(versions or {}),
        )

    def _verdict(self, seen: _Seen, ended: str = "") -> tuple[Verdict, str, str]:
        """The verdict on a host, its reason and its remedy; not clean unless it was proved."""
        where = seen.acting or seen.name
        if seen.refused:
            what, _, remedy = seen.refused.removeprefix(f"{seen.name}: ").partition("; ")
            return "refused", what, remedy or _remedy_for(what, "correct it")
        if seen.unreachable:
            remedy = f"see whether 'ssh {where}' works, with the user and address of the inventory"
            return "unreachable", seen.unreachable, remedy
        word, reason, remedy = (str(seen.look.get(k, "")) for k in ("verdict", "reason", "remedy"))
        said = seen.certificate or str(seen.own.get("verdict", ""))
        if seen.failed and said in ("", "clean"):
            remedy = _remedy_for(seen.failed, "correct that and run it again")
            return "unknown", seen.failed + self._unsure(seen), remedy
        complete = bool(seen.certificate) or (bool(seen.own) and self.verb not in CERTIFIED)
        if complete or (said and said != "clean"):
            if said == "held" and seen.look.get("holders") and seen.look.get("waiting"):
                remedy = f"gpuops reset -l {seen.name}"  # it may still be ended as others were
            if said == word:
                return _word(said), reason, remedy
            return _word(said), _text(seen.failed), "run it again"
        last = (f"; {word} at the last look: {reason}" if word else "") + self._unsure(seen)
        if ended:
            more = "" if ended == "interrupted" else ", with more time"
            return "unknown", f"{ended} before it was proved{last}", f"run it again{more}"
        return "unknown", f"{where} gave no answer for it{last}", "run it again with -v"

    def _unsure(self, seen: _Seen) -> str:
        """What may have been done on a host in a rung that never gave its result."""
        if self.verb != "reset" or self.check or not seen.rung:
            return ""
        return f"; signals of step {seen.rung} may have been sent and are not in this report"

    def _host(self, seen: _Seen, ended: str) -> Host:
        verdict, reason, remedy = self._verdict(seen, ended)
        if verdict == "clean" and self._counted_bad(seen.name):
            verdict, reason = (
                "unknown",
                "Ansible counts a failure of this host that it did not name",
            )
            remedy = "run it again with -v"
        look = seen.look
        actions = tuple(_action(each) for each in seen.actions)
        scan = look.get("scan") or {}
        timings = {
            "total": _seconds_between(seen.first, seen.last),
            "node": seen.node_seconds,
            "scan": float(scan.get("seconds") or 0.0),
        }
        return Host(
            name=seen.name,
            verdict=verdict,
            changed=any(action.result in SIGNALLED for action in actions),
            route=f"{seen.acting} for container {seen.vmid}" if seen.vmid else seen.acting,
            reason=reason,
            remedy=remedy,
            before=tuple(_gpu(each) for each in seen.before),
            after=tuple(_gpu(each) for each in look.get("gpus") or []),
            holders=tuple(_process(each) for each in look.get("holders") or []),
            killed=actions,
            spared=tuple(
                Spared(process=_process(each), reason=str(each.get("why", "")))
                for each in look.get("spared") or []
            ),
            rungs=tuple(seen.rungs),
            scope=str(look.get("scope", "")),
            only_gpus=seen.only_gpus,
            problems=tuple(str(each) for each in look.get("problems") or []),
            timings={name: round(value, 3) for name, value in timings.items()},
        )

    def _counted_bad(self, name: str) -> bool:
        stats = self.stats or {}
        return any((stats.get(count) or {}).get(name) for count in ("failures", "dark"))


def last_action(verb: str) -> str:
    """The action whose result is the last word on a host where nothing is certified."""
    return "gpu_release" if verb == "plan" else "gpu_state"


def _remedy_for(words: str, otherwise: str) -> str:
    if LOCKED in words:
        return "name a file with the vault's password in ANSIBLE_VAULT_PASSWORD_FILE"
    return otherwise


def _failed_turn(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a loop the first turn that failed, which says more than the whole."""
    turns = [each for each in result.get("results") or () if isinstance(each, Mapping)]
    return next((each for each in turns if each.get("failed")), result)


def _text(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _word(text: str) -> Verdict:
    return next((word for word in READABLE if word == text), "unknown")


def _seconds_between(first: str, last: str) -> float:
    try:
        return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    except ValueError:
        return 0.0


def _rung(name: str, seconds: float, found: Mapping[str, Any]) -> Rung:
    timings = found.get("timings") or {}
    return Rung(
        name=name,
        seconds=round(seconds, 3),
        verdict=_word(str(found.get("verdict"))),
        signalled=sum(each["result"] in SIGNALLED for each in found["actions"]),
        zero=_rounded(timings.get("zero")),
        second_zero=_rounded(timings.get("second_zero")),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _gpu(raw: Mapping[str, Any]) -> Gpu:
    return Gpu(
        index=raw["index"],
        uuid=raw["uuid"],
        minor=raw.get("minor"),
        name=str(raw.get("name") or ""),
        used_mib=raw.get("used_mib"),
        total_mib=raw.get("total_mib"),
        reserved_mib=raw.get("reserved_mib"),
        utilisation=raw.get("utilisation"),
        temperature=raw.get("temperature"),
        pstate=raw.get("pstate"),
        bus_id=str(raw.get("bus_id") or ""),
        driver=raw.get("driver"),
        verdict=_word(str(raw["verdict"])) if raw.get("verdict") else None,
        unattributed_mib=raw.get("unattributed_mib"),
    )


def _process(raw: Mapping[str, Any]) -> Process:
    evidence = raw.get("evidence") or {}
    return Process(
        pid=raw["pid"],
        node_pid=raw["node_pid"],
        ppid=raw["ppid"],
        start=raw["start"],
        state=raw["state"],
        user=str(raw["user"]),
        command=raw["command"],
        owner=raw["owner"],
        owner_evidence=str(raw.get("owner_evidence") or ""),
        name=str(raw.get("name") or ""),
        gpus=tuple(raw["gpus"]),
        evidence=tuple(f"{device}: {how}" for device, hows in evidence.items() for how in hows),
        used_mib={str(minor): used for minor, used in (raw.get("used_mib") or {}).items()},
    )


def _action(raw: Mapping[str, Any]) -> Action:
    return Action(
        process=_process(raw), signal=raw["signal"], rung=raw["rung"], result=raw["result"]
    )
