# SPDX-License-Identifier: GPL-3.0-or-later
"""The API: what it refuses, and on the lab: several at once, asyncio, secrets, Ctrl-C, time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.config.manager import find_ini_config_file

import gpuops
from gpuops import AnsibleError, PlanError, UsageError, runner
from tests.lab import Lab
from tests.patience import PATIENCE

SECRET = "hunter2-a-word-that-is-nowhere-else"
SITES = """
all:
  hosts:
    node1: {ansible_connection: local}
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text(SITES)
    return path


# --- without a lab: what cannot be, and where things are looked for ---


def test_nothing_is_run_without_hosts(inventory: Path) -> None:
    with pytest.raises(UsageError, match="no hosts were named"):
        gpuops.reset(" ", inventory)
    with pytest.raises(UsageError, match="no hosts were named"):
        gpuops.status([], inventory)


@pytest.mark.parametrize("limit", [",", "[", ":", "~[", "ct1[0:2", "a,~[", ["", " "]])
def test_what_ansible_would_take_for_every_host_is_refused(
    limit: str | list[str], inventory: Path
) -> None:
    with pytest.raises(UsageError, match="-l ct129"):
        gpuops.reset(limit, inventory)


@pytest.mark.parametrize("limit", [None, 5, True, b"node1", [None], ["node1", 5], object()])
def test_a_limit_that_is_no_names(limit: Any, inventory: Path) -> None:
    for verb in (gpuops.status, gpuops.plan, gpuops.reset, gpuops.verify):
        with pytest.raises(UsageError, match=r"names no host; .*-l ct129"):
            verb(limit, inventory)


@pytest.mark.parametrize("text", ["", "\n", " \n\t\r\n", None])
@pytest.mark.parametrize("limit", ["@FILE", "@FILE,@FILE", ["@FILE", ""], ":@FILE", "@FILE:@FILE"])
def test_files_of_names_without_a_name_are_refused(
    limit: str | list[str], text: str | None, inventory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "names"
    if text is not None:
        file.write_text(text)
    given = [limit] if isinstance(limit, str) else limit
    with pytest.raises(UsageError, match="names no host" if text is not None else "cannot be read"):
        gpuops.reset([each.replace("FILE", str(file)) for each in given], inventory)


@pytest.mark.parametrize("others", ["", "node1,", "node1:"])
def test_a_pipe_of_names_is_refused(inventory: Path, tmp_path: Path, others: str) -> None:
    os.mkfifo(tmp_path / "names")
    with pytest.raises(UsageError, match="is no file"):
        gpuops.reset(f"{others}@{tmp_path / 'names'}", inventory)


@pytest.mark.parametrize("between", [",", ":"])
def test_a_file_without_a_name_beside_a_name_is_no_error(tmp_path: Path, between: str) -> None:
    """To Ansible and to the collection too, and it does not mean every host."""
    (tmp_path / "names").touch()
    (tmp_path / "sites").write_text("[all:vars]\nansible_connection=local\n[two]\nnode1\nnode2\n")
    report = gpuops.status(f"node1{between}@{tmp_path / 'names'}", tmp_path / "sites")
    assert [host.name for host in report.hosts] == ["node1"]
    assert "names nothing" not in report.hosts[0].reason


def test_a_file_of_names_is_a_limit(inventory: Path, tmp_path: Path) -> None:
    """Also to Ansible: a name that the inventory does not have ends the run."""
    (tmp_path / "names").write_text("\nnode7\n")
    with pytest.raises(AnsibleError, match=r"Could not match supplied host pattern.* node7"):
        gpuops.status(f"@{tmp_path / 'names'}", inventory)


def test_a_plan_in_a_folder_that_is_not_there(inventory: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder /no/such"):
        gpuops.plan("all", inventory, write="/no/such/plan")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, recorded: Any) -> Any:
    """Let a plan be a recorded run that writes this text, or that fails to and says why."""

    def arrange(text: str = "", why: str = "", ended: str = "") -> None:
        def run(_: str, take: Any, *, variables: dict[str, Any], **__: Any) -> None:
            for event in recorded("plan-held")["events"]:
                if event["event"] == "playbook_on_stats" and why:
                    failed = {"host": "ct129", "res": {"msg": why}}
                    take({"event": "runner_on_failed", "event_data": failed})
                take(event)
            if ended:
                raise runner.Ended(ended)
            if text:
                Path(variables["gpuops_plan"]).write_text(text)

        monkeypatch.setattr(runner, "run", run)

    return arrange


def test_a_plan_takes_the_place_of_an_old_one(
    planned: Any, inventory: Path, tmp_path: Path
) -> None:
    """Also if they are the same, when Ansible by itself would leave the old file alone."""
    for text in ("one", "two", "two"):
        planned(text)
        gpuops.plan("all", inventory, write=tmp_path / "plan")
        assert (tmp_path / "plan").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {"hosts.yml", "plan"}


@pytest.mark.parametrize("old", ["", "an old plan"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"why": "No space left on device"}, r"not written to .*plan \(No space left on device\)"),
        ({"ended": "timed out after 3 s"}, r"not written to .*plan \(timed out after 3 s\)"),
        ({}, r"not written to .*plan \(no host could be looked at\)"),
    ],
)
def test_a_plan_that_is_not_written_is_an_error(
    planned: Any, inventory: Path, tmp_path: Path, old: str, how: dict[str, str], says: str
) -> None:
    planned(**how)
    file = tmp_path / "plan"
    if old:
        file.write_text(old)
    with pytest.raises(PlanError, match=says) as caught:
        gpuops.plan("all", inventory, write=file)
    assert [host.name for host in caught.value.report.hosts] == ["ct129", "node1"]
    assert (file.read_text() if file.exists() else "") == old
    assert [path.name for path in tmp_path.iterdir() if path != file] == ["hosts.yml"]


