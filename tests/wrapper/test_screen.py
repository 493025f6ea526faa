# SPDX-License-Identifier: GPL-3.0-or-later
"""What people see: on a pipe, on a terminal, on a small one, and with 500 hosts."""

from __future__ import annotations

import errno
import io
import re
from dataclasses import replace

import pytest

from gpuops.events import Step
from gpuops.report import Host, Report, totals
from gpuops.screen import LiveScreen, Screen, bars, lines, screen, sentence, whom
from gpuops.verbs import joined
from tests.wrapper.conftest import RECORDED, Replay

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


class Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)


def fleet(report: Report, clean: int) -> Report:
    first = report.hosts[0]
    good = Host(name="", verdict="clean", changed=False, route="", reason="all at 0 MiB")
    hosts = (*(replace(good, name=f"node{n}") for n in range(clean)), first)
    return replace(report, hosts=hosts, totals=totals(hosts))


def text_of(report: Report) -> str:
    return "\n".join(line for line, _ in lines(report))


# --- the result ---


@pytest.mark.parametrize("name", RECORDED)
def test_the_result_names_every_host_that_is_not_clean(replay: Replay, name: str) -> None:
    report = replay(name)
    for host in report.not_clean():
        assert host.name in text_of(report) and host.remedy in text_of(report)


def test_the_result_of_a_reset(replay: Replay) -> None:
    text = text_of(replay("reset-held"))
    assert "used MiB by GPU: 76115 76115 -> 0 0" in text
    assert "kill: KILL sent: python3 (pid" in text
    assert text.endswith("2 hosts: 2 clean; 1 process signalled (3.5 s)")
    assert "pve1: left out" in text


def test_of_500_hosts_the_clean_are_counted_and_the_bad_come_first(replay: Replay) -> None:
    text = text_of(fleet(replay("reset-blocked"), 499)).splitlines()
    assert text[0].startswith("ct129")
    assert len(text) < 15
    assert any("499 more are clean" in line for line in text)


def test_that_some_gpus_were_not_looked_at_is_said_also_of_those_that_are_counted(
    replay: Replay,
) -> None:
    report = replay("verify-some")
    assert re.search(r"^node1  clean        only GPU 1: 1 of 2 GPUs", text_of(report), re.M)
    assert "2 hosts: 2 clean (only some GPUs of 1 host) (" in text_of(report)
    hosts = tuple(replace(report.hosts[1], name=f"node{n}") for n in range(30))
    many = text_of(report.of(hosts))
    assert "30 more are clean" in many and "30 hosts: 30 clean (only GPU 1) (" in many


def test_a_clean_host_where_somebody_was_signalled_is_never_only_counted(replay: Replay) -> None:
    assert "ct129  clean" in re.sub(" +", "  ", text_of(fleet(replay("reset-held"), 40)))


def test_the_sentence(replay: Replay) -> None:
    assert sentence(replay("reset-check").totals, check=True).endswith("1 process to be signalled")
    assert sentence(totals([])) == "0 hosts"


def test_whom_a_plan_would_signal(replay: Replay) -> None:
    (line,) = whom(replay("plan-held"))
    assert line.startswith("ct129: python3 (pid ") and "lxc 129: python3 -m sglang" in line


def test_a_reset_carries_on_what_its_plan_could_not_look_at(replay: Replay) -> None:
    planned, done = replay("reset-unreachable"), replay("reset-held")
    both = joined(done, planned, "all")
    assert [host.name for host in both.hosts] == ["ct129", "node1", "ct130"]
    assert both.exit_code == 14 and both.totals.unreachable == 1


# --- on a pipe ---


def test_a_pipe_gets_plain_lines(replay: Replay) -> None:
    stream = io.StringIO()
    with screen(stream) as shown:
        assert type(shown) is Screen
        report = replay("reset-held", watch=shown.watch)
        shown.result(report)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.startswith("ct129: kill, waits for python3 on pve1 (used MiB: 76115 76115)\n")


def test_a_reader_that_left_does_not_stop_the_run(replay: Replay) -> None:
    for kind in (Screen, LiveScreen):
        with kind(Gone()) as shown:
            report = replay("reset-held", watch=shown.watch)
            shown.result(report)
        assert shown.gone and shown.problem is None
        assert report.clean


def test_a_full_disk_is_no_reader_that_left(replay: Replay) -> None:
    for kind in (Screen, LiveScreen):
        with kind(Full()) as shown:
            shown.result(replay("reset-held"))
        assert shown.gone and shown.problem is not None


# --- on a terminal ---


def drawn(steps: list[Step]) -> tuple[str, LiveScreen]:
    stream = Terminal()
    shown = screen(stream)
    assert isinstance(shown, LiveScreen)
    shown.console.print(shown.table(steps))
    return stream.getvalue(), shown


def step(name: str, phase: str, verdict: str | None, used: int = 0) -> Step:
    return Step(
        host=name,
        phase=phase,
        verdict=verdict,  # type: ignore[arg-type]
        used_mib=(used,) * 8,
        total_mib=(143771,) * 8,
        waits_for="python3 on pve1",
    )


def test_a_terminal_gets_a_line_a_host_with_its_bars(replay: Replay) -> None:
    steps: dict[str, Step] = {}
    replay("reset-held", watch=lambda each: steps.update({each.host: each}))
    text = CODES.sub("", drawn([*steps.values(), step("ct7", "kill", "held", 76115)])[0])
    assert re.search(r"^ct7 +kill +▅▅▅▅▅▅▅▅ +waits for python3 on pve1", text, re.M)
    assert re.search(r"^ct129 +clean +·· *$", text, re.M)


def test_what_needs_a_look_comes_first_and_the_rest_is_counted() -> None:
    steps = [step(f"n{n:03}", "done", "clean") for n in range(490)]
    steps += [step(f"h{n}", "kill", "held", 500) for n in range(9)] + [step("x", "done", "unknown")]
    text = CODES.sub("", drawn(steps)[0]).splitlines()
    assert text[1].startswith("x ")
    assert text[2].startswith("h0 ")
    assert len(text) <= 24
    assert re.match(
        r"491 of 500 hosts done, \d+ s; 480 not shown here, 480 of these clean", text[-1]
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = "a-very-long-host-name.of-a-very-long.domain.example"
    text = CODES.sub("", drawn([step(name, "kill", "held", 9), step("b", "done", "clean")])[0])
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) == 4


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, _ = drawn([step("a", "done", "held", 1)])
    assert re.search(r"\x1b\[3[0-9]m", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain, _ = drawn([step("a", "done", "held", 1)])
    assert not re.search(r"\x1b\[3[0-9]m", plain)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(screen(Terminal())) is Screen


def test_a_terminal_that_is_closed_gets_nothing(replay: Replay) -> None:
    stream = Terminal()
    shown = screen(stream)
    with shown:
        stream.close()
        report = replay("reset-held", watch=shown.watch)
        shown.result(report)
    assert report.clean


def test_bars() -> None:
    assert [mark for mark, _ in bars((0, 1, 50, 100, None), (100,) * 5)] == list("·▁▅█?")
    assert [mark for mark, _ in bars((7,), (None,))] == ["█"]


def test_a_command_line_cannot_move_the_cursor(replay: Replay) -> None:
    report = replay("reset-held")
    host = replace(report.hosts[0], reason="\x1b[2J\x1b]0;title\x07\x9b31mred")
    for stream in (io.StringIO(), Terminal()):
        with screen(stream) as shown:
            shown.result(replace(report, hosts=(host,)))
        text = CODES.sub("", stream.getvalue())
        assert "�[2J" in text and "\x07" not in text and "\x9b" not in text
