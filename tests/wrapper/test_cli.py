# SPDX-License-Identifier: GPL-3.0-or-later
"""The command: what it says, what it ends with, and that it starts at once."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pexpect
import pytest
import yaml

from gpuops import Interrupted, PlanError, Report, api, cli, options, verbs
from gpuops.render import render
from gpuops.report import EXIT_CODES, READABLE
from gpuops.verbs import joined
from tests.lab import Lab
from tests.patience import PATIENCE, until
from tests.wrapper.conftest import RECORDED, Replay

GPUOPS = [sys.executable, "-m", "gpuops"]
VERBS = ("status", "plan", "reset", "verify")


class Done:
    """What one call of the command printed and ended with."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Call = Callable[..., Done]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test writes into the history of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the command in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpuops", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, replay: Replay) -> Callable[..., dict[str, Any]]:
    """Let a verb answer with a report or a recorded run; returns what it was asked."""

    def arrange(verb: str, answer: str | Report | BaseException) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def stand_in(limit: Any, inventory: Any = None, **given: Any) -> Report:
            asked.update(given, limit=limit, inventory=inventory)
            if isinstance(answer, BaseException):
                raise answer
            return replay(answer, watch=given["watch"]) if isinstance(answer, str) else answer

        monkeypatch.setattr(api, verb, stand_in)
        return asked

    return arrange


# --- what is asked reaches the API ---


def test_every_option_reaches_the_api(call: Call, answers: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("{}")
    asked = answers("reset", "reset-held")
    call(
        *("reset", "-l", "a,b", "-i", "x", "-i", "y", "--gpus", "0,1", "--scope", "everything"),
        *("--profile", "now", "--check", "--timeout", "60", "--plan", str(plan), "-vv"),
        *("-e", "gpuops_mps=quit", "--extra", 'gpuops_baseline_mib={"0": 500}'),
    )
    assert asked["variables"] == {"gpuops_mps": "quit", "gpuops_baseline_mib": {"0": 500}}
    assert asked["limit"] == "a,b"
    assert asked["inventory"] == ("x", "y")
    assert (asked["gpus"], asked["scope"], asked["profile"]) == ("0,1", "everything", "now")
    assert (asked["check"], asked["timeout"], asked["plan"]) == (True, 60.0, str(plan))
    assert asked["verbosity"] == 1 and asked["output"] is not None


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_not_said_is_left_to_the_collection(call: Call, answers: Any, verb: str) -> None:
    asked = answers(verb, "reset-clean")
    assert call(verb, "-l", "all").code == 0
    assert asked["inventory"] is None and asked["gpus"] is None and asked["scope"] is None
    assert asked["timeout"] is None and asked["output"] is None


def test_a_question_is_about_the_same_variables(
    call: Call, answers: Any, types: Callable[[str], None]
) -> None:
    asked = [answers("plan", "plan-held"), answers("reset", "reset-held")]
    types("y\n")
    call("reset", "-l", "all", "-e", "gpuops_mps=quit")
    assert [each["variables"] for each in asked] == [{"gpuops_mps": "quit"}] * 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("false", False),
        ("[a, b]", ["a", "b"]),
        ("a=b", "a=b"),
        ("''", ""),
        ("{0: 5}", {0: 5}),
    ],
)
def test_the_value_of_a_variable_is_yaml(call: Call, answers: Any, text: str, value: Any) -> None:
    asked = answers("status", "status-held")
    call("status", "-l", "all", "-e", f"gpuops_x={text}")
    assert asked["variables"] == {"gpuops_x": value}


# --- exit codes and errors ---


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "reset-no-hosts"])
def test_the_exit_code_is_the_worst_hosts(
    call: Call, answers: Any, replay: Replay, name: str
) -> None:
    answers("reset", name)
    assert call("reset", "-l", "all").code == replay(name).exit_code


def test_ctrl_c_shows_the_report_so_far(
    call: Call, answers: Any, replay: Replay, tmp_path: Path
) -> None:
    report = replay("reset-held", ended="interrupted")
    answers("reset", Interrupted(report))
    done = call("reset", "-l", "all", "--output", f"json={tmp_path / 'r.json'}")
    assert done.code == 130
    assert "interrupted" in done.out and "ct129" in done.out
    assert Report.from_json((tmp_path / "r.json").read_text()) == report


