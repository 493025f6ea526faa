# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins of gpu_state and gpu_release share.

A module of ours knows how to work on a batch of targets. Its action plugin sends the knowledge
over standard input to one Python on the acting host (no files, no second round trip), or runs
the plain module where that cannot be done. Afterwards every host of the play takes its own result
out of its leader's batch, so that Ansible's own ok, changed and failed stay true for each host.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from ansible.plugins.action import ActionBase

from ansible_collections.gpuops.gpu.plugins.module_utils import deadline

# Where the knowledge lies. Read as text and not imported: Ansible compiles what it imports from a
# collection anew in every worker, and only the node needs it.
FOLDER = Path(__file__).parent.parent / "module_utils"
PACKAGE = "ansible_collections.gpuops.gpu.plugins.module_utils"
# Seconds that an answer may come later than its program's own deadline: connecting takes some.
ON_THE_WAY = 20.0
# In the order in which they import each other.
READERS = ("deadline", "commands", "owners", "nvidia_smi")
REST = ("holders", "signals", "turns", "verdict", "node", "restarts", "work", "program")
SENTINEL = "gpuops-answer "

# So much of what was done goes into the one line of a refusal.
MOST_SENTENCES = 3

# From include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG = 1

# -I and -S: no environment, no site-packages: faster, and nothing there can get in the way.
PYTHON_FLAGS = "-IS"


def program(request: dict[str, Any]) -> str:
    """The whole program for standard input: the knowledge as modules, then the request."""

    def sources(names: tuple[str, ...]) -> dict[str, str]:
        return {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in names}

    return PROGRAM.format(
        package=PACKAGE, request=json.dumps(request), readers=sources(READERS), rest=sources(REST)
    )


# The readers are started as soon as the code for that is there: nvidia-smi then answers while the
# rest is still being compiled.
PROGRAM = """\
import json, os, sys
package = {package!r}
parent = type(sys)(package)
sys.modules[package] = parent
def load(sources):
    for name, source in sources.items():
        module = type(sys)(package + "." + name)
        sys.modules[module.__name__] = module
        setattr(parent, name, module)
        exec(compile(source, name + ".py", "exec", dont_inherit=True), module.__dict__)
request = json.loads({request!r})
load({readers!r})
readers = parent.nvidia_smi.Readers(request["targets"]) if os.geteuid() == 0 else None
load({rest!r})
parent.program.main(request, readers)
"""


