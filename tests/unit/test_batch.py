# SPDX-License-Identifier: GPL-3.0-or-later
"""One execution for a batch: what is sent really runs, and every host gets its own result back."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.connection import local

from ansible_collections.gpuops.gpu.plugins.action import gpu_release, gpu_state
from ansible_collections.gpuops.gpu.plugins.filter import of_host
from ansible_collections.gpuops.gpu.plugins.module_utils import (
    arguments,
    deadline,
    holders,
    program,
    verdict,
    work,
)
from ansible_collections.gpuops.gpu.plugins.modules import gpu_release as gpu_release_module
from ansible_collections.gpuops.gpu.plugins.modules import gpu_state as gpu_state_module
from ansible_collections.gpuops.gpu.plugins.plugin_utils import batch
from tests.patience import PATIENCE

GPU = "0, GPU-1, 00000000:00:06.0, {}, 143771, 616, 0, 31, P0, 580.159.04, NVIDIA H200"
CLEAN = f"""#!/bin/sh
case $1 in
  --query-gpu=*) echo '{GPU.format(0)}' ;;
  -q) echo 'GPU UUID : GPU-1'; echo 'Minor Number : 0' ;;
esac
"""
BROKEN = "#!/bin/sh\necho 'No devices were found'; exit 6\n"


class Machine:
    """A machine of its own: its processes are not seen by others, nor others by them.

    Its nvidia-smi is a script of the test's, laid over /usr/local/sbin.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def tool(self, script: str) -> None:
        (self.folder / "nvidia-smi").write_text(script, encoding="utf-8")
        (self.folder / "nvidia-smi").chmod(0o755)

    def run(
        self, *command: str, text: str = "", cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        enter = 'mount --bind "$1" /usr/local/sbin && shift && exec "$@"'
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return subprocess.run(
            [*unshare, "sh", "-c", enter, "sh", str(self.folder), *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=6 * PATIENCE,
            check=False,
            cwd=cwd,
            env={**os.environ, **environment},
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "sbin")


class Ran:
    """What an action plugin ran on its machine, and what came back of it."""

    def __init__(self, before: str = "", after: str = "", **answer: Any) -> None:
        self.before, self.after, self.answer = before, after, answer
        self.commands: list[str] = []
        self.machine: Machine | None = None

    def __call__(self, command: str, in_data: bytes) -> dict[str, Any]:
        self.commands.append(command)
        if self.machine is None:
            return {"stdout": "", "stderr": "", "rc": 0, **self.answer}
        script = f"{self.before}\n{command}\nrc=$?\n{self.after}\nexit $rc"
        ran = self.machine.run("sh", "-c", script, text=in_data.decode())
        return {"stdout": ran.stdout, "stderr": ran.stderr, "rc": ran.returncode}


def action(kind: Any, args: dict[str, Any], ran: Ran | None = None, **task: Any) -> Any:
    """An action plugin as Ansible would have made it, as far as these tests need one."""
    made = kind.ActionModule.__new__(kind.ActionModule)
    given = {"args": args, "check_mode": False, "async_val": 0, "delegate_to": None, **task}
    made._task = SimpleNamespace(action="gpuops.gpu.gpu_state", **given)
    made._connection = SimpleNamespace(has_pipelining=True)
    made._templar = SimpleNamespace(template=lambda value: value)
    made._low_level_execute_command = ran
    return made


def checked(spec: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with their defaults, as Ansible checks them before the module's work begins."""
    found = ArgumentSpecValidator(spec).validate(given)
    assert found.error_messages == []
    validated: dict[str, Any] = found.validated_parameters
    return validated


TARGETS = checked(
    arguments.STATE, {"targets": [{"name": "node1", "expected_gpus": 1}, {"name": "again"}]}
)
RELEASE = checked(
    arguments.RELEASE,
    {
        "targets": [{"name": "node1"}],
        "rung": {"name": "kill", "select": "devices", "signal": "KILL", "wait": 1},
    },
)


def test_the_words_that_both_sides_must_agree_on() -> None:
    assert batch.SENTINEL == program.SENTINEL
    modules = {path.stem for path in batch.FOLDER.glob("*.py")} - {"__init__"}
    # What the node does not need stays on the controller.
    assert modules - {*batch.READERS, *batch.REST} == {"arguments"}


def test_what_is_sent_is_plain_text_that_names_no_file() -> None:
    text = batch.program({"verb": "state", "targets": [{"name": "Köln\n'\"\\{}%s"}]})
    compile(text, "program", "exec")
    assert str(batch.FOLDER) not in text


@pytest.mark.parametrize(
    ("script", "word", "reason"),
    [
        (CLEAN, "clean", "1 of 1 GPUs at 0 MiB in two readings in node1"),
        (BROKEN, "unknown", "nvidia-smi failed with exit code 6: No devices were found"),
        (CLEAN.replace(", 0, 143771", ", [N/A], 143771"), "unknown", "reads '[N/A]'"),
    ],
)
def test_the_program_runs_and_answers(
    machine: Machine, script: str, word: str, reason: str
) -> None:
    machine.tool(script)
    ran = machine.run(
        "/usr/bin/python3", "-IS", "-", text=batch.program({"verb": "state", **TARGETS})
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    line = ran.stdout.splitlines()[-1]
    assert line.startswith(batch.SENTINEL)
    answer = json.loads(line[len(batch.SENTINEL) :])
    assert sorted(answer["hosts"]) == ["again", "node1"]
    assert answer["hosts"]["node1"]["verdict"] == word
    assert reason in answer["hosts"]["node1"]["reason"]
    assert 0 < answer["seconds"] < 30


def test_a_machine_without_the_tool_is_unknown(machine: Machine) -> None:
    ran = Ran()
    ran.machine = machine
    answer = action(gpu_state, TARGETS, ran).execute(TARGETS, {})
    assert ran.commands == ["/usr/bin/python3 -IS -"]
    result = answer["hosts"]["node1"]
    assert result["verdict"] == "unknown"
    assert result["reason"] == "nvidia-smi is not installed there"
    assert result["gpus"] == []


def test_the_result_is_found_among_noise(machine: Machine) -> None:
    machine.tool(CLEAN)
    noise = "echo 'Welcome!'; echo 'gpuops-answer {old'; echo warning >&2"
    ran = Ran(before=noise, after="echo 'Goodbye'; echo bye >&2")
    ran.machine = machine
    answer = action(gpu_state, TARGETS, ran).execute(TARGETS, {})
    assert {name: host["verdict"] for name, host in answer["hosts"].items()} == {
        "node1": "clean",
        "again": "clean",
    }


def test_a_release_of_a_machine_that_is_clean_does_nothing(machine: Machine) -> None:
    machine.tool(CLEAN)
    ran = Ran()
    ran.machine = machine
    answer = action(gpu_release, RELEASE, ran).execute(RELEASE, {})
    host = answer["hosts"]["node1"]
    assert (host["verdict"], host["actions"], host["changed"]) == ("clean", [], False)
    assert (host["rung"], host["earlier"]) == ("kill", [])


@pytest.mark.parametrize(
    ("ran", "message"),
    [
        ({"rc": 1, "stderr": "Traceback\nMemoryError\n"}, "(exit code 1): MemoryError"),
        ({"rc": 0}, "(exit code 0): no output"),
        ({"rc": 0, "stdout": "Welcome!\n"}, "(exit code 0): Welcome!"),
        ({"rc": 0, "stdout": "x gpuops-answer {}\n"}, "gave no answer"),
        ({"rc": 0, "stdout": 'gpuops-answer {"hosts": {"no'}, "gave no answer"),
        ({"rc": 127, "stderr": "sh: 1: /usr/bin/python3: not found"}, "install python3 there"),
        (
            {"rc": 127, "stderr": "sh: 1: sudo: not found"},
            "(exit code 127): sh: 1: sudo: not found",
        ),
    ],
)
def test_no_answer_is_a_failure_and_never_a_result(ran: dict[str, Any], message: str) -> None:
    for delegate, who in ((None, "the host"), ("pve1", "pve1")):
        made = action(gpu_state, TARGETS, Ran(**ran), delegate_to=delegate)
        answer = made.execute(TARGETS, {})
        assert answer["failed"] is True
        assert "hosts" not in answer
        assert answer["msg"].startswith(who)
        assert message in answer["msg"]


@pytest.mark.parametrize(
    ("variables", "delegate", "command"),
    [
        ({}, None, "/usr/bin/python3 -IS -"),
        ({"ansible_python_interpreter": "/opt/my py/python3"}, None, "'/opt/my py/python3' -IS -"),
        ({"ansible_python_interpreter": "auto_silent"}, None, "/usr/bin/python3 -IS -"),
        ({"ansible_python_interpreter": "/controller's"}, "pve1", "/usr/bin/python3 -IS -"),
        (
            {"ansible_delegated_vars": {"pve1": {"ansible_python_interpreter": "/opt/python3"}}},
            "pve1",
            "/opt/python3 -IS -",
        ),
    ],
)
def test_the_python_of_the_acting_host(
    variables: dict[str, Any], delegate: str | None, command: str
) -> None:
    ran = Ran()
    action(gpu_state, TARGETS, ran, delegate_to=delegate).execute(TARGETS, variables)
    assert ran.commands == [command]


def test_check_mode_travels_with_the_release() -> None:
    for check in (False, True):
        made = action(gpu_release, RELEASE, check_mode=check)
        assert made.request(RELEASE) == {"verb": "release", "check": check, **RELEASE}
    assert action(gpu_state, TARGETS).request(TARGETS) == {"verb": "state", **TARGETS}


def process(pid: int, name: str = "python3", **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "node_pid": pid + 90000,
        "name": name,
        "owner": "lxc 129",
        "gpus": [4],
        **more,
    }


def done(pid: int, result: str = "sent", rung: str = "terminate") -> dict[str, Any]:
    return process(pid, rung=rung, signal="TERM", result=result)


def host(verdict: str, name: str = "ct129", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "verdict": verdict,
        "settled": verdict != "held",
        "changed": False,
        "before": [{"index": 4, "used_mib": 20480}],
        "gpus": [{"index": 4, "used_mib": 0}],
        "actions": [],
        "holders": [],
        "plan": [],
        "refused": "",
        "timings": {},
        "done": 0.2,
        "proved_at": 1000.0,
        "rung": "terminate",
        **more,
    }


def taken(batch_result: Any, kind: Any = gpu_release, name: str = "ct129") -> dict[str, Any]:
    found: dict[str, Any] = action(kind, {}).take(batch_result, name)
    # The roles hand over only what the filter leaves of it.
    assert action(kind, {}).take(of_host.of_host(batch_result, name), name) == found
    return found


def test_everything_that_is_returned_is_documented(machine: Machine) -> None:
    machine.tool(CLEAN)
    documented = yaml.safe_load(gpu_state_module.RETURN)
    more = yaml.safe_load(gpu_release_module.RETURN)
    request = {"verb": "state", "targets": TARGETS["targets"], "earlier": {}}
    ran = machine.run(sys.executable, "-IS", "-", text=batch.program(request))
    answer = json.loads(ran.stdout.partition(batch.SENTINEL)[2])
    assert set(answer) - {"changed"} == set(documented) == set(more)
    state, released = documented["hosts"]["contains"], more["hosts"]["contains"]
    for result in answer["hosts"].values():
        assert set(result) == set(state)
    assert set(released) - {"before"} <= set(state)
    bare = work.bare_result("node1", verdict.Verdict(verdict.UNKNOWN, ""))
    assert set(bare) == {key for key, each in state.items() if "returned" not in each}
    rung = {"name": "kill", "signal": "KILL"}
    signalled = work.action(holders.Holder(1), rung, "sent")
    for of, key, shown in (
        (state, "gpus", {*answer["hosts"]["node1"]["gpus"][0]}),
        (state, "holders", {*holders.Holder(1).as_dict()}),
        (released, "actions", {*signalled} - {*holders.Holder(1).as_dict()}),
    ):
        text = " ".join(of[key]["description"])
        assert [word for word in shown if not re.search(rf"\b{word}\b", text)] == []


def test_a_host_renders_nothing_of_the_others_but_whether_they_are_clean() -> None:
    found = of_host.of_host(
        {
            "results": [
                {
                    "hosts": {"ct129": host("held"), "ct130": host("clean", "ct130")},
                    "seconds": 1.0,
                    "ended_at": 1001.0,
                },
                {"hosts": {"ct130": host("clean", "ct130")}, "invocation": {"targets": [1] * 40}},
                {"unreachable": True, "msg": "no route", "item": {"name": "kill"}},
            ],
            "msg": "All items completed",
        },
        "ct129",
    )
    other = {"verdict": "clean", "proved_at": 1000.0}
    assert found == {
        "results": [
            {"hosts": {"ct129": host("held"), "ct130": other}, "ended_at": 1001.0},
            {"hosts": {"ct130": other}},
            {"unreachable": True, "msg": "no route"},
        ]
    }


def test_a_host_takes_its_own_reading_and_nobody_elses() -> None:
    hosts = {"ct129": host("held"), "ct130": host("clean", "ct130"), "ct131": host("held", "ct131")}
    for name, expected in hosts.items():
        mine = taken({"hosts": hosts}, gpu_state, name)
        assert (mine["name"], mine["verdict"]) == (name, expected["verdict"])
        mine["verdict"] = "changed"
        # What one takes is its own: changing it changes no other's.
        assert hosts[name]["verdict"] == expected["verdict"] != "changed"


@pytest.mark.parametrize("kind", [gpu_state, gpu_release])
@pytest.mark.parametrize(
    "result",
    [None, [], "", {}, {"hosts": {}}, {"hosts": {"ct12": host("clean", "ct12")}}, {"results": []}],
)
def test_no_result_for_a_host_is_a_failure(kind: Any, result: Any) -> None:
    mine = taken(result, kind)
    assert mine["failed"] is True
    assert mine["msg"]
    assert "verdict" not in mine


@pytest.mark.parametrize("kind", [gpu_state, gpu_release])
def test_a_batch_that_failed_fails_each_of_its_hosts(kind: Any) -> None:
    mine = taken({"failed": True, "msg": "pve1 gave no answer"}, kind)
    assert (mine["failed"], mine["msg"]) == (True, "pve1 gave no answer")
    mine = taken({"unreachable": True, "msg": "no route to host"}, kind)
    assert (mine["unreachable"], mine["msg"]) == (True, "no route to host")
    assert "verdict" not in mine


def test_a_rung_that_failed_fails_only_those_it_was_climbed_for() -> None:
    rounds = {
        "results": [
            {"hosts": {"ct129": host("held"), "ct130": host("clean", "ct130")}},
            {"failed": True, "msg": "pve1 gave no answer"},
        ]
    }
    assert taken(rounds)["failed"] is True
    assert taken(rounds)["msg"] == "pve1 gave no answer"
    assert taken(rounds, name="ct130")["verdict"] == "clean"


@pytest.mark.parametrize("lost", [{"unreachable": True}, {"failed": True}])
@pytest.mark.parametrize("count", [1, 5])
def test_what_was_done_before_the_acting_host_was_lost_is_said(
    lost: dict[str, Any], count: int
) -> None:
    sent = [done(7 + number) for number in range(count)]
    first = host("held", changed=True, actions=sent, holders=[process(7)])
    rounds = [{"hosts": {"ct129": first}}, {**lost, "msg": "no route to pve1"}]
    mine = taken({"results": rounds})
    assert {key: mine[key] for key in lost} == lost
    assert (mine["actions"], mine["changed"], len(mine["record"])) == (sent, True, count)
    assert mine["msg"].startswith("no route to pve1; terminate: TERM sent: python3 (pid 7")
    assert ("; and 2 more" in mine["msg"]) is (count == 5)
    assert "verdict" not in mine


def test_the_rounds_of_a_host_become_one_result() -> None:
    first = host(
        "held",
        changed=True,
        holders=[process(7), process(8, "sglang::schedul")],
        actions=[done(7), done(8)],
        gpus=[{"index": 4, "used_mib": 500}],
    )
    second = host(
        "clean",
        rung="kill",
        before=[{"index": 4, "used_mib": 500}],
        actions=[done(8, rung="kill")],
        timings={"zero": 0.4, "second_zero": 0.5},
    )
    other = host("clean", "ct130")
    mine = taken(
        {"results": [{"hosts": {"ct129": first, "ct130": other}}, {"hosts": {"ct129": second}}]}
    )
    assert (mine["name"], mine["verdict"], mine["changed"]) == ("ct129", "clean", True)
    assert mine["before"] == first["before"]
    assert mine["gpus"] == second["gpus"]
    assert [(each["rung"], each["pid"]) for each in mine["actions"]] == [
        ("terminate", 7),
        ("terminate", 8),
        ("kill", 8),
    ]
    assert [(each["name"], each["verdict"], each["signalled"]) for each in mine["rungs"]] == [
        ("terminate", "held", 2),
        ("kill", "clean", 1),
    ]
    assert mine["rungs"][1]["timings"] == second["timings"]
    assert mine["diff"]["before"] == (
        "90007 python3 (lxc 129) on GPU 4\n90008 sglang::schedul (lxc 129) on GPU 4\n"
    )
    assert mine["diff"]["after"] == ""
    alone = taken({"results": [{"hosts": {"ct129": first, "ct130": other}}]}, name="ct130")
    assert (alone["changed"], alone["actions"], alone["rungs"]) == (False, [], [])


@pytest.mark.parametrize(
    ("hosts", "proved"),
    [
        ([{"ct129": host("clean")}], True),
        ([{"ct129": host("clean"), "ct130": host("clean", "ct130")}], True),
        ([{"ct129": host("clean"), "ct130": host("blocked", "ct130")}], False),
        ([{"ct129": host("clean", actions=[done(7)])}], True),
        ([{"ct129": host("held", actions=[done(7)])}, {"ct129": host("clean")}], True),
        ([{"ct129": host("clean")}, {"ct129": host("held")}], False),
        ([{"ct129": host("clean"), "ct130": host("held", "ct130")}, {}], False),
    ],
)
def test_only_a_batch_that_ended_clean_for_all_its_hosts_is_a_proof(
    hosts: list[dict[str, Any]], proved: bool
) -> None:
    assert taken({"results": [{"hosts": each} for each in hosts]})["proved"] is proved


def test_a_plan_that_was_refused_fails_the_host_in_a_sentence() -> None:
    refused = host("held", refused="not in the plan: late (pid 9)")
    mine = taken({"results": [{"hosts": {"ct129": refused}}]})
    assert (mine["failed"], mine["msg"]) == (True, "ct129: not in the plan: late (pid 9)")
    assert "actions" not in mine


def test_a_proof_is_as_old_as_the_oldest_reading_in_it() -> None:
    early = {
        "hosts": {"ct129": host("clean", proved_at=1000.0), "ct130": host("held", "ct130")},
        "ended_at": 1001.0,
    }
    late = {"hosts": {"ct130": host("clean", "ct130", proved_at=1060.0)}, "ended_at": 1062.0}
    # All of them say so, whenever they look: one reads again for all or nobody does.
    assert [taken({"results": [early, late]}, name=name)["age"] for name in ("ct129", "ct130")] == [
        62.0,
        62.0,
    ]
    assert taken(early)["age"] == 1.0


def test_an_unreachable_batch_proves_nothing() -> None:
    assert taken({"unreachable": True, "msg": "no route"})["proved"] is False


def test_the_diff_of_check_mode_leaves_out_who_would_be_ended() -> None:
    planned = host(
        "held", holders=[process(7), process(8)], actions=[done(7, "would be sent")], changed=True
    )
    mine = taken({"hosts": {"ct129": planned}})
    assert mine["changed"] is True
    assert mine["diff"]["before"].count("\n") == 2
    assert mine["diff"]["after"] == "90008 python3 (lxc 129) on GPU 4\n"


def test_a_rung_is_climbed_only_for_those_who_are_not_settled() -> None:
    args = {**RELEASE, "targets": [{"name": "ct129"}, {"name": "ct130"}, {"name": "ct131"}]}
    after = {
        "hosts": {
            "ct129": host("held", actions=[done(7)], earlier=[done(1)]),
            "ct130": host("clean", "ct130", actions=[done(8)]),
        }
    }
    for check in (False, True):
        prepared = action(gpu_release, {**args, "after": after}, check_mode=check).prepare({})
        assert "after" not in prepared
        assert prepared["targets"] == [{"name": "ct129"}]
        assert prepared["earlier"] == {"ct129": [done(1), done(7)]}
    assert action(gpu_release, args).prepare({})["targets"] == args["targets"]
    # After a step that brought nothing there is nobody known to be held.
    assert action(gpu_release, {**args, "after": {"failed": True}}).prepare({})["targets"] == []


PLAY = """
- hosts: all
  gather_facts: false
  vars:
    ansible_python_interpreter: /usr/bin/python3
    targets: [{name: node1, expected_gpus: 1}, {name: node2, gpus: [0]}]
  tasks:
    - gpuops.gpu.gpu_state:
        targets: "{{ targets }}"
      register: state
    - gpuops.gpu.gpu_release:
        targets: "{{ targets }}"
        rung: {name: kill, select: devices, signal: KILL, wait: 1}
      register: release
    - gpuops.gpu.gpu_state:
        targets: "{{ targets }}"
      async: 20
      poll: 1
      register: later
      when: inventory_hostname == 'fast'
    - ansible.builtin.debug:
        msg: "{{ {inventory_hostname: results} | to_json }}"
      vars:
        results: {state: "{{ state }}", release: "{{ release }}", later: "{{ later }}"}
"""


def shape(value: Any, at: str = "") -> Any:
    """The names and types in a result, with what differs between two runs left out."""
    if isinstance(value, dict):
        return {key: shape(each, key) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [shape(each, at) for each in value]
    return type(value).__name__ if at in ("seconds", "processes", "done", "proved_at") else value


def test_the_fast_path_and_the_plain_module_agree(
    machine: Machine, tmp_path: Path, root: Path
) -> None:
    """The same tasks over Ansible's local connection, and over one that cannot pipeline."""
    machine.tool(CLEAN)
    source = inspect.getsource(local)
    plain = source.replace("has_pipelining = True", "has_pipelining = False")
    assert plain != source
    (tmp_path / "plain.py").write_text(plain.replace("'local'", "'plain'"), encoding="utf-8")
    (tmp_path / "play.yml").write_text(PLAY, encoding="utf-8")
    (tmp_path / "hosts.yml").write_text(
        json.dumps(
            {
                "all": {
                    "hosts": {
                        "fast": {"ansible_connection": "local"},
                        "plain": {"ansible_connection": "plain"},
                    }
                }
            }
        ),
        encoding="utf-8",
    )
    ran = machine.run(
        str(Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        "hosts.yml",
        "play.yml",
        cwd=tmp_path,
        ANSIBLE_COLLECTIONS_PATH=str(root / "collections"),
        ANSIBLE_CONNECTION_PLUGINS=str(tmp_path),
        ANSIBLE_HOME=str(tmp_path / "home"),
        ANSIBLE_REMOTE_TMP=str(tmp_path / "remote"),
        ANSIBLE_ASYNC_DIR=str(tmp_path / "async"),
        ANSIBLE_NOCOLOR="1",
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results: dict[str, Any] = {}
    for line in re.findall(r'"msg": (".*")$', ran.stdout, re.MULTILINE):
        results.update(json.loads(json.loads(line)))
    assert set(results) == {"fast", "plain"}
    for result in results.values():
        for verb in ("state", "release"):
            hosts = result[verb]["hosts"]
            assert {name: each["verdict"] for name, each in hosts.items()} == {
                "node1": "clean",
                "node2": "clean",
            }
            assert result[verb]["changed"] is False
    # Only the plain module was shipped by Ansible, which leaves its trace in the result.
    assert "invocation" not in results["fast"]["state"]
    assert shape(results["fast"]["state"]["hosts"]) == shape(results["plain"]["state"]["hosts"])
    assert shape(results["fast"]["release"]["hosts"]) == shape(results["plain"]["release"]["hosts"])
    assert isinstance(results["plain"]["state"]["seconds"], float)
    # Nor can what runs in the background be sent over standard input.
    assert shape(results["fast"]["later"]["hosts"]) == shape(results["plain"]["state"]["hosts"])
    assert results["fast"]["later"]["finished"]


def test_who_survives_a_rung_stays_in_the_diff() -> None:
    only = host("held", changed=True, holders=[process(7)], actions=[done(7)])
    mine = taken({"hosts": {"ct129": only}})
    assert mine["diff"]["after"] == mine["diff"]["before"] == "90007 python3 (lxc 129) on GPU 4\n"


@pytest.mark.parametrize("result", ["let go", "gone", "not permitted"])
def test_only_who_was_sent_a_signal_counts_as_signalled(result: str) -> None:
    only = host("held", actions=[done(7, result), done(8)])
    assert taken({"hosts": {"ct129": only}})["rungs"][0]["signalled"] == 1


def test_a_host_that_was_settled_before_its_node_was_lost_keeps_its_result() -> None:
    rounds = {
        "results": [
            {"hosts": {"ct129": host("held"), "ct130": host("clean", "ct130")}},
            {"unreachable": True, "msg": "lost"},
        ]
    }
    assert taken(rounds)["unreachable"] is True
    assert taken(rounds, name="ct130")["verdict"] == "clean"


def test_the_python_that_is_missing_is_named() -> None:
    made = action(gpu_state, TARGETS, Ran(rc=127, stderr="sh: 1: /opt/python3: not found"))
    answer = made.execute(TARGETS, {"ansible_python_interpreter": "/opt/python3"})
    assert "has no /opt/python3" in answer["msg"]


def test_a_run_without_root_is_a_verdict_like_any_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.tool(CLEAN)
    ran = Ran()
    ran.machine = machine
    full = action(gpu_release, RELEASE, ran).execute(RELEASE, {})["hosts"]["node1"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    request = action(gpu_release, RELEASE).request(RELEASE)
    bare = program.run(request)["hosts"]["node1"]
    assert (bare["verdict"], bare["settled"], bare["changed"]) == ("unknown", True, False)
    assert "must be root" in bare["reason"]
    # What does not need a look at the machine is all there.
    unseen = {"place", "inside", "scope", "holders_only", "readings", "scan"}
    assert set(bare) == set(full) - {"rung", "earlier", "proved_at"} - unseen
    merged = taken({"hosts": {"node1": {**bare, "rung": "kill"}}}, name="node1")
    assert (merged["verdict"], merged["actions"]) == ("unknown", [])


def test_a_proc_of_another_namespace_makes_everything_unknown(machine: Machine) -> None:
    machine.tool(CLEAN)
    text = batch.program({"verb": "release", "check": False, **RELEASE})
    # As Machine.run, but for --mount-proc: the numbers in /proc are those of the namespace above.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    enter = 'mount --bind "$1" /usr/local/sbin && exec /usr/bin/python3 -IS -'
    ran = subprocess.run(
        [*unshare, "sh", "-c", enter, "sh", str(machine.folder)],
        input=text,
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=True,
    )
    answer = json.loads(ran.stdout.splitlines()[-1][len(batch.SENTINEL) :])
    result = answer["hosts"]["node1"]
    assert (result["verdict"], result["actions"], answer["settled"]) == ("unknown", [], True)
    assert result["reason"].startswith("/proc on the acting host is not that of its own")
    assert "mount -t proc" in result["remedy"]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each time that the worker's children would have been ended; ours are the tests' own.

    No alarm is set, as in a worker: that of pytest-timeout is put back afterwards.
    """
    times: list[str] = []
    monkeypatch.setattr(batch, "end_children", lambda: times.append("ended"))
    others = signal.setitimer(signal.ITIMER_REAL, 0)
    yield times
    signal.setitimer(signal.ITIMER_REAL, *others)


def test_a_host_that_never_answers_fails_as_such(
    monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        with suppress(Exception):  # as a connection does that tries again
            time.sleep(60)

    monkeypatch.setattr(deadline, "of_request", lambda _: 0.2)
    monkeypatch.setattr(batch, "ON_THE_WAY", 0.1)
    made = action(gpu_state, TARGETS, delegate_to="pve1")
    made._low_level_execute_command = never
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    answer = made.execute(TARGETS, {})
    assert time.monotonic() - began < PATIENCE
    assert answer["failed"] is True
    assert answer["msg"].startswith("pve1 gave no answer within 0.3 s and was given up")
    assert ended == ["ended"]
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == (
        (0.0, 0.0),
        before,
    )


def test_a_limit_in_time_ends_nothing(ended: list[str]) -> None:
    with batch.limit(5):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert ended == []


def test_the_tasks_own_limit_counts(ended: list[str]) -> None:
    class Own(BaseException):
        pass

    def ring(*_: object) -> None:
        raise Own

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Own):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with batch.limit(0.05):
                time.sleep(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended == []


WORKER = """
import os, subprocess, sys, time
from ansible_collections.gpuops.gpu.plugins.plugin_utils import batch
if sys.argv[1] == "leads":
    os.setsid()
child = subprocess.Popen(["sleep", "60"])
try:
    with batch.limit(0.2):
        child.wait()
except batch.Overdue:
    print("overdue", flush=True)
if sys.argv[1] == "leads":
    child.wait(60)
time.sleep(0.2)
print(child.poll())
child.kill()
"""


@pytest.mark.parametrize(("leads", "code"), [("leads", "-15"), ("does not", "None")])
def test_what_a_worker_waited_for_is_ended_where_it_leads_its_group(
    root: Path, leads: str, code: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WORKER, leads],
        env={**os.environ, "PYTHONPATH": str(root / "collections")},
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=False,
    )
    assert (ran.stdout.split(), ran.returncode) == (["overdue", code], 0), ran.stderr