@pytest.mark.parametrize(
    ("arguments", "says", "remedy"),
    [
        (["reset"], "Missing option '-l'", "see gpuops reset --help"),
        (["reset", "-l", " "], "no hosts were named", "-l ct129"),
        (["reset", "-l", "a", "--output", "pdf"], "no format 'pdf'", "see gpuops reset --help"),
        (["reset", "-l", "a", "--output", "json=/no/such/x"], "cannot be a file", "see gpuops"),
        (
            ["reset", "-l", "a", "--json", "--output", "jsonl"],
            "more than one format",
            "FORMAT=FILE",
        ),
        *(
            (
                ["reset", "-l", "a", "--timeout", text],
                f"'{text}' is no number of seconds above zero",
                "see gpuops reset --help",
            )
            for text in ("0", "-1", "x", "nan", "")
        ),
        *(
            (["status", "-l", "a", "-e", text], says, "see gpuops status --help")
            for text, says in (
                ("gpuops_mps", "'gpuops_mps' is not NAME=VALUE"),
                ("gpuops_mps=", "'gpuops_mps' is not NAME=VALUE"),
                ("=quit", "'' is not NAME=VALUE"),
                ("a\nb=quit", r"'a\nb' is not NAME=VALUE"),
                ("@file", "'@file' is not NAME=VALUE"),
                ("gpuops-mps=quit", "'gpuops-mps' is not NAME=VALUE"),
                ("gpuops_rungs=[\n", "the value of gpuops_rungs is no YAML"),
                ("gpuops_rungs=" + 3000 * "[", "the value of gpuops_rungs is no YAML"),
                ("gpuops_mps={{ x }}", "the value of gpuops_mps is no YAML"),
                ("gpuops_mps=2026-11-01", "the value of gpuops_mps is no YAML"),
                ("gpuops_mps=.nan", "the value of gpuops_mps is no YAML"),
                ("gpuops_gpus=1", "gpuops_gpus is set by --gpus"),
            )
        ),
        *(
            ([verb, "-l", "a", "-e", f"gpuops_{name}=x"], f"is set by --{option}", "see gpuops")
            for verb, name, option in (
                ("plan", "plan", "write"),
                ("reset", "plan", "plan"),
                ("reset", "profile", "profile"),
                ("verify", "scope", "scope"),
            )
        ),
        ([], "Missing command", "see gpuops --help"),
        (["reset", "-l", "a", "-i", "none.yml"], "none.yml is not there", "gpuops init"),
        (["reset", "-l", "a", "--plan", "none"], "does not exist", "see gpuops reset --help"),
        (["nosuch"], "No such command 'nosuch'", "see gpuops --help"),
        (["report"], "no report was named", "gpuops report FILE"),
        (["report", __file__], "no JSON", "--output json"),
    ],
)
def test_an_error_is_a_line_of_what_and_one_of_what_to_do(
    call: Call, arguments: list[str], says: str, remedy: str
) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert done.out == ""
    what, to_do = done.err.splitlines()
    assert what.startswith("gpuops: ") and says in what
    assert remedy in to_do


@pytest.mark.parametrize(
    ("inventory", "limit", "says"),
    [
        ("broken", "all", "Completely failed to parse inventory source FILE"),
        ("sound", "nosuch", "Could not match supplied host pattern: nosuch"),
    ],
)
def test_where_ansible_ends_the_first_that_it_says_is_the_error(
    call: Call, tmp_path: Path, inventory: str, limit: str, says: str
) -> None:
    (tmp_path / "broken").write_text(Path("/etc/passwd").read_text())
    (tmp_path / "sound").write_text("node1 ansible_connection=local\n")
    file = tmp_path / inventory
    done = call("status", "-l", limit, "-i", str(file))
    assert done.code == 2
    what, to_do = done.err.splitlines()
    assert what == f"gpuops: Ansible ended without a result: {says.replace('FILE', str(file))}"
    assert to_do.startswith("        correct the inventory, what was given after -l, or ")