def test_a_plan_that_cannot_take_its_place_loses_no_report(
    planned: Any, inventory: Path, tmp_path: Path
) -> None:
    planned("a plan")
    file = tmp_path / "plan"

    def watch(_: Any) -> None:
        (file / "taken").mkdir(parents=True, exist_ok=True)

    with pytest.raises(PlanError, match=r"not written to .*/plan \(Is a directory\)") as caught:
        gpuops.plan("all", inventory, write=file, watch=watch)
    assert [host.name for host in caught.value.report.hosts] == ["ct129", "node1"]
    assert {path.name for path in tmp_path.iterdir()} == {"hosts.yml", "plan"}


def test_a_plan_where_nothing_can_be_written(inventory: Path) -> None:
    with pytest.raises(UsageError, match="plan cannot be written"):
        gpuops.plan("all", inventory, write="/proc/self/plan")


def test_a_plan_that_is_no_file(inventory: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in ("/dev/null", tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="is no file"):
            gpuops.plan("all", inventory, write=place)
        with pytest.raises(UsageError, match="is no file"):
            gpuops.reset("all", inventory, plan=place)


@pytest.mark.parametrize("gpus", [[], (), set(), "", " ", ",", [""], iter(()), (n for n in ())])
def test_gpus_that_name_nothing_are_not_all_of_them(gpus: Any, inventory: Path) -> None:
    for verb in (gpuops.status, gpuops.plan, gpuops.reset, gpuops.verify):
        with pytest.raises(UsageError, match="gpus names nothing"):
            verb("all", inventory, gpus=gpus)


@pytest.mark.parametrize(
    "gpus", [True, False, [True], b"0", bytearray(b"0"), 1.0, [0, 1.0], [None], [[0]], object()]
)
def test_gpus_that_are_no_names(gpus: Any, inventory: Path) -> None:
    with pytest.raises(UsageError, match="names no GPU"):
        gpuops.reset("all", inventory, gpus=gpus)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (0, ["0"]),
        ("0", ["0"]),
        ("0, 2-3,", ["0", "2-3"]),
        ([0, "GPU-1"], ["0", "GPU-1"]),
        ((n for n in (1, 2)), ["1", "2"]),
    ],
)
def test_gpus_are_words(
    gpus: Any, words: list[str], inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(runner, "run", lambda *_, **given: asked.update(given["variables"]))
    with pytest.raises(AnsibleError):  # nothing was said of any host
        gpuops.status("all", inventory, gpus=gpus)
    assert asked == {"gpuops_gpus": words}


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ({"gpus": 0}, ("0",)),
        ({"gpus": "0, 2-3"}, ("0", "2-3")),
        ({"variables": {"gpuops_gpus": 0}}, ("0",)),
        ({"variables": {"gpuops_gpus": ["0", 1]}}, ("0", "1")),
        ({}, ()),
    ],
)
def test_the_report_says_what_was_asked_for(
    planned: Any, inventory: Path, asked: dict[str, Any], gpus: tuple[str, ...]
) -> None:
    planned()
    report = gpuops.plan("all", inventory, scope="everything", profile="now", **asked)
    assert (report.gpus, report.scope, report.profile) == (gpus, "everything", "now")
    asked.pop("gpus", None)
    assert gpuops.plan("all", inventory, **asked).scope == ""


