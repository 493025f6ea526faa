# SPDX-License-Identifier: GPL-3.0-or-later
"""Play a scenario on the lab: arrange it, type the command, compare what came of it.

Besides what a scenario says, each one is checked for what must always hold: the bystanders are
the same living processes as before, nothing of ours still runs on any machine, nobody but those
named was signalled, a machine that is called clean has no memory in use, every refusal is one
line, and the package gpuops makes the same of it, in every format.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import linux
from tests.lab.lab import Lab, in_host, is_there, wait_until
from tests.lab.plan import LabError
from tests.patience import PATIENCE, until
from tests.scenarios.scenario import Outcome, Scenario
from tests.wrapper import matrix

ROOT = Path(__file__).resolve().parents[2]
CALLBACKS = Path(__file__).parent / "callback"
LONGEST_RUN = 200  # seconds
OURS = re.compile(r"-IS -|gpuops-ready|nvidia-smi|lxc-attach|\bpct exec|ActiveState")
# How somebody watches the GPUs.
WATCH = ("/usr/bin/nvidia-smi", "--query-gpu=memory.used", "--format=csv", "-lms", "200")
# What a server does first, before it has chosen a GPU.
BEGINNING = "import os, time; os.open('/dev/nvidiactl', os.O_PATH); time.sleep(86400)"
OPENS_NO_GPU = ("/usr/bin/python3", "python3", "-c", BEGINNING)
EVERYBODY = ("", "all", "gpu_nodes")
LONGEST_STAY = 5  # seconds that something of ours may stay; who waits for nvidia-smi stays for ten
LONGEST_SILENCE = 10  # seconds from SIGKILL until who outlives it is reported
# Seconds that Ansible takes to start on the machine for which these limits, and those of the
# scenarios, were written: an idle one.
USUAL_START = 0.4
# systemd keeps what sshd says in its journal; it is read from outside as a file, as of the others.
SSHD_LOG_UNIT = """\
mkdir -p /etc/systemd/system/ssh.service.d
printf '[Service]\\nExecStart=\\nExecStart=/usr/sbin/sshd -D -E /run/sshd.log\\n' \\
    >/etc/systemd/system/ssh.service.d/log.conf
systemctl daemon-reload
systemctl restart ssh
"""
LONGEST_REFUSAL = 600  # characters


@dataclass(frozen=True)
class Process:
    """A process by number and start time: another one with the same number is another one."""

    what: str
    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Is it there and no zombie?"""
        return is_there(self.pid, self.start) and linux.process_state(self.pid) != "Z"

    def end(self) -> None:
        """Take it away, if it is still the same."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            if self.alive:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


@dataclass
class Run:
    """What one typed command did, as recorded by the callback, by sshd and by the clock."""

    code: int
    output: str
    seconds: float
    events: list[dict[str, Any]]
    executions: dict[str, int]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The recorded events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """Ansible's own count by host."""
        return next((event["hosts"] for event in self.of("recap")), {})

    def results(self, host: str) -> list[dict[str, Any]]:
        """This host's results that carry a verdict, in order."""
        return [event["result"] for event in self.verdicts if event["host"] == host]

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """The events that carry a verdict: of tasks that went well and of those that failed."""
        return [
            event
            for event in self.events
            if event["event"] in ("verdict", "failed") and "verdict" in event["result"]
        ]

    def refusals(self, host: str) -> list[str]:
        """The messages with which a host failed or could not be reached."""
        return [
            str(event["result"].get("msg", ""))
            for event in self.of("failed") + self.of("unreachable")
            if event["host"] == host and not event["ignored"]
        ]

    def verdict(self, host: str) -> str:
        """The last verdict on this host, or why there is none."""
        if self.recap.get(host, {}).get("unreachable"):
            return "unreachable"
        results = self.results(host)
        if results:
            return str(results[-1]["verdict"])
        return "refused" if self.refusals(host) else "absent"

    def actions(self, outcome: str) -> list[dict[str, Any]]:
        """Everything that was (or in check mode would be) signalled, in order."""
        hosts = {event["host"] for event in self.verdicts}
        found = [action for host in hosts for action in self.signals(host)]
        return [action for action in found if action["result"] == outcome]

    def signals(self, host: str) -> list[dict[str, Any]]:
        """What this host's last result that says so has of signals, in order."""
        lists = [result["actions"] for result in self.results(host) if result.get("actions")]
        return list(lists[-1]) if lists else []

    def climbed(self, machine: str) -> int:
        """How many of the rungs to climb it took to signal the last one on this machine."""
        most = 0
        for data in [event["event_data"] for event in self.of("runner_on_ok")]:
            if data["resolved_action"] == "gpuops.gpu.gpu_route" and acts_on(data["res"], machine):
                names = [rung["name"] for rung in data["res"]["rungs"]]
                sent = [each for each in self.signals(data["host"]) if each["result"] == "sent"]
                most = max([most, *(1 + names.index(each["rung"]) for each in sent)])
        return most

    @property
    def spared(self) -> list[dict[str, Any]]:
        """Everybody who was reported as seen and left alone."""
        return self.named("spared")

    def named(self, *lists: str) -> list[dict[str, Any]]:
        """Every process in these lists of any result."""
        results = [event["result"] for event in self.verdicts]
        return [each for result in results for key in lists for each in result.get(key, [])]

    @property
    def words(self) -> str:
        """All that was said, with white space as single blanks: the screen folds long lines."""
        texts = [self.output]
        for event in self.events:
            message = event.get("result", {}).get("msg", "")
            texts += message if isinstance(message, list) else [str(message)]
        return squeeze(" ".join(str(text) for text in texts))