def end_with_controller() -> None:
    """Have the kernel end this worker when ``ansible-playbook`` is killed.

    A worker is a process group of its own and would wait on, and with it the program on the node.
    Its own handler of SIGTERM then ends its ssh, and the node notices that nobody listens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Overdue(BaseException):
    """A host does not answer. No Exception: after one the connection would be tried again."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Give up what is done in the block after ``seconds``, and end the ssh that it waits for.

    An alarm, because a worker of Ansible is a process of its own that does nothing else; where the
    task has set one itself (its keyword ``timeout``) that one counts.

    :raises Overdue: the time is over.
    """

    def ring(*_: object) -> None:
        raise Overdue

    if signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except Overdue:
        end_children()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def end_children() -> None:
    """End what this worker has started: it leads a process group (since ansible-core 2.19)."""
    if os.getpgrp() == os.getpid():
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


class NoResult(Exception):
    """A batch holds no outcome for a host; ``result`` says so in Ansible's way.

    ``rounds``: those that it took part in before the acting host was lost.
    """

    def __init__(self, rounds: list[dict[str, Any]], **result: Any) -> None:
        self.rounds = rounds
        self.result = result


def own_rounds(batch: Any, name: str) -> list[dict[str, Any]]:
    """The results of one host in a registered batch, one for each round (item) it took part in.

    :raises NoResult: the acting host was unreachable, gave no answer, or was not asked.
    """
    rounds = batch.get("results", [batch]) if isinstance(batch, dict) else []
    mine = [each["hosts"][name] for each in rounds if name in each.get("hosts", {})]
    # `failed` itself is not looked at: the roles suppress it, so that the leader stays in the play.
    broken = [each for each in rounds if "hosts" not in each and not each.get("skipped")]
    if broken and (not mine or not mine[-1]["settled"]):
        msg = str(broken[-1].get("msg", "the acting host gave no answer"))
        kind = "unreachable" if broken[-1].get("unreachable") else "failed"
        raise NoResult(mine, **{kind: True, "msg": msg})
    if not mine:
        raise NoResult(
            [], failed=True, msg=f"there is no result for {name}; run all tasks of the role"
        )
    return mine


def some_of(record: list[str]) -> list[str]:
    """The beginning of what was done, for the one line of a refusal."""
    left = len(record) - MOST_SENTENCES
    return [*record[:MOST_SENTENCES], *([f"and {left} more"] if left > 0 else [])]


class BatchAction(ActionBase):
    """Run a batch on the acting host, or take one host's result out of it."""

    _supports_check_mode = True
    _supports_async = True
    VERB: ClassVar[str]
    SPEC: ClassVar[dict[str, Any]]
    # Arguments that only the action plugin knows, and that the module never sees.
    CONTROLLER_ONLY: ClassVar[tuple[str, ...]] = ()

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Entry point of Ansible."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        if "take" in self._task.args:
            result.update(self.take(self._task.args["take"], str(task_vars["inventory_hostname"])))
            return result
        args = self.prepare(task_vars)
        _, args = self.validated(args)
        if not args["targets"]:
            result.update(hosts={}, settled=True, changed=False)
            return result
        result.update(self.execute(args, task_vars))
        return result

    def prepare(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        """The module's arguments out of the task's; leaves out what only the controller needs."""
        return {k: v for k, v in self._task.args.items() if k not in self.CONTROLLER_ONLY}

    def validated(self, args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Check against the module's own argument spec; raises with Ansible's own words."""
        asked, self._task.args = self._task.args, args
        try:
            return self.validate_argument_spec(argument_spec=self.SPEC)
        finally:
            self._task.args = asked

    def request(self, args: dict[str, Any]) -> dict[str, Any]:
        """What the node program is asked."""
        return {"verb": self.VERB, **args}

    def execute(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """One execution on the acting host; returns what the module returns, or a failure."""
        if self._task.async_val or not getattr(self._connection, "has_pipelining", False):
            ran: dict[str, Any] = self._execute_module(
                module_name=self._task.action,
                module_args=args,
                task_vars=task_vars,
                wrap_async=self._task.async_val,
            )
            return ran
        end_with_controller()
        command = f"{shlex.quote(self.interpreter(task_vars))} {PYTHON_FLAGS} -"
        request = self.request(args)
        seconds = deadline.of_request(request) + ON_THE_WAY
        try:
            with limit(seconds):
                ran = self._low_level_execute_command(
                    command, in_data=program(request).encode("utf-8")
                )
        except Overdue:
            where = self._task.delegate_to or "the host"
            return {
                "failed": True,
                "msg": f"{where} gave no answer within {seconds:g} s and was given up: "
                f"see whether it hangs, or a stopped python3 {PYTHON_FLAGS} is there",
            }
        for line in reversed(ran["stdout"].splitlines()):
            if line.startswith(SENTINEL):
                with suppress(ValueError):  # cut off in the middle: no answer at all
                    answer: dict[str, Any] = json.loads(line[len(SENTINEL) :])
                    return answer
        return {"failed": True, "msg": self.no_answer(ran, self.interpreter(task_vars))}

    def interpreter(self, task_vars: dict[str, Any]) -> str:
        """The acting host's Python: as configured there, without a round trip to discover it."""
        delegate = self._task.delegate_to
        if delegate:
            task_vars = task_vars.get("ansible_delegated_vars", {}).get(delegate, {})
        configured = str(self._templar.template(task_vars.get("ansible_python_interpreter", "")))
        return configured if configured.startswith("/") else "/usr/bin/python3"

    def no_answer(self, ran: dict[str, Any], python: str) -> str:
        """One sentence for an execution that brought no answer."""
        where = self._task.delegate_to or "the host"
        said = [
            line for line in (ran["stderr"] + "\n" + ran["stdout"]).splitlines() if line.strip()
        ]
        # A sudo that is not there ends with the same code.
        if ran["rc"] == 127 and any(python in line for line in said):
            return (
                f"{where} has no {python}: install python3 there, or set ansible_python_interpreter"
            )
        last = said[-1].strip() if said else "no output"
        return f"{where} gave no answer (exit code {ran['rc']}): {last}"

    def take(self, batch: Any, name: str) -> dict[str, Any]:
        """This host's own result out of its leader's registered result."""
        try:
            return self.merge(own_rounds(batch, name))
        except NoResult as error:
            return self.lost(error)

    def lost(self, error: NoResult) -> dict[str, Any]:
        """What there is to say of a host whose outcome is not known."""
        return error.result

    def merge(self, rounds: list[dict[str, Any]]) -> dict[str, Any]:
        """One result out of the rounds (rungs) in which this host took part."""
        return dict(rounds[-1])