def test_where_ansibles_settings_leave_nothing_to_do_they_are_named(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_SKIP_TAGS", "always")
    (tmp_path / "sites").write_text("node1 ansible_connection=local\n")
    done = call("status", "-l", "node1", "-i", str(tmp_path / "sites"))
    assert done.code == 2
    what, to_do = done.err.splitlines()
    assert what == "gpuops: Ansible ended without a result: it said nothing"
    assert "or Ansible's own settings (environment, ansible.cfg)" in to_do


def test_what_was_typed_as_an_option_is_named_as_one(
    call: Call, answers: Any, replay: Replay
) -> None:
    answers("reset", "reset-refused")
    typed = call("reset", "-l", "all", "--scope", "user:alice").out
    assert "--scope is 'user:alice'" in typed and "gpuops_" not in typed
    # Set in the inventory, it is to be put right there.
    assert "gpuops_scope is 'user:alice'" in call("reset", "-l", "all", "--gpus", "1").out
    assert "gpuops_scope is 'user:alice'" in call("reset", "-l", "all").out


def test_a_bug_is_no_traceback_either(call: Call, answers: Any) -> None:
    answers("status", RuntimeError("the sky\nfell"))
    done = call("status", "-l", "all")
    assert done.code == 1
    assert done.err.splitlines()[0] == "gpuops: internal error: RuntimeError: the sky fell"


# --- a plan, and the question ---


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let somebody sit at the terminal and type this."""

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    def arrange(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Typed(text))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    return arrange


def not_written(report: Report) -> PlanError:
    return PlanError(report, "the plan was not written (no space)", "plan again")


def test_a_plan_that_was_not_written_is_shown_and_ends_with_2(
    call: Call, answers: Any, replay: Replay, tmp_path: Path
) -> None:
    answers("plan", not_written(replay("plan-held")))
    file = tmp_path / "r.json"
    done = call("plan", "-l", "all", "--write", "x", "--output", f"json={file}")
    assert done.code == 2
    assert done.err.splitlines()[0] == "gpuops: the plan was not written (no space)"
    assert "ct129  held" in done.out
    assert Report.from_json(file.read_text()) == replay("plan-held")


def test_without_a_plan_there_is_an_error_and_no_question(
    call: Call, answers: Any, replay: Replay, types: Callable[[str], None]
) -> None:
    answers("plan", not_written(replay("plan-held")))
    asked = answers("reset", "reset-held")
    types("y\n")
    done = call("reset", "-l", "all")
    assert done.code == 2 and not asked
    assert "the plan was not written (no space)" in done.err and "[y/N]" not in done.err


def test_where_nobody_could_be_looked_at_the_plan_itself_says_why(
    call: Call, answers: Any, replay: Replay, types: Callable[[str], None]
) -> None:
    answers("plan", not_written(replay("status-unknown")))
    types("y\n")
    done = call("reset", "-l", "all")
    assert done.code == 13 and done.err == ""
    assert "ct129  unknown" in done.out


@pytest.mark.parametrize("answer", ["y\n", "n\n"])
def test_whom_it_would_end_is_shown_where_it_is_asked(
    call: Call, answers: Any, types: Callable[[str], None], answer: str
) -> None:
    """Standard output is no terminal here, as with > FILE."""
    answers("plan", "plan-held")
    asked = answers("reset", "reset-held")
    types(answer)
    done = call("reset", "-l", "all")
    shown, question, rest = done.err.partition("End this process? [y/N]")
    assert question and re.match(r"ct129: python3 \(pid .*: python3 -m sglang", shown)
    assert shown not in done.out
    assert bool(asked) is (answer == "y\n") is ("nobody was signalled" not in rest)


def test_ctrl_c_after_a_yes_loses_no_host(
    call: Call, answers: Any, replay: Replay, tmp_path: Path, types: Callable[[str], None]
) -> None:
    """Of its plan two hosts could be reset and one could not; it was ended in the first."""
    planned, begun = replay("plan-held"), replay("reset-held", ended="interrupted")
    away = replay("reset-unreachable").hosts[1]
    planned = replace(planned, hosts=(*planned.hosts, away))
    first = replace(begun.hosts[0], verdict="unknown", reason="interrupted before it was proved")
    answers("plan", planned)
    asked = answers("reset", Interrupted(replace(begun, hosts=(first,))))
    types("y\n")
    done = call("reset", "-l", "all", "--output", f"json={tmp_path / 'r.json'}")
    assert done.code == 130
    assert asked["limit"] == ["ct129", "node1"]
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert [(host.name, host.verdict) for host in report.hosts] == [
        ("ct129", "unknown"),
        ("node1", "unknown"),
        ("ct130", "unreachable"),
    ]
    assert report.hosts[1].reason == "the run was ended before it came to it"
    assert report.hosts[0].killed and not report.hosts[1].killed
    assert report.ended == "interrupted" and report.totals.hosts == 3


@pytest.mark.parametrize("ended", ["interrupted", "timed out after 3 s"])
def test_what_a_plan_would_have_done_is_not_told_as_done(replay: Replay, ended: str) -> None:
    nothing = replace(replay("reset-held", ended=ended), hosts=())
    report = joined(nothing, replay("plan-held"), "all")
    assert report.totals.killed == 0 and report.totals.unknown == 2
    assert not any(host.changed or host.killed or host.rungs for host in report.hosts)


# --- output ---


def test_json_on_stdout_is_alone_there(call: Call, answers: Any, replay: Replay) -> None:
    answers("reset", "reset-held")
    done = call("reset", "-l", "all", "--json")
    assert Report.from_json(done.out) == replay("reset-held")
    assert "2 hosts: 2 clean" in done.err


def test_dev_stdout_is_standard_output(call: Call, answers: Any, replay: Replay) -> None:
    answers("reset", "reset-held")
    done = call("reset", "-l", "all", "--output", "json=/dev/stdout")
    assert Report.from_json(done.out) == replay("reset-held")
    assert "2 hosts: 2 clean" in done.err


@pytest.mark.parametrize("coding", ["ascii", "latin-1", "utf-8"])
def test_a_document_on_stdout_is_utf_8_whatever_the_locale(
    replay: Replay, tmp_path: Path, coding: str
) -> None:
    report = replay("reset-held")
    host = replace(report.hosts[0], name="knöten1", reason="€")
    report = replace(report, hosts=(host,))
    (tmp_path / "old.json").write_text(report.to_json())
    done = subprocess.run(
        [*GPUOPS, "report", str(tmp_path / "old.json"), "--json"],
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": coding},
        capture_output=True,
    )
    assert Report.from_json(done.stdout) == report
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["report", "FILE", "--json"], ["report", "FILE"]])
def test_a_reader_that_has_left_changes_no_exit_code(
    replay: Replay, tmp_path: Path, arguments: list[str]
) -> None:
    file = tmp_path / "old.json"
    file.write_text(replay("reset-blocked").to_json())
    reads, writes = os.pipe()
    os.close(reads)
    words = [each.replace("FILE", str(file)) for each in arguments]
    done = subprocess.run([*GPUOPS, *words], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == 11
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_several_outputs_at_once(call: Call, answers: Any, tmp_path: Path) -> None:
    answers("verify", "verify-held")
    outputs = [f"{format}={tmp_path / format}" for format in options.FORMATS]
    done = call("verify", "-l", "all", *(word for each in outputs for word in ("--output", each)))
    assert done.code == 10
    assert {path.name for path in tmp_path.iterdir()} >= set(options.FORMATS)
    assert ElementTree.parse(tmp_path / "junit").getroot().attrib["failures"] == "1"


def test_an_old_report_is_shown_again(
    call: Call, answers: Any, replay: Replay, tmp_path: Path
) -> None:
    old = tmp_path / "old.json"
    old.write_text(replay("reset-blocked").to_json())
    done = call("report", str(old), "--output", f"markdown={tmp_path / 'x.md'}")
    assert done.code == 11
    assert "ct129  blocked" in done.out
    assert "| ct129 | blocked |" in (tmp_path / "x.md").read_text()


def test_json_lines_are_put_together_again(
    call: Call, answers: Any, replay: Replay, tmp_path: Path
) -> None:
    answers("reset", "reset-held")
    file = tmp_path / "x.jsonl"
    call("reset", "-l", "all", "--output", f"jsonl={file}")
    assert len(file.read_text().splitlines()) == 2
    done = call("report", str(file), "--json")
    assert done.code == 0 and Report.from_json(done.out) == replay("reset-held")


def test_json_lines_that_are_not_all_of_one_run_are_no_report(
    call: Call, replay: Replay, tmp_path: Path
) -> None:
    run, other = replay("reset-held"), replace(replay("reset-held"), started="2026-11-30")
    wide = replace(run, hosts=(*run.hosts, replace(run.hosts[0], name="node7")))
    lines = render(run, "jsonl").splitlines(keepends=True)
    for text, wrong in (
        ("".join([*lines, render(other, "jsonl")]), "its lines are of more than one run"),
        ("".join([*lines, lines[0]]), "a host is in it more than once"),
        # The end of the file is missing: who is in it may be held.
        ("".join(render(wide, "jsonl").splitlines(keepends=True)[:2]), "it has 2 of the 3 hosts"),
    ):
        file = tmp_path / "x.jsonl"
        file.write_text(text)
        done = call("report", str(file))
        assert (done.code, done.out) == (2, "")
        what, remedy = done.err.splitlines()
        assert what.startswith(f"gpuops: {wrong}")
        assert remedy == "        give all lines of one run, with the same 'started'"
    # One line alone is the report of its host, and says so; blank ones say nothing.
    file.write_text(lines[0] + "\n")
    done = call("report", str(file), "--output", "prometheus")
    assert done.code == run.of(run.hosts[:1]).exit_code
    assert "(1 of the 2 hosts of its run)" in done.err and "gpuops_run_clean" not in done.out
    again = call("report", str(file), "--output", "jsonl").out
    assert again == lines[0]
    file.write_text("\n".join(lines))
    assert Report.from_json(call("report", str(file), "--json").out) == run


def test_the_schema_is_printed(call: Call) -> None:
    done = call("report", "--schema")
    assert done.code == 0
    assert json.loads(done.out)["title"] == "gpuops.report/1"


def test_formats_agree_with_those_of_the_renderings() -> None:
    from gpuops.render import FORMATS

    assert tuple(FORMATS) == options.FORMATS


# --- streams, disks and folders as they should not be ---

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shell(replay: Replay, tmp_path: Path) -> Callable[[str], Done]:
    """Type it in a folder with an old report and the inventory of this machine."""
    (tmp_path / "old.json").write_text(replay("reset-blocked").to_json())
    (tmp_path / "sites").write_text("node1 ansible_connection=local\n")
    (tmp_path / "here").mkdir()
    names = {"report": tmp_path / "old.json", "sites": tmp_path / "sites"}

    def run(line: str) -> Done:
        done = subprocess.run(
            ["sh", "-c", f'gpuops() {{ "$0" -m gpuops "$@"; }}\n{line.format(**names)}', GPUOPS[0]],
            cwd=tmp_path / "here",
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr and "internal error" not in done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return run


QUICK = {
    "report {report}": 11,
    "report {report} --json": 11,
    "history -l all": 0,
    "report --schema": 0,
    "completion bash": 0,
    "init new.yml": 0,
    "--help": 0,
    "--version": 0,
}
CLOSED = ("<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("closed", CLOSED)
def test_a_stream_that_is_closed_changes_no_exit_code(
    shell: Callable[[str], Done], closed: str
) -> None:
    for line, code in QUICK.items():
        assert shell(f"rm -f new.yml; gpuops {line} {closed}").code == code, line


@pytest.mark.parametrize("line", QUICK)
def test_a_standard_output_that_is_full_is_one_line_and_2(
    shell: Callable[[str], Done], line: str
) -> None:
    done = shell(f"gpuops {line} > /dev/full")
    assert done.code == 2
    what, to_do = done.err.splitlines()[-2:]
    assert what.startswith("gpuops: standard output ") and "No space left" in what
    assert to_do.startswith("        ")


def test_a_run_on_full_and_closed_streams(shell: Callable[[str], Done], tmp_path: Path) -> None:
    """On this machine: what a status finds here does not matter, but that it counts."""
    status = "gpuops status -l node1 -i {sites}"
    code = shell(status).code
    assert shell(f"{status} > /dev/full").code == 2
    for closed in ("<&-", ">&-", "<&- >&- 2>&-"):
        assert shell(f"{status} --output json=x.json {closed}").code == code
        file = tmp_path / "here/x.json"
        assert Report.from_json(file.read_text()).exit_code == code
        file.unlink()


def test_a_variable_reaches_the_roles_and_is_written_down_nowhere(
    shell: Callable[[str], Done], tmp_path: Path
) -> None:
    status = "gpuops status -l node1 -i {sites} --log-dir log --output json=x"
    assert "mean gpuops_protect_more" in shell(f"{status} -e gpuops_protet_more=x").out
    shell(f"rm -r x log; {status} -e a_word=hunter2")
    for file in ("x", "log/history.jsonl"):
        written = (tmp_path / "here" / file).read_text()
        assert "node1" in written and "hunter2" not in written


@pytest.mark.parametrize(
    "locale", ["LC_ALL=C", "LC_ALL=POSIX", "LANG=de_DE.ISO-8859-1", "LC_ALL=en_XX.UTF-8"]
)
def test_a_run_in_a_locale_that_ansible_refuses(
    shell: Callable[[str], Done], tmp_path: Path, locale: str
) -> None:
    """On this machine: what a status finds here does not matter, but that there is a result."""
    unset = "unset LANG LC_ALL LC_CTYPE"
    done = shell(f"{unset}; export {locale}; gpuops status -l node1 -i {{sites}} --output json=x")
    assert done.err == ""
    assert Report.from_json((tmp_path / "here/x").read_text()).hosts[0].name == "node1"


def test_a_pipe_that_nobody_opens_holds_up_nothing_else(
    shell: Callable[[str], Done], tmp_path: Path
) -> None:
    """Ctrl-C ends the wait for it, and by then all else has been shown and kept."""
    del shell  # it made the files
    pipe, out, file = tmp_path / "pipe", tmp_path / "out", tmp_path / "x.json"
    os.mkfifo(pipe)
    asked = ["status", "-l", "node1", "-i", str(tmp_path / "sites"), "--log-dir", str(tmp_path)]
    asked += ["--output", f"json={pipe}", "--output", f"json={file}"]
    with out.open("w") as stream:
        run = subprocess.Popen([*GPUOPS, *asked], stdout=stream, cwd=ROOT)
    try:
        assert until(lambda: "1 host: 1 " in out.read_text(), 3 * PATIENCE)
        assert Report.from_json(file.read_text()).hosts[0].name == "node1"
        assert (tmp_path / "history.jsonl").read_text()
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 130
    finally:
        run.kill()
        run.wait()


def test_a_reader_of_a_file_that_has_left_changes_no_exit_code(call: Call, answers: Any) -> None:
    answers("reset", "reset-clean")
    reads, writes = os.pipe()
    os.close(reads)
    done = call("reset", "-l", "all", "--output", f"json=/dev/fd/{writes}")
    os.close(writes)
    assert done.code == 0 and done.err == ""


def test_where_nobody_says_which_file_it_was_either_is_named(call: Call, answers: Any) -> None:
    answers("status", OSError(28, "No space left on device"))
    done = call("status", "-l", "all")
    assert done.code == 2
    assert done.err.startswith("gpuops: standard output or a file cannot be used (No space")


@pytest.mark.parametrize("verb", ["status", "reset"])
def test_without_room_for_a_temporary_folder_it_says_so(
    call: Call, types: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    (tmp_path / "sites").write_text("node1 ansible_connection=local\n")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    types("n\n")
    done = call(verb, "-l", "node1", "-i", str(tmp_path / "sites"))
    assert done.code == 2
    what, to_do = done.err.splitlines()
    assert what.startswith("gpuops: a temporary folder cannot be made (No usable temporary ")
    assert "TMPDIR" in to_do


def test_a_full_disk_leaves_no_half_of_an_inventory(shell: Callable[[str], Done]) -> None:
    done = shell("(ulimit -f 0; gpuops init new/hosts.yml); code=$?; ls new; exit $code")
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("gpuops: new/hosts.yml cannot be written (File too large)\n")


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("status -l all -i {sites}", 2, "the working folder cannot be used"),
        ("plan -l all -i {sites} --write plan", 2, "the working folder cannot be used"),
        ("verify -l all -i {sites} --output json=x", 2, "the working folder cannot be used"),
        ("status -l all", 2, "the working folder cannot be used"),
        ("init", 2, "inventory/hosts.yml cannot be written"),
        ("report {report} --output json=x", 2, "x cannot be written"),
        ("report {report}", 11, ""),
        ("history -l all", 0, ""),
        ("--help", 0, ""),
    ],
)
def test_a_working_folder_that_is_gone(
    shell: Callable[[str], Done], line: str, code: int, says: str
) -> None:
    done = shell(f"rmdir ../here; gpuops {line}")
    assert done.code == code
    assert len(done.err.splitlines()) == (2 if says else 0)
    assert says in done.err


# --- help and completion ---


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_tells_the_exit_codes(call: Call, verb: str) -> None:
    done = call(*([verb] if verb else []), "--help")
    assert done.code == 0
    for code in (0, 1, 2, 10, 11, 12, 13, 14, 130):
        assert re.search(rf"^ +{code}  \w", done.out, re.M)
    words = " ".join(done.out.split())
    for verdict, code in EXIT_CODES.items():
        assert f" {code} {verdict}" in words
    assert "or a file could not be written (if that is the history: only a warning) 10" in words
    assert "&& gpuops" not in done.out, "on a held machine they do not end with 0"


def test_help_of_doctor_tells_those_codes_that_it_has(call: Call) -> None:
    told = re.findall(r"^ +(\d+)  \w", call("doctor", "--help").out, re.M)
    ends = [EXIT_CODES[verdict] for verdict in EXIT_CODES if verdict not in READABLE]
    assert sorted(map(int, told)) == sorted([0, 1, 130, *ends])
    assert re.search(r"^ +2  refused: ", call("doctor", "--help").out, re.M)


def test_help_of_verify_says_how_long_it_waits(call: Call, root: Path) -> None:
    words = " ".join(call("verify", "--help").out.split())
    roles = yaml.safe_load((root / "roles/gpu_verify/defaults/main.yml").read_text())
    retries, delay = roles["gpuops_verify_retries"], roles["gpuops_verify_delay"]
    assert f"read again up to {retries} times, with {delay} second between" in words
    assert "-e gpuops_verify_retries=600 for ten minutes" in words


def test_help_of_history_speaks_of_no_groups_to_name(call: Call) -> None:
    words = " ".join(call("history", "--help").out.split())
    assert "-l, --limit HOSTS Names of hosts that were in a run" in words
    assert "Hosts or groups" not in words


def test_each_time_that_the_help_of_history_shows_is_taken(call: Call) -> None:
    words = " ".join(call("history", "--help").out.split())
    shown = re.search(r"so long ago, as (\w+), (\w+) or (\w+), or a date, as ([\d-]+)\.", words)
    assert shown
    for each in shown.groups():
        assert call("history", "--since", each).code == 0


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_completion_is_a_script_for_the_shell(call: Call, shell: str) -> None:
    done = call("completion", shell)
    assert done.code == 0 and "_GPUOPS_COMPLETE" in done.out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.out, text=True, check=True)


def test_completion_completes() -> None:
    environment = {**os.environ, "_GPUOPS_COMPLETE": "bash_complete", "COMP_CWORD": "3"}
    environment["COMP_WORDS"] = "gpuops reset --output "
    done = subprocess.run(
        [str(Path(sys.executable).parent / "gpuops")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "junit" in done.stdout


def test_help_loads_neither_rich_nor_ansible() -> None:
    code = (
        "import sys; sys.argv = ['gpuops', '--help']\n"
        "from gpuops.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'rich', 'jinja2', 'ansible', 'ansible_runner', 'yaml', 'asyncio',"
        " 'prometheus_client', 'gpuops.report'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- on the lab ---


def typed(lab: Lab, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    done = lab.run(
        [*GPUOPS, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        **options,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.lab
def test_a_fleet_with_a_node_down_as_a_ci_job(lab: Lab, tmp_path: Path) -> None:
    """Three containers on two Proxmox hosts and two bare nodes, one of them down."""
    held = [lab.hold("ct129", gpus="0-7"), lab.hold("ct131", gpus="2"), lab.hold("node1", gpus="1")]
    lab.cut("node2")
    done = typed(lab, "reset", "-l", "gpu_nodes", "--yes", "--output", f"junit={tmp_path}/x.xml")
    assert done.returncode == 14, done.stdout + done.stderr
    cases = ElementTree.parse(tmp_path / "x.xml").getroot()[0]
    assert {
        case.attrib["name"]: [each.tag for each in case if each.tag != "system-out"]
        for case in cases
    } == {"ct129": [], "ct130": [], "ct131": [], "node1": [], "node2": ["error"]}
    assert not any(lab.alive(*(each["id"] for each in held)).values())
    assert done.stdout.splitlines()[0].startswith("node2  unreachable")
    assert re.search(r"5 hosts: 4 clean, 1 unreachable; 3 processes signalled", done.stdout)
    lab.mend("node2")
    again = typed(lab, "verify", "-l", "gpu_nodes", "--json")
    assert again.returncode == 0, again.stderr
    assert Report.from_json(again.stdout).clean


@pytest.mark.lab
def test_on_a_terminal_it_asks_and_keeps_to_what_it_showed(lab: Lab) -> None:
    server = lab.hold("ct129", gpus="0-3")

    def terminal(answer: str) -> tuple[int | None, str]:
        # typed within the lab's network, by a program that gives it a terminal
        child = pexpect.spawn(
            lab.command(GPUOPS)[0],
            [*lab.command(GPUOPS)[1:], "reset", "-l", "ct129"],
            encoding="utf-8",
            timeout=60,
            dimensions=(24, 100),
            env={**os.environ, "TERM": "xterm-256color"},
        )
        child.expect(r"End this process\? \[y/N\]")
        shown = str(child.before)
        child.sendline(answer)
        child.expect(pexpect.EOF)
        shown += str(child.before)
        child.close()
        return child.exitstatus, shown

    code, shown = terminal("n")
    assert code == 10 and "nobody was signalled" in shown
    assert f"python3 (pid {server['pid']}, " in shown
    assert lab.alive(server["id"])[server["id"]]
    code, shown = terminal("y")
    assert code == 0, shown
    assert not lab.alive(server["id"])[server["id"]]
    assert "1 host: 1 clean; 1 process signalled" in shown


@pytest.mark.lab
def test_a_proof_of_one_gpu_is_never_told_as_one_of_the_host(lab: Lab, tmp_path: Path) -> None:
    lab.hold("node1", gpus="2")
    log = ("-l", "node1", "--log-dir", str(tmp_path))
    prom = tmp_path / "x.prom"
    done = typed(lab, "verify", *log, "--gpus", "1", "--output", f"prometheus={prom}")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("node1  clean        only GPU 1: ")
    assert last.startswith("1 host: 1 clean (only GPU 1) (")
    assert not re.search(r"^gpuops_(verdict|run_clean)\b", prom.read_text(), re.M)
    told = typed(lab, "history", *log).stdout
    assert "verify: clean (only GPU 1); " in told
    assert "node1: not proved clean as a whole in this time" in told
    assert "node1, only GPU 1: last proved clean" in told


@pytest.mark.lab
def test_a_plan_that_no_longer_holds_ends_with_2(lab: Lab, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    lab.hold("ct129", gpus="0")
    assert typed(lab, "plan", "-l", "ct129", "--write", plan).returncode == 10
    stranger = lab.hold("ct129", gpus="1")
    done = typed(lab, "reset", "-l", "ct129", "--plan", plan)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not in the plan" in done.stdout
    assert lab.alive(stranger["id"])[stranger["id"]]


# --- to begin with ---


def test_init_writes_an_inventory_and_never_over_one(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "new/hosts.yml"
    assert call("init", str(file)).code == 0
    sample = yaml.safe_load(file.read_text())["all"]["children"]
    assert sample["gpu_nodes"]["hosts"]["ct129"]["gpuops_proxmox_host"] == "pve1"
    file.write_text("mine")
    done = call("init", str(file))
    assert done.code == 2 and "is there already" in done.err
    assert file.read_text() == "mine"


def test_init_and_the_sample_of_the_checkout_say_the_same(root: Path) -> None:
    """Everything but the commands at the top."""

    def body(path: Path) -> str:
        return path.read_text().partition("\n\n")[2]

    assert body(root / "gpuops/hosts.yml") == body(root / "inventory/hosts.yml")


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("status-held", 0, "ok   ct129: reached through pve1 for container 129, 2 NVIDIA H200"),
        ("status-unknown", 13, "BAD  ct129: unknown through pve1 for container 129: "),
        ("verify-some", 0, "driver 580.159.04), clean (only GPU 1)"),
        ("reset-unreachable", 14, "BAD  ct130: unreachable through pve1"),
        ("reset-refused", 2, "BAD  ct129: refused: gpuops_scope is"),
    ],
)
def test_doctor(
    call: Call, monkeypatch: pytest.MonkeyPatch, replay: Replay, name: str, code: int, says: str
) -> None:
    monkeypatch.setattr(api, "status", lambda *_, **__: replay(name))
    done = call("doctor", "-l", "all")
    assert done.code == code
    assert says in done.out and "ok   ansible-core 2." in done.out


def test_doctor_looks_with_the_variables_that_are_given(
    call: Call, answers: Any, replay: Replay
) -> None:
    asked = answers("status", replay("status-held"))
    call("doctor", "-l", "all", "-e", "gpuops_expected_gpus=8")
    assert asked["variables"] == {"gpuops_expected_gpus": 8}


def test_doctor_calls_nothing_ok_that_it_did_not_ask(
    call: Call, monkeypatch: pytest.MonkeyPatch, replay: Replay
) -> None:
    monkeypatch.setattr(api, "status", lambda *_, **__: replay("reset-held"))
    done = call("doctor", "-l", "all")
    (line,) = (each for each in done.out.splitlines() if " pve1: " in each)
    said = "not asked: it is in the group proxmox_hosts, so only its containers are looked at"
    assert line == f"--   pve1: {said}"


@pytest.mark.lab
def test_doctor_names_what_a_machine_lacks(lab: Lab) -> None:
    for name in ("pve2", "node1"):
        lab.fault(name, "smi-missing")
    lab.cut("node2")
    done = typed(lab, "doctor", "-l", "gpu_nodes")
    assert done.returncode == 14, done.stdout + done.stderr
    said = {line[:11]: line for line in done.stdout.splitlines()}
    assert "8 NVIDIA H200 (driver 580.159.04), clean" in said["ok   ct129: "[:11]]
    assert "nvidia-smi is not installed" in said["BAD  ct131: "[:11]]
    assert "nvidia-smi is not installed" in said["BAD  node1: "[:11]]
    assert "driver's list of processes: nvidia-smi is not installed" in said["ok   pve2: "[:11]]
    assert "unreachable" in said["BAD  node2: "[:11]]


@pytest.mark.parametrize(
    ("remedy", "shown"),
    [
        (
            "set gpuops_mps=quit to have MPS told to quit",
            "add -e gpuops_mps=quit to have MPS told to quit",
        ),
        (
            "name its other GPUs in gpuops_gpus too, or set gpuops_baseline_mib",
            "name its other GPUs in gpuops_gpus (--gpus) too, or set gpuops_baseline_mib",
        ),
        ("widen gpuops_scope or -l", "widen gpuops_scope (--scope) or -l"),
        ("set proxmox_vmid and gpuops_proxmox_host", "set proxmox_vmid and gpuops_proxmox_host"),
    ],
)
def test_a_remedy_names_what_can_be_typed(replay: Replay, remedy: str, shown: str) -> None:
    run = replay("reset-held")
    told = replace(run, hosts=(replace(run.hosts[0], remedy=remedy),))
    assert verbs.in_options(told, []).hosts[0].remedy == shown
    assert verbs.in_options(told, ["scope"]).hosts[0].remedy.count("--scope") <= 1
