# SPDX-License-Identifier: GPL-3.0-or-later
"""The history: nothing is lost or torn, whoever writes at the same time, and it answers."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuops import Report, UsageError, cli, history
from tests.wrapper.conftest import Replay


def at(report: Report, days_ago: float) -> Report:
    began = datetime.now(UTC) - timedelta(days=days_ago)
    return replace(report, started=began.isoformat(timespec="milliseconds"))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpuops", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def many(report: Report, where: Path, times: int) -> None:
    for _ in range(times):
        history.append(report, where)


def test_nothing_is_lost_or_torn_with_eight_writers(replay: Replay, tmp_path: Path) -> None:
    report = replay("reset-blocked")
    hosts = tuple(replace(report.hosts[0], name=f"h{n}") for n in range(30))
    report = replace(report, hosts=hosts)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=many, args=(report, tmp_path, 25)) for _ in range(8)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        read = list(history.read(tmp_path))
        assert len(read) >= seen
        seen = len(read)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    lines = (tmp_path / history.NAME).read_text().splitlines()
    names = [json.loads(line)["host"] for line in lines]
    assert len(names) == 8 * 25 * 30
    runs = [names[start : start + 30] for start in range(0, len(names), 30)]
    assert all(run == [f"h{n}" for n in range(30)] for run in runs), "runs are not mixed"


def test_it_is_only_for_its_owner(replay: Replay, tmp_path: Path) -> None:
    history.append(replay("reset-held"), tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a/b" / history.NAME).stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_off_costs_only_itself(replay: Replay, tmp_path: Path) -> None:
    history.append(replay("reset-held"), tmp_path)
    file = tmp_path / history.NAME
    file.write_bytes(file.read_bytes()[:-40])
    history.append(replay("reset-held"), tmp_path)
    assert [each["host"] for each in history.read(tmp_path)] == ["ct129", "ct129", "node1"]


def test_what_is_no_entry_is_passed_over(replay: Replay, tmp_path: Path) -> None:
    (tmp_path / history.NAME).write_text('{}\n[]\nnull\n\xff\n{"schema": "x", "time": "y"}\n')
    history.append(replay("reset-held"), tmp_path)
    assert len(list(history.read(tmp_path))) == 2


def test_an_entry_that_lacks_something_is_passed_over(replay: Replay, tmp_path: Path) -> None:
    history.append(replay("reset-held"), tmp_path)
    file = tmp_path / history.NAME
    whole = json.loads(file.read_text().splitlines()[0])
    for name in whole:
        part = json.dumps({key: value for key, value in whole.items() if key != name})
        file.write_text(file.read_text() + part + "\n")
    file.write_text(file.read_text() + json.dumps({**whole, "time": "2026-11-29T16:00:00"}) + "\n")
    found = history.read(tmp_path, since=history.moment("2026-11-01"))
    assert len(list(history.tell(found))) > 3


@pytest.mark.parametrize(
    "change",
    [
        {"host": 7},
        {"host": None},
        {"host": ["ct129"]},
        {"time": "0001-01-01T00:00:00+05:00"},
        {"time": "9999-12-31T23:59:59-05:00"},
        {"time": 5},
        {"held": 5},
        {"held": [5]},
        {"held": [{"gpus": 5}]},
        {"only_gpus": 5},
        {"gpus": "NESTED"},
        {"held": "NESTED"},
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_told_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    replay: Replay,
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    history.append(replay("reset-held"), tmp_path)
    file = tmp_path / history.NAME
    good = file.read_text()
    bad = json.dumps({**json.loads(good.splitlines()[0]), **change})
    file.write_text(bad.replace('"NESTED"', "[" * 100_000 + "]" * 100_000) + "\n" + good)
    for more in ((), ("--json",), ("--since", "2020-01-01")):
        assert call(monkeypatch, "history", "-l", "*", "--log-dir", str(tmp_path), *more) == 0
        said = capsys.readouterr()
        assert said.err == "" and "ct129" in said.out and "node1" in said.out
    assert len(list(history.read(tmp_path))) == 2


def test_a_disk_that_is_full_leaves_it_as_it_was(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.append(replay("reset-held"), tmp_path)
    before = (tmp_path / history.NAME).read_bytes()
    real = history.os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) < 200:
            raise OSError(28, "No space left on device")
        return real(handle, data[:100])

    monkeypatch.setattr(history.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        history.append(replay("reset-held"), tmp_path)
    assert (tmp_path / history.NAME).read_bytes() == before


def test_it_tells_when_it_was_clean_and_who_held_it(replay: Replay, tmp_path: Path) -> None:
    history.append(at(replay("reset-held"), 3), tmp_path)
    history.append(at(replay("status-held"), 1), tmp_path)
    history.append(at(replay("reset-unreachable"), 0.1), tmp_path)
    lines = list(history.tell(history.read(tmp_path, ["ct129"])))
    assert [line for line in lines if line.startswith("ct129: last proved clean")]
    (clean,) = [line for line in lines if "last proved clean" in line]
    (held,) = [line for line in lines if "last held" in line]
    assert clean.endswith("(reset)")
    assert "python3" in held and "left: python3 -m sglang" in held
    assert any("KILL sent" in line for line in lines)
    assert not any("node1" in line for line in lines)


def summary(entries: list[dict[str, Any]]) -> list[str]:
    """The lines on when it was clean, without the times and the holders."""
    lines = [re.sub(r" \d[-0-9]{9} [:0-9]{8}Z", "", line) for line in history.tell(entries)]
    return [line for line in lines if re.match(r"node1.*: (last|not) proved clean", line)]


ONE = "node1, only GPU 1: last proved clean (verify)"
MORE = "node1, only GPU 2, 3: last proved clean (verify)"
WHOLE = "node1: last proved clean (reset)"
NONE = "node1: not proved clean as a whole in this time"


@pytest.mark.parametrize(
    ("runs", "lines"),
    [
        (["one"], [NONE, ONE]),
        (["one", "more", "one"], [NONE, ONE, MORE]),
        (["whole", "one"], [WHOLE, ONE]),
        (["one", "whole"], [WHOLE]),
    ],
)
def test_a_proof_of_some_gpus_is_none_of_the_host(
    replay: Replay, runs: list[str], lines: list[str]
) -> None:
    whole, some = replay("reset-clean"), replay("verify-some")
    node = some.hosts[1]
    entries = {
        "one": history.entry(some, node),
        "more": history.entry(some, replace(node, only_gpus=("2", "3"))),
        "whole": history.entry(whole, replace(whole.hosts[2], name="node1")),
    }
    assert summary([entries[name] for name in runs]) == lines


def test_of_an_entry_that_does_not_say_which_gpus_none_is_guessed(
    replay: Replay, tmp_path: Path
) -> None:
    """As of versions that did not note it."""
    history.append(at(replay("verify-some"), 1), tmp_path)
    file = tmp_path / history.NAME
    old = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in old:
        del entry["only_gpus"]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in old))
    assert summary(list(history.read(tmp_path, ["node1"]))) == [
        NONE,
        "node1, all or some GPUs (not noted): last proved clean (verify)",
    ]


def test_since(replay: Replay, tmp_path: Path) -> None:
    for days in (10, 5, 1):
        history.append(at(replay("reset-held"), days), tmp_path)
    found = list(history.read(tmp_path, ["node*"], history.moment("7d")))
    assert len(found) == 2
    assert len(list(history.read(tmp_path, ["node1"], history.moment("2020-01-01")))) == 3


@pytest.mark.parametrize("text", ["", "7", "d7", "7y", "yesterday", "-1d", "999999w", "0001-01-01"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        history.moment(text)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history.folder() == Path("/state/gpuops")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/me")
    assert history.folder() == Path("/home/me/.local/state/gpuops")


def test_a_folder_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / history.NAME).mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        list(history.read(tmp_path))


# --- the command ---


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, replay: Replay) -> None:
    def stand_in(*_: Any, watch: Any, **__: Any) -> Report:
        return at(replay("reset-held"), 0)

    monkeypatch.setattr("gpuops.api.reset", stand_in)


@pytest.mark.usefixtures("answered")
def test_each_run_is_remembered_and_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ("--log-dir", str(tmp_path))
    assert call(monkeypatch, "reset", "-l", "all", *log) == 0
    capsys.readouterr()
    assert call(monkeypatch, "history", "-l", "ct129", "--since", "1h", *log) == 0
    assert "ct129: last proved clean" in capsys.readouterr().out
    assert call(monkeypatch, "history", "-l", "all", "--json", *log) == 0
    read = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["host"] for each in read] == ["ct129", "node1"]
    assert read[0]["gpus"][0]["before_mib"] == 76115 and read[0]["gpus"][0]["after_mib"] == 0
    assert call(monkeypatch, "history", "--json", *log) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == read
    assert call(monkeypatch, "history", "-l", "ct7", *log) == 0
    assert "no run on ct7 is remembered" in capsys.readouterr().out
    assert call(monkeypatch, "history", "-l", "ct129, node1 ", "--json", *log) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert call(monkeypatch, "history", "-l", " ,", *log) == 2
    assert "no hosts were named" in capsys.readouterr().err
    for nothing in ("soon", "", " "):
        assert call(monkeypatch, "history", "-l", "all", "--since", nothing, *log) == 2
        assert f"--since is '{nothing}'" in capsys.readouterr().err


@pytest.mark.usefixtures("answered")
def test_a_history_that_cannot_be_written_does_not_hide_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "reset", "-l", "all", "--log-dir", "/proc/self/x") == 0
    said = capsys.readouterr()
    assert "cannot be written" in said.err and "2 hosts: 2 clean" in said.out