@pytest.mark.parametrize("verb", ["status", "plan", "reset", "verify"])
def test_every_verb_takes_what_each_takes(
    verb: str, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a mode that changes nothing is Ansible's only where something would be changed."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(runner, "run", lambda *_, **given: asked.update(given))
    same: dict[str, Any] = {"gpus": 0, "scope": "everything", "profile": "now", "timeout": 5}
    with pytest.raises(AnsibleError):  # nothing was said of any host
        getattr(gpuops, verb)("all", inventory, check=True, **same)
    assert asked["variables"]["gpuops_profile"] == "now"
    assert asked["check"] is (verb == "reset")


def test_an_inventory_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="gpuops init"):
        gpuops.status("all", "nowhere.yml")


def test_a_timeout_of_nothing(inventory: Path) -> None:
    with pytest.raises(UsageError, match="above zero"):
        gpuops.status("all", inventory, timeout=0)


def test_ansibles_own_words_when_there_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    broken = tmp_path / "hosts.yml"
    broken.write_text("all: [")
    with pytest.raises(AnsibleError) as caught:
        gpuops.verify("all", broken)
    assert "hosts" in caught.value.text and "\n" not in caught.value.text
    assert not list((tmp_path / "tmp").glob("gpuops-*"))


@pytest.mark.parametrize("limit", ["node7", "node1,node7", "node1,nodes*"])
def test_a_mistyped_name_ends_a_run_also_without_the_checkouts_configuration(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.chdir(inventory.parent)
    monkeypatch.setenv("HOME", str(inventory.parent))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    with pytest.raises(AnsibleError, match="Could not match supplied host pattern"):
        gpuops.status(limit, inventory)


def test_half_an_inventory_ends_a_run_too(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inventory.parent)
    monkeypatch.setenv("HOME", str(inventory.parent))
    broken = inventory.with_name("broken.yml")
    broken.write_text("all: [")
    with pytest.raises(AnsibleError, match=r"failed to parse inventory source .*broken\.yml"):
        gpuops.status("node1", [inventory, broken])


def test_inventories_become_absolute(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inventory.parent)
    assert runner.inventory_sources("hosts.yml") == [str(inventory)]
    assert runner.inventory_sources([inventory, "a,b"]) == [str(inventory), "a,b"]


def test_without_an_inventory_the_usual_place_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ANSIBLE_INVENTORY", raising=False)
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    with pytest.raises(UsageError, match="gpuops init"):
        runner.inventory_sources(None)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text(SITES)
    assert runner.inventory_sources(None) == [str(tmp_path / "inventory/hosts.yml")]


NAMED = "[defaults]\ninventory = other\n"
NOT_NAMED = "[defaults]\nforks = 5 ; not many\n[ssh_connection]\nssh_args = -o ControlPath=%%h\n"


@pytest.mark.parametrize("open_to_all", [False, True])
@pytest.mark.parametrize("asked_for", ["", "ansible.cfg", "mine.cfg", "folder", "none.cfg"])
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"ansible.cfg": NAMED},
        {"ansible.cfg": NOT_NAMED},
        {"home/.ansible.cfg": NAMED},
        {"home/.ansible.cfg": NOT_NAMED},
        {"ansible.cfg": NOT_NAMED, "home/.ansible.cfg": NAMED},
        {"ansible.cfg": "", "mine.cfg": NAMED, "folder/ansible.cfg": NAMED},
        {"ansible.cfg": NAMED, "mine.cfg": "", "folder/ansible.cfg": NOT_NAMED},
        {"ansible.cfg": "no settings"},
    ],
)
def test_the_usual_place_yields_to_an_inventory_that_ansible_would_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    asked_for: str,
    open_to_all: bool,
) -> None:
    """Which file of settings Ansible would take, it says itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ANSIBLE_INVENTORY", raising=False)
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    if asked_for:
        monkeypatch.setenv("ANSIBLE_CONFIG", asked_for)
    for folder in ("home", "folder", "inventory"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventory/hosts.yml").write_text(SITES)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if open_to_all:
        tmp_path.chmod(0o777)
    taken = find_ini_config_file()
    settings = Path(taken).read_text() if taken else ""
    named = "inventory" in settings or "no settings" in settings
    usual = [str(tmp_path / "inventory/hosts.yml")]
    assert runner.inventory_sources(None) == ([] if named else usual)
    assert ("ANSIBLE_FORKS" in runner.environment()) is (taken is None)


def test_ansibles_warnings_are_shown_beside_its_errors(inventory: Path) -> None:
    inventory.write_text("")
    with pytest.raises(AnsibleError) as caught:
        gpuops.status("node7", inventory)
    assert "Could not match supplied host pattern, ignoring: node7" in caught.value.text
    assert "hosts list is empty" in caught.value.text


def test_our_defaults_yield_to_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    assert runner.environment()["ANSIBLE_FORKS"] == "50"
    (tmp_path / "ansible.cfg").write_text("")
    assert "ANSIBLE_FORKS" not in runner.environment()


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"ASK_PASS": "1", "BECOME_ASK_PASS": "1"},
        {"ASK_VAULT_PASS": "1"},
        {"NO_LOG": "1"},
        *({"STDOUT_CALLBACK": name} for name in ("oneline", "minimal", "json", "no.such.one")),
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("place", ["environment", "file"])
def test_a_run_gives_its_result_whatever_is_set_for_ansible(
    inventory: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    place: str,
    words: bool,
) -> None:
    """Of a prompt, hidden results, and callbacks for other uses; with Ansible's words and without.

    On this machine: what a status finds here does not matter, but that it is said.
    """
    monkeypatch.chdir(inventory.parent)
    if place == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(f"ANSIBLE_{name}", value)
    else:
        lines = (f"{name.lower()} = {value}\n" for name, value in settings.items())
        Path("ansible.cfg").write_text("[defaults]\n" + "".join(lines))
    said: list[str] = []
    report = gpuops.status("node1", inventory, timeout=60, output=said.append if words else None)
    assert not report.ended
    (host,) = report.hosts
    assert host.route == "node1" and "no answer" not in host.reason
    assert "Traceback" not in "".join(said)


def test_a_host_that_fails_ends_no_other_whatever_is_set_for_ansible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_ANY_ERRORS_FATAL", "1")
    (tmp_path / "sites").write_text(
        "[all:vars]\nansible_connection=local\n[two]\nnode1 gpuops_scope=wrong\nnode2\n"
    )
    wrong, other = gpuops.status("all", tmp_path / "sites").hosts
    assert (wrong.name, wrong.verdict) == ("node1", "refused")
    assert other.after or other.problems, "it was looked at"


def test_a_vault_that_asks_for_its_password_ends_a_run(
    inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_VAULT_IDENTITY_LIST", "mine@prompt")
    with pytest.raises(AnsibleError, match="Invalid vault password was provided"):
        gpuops.status("node1", inventory, timeout=60)


def test_an_ansible_of_another_python_is_started_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.ansible_playbook() == [sys.executable, "-P", str(runner.STARTER)]
    other = tmp_path / "other" / "ansible-playbook"
    for path in (other, tmp_path / "ours" / "python"):
        path.parent.mkdir()
        path.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "ours" / "python"))
    monkeypatch.setenv("PATH", str(other.parent))
    assert runner.ansible_playbook() == [str(other)]
    other.unlink()
    with pytest.raises(AnsibleError, match="there is no ansible-playbook here"):
        runner.ansible_playbook()


def test_the_starter_is_ansible_playbook(tmp_path: Path) -> None:
    argv = [*runner.ansible_playbook(), "--version"]
    said = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith("ansible-playbook [core ")


# --- on the lab ---


def script(lab: Lab, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in the lab's network; its output and exit code."""
    argv = [sys.executable, "-c", textwrap.dedent(text)]
    done = lab.run(argv, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.lab
def test_three_runs_at_once_in_one_process_and_nothing_is_left(lab: Lab, tmp_path: Path) -> None:
    server = lab.hold("ct129", gpus="0-7", mib=76115)
    done = script(
        lab,
        """
        import concurrent.futures, json, gpuops
        with concurrent.futures.ThreadPoolExecutor() as pool:
            runs = [pool.submit(gpuops.reset, "ct129", profile="now"),
                    pool.submit(gpuops.status, ["node1", "node2"]),
                    pool.submit(gpuops.verify, "ct131")]
            print(json.dumps([run.result().to_dict() for run in runs]))
        again = gpuops.reset("ct129")
        again.raise_for_verdict()
        assert not again.hosts[0].changed
        """,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    reset, status, verify = json.loads(done.stdout)
    assert [host["verdict"] for run in (reset, status, verify) for host in run["hosts"]] == [
        "clean"
    ] * 4
    assert [each["process"]["pid"] for each in reset["hosts"][0]["killed"]] == [server["pid"]]
    assert [gpu["used_mib"] for gpu in reset["hosts"][0]["before"]] == [76115] * 8
    assert [gpu["used_mib"] for gpu in reset["hosts"][0]["after"]] == [0] * 8
    assert status["hosts"][0]["route"] == "node1"
    assert not list(tmp_path.iterdir())


@pytest.mark.lab
def test_no_secret_of_the_environment_reaches_a_file(lab: Lab, tmp_path: Path) -> None:
    """Every file of the private folder is read while the run goes on, and after each event."""
    done = script(
        lab,
        """
        import os, pathlib, stat, sys, threading, gpuops
        seen, found, stop = set(), [], threading.Event()
        secret = os.environ["THE_SECRET"].encode()
        def look():
            while not stop.is_set():
                for path in pathlib.Path(os.environ["TMPDIR"]).rglob("*"):
                    try:
                        if not stat.S_ISREG(path.lstat().st_mode):
                            continue
                        text = path.read_bytes()
                    except OSError:
                        continue
                    seen.add(path.name.rpartition("-")[2])
                    if secret in text:
                        found.append(str(path))
        threads = [threading.Thread(target=look) for _ in range(1)]
        [thread.start() for thread in threads]
        report = gpuops.status("node1")
        stop.set()
        assert report.clean, report
        assert seen, "nothing was looked at"
        assert not found, found
        """,
        env={**os.environ, "TMPDIR": str(tmp_path), "THE_SECRET": SECRET},
    )
    assert SECRET not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.lab
def test_asyncio_runs_side_by_side_and_a_cancelled_one_is_over(lab: Lab, tmp_path: Path) -> None:
    held = lab.hold("ct129", gpus="0", ignore_term=True)
    script(
        lab,
        """
        import asyncio, os, gpuops
        async def main():
            one, two = await asyncio.gather(
                gpuops.aio.status("node1"), gpuops.aio.status("ct131"))
            assert one.clean and two.clean
            asks = asyncio.Event()
            loop = asyncio.get_running_loop()
            def watch(step):
                if step.phase == "terminate":
                    loop.call_soon_threadsafe(asks.set)
            task = asyncio.create_task(gpuops.aio.reset("ct129", watch=watch))
            await asks.wait()
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                print("cancelled")
            assert not os.listdir(os.environ["TMPDIR"])
            try:
                await gpuops.aio.status("nobody-of-this-name")
            except gpuops.AnsibleError:
                print("an error is an error")
        asyncio.run(main())
        """,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    # Whom it had only asked to end was not killed any more.
    assert lab.alive(held["id"])[held["id"]]


@pytest.mark.lab
def test_a_run_that_takes_too_long_is_ended_and_says_so(lab: Lab) -> None:
    lab.fault("ct129", "smi-hang", "")
    script(
        lab,
        """
        import time, gpuops
        began = time.monotonic()
        # Time to begin with the host, and not nearly enough for what it waits for there.
        report = gpuops.status("ct129", timeout=20, variables={"gpuops_smi_timeout": 60})
        assert time.monotonic() - began < 60
        assert report.ended == "timed out after 20 s", report
        assert [(h.name, h.verdict) for h in report.hosts] == [("ct129", "unknown")]
        assert not report.clean and report.exit_code == 13
        """,
    )


@pytest.mark.lab
def test_ctrl_c_gives_the_report_so_far_and_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    lab.hold("ct129", gpus="0", ignore_term=True)
    text = """
        import os, sys, gpuops
        print(os.getpid(), flush=True)
        def watch(step):
            print(step.phase, flush=True)
        try:
            gpuops.reset("ct129,node1", watch=watch)
        except gpuops.Interrupted as error:
            print([(h.name, h.verdict) for h in error.report.hosts], error.report.exit_code)
            sys.exit(130)
    """
    run = lab.popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    for line in run.stdout:
        if line == "terminate\n":
            break
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)
    rest = run.stdout.read()
    assert run.wait(3 * PATIENCE) == 130, rest
    assert "('ct129', 'unknown')" in rest and "130" in rest
    assert not list(tmp_path.iterdir())