def acts_on(route: dict[str, Any], machine: str) -> bool:
    """Is this machine of the lab, which may go by a second name, the one to act on?"""
    return str(route["acting"]).removesuffix("-ssh") == machine


def squeeze(text: str) -> str:
    """Runs of white space as one blank."""
    return re.sub(r"\s+", " ", text)


def slowness() -> float:
    """How many times as long as it usually does Ansible takes to start, here and now."""
    began = time.monotonic()
    program = Path(sys.executable).parent / "ansible-playbook"
    subprocess.run([program, "--version"], check=True, stdout=subprocess.DEVNULL)
    return max(1.0, (time.monotonic() - began) / USUAL_START)


def too_long(seconds: float, limit: float) -> bool:
    """Is that more than the limit, also in view of how slow the machine is?"""
    return seconds > limit and seconds > limit * slowness()


def recorded(record: Path) -> dict[str, str]:
    """The environment of a typed command: nothing of ours but a record of Ansible's events."""
    foreign = ("ANSIBLE_", "GPUOPS_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS),
        "ANSIBLE_NOCOLOR": "1",
        "SCENARIO_RECORD": str(record),
    }


@dataclass
class World:
    """The lab of a test session, with its bystanders."""

    lab: Lab
    shape: dict[str, Any] | None = None
    bystanders: dict[str, Process] = field(default_factory=dict)
    neighbour: dict[str, Any] | None = None
    held: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    plain: dict[str, Process] = field(default_factory=dict)
    worn: bool = False  # something was done that only a new lab undoes
    record: Path = Path("/dev/null")

    # --- the lab ---

    def prepare(self, scenario: Scenario) -> None:
        """The lab in the shape asked for, with all bystanders alive."""
        if self.shape != scenario.lab or self.worn:
            self.down()
            self.lab.up(**scenario.lab)
            self.shape, self.worn = scenario.lab, False
            for name in self.machines():
                self.log_sessions(name)
        self.place_bystanders()
        self.place_beginner(scenario)
        self.place_neighbour(scenario)

    def down(self) -> None:
        """Take the lab away."""
        if self.shape is not None:
            self.lab.down()
        self.shape, self.neighbour = None, None
        self.bystanders.clear()

    def machines(self) -> list[str]:
        """Every host and container of the lab."""
        plan = self.lab.plan()
        return [host.name for host in plan.hosts] + [each.name for each in plan.containers()]

    def log_sessions(self, name: str) -> None:
        """Let a machine's sshd write down every command that it is asked to execute."""
        log = self.sshd_log(name)
        script = "echo LogLevel VERBOSE >>/etc/ssh/sshd_config\n"
        unit = self.lab.has_systemd(name)
        script += SSHD_LOG_UNIT if unit else "kill -HUP $(cat /run/sshd.pid)"
        self.lab.inside(name, ["sh", "-c", script], check=True)
        lines = 1 if unit else 3
        assert until(lambda: log.exists() and log.read_text().count("Server listening") >= lines), (
            f"sshd of {name} did not restart"
        )

    def sshd_log(self, name: str) -> Path:
        """What the machine's sshd says, from outside."""
        return Path(f"/proc/{self.lab.running_init(name)}/root/run/sshd.log")

    def executions(self) -> dict[str, int]:
        """How many commands each machine's sshd has been asked to execute so far."""
        counts = {}
        for name in self.machines():
            if self.lab.init(name):
                text = self.sshd_log(name).read_text(errors="replace")
                counts[name] = text.count("Starting session: command")
        return counts

    # --- bystanders ---

    def place_bystanders(self) -> None:
        """Whoever must live through every scenario; puts back who is missing."""
        for name, process in list(self.bystanders.items()):
            if not process.alive:
                del self.bystanders[name]
        plan = self.lab.plan()
        watched = [h.name for h in plan.hosts] + [
            h.containers[0].name for h in plan.hosts if h.containers
        ]
        for name in self.machines():
            self.keep(f"sshd of {name}", lambda n=name: self.sshd(n))
            self.keep(f"process 1 of {name}", lambda n=name: self.lab.running_init(n))
        for name in watched:
            self.keep(
                f"dcgm-exporter on {name}",
                lambda n=name: self.lab.hold(
                    n, gpus="0", kind="open-only", name="dcgm-exporter", ignore_term=False
                )["outer_pid"],
            )
            self.keep(f"an editor on {name}", lambda n=name: self.start_plain(n, "vim"))
        for host in plan.hosts:
            if len(host.containers) > 1:
                other = host.containers[1].name
                self.keep(
                    f"a server without GPU in {other}",
                    lambda n=other: self.start_plain(n, "sglang::scheduler_TP0"),
                )

    def forget(self, name: str, which: str) -> None:
        """Bystanders that the scenario itself has ended, and that may still be on their way."""
        for what in list(self.bystanders):
            if what.endswith(f" {name}") and what.startswith(which):
                del self.bystanders[what]

    def keep(self, what: str, start: Any) -> None:
        """Remember a bystander; start it if there is none."""
        if what not in self.bystanders:
            pid = start()
            self.bystanders[what] = Process(what, pid, linux.start_time(pid))

    def sshd(self, name: str) -> int:
        """The listening sshd of a machine, as a number outside."""
        inner = Path(f"/proc/{self.lab.running_init(name)}/root/run/sshd.pid")

        def listening() -> int | None:
            for pid in self.processes(name):
                numbers = linux.namespace_pids(pid)
                if numbers and str(numbers[-1]) == inner.read_text().strip():
                    return pid if command_line(pid).startswith("sshd") else None
            return None

        # It answers to its name only when it has set its title.
        found: int = wait_until(listening, PATIENCE, f"sshd on {name}")
        return found

    def start_plain(self, name: str, title: str) -> int:
        """A process of that title which holds no GPU; its number outside."""
        return self.start(name, "/usr/bin/sleep", title, "86400")

    def start(self, name: str, program: str, *argv: str) -> int:
        """A program on a machine, as a session of somebody who is logged in has it."""
        container = self.lab.plan().container(name)
        place = self.lab.entry_cgroup(name)
        if not container:
            place = self.lab.paths.host_cgroup(name) / "user.slice/user-0.slice/session-1.scope"
        place.mkdir(parents=True, exist_ok=True)

        def body() -> int:
            if os.fork():
                return 0  # the process belongs to process 1 from now on
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            for target in (0, 1, 2):
                os.dup2(null, target)
            os.execv(program, argv)

        before = set(self.processes(name))
        assert in_host(self.lab.running_init(name), place, body) == 0
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for pid in set(self.processes(name)) - before:
                # Perl's stands before that of a script.
                if command_line(pid).endswith(" ".join(argv)):
                    return pid
            time.sleep(0.005)
        raise AssertionError(f"{argv[0]} did not start on {name}")

    def place_beginner(self, scenario: Scenario) -> None:
        """A server next door that every look finds and no name protects: it has no GPU yet."""
        everybody = limit_of(scenario.typed) in EVERYBODY
        for host in self.lab.plan().hosts:
            for other in host.containers[1:2]:
                what = f"a server that begins in {other.name}"
                if not everybody and other.name not in scenario.then.verdict:
                    self.keep(what, functools.partial(self.start, other.name, *OPENS_NO_GPU))
                elif what in self.bystanders:
                    self.bystanders.pop(what).end()

    def place_neighbour(self, scenario: Scenario) -> None:
        """A workload on GPUs that the command is not about: on node1, or else in ct130."""
        limit = limit_of(scenario.typed)
        homes = [name for name in ("node1", "ct130") if name in self.machines()]
        touched = {"node1"} if "node1" in limit else set()
        touched |= {"ct130"} if re.search(r"ct|pve|inside|proxmox", limit) else set()
        if limit in EVERYBODY:
            touched = {"node1", "ct130"}
        home = next((name for name in homes if name not in touched), None)
        if self.neighbour and (self.neighbour["host"] != home or not self.alive(self.neighbour)):
            self.end(self.neighbour)
            self.bystanders.pop("a neighbour's workload", None)
            self.neighbour = None
        if home and not self.neighbour:
            self.neighbour = self.lab.hold(home, gpus="all", mib=60000, name="python3")
            process = Process(
                f"a neighbour's workload on {home}",
                self.neighbour["outer_pid"],
                self.neighbour["start_time"],
            )
            self.bystanders["a neighbour's workload"] = process
        self.settle(without=home)

    def settle(self, without: str | None) -> None:
        """Wait until no memory is in use but the neighbour's."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            busy = [
                name
                for name, used in self.used().items()
                if any(used) and not (without and self.lab.plan().host(without).name == name)
            ]
            if not busy:
                return
            time.sleep(0.05)
        raise AssertionError(f"memory is still in use before the scenario on {busy}")

    # --- what there is ---

    def processes(self, name: str) -> Iterator[int]:
        """All processes of a machine (of a Proxmox host: with its containers), outer numbers."""
        container = self.lab.plan().container(name)
        paths = self.lab.paths
        top = paths.ct_cgroup(container) if container else paths.host_cgroup(name)
        for file in top.rglob("cgroup.procs"):
            try:
                yield from [int(pid) for pid in file.read_text().split()]
            except OSError:
                continue

    def ours(self) -> list[str]:
        """Command lines of gpuops that run on any machine."""
        theirs = {each.pid for each in self.plain.values()}
        found = []
        for host in self.lab.plan().hosts:
            for pid in set(self.processes(host.name)) - theirs:
                line = command_line(pid)
                if OURS.search(line):
                    found.append(f"{host.name}: pid {pid}: {line[:80]}")
        return found

    def alive(self, holder: dict[str, Any]) -> bool:
        """Is that very holder alive? One that is started again and again: is there any?"""
        return (
            any(
                each["id"] == holder["id"]
                and each["alive"]
                and (holder["respawn"] or each["outer_pid"] == holder["outer_pid"])
                for each in self.lab.holders()
            )
            if "respawn" in holder
            else is_there(holder["outer_pid"], holder["start_time"])
        )

    def used(self) -> dict[str, list[int]]:
        """MiB in use by machine and GPU, as the driver has it."""
        return {name: host["driver"]["used"] for name, host in self.lab.status()["hosts"].items()}

    # --- events ---

    def happen(self, event: dict[str, Any]) -> None:
        """Arrange one thing."""
        ((verb, what),) = event.items()
        getattr(self, f"do_{verb}")(what)

    def do_hold(self, what: dict[str, Any]) -> None:
        """Processes that hold GPUs."""
        options = dict(what)
        label = options.pop("as")
        host = options.pop("host")
        if "gpus" in options:
            options["gpus"] = str(options["gpus"])
        respawn = options.get("respawn", 0)
        options["respawn"] = -1 if respawn is True else respawn
        held = self.lab.hold_many(host, options.pop("count", 1), **options)
        again = options["respawn"] != 0 or options.get("restart") == "always"
        self.held[label] = [dict(holder, respawn=again) for holder in held]

    def do_fault(self, what: dict[str, Any]) -> None:
        """Something is broken; its value can name a process that holds no GPU, as in {label}."""
        numbers = {name: linux.namespace_pids(each.pid)[-1] for name, each in self.plain.items()}
        value = str(what.get("value", "")).format_map(numbers)
        self.lab.fault(what["where"], what["kind"], value)

    def do_heal(self, host: str) -> None:
        """Nothing is broken any more."""
        self.lab.heal(host)

    def do_stop(self, container: str) -> None:
        """A container is stopped."""
        self.worn = True
        self.lab.stop(container)
        self.forget(container, "")

    def do_cut(self, host: str) -> None:
        """A host's sshd is gone."""
        self.worn = True
        self.lab.cut(host)
        self.forget(host, "sshd")

    def do_drop(self, label: str) -> None:
        """Holders end by themselves."""
        for holder in self.held.pop(label):
            self.end(holder)

    def do_kill(self, label: str) -> None:
        """Holders are killed by somebody else."""
        for holder in self.held[label]:
            os.kill(holder["outer_pid"], signal.SIGKILL)

    def do_user(self, what: dict[str, Any]) -> None:
        """Somebody else than root may log in."""
        self.worn = True
        home = f"/home/{what['name']}"
        script = (
            f"mkdir -p {home} && cp -r /root/.ssh {home}/ && chown -R 1007 {home} && "
            f"echo '{what['name']}:x:1007:1007::{home}:/bin/bash' >>/etc/passwd"
        )
        self.lab.inside(what["host"], ["sh", "-c", script], check=True)

    def do_program(self, what: dict[str, Any]) -> None:
        """An executable file is there."""
        self.worn = True
        script = f"cat >{what['path']} && chmod 755 {what['path']}"
        self.lab.inside(what["host"], ["sh", "-c", script], input=what["text"], check=True)

    def do_vars(self, what: dict[str, Any]) -> None:
        """The inventory says more of some hosts."""
        for name, variables in what.items():
            file = self.lab.paths.state / "host_vars" / f"{name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(variables))

    def do_freeze(self, label: str) -> None:
        """Who looks after a holder is stopped."""
        for helper in self.helpers(self.held[label][0]):
            os.kill(helper["pid"], signal.SIGSTOP)

    def do_type(self, typed: str) -> None:
        """Another command, before the one that is judged."""
        run = self.type(typed)
        assert run.code == 0, f"{typed} (exit {run.code})\n{run.output}"
        assert not run.actions("sent"), f"{typed} signalled somebody"

    def do_alter(self, what: dict[str, Any]) -> None:
        """A file is edited."""
        file = Path(self.apart(what["file"]))
        text = file.read_text()
        assert what["from"] in text, f"{what['from']} is not in {text}"
        file.write_text(text.replace(what["from"], what["to"]))

    def do_plain(self, what: dict[str, Any]) -> None:
        """A process that holds no GPU."""
        self.remember_plain(what["as"], self.start_plain(what["host"], what["name"]))

    def do_watch(self, what: dict[str, Any]) -> None:
        """Somebody reads the GPUs again and again."""
        self.remember_plain(what["as"], self.start(what["host"], WATCH[0], *WATCH))

    def remember_plain(self, label: str, pid: int) -> None:
        """A process of this file that holds no GPU."""
        self.plain[label] = Process(label, pid, linux.start_time(pid))

    def do_escape(self, label: str) -> None:
        """A holder leaves its container's control group."""
        holder = self.held[label][0]
        host = self.lab.plan().host(holder["host"]).name
        group = self.lab.paths.host_cgroup(host) / "system.slice/escaped.service"
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text(str(holder["outer_pid"]))

    def end(self, holder: dict[str, Any]) -> None:
        """End a holder that may have ended already."""
        for host in self.lab.status()["hosts"].values():
            driver = host["driver"]
            there = {each["id"] for each in driver["holders"]}
            if holder["id"] in there | set(driver["helpers"]) | set(driver["endings"]):
                self.lab.drop(holder["id"])

    def helpers(self, holder: dict[str, Any]) -> list[dict[str, Any]]:
        """The processes that look after a holder, with their numbers outside."""
        found: list[dict[str, Any]] = []
        for host in self.lab.status()["hosts"].values():
            found += host["driver"]["helpers"].get(holder["id"], [])
        return found

    def restore(self) -> None:
        """All is well again, and everybody of the scenario is gone."""
        if self.shape is None:
            return
        shutil.rmtree(self.lab.paths.state / "host_vars", ignore_errors=True)
        try:
            self.lab.heal()
            for holders in self.held.values():
                for holder in holders:
                    self.end(holder)
            for process in self.plain.values():
                if process.alive:
                    os.kill(process.pid, signal.SIGKILL)
        except (LabError, OSError):
            self.worn = True
        self.held.clear()
        self.plain.clear()

    # --- the command ---

    def apart(self, text: str) -> str:
        """The same with its files in a folder of this run of the suite."""
        return text.replace("/tmp/", f"{self.record.parent}/")

    def type(self, typed: str) -> Run:
        """Run a command as an operator types it at the root of the checkout."""
        self.record.unlink(missing_ok=True)
        # Labs have the same addresses: a connection kept by another one must not be used.
        masters = {"ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.lab.paths.state / "cp")}
        before = self.executions()
        began = time.monotonic()
        ran = self.lab.run(
            shlex.split(self.apart(typed)),
            cwd=ROOT,
            env={**recorded(self.record), **masters},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_RUN,
        )
        seconds = time.monotonic() - began
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        after = self.executions()
        counts = {name: after[name] - before.get(name, 0) for name in after}
        return Run(ran.returncode, ran.stdout, seconds, [json.loads(x) for x in lines], counts)

    def play(self, scenario: Scenario) -> None:
        """One scenario from beginning to end; AssertionError names all that was wrong."""
        self.prepare(scenario)
        try:
            for event in scenario.given:
                self.happen(event)
            self.once(scenario.typed, scenario.then, "")
            if scenario.again is not None:
                for event in scenario.meanwhile:
                    self.happen(event)
                self.once(scenario.typed, scenario.again, "typed again: ")
        except Exception:
            self.worn = True
            raise
        finally:
            self.restore()

    def once(self, typed: str, outcome: Outcome, when: str) -> None:
        """Type a command and compare."""
        living = [each for each in self.bystanders.values() if each.alive]
        there = {
            label: [holder for holder in holders if self.alive(holder)]
            for label, holders in self.held.items()
        }
        run = self.type(typed)
        check = Check(self, run, outcome, there)
        check.everything()
        check.bystanders([*living, *self.plain.values()])
        check.leftovers()
        check.problems += matrix.problems(typed, run.events, outcome.verdict)
        assert not check.problems, (
            "\n".join(when + each for each in check.problems)
            + f"\n\n--- {typed} (exit {run.code}, {run.seconds:.1f} s)\n{run.output}"
        )


@dataclass
class Check:
    """Compare one run with what must come of it; collects everything that is wrong."""

    world: World
    run: Run
    outcome: Outcome
    there: dict[str, list[dict[str, Any]]]
    problems: list[str] = field(default_factory=list)

    def expect(self, what: str, wanted: Any, found: Any) -> None:
        """Note a difference."""
        if wanted != found:
            self.problems.append(f"{what}: must be {wanted}, is {found}")

    def everything(self) -> None:
        """All that the outcome names, and what must hold of any run."""
        run, outcome = self.run, self.outcome
        self.expect("exit code", outcome.exit, run.code)
        for host, word in outcome.verdict.items():
            self.expect(f"verdict on {host}", word, run.verdict(host))
        self.signalled()
        self.known()
        self.truth()
        self.economy()
        self.in_time()
        self.changes()
        self.one_line()
        for words in outcome.says:
            if squeeze(words) not in run.words:
                self.problems.append(f"nowhere is said: {words}")
        for words in outcome.silent:
            if squeeze(words) in run.words:
                self.problems.append(f"must not be said: {words}")
        for label in outcome.spares:
            if not any(self.is_him(each, label) for each in run.spared):
                self.problems.append(f"{label} is not reported as spared")
        for host, most in outcome.executions.items():
            if run.executions[host] > most:
                self.problems.append(
                    f"{host}: {run.executions[host]} remote executions, at most {most}"
                )
        if outcome.within is not None and too_long(run.seconds, outcome.within):
            self.problems.append(f"took {run.seconds:.1f} s, at most {outcome.within:g}")

    def is_him(self, seen: dict[str, Any], label: str) -> bool:
        """Is the process in a report the one of this file?"""
        plain = self.world.plain.get(label)
        if plain and plain.start == seen["start"]:
            return True
        for holder in self.there.get(label, []):
            if holder["respawn"] and seen["name"] == holder["name"][:15]:
                return True
            numbers = (holder["node_pid"], holder["pid"])
            if seen["start"] == holder["start_time"] and seen["node_pid"] in numbers:
                return True
            # The daemon that started the server of MPS has the GPUs open too.
            if holder["kind"] == "mps" and any(
                seen["start"] == each["start_time"] for each in self.world.helpers(holder)
            ):
                return True
        return False

    def by_rung(self, actions: list[dict[str, Any]]) -> dict[str, str]:
        """The last rung for each process of this file; strangers under a name that says so."""
        rungs = {}
        for action in actions:
            label = next((each for each in self.there if self.is_him(action, each)), None)
            who = label or f"somebody else, {action['name']} (pid {action['node_pid']})"
            rungs[who] = action["rung"]
        return rungs

    def signalled(self) -> None:
        """Who was signalled at which rung, and who is alive."""
        outcome = self.outcome
        wanted = outcome.killed | outcome.survives
        self.expect("signalled, by rung", wanted, self.by_rung(self.run.actions("sent")))
        planned = self.by_rung(self.run.actions("would be sent"))
        self.expect("would be signalled, by rung", outcome.would_kill, planned)
        for label, holders in self.there.items():
            for holder in holders:
                alive = self.world.alive(holder)
                if alive and label in outcome.killed:
                    self.problems.append(f"{label} is still alive")
                if not alive and label not in outcome.killed:
                    self.problems.append(f"{label} is dead")

    def known(self) -> None:
        """Nobody is reported but who was put there: no ghosts, of our readers only one stuck."""
        others = [*self.world.bystanders.values(), *self.world.plain.values()]
        starts = {each.start for each in others}
        for seen in self.run.named("holders", "spared"):
            if any(word in seen["command"] for word in self.outcome.leaves):
                continue
            if seen["start"] not in starts and not any(self.is_him(seen, it) for it in self.there):
                who = f"{seen['name']} (pid {seen['node_pid']}, {seen['command']})"
                self.problems.append(f"reported, and nobody put it there: {who}")

    def truth(self) -> None:
        """What is called clean is clean, as the driver has it."""
        used = self.world.used()
        plan = self.world.lab.plan()
        for machine, text in self.outcome.used_mib.items():
            self.expect(f"MiB in use on {machine}", text, " ".join(map(str, used[machine])))
        for host in self.outcome.verdict:
            name = host.removesuffix("-ssh")
            if self.run.verdict(host) != "clean" or name not in self.world.machines():
                continue
            machine = plan.host(name).name
            if machine not in self.outcome.used_mib and any(used[machine]):
                self.problems.append(f"FALSE CLEAN: {host}: MiB in use: {used[machine]}")

    def economy(self) -> None:
        """Refused before anybody is reached; clean with two executions and one more for each rung.

        A scenario that is refused for what was read on the machine says how often that was.
        """
        run, stated = self.run, self.outcome.executions
        words = set(self.outcome.verdict.values())
        if words == {"refused"} and not stated:
            self.expect("remote executions", 0, sum(run.executions.values()))
        if words == {"clean"}:
            for machine, count in run.executions.items():
                climbed = run.climbed(machine)
                if count > stated.get(machine, 2 + climbed):
                    self.problems.append(f"{machine}: {count} executions for {climbed} rungs")

    def in_time(self) -> None:
        """Who outlives SIGKILL is reported soon after it."""
        for event in self.run.verdicts:
            sent = [each["at"] for each in event["result"].get("actions", [])]
            if event["result"]["verdict"] == "unkillable" and sent:
                passed = event["at"] - min(sent) / os.sysconf("SC_CLK_TCK")
                if too_long(passed, LONGEST_SILENCE):
                    self.problems.append(f"unkillable is said {passed:.1f} s after the signal")

    def changes(self) -> None:
        """Ansible's count of changed hosts: those on which somebody was signalled, no others."""
        changed = sum(1 for host in self.run.recap.values() if host["changed"])
        if self.outcome.changed is not None:
            self.expect("hosts changed", self.outcome.changed, changed)
        elif not (self.run.actions("sent") or self.run.actions("would be sent")):
            self.expect("hosts changed", 0, changed)
        else:
            self.expect("anything changed", True, changed > 0)

    def one_line(self) -> None:
        """A refusal is one line for people, once for each host."""
        for host, counts in self.run.recap.items():
            refusals = self.run.refusals(host)
            if counts["failures"] or counts["unreachable"]:
                self.expect(f"refusals of {host}", 1, len(refusals))
            for text in refusals:
                if "\n" in text.strip() or len(text) > LONGEST_REFUSAL:
                    self.problems.append(f"{host}: not one line: {text!r}")
        for word in ("Traceback", "internal error", "MODULE FAILURE", "Unexpected Exception"):
            if word in self.run.words:
                self.problems.append(f"says {word!r}")

    def bystanders(self, before: list[Process]) -> None:
        """Whoever lived before and has nothing to do with it lives."""
        for process in before:
            if not process.alive:
                self.problems.append(f"BYSTANDER HARMED: {process.what}")

    def leftovers(self) -> None:
        """Nothing of ours stays on any machine."""
        began = time.monotonic()
        while True:
            left = self.world.ours()
            for word, most in self.outcome.leaves.items():
                allowed = [each for each in left if word in each][:most]
                left = [each for each in left if each not in allowed]
            if not left or too_long(time.monotonic() - began, LONGEST_STAY):
                break
            time.sleep(0.02)
        self.problems += [f"left behind on {each}" for each in left]


def command_line(pid: int) -> str:
    """The command line with blanks, or nothing where there is none."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace").strip()


def limit_of(typed: str) -> str:
    """What follows -l in a command, or nothing."""
    words = shlex.split(typed)
    for flag in ("-l", "--limit"):
        if flag in words:
            return words[words.index(flag) + 1]
    return ""
