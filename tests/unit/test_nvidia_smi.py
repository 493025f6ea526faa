# SPDX-License-Identifier: GPL-3.0-or-later
"""The tool's output is read strictly: what is not plainly good proves nothing."""

import errno
import io
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    commands,
    deadline,
    nvidia_smi,
    verdict,
)
from tests.patience import PATIENCE, until

Capture = Callable[[str], str]

FIELDS = len(nvidia_smi.GPU_FIELDS)
# What a good row is, written without the code under test.
GOOD_ROW = re.compile(r"\s*(\d+)\s*,\s*(GPU-[^,]*),[^,]*,\s*(\d+)\s*,(?:[^,]*,){6}.*", re.ASCII)

# Other letters that end a line elsewhere may be part of a name.
LINE_ENDS = re.compile(r"\n")


def usable(name: str) -> bool:
    """A name that the tool could print in one row and that keeps its outer blanks."""
    return bool(name) and name == name.strip() and not LINE_ENDS.search(name)


names = st.one_of(
    st.sampled_from(
        ["NVIDIA H200", "NVIDIA H100, PCIe", "Quadro, RTX, 6000", "显卡", "Карта №1", "GPU-1, 0"]
    ),
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), min_size=1).filter(
        usable
    ),
)
numbers = st.integers(min_value=0, max_value=10**7)
# Used, total and reserved.
memory = st.tuples(numbers, numbers, numbers).map(lambda mib: (min(mib[:2]), max(mib[:2]), mib[2]))


@st.composite
def rows(draw: st.DrawFn, least: int = 1) -> list[list[str]]:
    """The rows of a machine, each a list of its fields."""
    count = draw(st.integers(min_value=least, max_value=8))
    uuids = draw(st.lists(st.uuids(), min_size=count, max_size=count, unique=True))
    buses = draw(st.lists(st.integers(0, 255), min_size=count, max_size=count, unique=True))
    return [
        [
            str(index),
            f"GPU-{uuid}",
            f"00000000:{buses[index]:02X}:00.0",
            *map(str, draw(memory)),
            str(draw(st.integers(0, 100))),
            str(draw(st.integers(0, 110))),
            f"P{draw(st.integers(0, 12))}",
            "580.159.04",
            draw(names),
        ]
        for index, uuid in enumerate(uuids)
    ]


def text_of(table: list[list[str]]) -> str:
    return "".join(", ".join(row) + "\n" for row in table)


def parsed(text: str) -> nvidia_smi.Reading:
    return nvidia_smi.parse_gpus(text, 0)


@given(rows())
def test_good_rows_are_read_as_they_are(table: list[list[str]]) -> None:
    reading = parsed(text_of(table))
    assert not reading.problem(holders_only=False)
    assert reading.problems == []
    seen = [
        [
            str(gpu.index),
            gpu.uuid,
            gpu.bus_id,
            str(gpu.used_mib),
            str(gpu.total_mib),
            str(gpu.reserved_mib),
            str(gpu.utilisation),
            str(gpu.temperature),
            gpu.pstate,
            gpu.driver,
            gpu.name,
        ]
        for gpu in reading.gpus
    ]
    assert seen == table


not_numbers = st.one_of(
    st.sampled_from(
        [
            "",
            "[N/A]",
            "N/A",
            "[Not Supported]",
            "[Unknown Error]",
            "[Insufficient Permissions]",
            "[GPU requires reset]",
            "[GPU is lost]",
            "0 MiB",
            "-1",
            "+0",
            "0.0",
            "0x0",
            "1e3",
            "1_000",
            "\u0660",
            "²",
            "None",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters=",")).filter(
        lambda text: not re.fullmatch(r"[0-9]+", text.strip()) and not LINE_ENDS.search(text)
    ),
)


@given(rows(), not_numbers, st.data())
def test_memory_that_is_no_number_is_unknown_and_never_zero(
    table: list[list[str]], value: str, data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, len(table) - 1))
    table[which][3] = value
    reading = parsed(text_of(table))
    assert reading.problem(holders_only=False)
    problem = verdict.unreadable(verdict.Target({"name": "node1"}), reading, 0)
    assert problem == f"memory.used of GPU {which} reads '{value.strip()}'"
    assert reading.gpus[which].used_mib is None


@given(
    rows(), st.sampled_from([4, 5, 6, 7]), st.sampled_from(["[N/A]", "N/A", "", "[GPU is lost]"])
)
def test_other_values_that_are_no_number_are_none(
    table: list[list[str]], column: int, value: str
) -> None:
    table[0][column] = value
    gpu = parsed(text_of(table)).gpus[0]
    values = [gpu.total_mib, gpu.reserved_mib, gpu.utilisation, gpu.temperature]
    assert values[column - 4] is None
    assert values.count(None) == 1


@given(rows(), st.data())
def test_a_line_twice_is_not_readable(table: list[list[str]], data: st.DataObject) -> None:
    table.append(data.draw(st.sampled_from(table)))
    reading = parsed(text_of(table))
    assert reading.problem(holders_only=False)
    assert any("twice" in problem for problem in reading.problems)


@given(rows(least=2), st.sampled_from([0, 1, 2]))
def test_what_only_one_gpu_can_have_is_not_readable_twice(
    table: list[list[str]], column: int
) -> None:
    table[-1][column] = table[0][column].lower() if column == 2 else table[0][column]
    reading = parsed(text_of(table))
    assert reading.problem(holders_only=False)
    assert any("twice" in problem for problem in reading.problems)


@given(rows(), st.data())
def test_a_line_dropped_is_noticed_by_its_number(
    table: list[list[str]], data: st.DataObject
) -> None:
    expected = len(table)
    del table[data.draw(st.integers(0, expected - 1))]
    reading = parsed(text_of(table))
    for spec, nodes in (({"expected_gpus": expected}, 0), ({}, expected)):
        target = verdict.Target({"name": "node1", **spec})
        problem = verdict.unreadable(target, reading, nodes)
        if table:
            assert problem == (
                f"nvidia-smi lists {expected - 1} GPUs where {expected} are expected"
            )
        else:
            assert problem == "nvidia-smi listed no GPU"


noise = st.one_of(
    st.sampled_from(
        [
            "WARNING: infoROM is corrupted at gpu 0000:00:06.0",
            "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error",
            "index, uuid, pci.bus_id, memory.used [MiB], memory.total [MiB]",
            "No devices were found",
            "perl: warning: Setting locale failed.",
            "0, GPU-1",
            "-1, GPU-1, 0, 0, 0, 0, 0, 0, P0, 580, x",
        ]
    ),
    st.text(st.characters(codec="utf-8"), min_size=1).filter(
        lambda text: text.strip() and not any(map(GOOD_ROW.fullmatch, text.splitlines()))
    ),
)


@given(rows(), noise, st.data())
def test_a_line_that_is_no_row_spoils_the_reading(
    table: list[list[str]], line: str, data: st.DataObject
) -> None:
    lines = text_of(table).splitlines(keepends=True)
    lines.insert(data.draw(st.integers(0, len(lines))), line + "\n")
    reading = parsed("".join(lines))
    assert reading.problem(holders_only=False)
    assert any("a line that is no GPU" in problem for problem in reading.problems)


@given(rows(), st.integers(0, FIELDS - 1))
def test_a_field_missing_is_not_readable(table: list[list[str]], column: int) -> None:
    # A comma in the name would fill the gap; test_a_reading_is_only_readable… covers that.
    assume("," not in table[0][-1])
    del table[0][column]
    assert parsed(text_of(table)).problem(holders_only=False)


@given(rows(), st.data())
def test_a_reading_is_only_readable_if_every_line_is_a_good_row(
    table: list[list[str]], data: st.DataObject
) -> None:
    text = text_of(table)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        new = data.draw(st.sampled_from(["", "\n", ",", " ", "0", "[N/A]", "GPU-", "-"]))
        text = text[:place] + new + text[place + data.draw(st.integers(0, 3)) :]
    reading = parsed(text)
    found = [GOOD_ROW.fullmatch(line) for line in text.splitlines() if line.strip()]
    if not verdict.unreadable(verdict.Target({"name": "node1"}), reading, 0):
        assert all(found)
        matches = [match for match in found if match]
        assert len({int(match[1]) for match in matches}) == len(found) > 0
        assert len({match[2].strip() for match in matches}) == len(found)
        assert [gpu.used_mib for gpu in reading.gpus] == [int(match[3]) for match in matches]


@given(rows(), st.integers(-64, 255).filter(bool))
def test_an_exit_code_other_than_zero_is_not_readable(table: list[list[str]], code: int) -> None:
    reading = nvidia_smi.parse_gpus(text_of(table), code)
    assert reading.problem(holders_only=False)
    assert reading.gpus == []


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
def test_silence_is_not_readable(text: str) -> None:
    reading = parsed(text)
    assert reading.problem(holders_only=False)
    assert reading.problems == ["nvidia-smi listed no GPU"]


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert isinstance(parsed(text).problem(holders_only=False), str)
    assert isinstance(nvidia_smi.parse_apps(text, 0), tuple)
    assert isinstance(nvidia_smi.parse_minors(text), dict)


def test_a_process_cannot_give_a_gpu_another_number() -> None:
    real = "GPU UUID : GPU-1\nMinor Number : 4\nName : {}\nGPU UUID : GPU-2\nMinor Number : 5\n"
    assert nvidia_smi.parse_minors(real.format("x\fMinor Number : 7")) == {"GPU-1": 4, "GPU-2": 5}
    for name in ("x\nMinor Number : 7", "x\nGPU UUID : GPU-1\nMinor Number : 7"):
        assert nvidia_smi.parse_minors(real.format(name)) == {"GPU-2": 5}
    forged = "x\nGPU UUID : GPU-2\nMinor Number : 7"
    assert nvidia_smi.parse_minors(real.format(forged)) == {"GPU-1": 4}


@given(st.binary())
def test_any_bytes_of_the_drivers_files_are_read_without_an_error(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "0000:00:06.0").mkdir()
        (Path(folder) / "0000:00:06.0" / "information").write_bytes(text)
        assert isinstance(nvidia_smi.minors_from_proc(folder), dict)


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("no_dev0", 6, "No devices were found"),
        ("nobody_dev0mode", 6, "No devices were found"),
        ("bad_index", 6, "No devices were found"),
        (
            "no_ctl",
            17,
            "Failed to initialize NVML: GPU access blocked by the operating system",
        ),
        ("nobody_devmode", 4, "Failed to initialize NVML: Insufficient Permissions"),
        (
            "no_lib",
            12,
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure "
            "that the NVIDIA Display Driver is properly installed and present in your system.",
        ),
        ("bad_field", 2, 'Field "bogus" is not a valid field to query.'),
        ("bad_flag", 255, "ERROR: Option --nosuch is not recognized. Please run 'nvidia-smi -h'."),
    ],
)
def test_the_real_tools_failures_are_named(
    capture: Capture, name: str, code: int, problem: str
) -> None:
    text = capture(f"{name}.out")
    reading = nvidia_smi.parse_gpus(text, code)
    assert reading.problem(holders_only=False)
    assert reading.problems == [f"nvidia-smi failed with exit code {code}: {problem}"]
    assert nvidia_smi.parse_apps(text, code) == ([], reading.problems)
    # The same words with exit code 0, as some drivers have it, are no better.
    assert parsed(text).problem(holders_only=False)


def test_other_outputs_of_the_real_tool_are_no_reading(capture: Capture) -> None:
    for name in ("query_used.out", "table.out", "q.out", "apps.out"):
        assert parsed(capture(name)).problem(holders_only=False)


def test_a_tool_that_is_not_there_is_said_in_other_words() -> None:
    assert nvidia_smi.failure("sh: 1: nvidia-smi: not found", 127) == (
        "nvidia-smi is not installed there"
    )
    assert nvidia_smi.failure(" \n", 9) == "nvidia-smi failed with exit code 9: it said nothing"


def test_the_drivers_list_of_processes(capture: Capture) -> None:
    assert nvidia_smi.parse_apps(capture("apps.out"), 0) == ([], [])
    text = (
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9, 561, 5638\n"
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9, 562, [N/A]\n"
        "MIG-41b3b2a4-8b9d-5d3b-9d5d-2b3bb6bf1f33, 563, 0\n"
    )
    apps, problems = nvidia_smi.parse_apps(text, 0)
    assert problems == []
    assert [(app.pid, app.used_mib) for app in apps] == [(561, 5638), (562, None), (563, 0)]
    assert apps[2].gpu_uuid == "MIG-41b3b2a4-8b9d-5d3b-9d5d-2b3bb6bf1f33"


@pytest.mark.parametrize(
    "line",
    [
        "No running processes found",
        "GPU-1, 12",
        "GPU-1, 12, 5, x",
        "GPU-1, [N/A], 5",
        "GPU-1, -4, 5",
        "a,12,5",
    ],
)
def test_a_line_that_is_no_process_is_a_problem(line: str) -> None:
    apps, problems = nvidia_smi.parse_apps(f"GPU-1, 7, 5\n{line}\n", 0)
    assert [app.pid for app in apps] == [7]
    assert problems == [f"the driver's list has a line that is no process: '{line}'"]


def test_minor_numbers_from_the_tool(capture: Capture) -> None:
    assert nvidia_smi.parse_minors(capture("q.out")) == {
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9": 0
    }


def test_a_minor_number_that_cannot_be_read_is_left_out() -> None:
    text = (
        "Minor Number : 9\n"
        "GPU UUID : GPU-1\nMinor Number : N/A\n"
        "GPU UUID : GPU-2\nMinor Number : 5\n"
    )
    assert nvidia_smi.parse_minors(text) == {"GPU-2": 5}


def test_minor_numbers_from_the_driver(capture: Capture, tmp_path: Path) -> None:
    real = capture("procinfo.out").partition("Model:")
    information = (real[1] + real[2]).partition("/proc/driver")[0]
    other = information.replace("a5edddaa", "b5edddaa").replace("Minor: \t 0", "Minor: \t 5")
    for bus, text in (("0000:00:06.0", information), ("0000:00:07.0", other)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text, encoding="utf-8")
    (tmp_path / "0000:00:08.0").mkdir()
    (tmp_path / "0000:00:09.0").mkdir()
    (tmp_path / "0000:00:09.0/information").write_text(
        "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 3\n"
    )
    assert nvidia_smi.minors_from_proc(str(tmp_path)) == {
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9": 0,
        "GPU-b5edddaa-6e4a-9986-b9b5-dab572bc80a9": 5,
    }
    assert nvidia_smi.minors_from_proc(str(tmp_path / "none")) == {}


GOOD = "0, GPU-1, 00000000:00:06.0, 20, 143771, 616, 0, 31, P0, 580.159.04, NVIDIA H200"


class Place:
    """A place of reading whose nvidia-smi is a little shell script of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sessions: list[nvidia_smi.Session] = []

    def session(self, script: str | None, timeout: float = PATIENCE) -> nvidia_smi.Session:
        if script is not None:
            tool = self.folder / "nvidia-smi"
            tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            tool.chmod(0o755)
        prefix = ["env", f"PATH={self.folder}:/usr/bin:/bin"]
        made = nvidia_smi.Session("container 129", prefix, timeout)
        self.sessions.append(made)
        return made

    def close(self) -> None:
        for session in self.sessions:
            session.close()
            for pid in {session.pid} - {0}:
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                with suppress(OSError):
                    os.waitpid(pid, 0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def asked(session: nvidia_smi.Session, question: str = "gpus") -> nvidia_smi.Reading:
    session.ask(question)
    return session.gpus()


def number_in(file: Path) -> str:
    """The PID that a tool writes into this file when it has started."""
    assert until(lambda: file.exists() and file.read_text(encoding="ascii").endswith("\n"))
    return file.read_text(encoding="ascii").strip()


def ends(pid: int) -> bool:
    """Does this child of ours end, and is it reaped, by the code or else here?"""

    def reaped() -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:
            return True

    return until(reaped)


def test_a_session_answers_every_question_in_order(place: Place) -> None:
    session = place.session(
        f"""
case $1 in
  --query-gpu=*) echo '{GOOD}' ;;
  --query-compute-apps=*) echo 'GPU-1, 12, 20' ;;
  -q) echo 'GPU UUID : GPU-1'; echo 'Minor Number : 4' ;;
esac
"""
    )
    for question in ("gpus", "apps", "minors", "nodes", "gpus"):
        session.ask(question)
    first = session.gpus()
    assert not first.problem(holders_only=False)
    assert [(gpu.used_mib, gpu.name) for gpu in first.gpus] == [(20, "NVIDIA H200")]
    apps, problems = session.apps()
    assert [(app.pid, app.used_mib) for app in apps] == [(12, 20)]
    assert problems == []
    assert nvidia_smi.parse_minors(session.answer()[0]) == {"GPU-1": 4}
    listing, code = session.answer()
    assert code == 0
    assert "null" in listing.split()
    assert not session.gpus().problem(holders_only=False)


def test_an_answer_that_lay_there_is_not_taken_for_a_fresh_one(place: Place) -> None:
    session = place.session(f"echo '{GOOD}'")
    session.ask("gpus", "gpus")
    assert session.has_answered(2, PATIENCE)
    lay = time.monotonic()
    assert session.gpus().at < lay
    assert session.gpus().at < lay


def test_a_reading_may_be_as_old_as_its_question(place: Place) -> None:
    """A tool may read first and print late; that nothing was printed says nothing."""
    session = place.session(f"sleep 0.5; echo '{GOOD}'")
    began = time.monotonic()
    session.ask("gpus")
    asked = time.monotonic()
    time.sleep(0.2)
    assert began <= session.gpus().at <= asked


def test_a_session_asks_for_exactly_the_fields_that_are_parsed(place: Place) -> None:
    session = place.session('echo "$*"')
    session.ask("gpus")
    session.ask("apps")
    assert session.answer() == (
        f"--query-gpu={','.join(nvidia_smi.GPU_FIELDS)} --format=csv,noheader,nounits\n",
        0,
    )
    assert session.answer() == (
        "--query-compute-apps=gpu_uuid,pid,used_gpu_memory --format=csv,noheader,nounits\n",
        0,
    )


def test_a_tool_that_never_answers_is_abandoned_at_the_deadline(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = place.session("exec sleep 60", timeout=0.3)
    began = time.monotonic()
    reading = asked(session)
    assert 0.25 < time.monotonic() - began < PATIENCE
    assert reading.problem(holders_only=False)
    assert reading.problems == ["container 129: nvidia-smi did not answer within 0.3 s"]
    # From then on it says so at once, and waits for nobody.
    monkeypatch.setattr(deadline, "readable", lambda *_: pytest.fail("waited again"))
    assert asked(session).problems == reading.problems
    session.ask("apps")
    assert session.apps() == ([], reading.problems)
    # The shell is killed, though nobody waits for it.
    assert ends(session.pid)


def test_a_tool_that_hangs_after_a_good_row_gives_no_reading(place: Place) -> None:
    session = place.session(f"echo '{GOOD}'; exec sleep 60", timeout=0.3)
    reading = asked(session)
    assert reading.problem(holders_only=False)
    assert reading.gpus == []


def test_a_slow_second_answer_has_a_deadline_of_its_own(place: Place) -> None:
    session = place.session(f"echo '{GOOD}'")
    session.ask("gpus", "gpus")
    assert not session.gpus().problem(holders_only=False)
    # The time of the first answer is over since long when the second is waited for.
    session._asked[0] -= 2 * PATIENCE
    assert not session.gpus().problem(holders_only=False)


def test_a_tool_that_dies_is_a_problem_with_its_exit_code(place: Place) -> None:
    session = place.session("kill -9 $$")
    reading = asked(session)
    assert reading.problem(holders_only=False)
    assert reading.problems[0].startswith("nvidia-smi failed with exit code 137")
    # The shell outlives the tool.
    assert asked(session).problems == reading.problems


def test_a_shell_that_dies_is_a_problem_with_its_last_words(place: Place) -> None:
    session = place.session("echo 'container going down'; kill -9 $PPID")
    reading = asked(session)
    assert reading.problem(holders_only=False)
    assert reading.problems[0].startswith("container 129: cannot read there: ")
    assert asked(session).problems == reading.problems


def test_a_way_that_refuses_is_named() -> None:
    session = nvidia_smi.Session(
        "container 129", ["sh", "-c", 'echo "CT 129 not running!" >&2; exit 255'], 5
    )
    reading = asked(session)
    session.close()
    assert reading.problems == ["container 129: cannot read there: CT 129 not running!"]
    assert not session.hung


def test_a_way_that_does_not_exist_is_named() -> None:
    session = nvidia_smi.Session("container 129", ["no-such-pct", "exec", "129", "--"], 5)
    reading = asked(session)
    session.close()
    assert reading.problem(holders_only=False)
    assert reading.problems == ["there is no command 'no-such-pct' to reach container 129 with"]
    assert not session.hung


@pytest.mark.parametrize("prefix", [[], ["lxc-attach", "-n", "129", "--"]])
def test_a_reader_that_cannot_be_started_says_why(
    monkeypatch: pytest.MonkeyPatch, prefix: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawnp", refuse)
    session = nvidia_smi.Session("node1", prefix, 5)
    reading = asked(session)
    session.close()
    name = (prefix or ["sh"])[0]
    assert reading.problems == [
        f"node1: '{name}' could not be started: Resource temporarily unavailable"
    ]
    assert not session.hung


def test_no_descriptor_for_a_reader_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    pipes = [os.pipe()]

    def one() -> tuple[int, int]:
        if not pipes:
            raise OSError(errno.EMFILE, "Too many open files")
        return pipes.pop()

    monkeypatch.setattr(os, "pipe", one)
    session = nvidia_smi.Session("node1", [], 5)
    assert session.lost == "node1: 'sh' could not be started: Too many open files"
    session.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_the_way_there_prints_first_is_dropped(tmp_path: Path, place: Place) -> None:
    place.session(f"echo '{GOOD}'")
    noisy = f'echo "warning: locale"; echo "{GOOD}" >&2; PATH={tmp_path}:$PATH; exec "$@"'
    session = nvidia_smi.Session("container 129", ["sh", "-c", noisy, "pct"], 5)
    place.sessions.append(session)
    assert [len(asked(session).gpus) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_what_the_tool_prints_before_its_rows_spoils_the_reading(place: Place, stream: str) -> None:
    session = place.session(f"echo 'WARNING: infoROM is corrupted'{stream}; echo '{GOOD}'")
    reading = asked(session)
    assert reading.problem(holders_only=False)
    assert "infoROM is corrupted" in reading.problems[0]


def test_no_tool_there(place: Place) -> None:
    reading = asked(place.session(None))
    assert reading.problems == ["nvidia-smi is not installed there"]


def test_a_tool_that_exits_with_127_itself(place: Place) -> None:
    reading = asked(place.session(f"echo '{GOOD}'; exit 127"))
    assert reading.problem(holders_only=False)


def test_a_large_answer_arrives_whole(place: Place) -> None:
    rows_wanted = 20000
    session = place.session(
        f"yes 'GPU-{'1' * 80}, 12, 20' 2>&- | head -n {rows_wanted}", timeout=10
    )
    session.ask("apps")
    session.ask("gpus")
    apps, problems = session.apps()
    assert (len(apps), problems) == (rows_wanted, [])
    assert session.gpus().problem(holders_only=False)


def test_bytes_that_are_no_text_are_read_without_an_error(place: Place) -> None:
    session = place.session(f"printf '\\377\\376\\n'; echo '{GOOD}'")
    reading = asked(session)
    assert reading.problem(holders_only=False)
    assert len(reading.gpus) == 1


def test_sessions_leave_no_descriptor_behind(place: Place) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for script in (f"echo '{GOOD}'", "exec sleep 60"):
        session = place.session(script, timeout=0.2)
        asked(session)
        place.sessions.remove(session)
        session.close()
        with suppress(ProcessLookupError):
            os.killpg(session.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(session.pid, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_tool_that_never_stops_printing_is_abandoned(place: Place) -> None:
    session = place.session("exec yes noise", timeout=2)
    began = time.monotonic()
    reading = asked(session)
    assert time.monotonic() - began < PATIENCE
    assert reading.problem(holders_only=False)
    assert len(reading.problems) == 1
    assert reading.problems[0].startswith("container 129: nvidia-smi d")


def test_a_tool_that_hangs_is_killed_with_its_shell(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    session = place.session(f"echo $$ >{file}; exec sleep 60", timeout=0.5)
    session.ask("gpus")
    tool = Path("/proc") / number_in(file)
    assert session.gpus().problem(holders_only=False)
    assert until(lambda: not tool.exists())


@pytest.mark.parametrize("name", ["gpuops-rc 7", "gpuops-rc x", "gpuops-ready"])
def test_no_process_can_shift_the_answers_by_its_name(place: Place, name: str) -> None:
    session = place.session(
        f"""
case $1 in
  --query-gpu=*) echo '{GOOD}' ;;
  -q) echo '{name}'; echo 'Name : python' ;;
esac
"""
    )
    session.ask("minors")
    session.ask("gpus")
    assert session.answer() == (f"{name}\nName : python\n", 0)
    assert not session.gpus().problem(holders_only=False)


def test_thousands_of_digits_are_no_number() -> None:
    assert nvidia_smi.number("9" * 5000) is None
    assert nvidia_smi.number("143771") == 143771


@pytest.mark.parametrize(
    "row",
    [
        # memory.used is missing and a comma in the name fills the gap, so that total is read as it.
        "0, GPU-1, 00000000:00:06.0, 0, 616, 0, 31, P0, 580.159.04, Quadro, RTX",
        # One field too many before memory.used.
        "0, GPU-1, 00000000:00:06.0, 0, 76115, 143771, 616, 0, 31, P0, 580.159.04, NVIDIA H200",
        "0, GPU-1, x, 0, x, x, x, x, x, x, x",
    ],
)
def test_fields_that_are_out_of_place_are_noticed(row: str) -> None:
    assert parsed(row + "\n").problem(holders_only=False)
    assert not parsed(GOOD + "\n").problem(holders_only=False)


def test_a_closed_session_leaves_no_call_behind(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    session = place.session(f"echo $$ >{file}; exec sleep 60")
    session.ask("gpus")
    tool = Path("/proc") / number_in(file)
    place.sessions.remove(session)
    session.close()
    assert until(lambda: not tool.exists())


OTHER = GOOD.replace("0, GPU-1, 00000000:00:06", "1, GPU-2, 00000000:00:07")
USED_THEN_FREE = f"""
[ "$3$4" = -lms100 ] || exit 3
for used in 20 20 0 0 0 0; do
  echo '{GOOD}' | sed "s/ 20,/ $used,/"; echo '{OTHER}' | sed "s/ 20,/ $used,/"; sleep 0.05
done
exec sleep 60
"""


@pytest.fixture
def loops() -> Iterator[Callable[..., nvidia_smi.Loop]]:
    started: list[nvidia_smi.Loop] = []

    def start(session: nvidia_smi.Session, *uuids: str) -> nvidia_smi.Loop:
        gpus = [nvidia_smi.Gpu(index, uuid) for index, uuid in enumerate(uuids)]
        started.append(nvidia_smi.Loop(session, nvidia_smi.Reading(gpus, [])))
        return started[-1]

    yield start
    for loop in started:
        loop.close()


def test_a_loop_gives_one_whole_reading_after_the_other(
    place: Place, loops: Callable[..., nvidia_smi.Loop]
) -> None:
    loop = loops(place.session(USED_THEN_FREE), "GPU-1", "GPU-2")
    seen = []
    for _ in range(6):
        reading = loop.reading(PATIENCE)
        assert reading is not None and not reading.problem(holders_only=False)
        seen.append([gpu.used_mib for gpu in reading.gpus])
    assert seen == [[20, 20], [20, 20], *[[0, 0]] * 4]
    assert loop.reading(0.3) is None
    assert not loop.over


def test_a_line_of_a_loop_that_lay_there_is_not_taken_for_a_fresh_one(
    place: Place, loops: Callable[..., nvidia_smi.Loop], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    script = f"echo '{GOOD}'; echo '{GOOD}'; echo '{GOOD}'; >{done}; exec sleep 60"
    loop = loops(place.session(script), "GPU-1")
    assert until(done.exists)
    lay = time.monotonic()
    for _ in range(3):
        reading = loop.reading(PATIENCE)
        assert reading is not None
        assert reading.at < lay


@pytest.mark.parametrize(
    "script",
    [
        "exit 0",
        "echo 'Invalid combination of input arguments.'; exit 2",
        f"echo '{GOOD}'; echo '{GOOD}'; exec sleep 60",
        f"echo '{OTHER}'; echo '{GOOD}'; exec sleep 60",
        f"echo '{GOOD}'; exit 0",
        f"echo '{GOOD}'; echo '{OTHER}' | sed 's/ 20,/ [GPU is lost],/'; exec sleep 60",
        f"echo '{GOOD}'; echo '{OTHER}'; echo '{GOOD}'; echo 'GPU 1: lost'; exec sleep 60",
    ],
)
def test_a_loop_that_says_anything_else_is_over(
    place: Place, loops: Callable[..., nvidia_smi.Loop], script: str
) -> None:
    session = place.session(script)
    loop = loops(session, "GPU-1", "GPU-2")
    for _ in range(2):
        reading = loop.reading(PATIENCE)
        assert reading is None or [gpu.used_mib for gpu in reading.gpus] == [20, 20]
        if reading is None:
            break
    assert loop.over
    assert not session.lost, "an ordinary reading has to say what is wrong"


def test_a_loop_that_falls_silent_ends_its_session(
    place: Place, loops: Callable[..., nvidia_smi.Loop]
) -> None:
    session = place.session(f"echo '{GOOD}'; exec sleep 60")
    loop = loops(session, "GPU-1")
    assert loop.reading(PATIENCE) is not None
    assert loop.reading(0.1) is None
    assert not loop.over
    session.timeout = 0.5
    began = time.monotonic()
    assert loop.reading(60) is None
    assert loop.over
    assert time.monotonic() - began < PATIENCE
    assert session.lost == "container 129: nvidia-smi did not answer within 0.5 s"
    assert session.hung


def test_a_lost_session_starts_no_loop(
    place: Place, tmp_path: Path, loops: Callable[..., nvidia_smi.Loop]
) -> None:
    file = tmp_path / "started"
    session = place.session(f"echo $$ >>{file}; exec sleep 60", timeout=0.3)
    session.ask("gpus")
    first = number_in(file)
    assert session.gpus().problem(holders_only=False)
    assert session.lost
    assert loops(session, "GPU-1").over
    assert number_in(file) == first


def test_a_closed_loop_leaves_no_process_and_no_descriptor(place: Place, tmp_path: Path) -> None:
    session = place.session(f"echo $$ >{tmp_path}/pid; echo '{GOOD}'; exec sleep 60")
    before = len(list(Path("/proc/self/fd").iterdir()))
    loop = nvidia_smi.Loop(session, nvidia_smi.Reading([nvidia_smi.Gpu(0, "GPU-1")], []))
    assert loop.reading(PATIENCE) is not None
    tool = int((tmp_path / "pid").read_text(encoding="ascii"))
    loop.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert ends(tool)


@pytest.fixture
def in_kernel(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, str]]:
    """What is found to sit in the kernel: nothing, unless a test puts something in."""
    found: set[tuple[int, str]] = set()
    monkeypatch.setattr(nvidia_smi, "_calls_in_kernel", lambda: set(found))
    return found


class Batch:
    """Readers whose nvidia-smi is a script of the test's, which says whenever it is started."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.readers: nvidia_smi.Readers | None = None
        patch.setitem(commands.ENVIRONMENT, "PATH", f"{folder}:/usr/bin:/bin")

    def start(self, script: str, count: int, timeout: float = PATIENCE) -> nvidia_smi.Readers:
        tool = self.folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho $$ >>{self.folder}/started\n{script}\n")
        tool.chmod(0o755)
        self.targets = [{"name": f"n{each}", "smi_timeout": timeout} for each in range(count)]
        self.readers = nvidia_smi.Readers(self.targets)
        return self.readers

    def readings(self) -> list[nvidia_smi.Reading]:
        """The first reading of each target, in order."""
        assert self.readers is not None
        found = []
        for target in self.targets:
            session = self.readers.of(target)
            with suppress(nvidia_smi.SmiError):
                session.answer()
            found.append(session.gpus())
            session.drop_answers()
            commands.kill(session.pid)
            session.close()
        return found

    def nothing_once_hanging(self) -> set[tuple[int, str]]:
        """No call in the kernel, said when the script has made the file ``hangs``."""
        assert until((self.folder / "hangs").exists)
        return set()

    @property
    def starts(self) -> int:
        """How many nvidia-smi were started so far."""
        file = self.folder / "started"
        return len(file.read_text().split()) if file.exists() else 0


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    return Batch(tmp_path, monkeypatch)


@pytest.mark.usefixtures("in_kernel")
def test_the_first_reader_of_a_batch_starts_alone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_smi, "HEAD_START", PATIENCE)
    said = batch.folder / "said"
    script = f"echo start >>{said}; sleep 0.3; echo answer >>{said}; echo '{GOOD}'"
    readers = batch.start(script, 4)
    began = time.monotonic()
    readers.start_others()
    assert time.monotonic() - began < PATIENCE, "the first reading is enough"
    assert [reading.problem(holders_only=False) for reading in batch.readings()] == [""] * 4
    assert said.read_text().split()[:3] == ["start", "answer", "start"]


def test_a_batch_leaves_one_call_stuck_in_the_kernel_and_not_one_for_each(
    batch: Batch, in_kernel: set[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_smi, "HEAD_START", 0.1)
    readers = batch.start("exec sleep 60", 40, timeout=0.6)
    assert until(lambda: batch.starts == 1), "it hangs, and has not merely not begun"
    in_kernel.add((4711, "1"))
    readers.start_others()
    first, *others = batch.readings()
    assert first.problems == ["n0: nvidia-smi did not answer within 0.6 s"]
    assert [each.problems[0] for each in others] == [
        f"n{each}: an earlier nvidia-smi (pid 4711) is stuck in the driver" for each in range(1, 40)
    ]
    assert batch.starts == 1


@pytest.mark.usefixtures("in_kernel")
def test_a_first_reader_that_only_its_own_place_holds_up_delays_nobody_long(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_smi, "HEAD_START", 0.2)
    # The first has to be the one that hangs, however long its shell takes to get there.
    script = f"mkdir {batch.folder}/hangs 2>&- && exec sleep 60; echo '{GOOD}'"
    readers = batch.start(script, 3, timeout=PATIENCE)
    monkeypatch.setattr(nvidia_smi, "_calls_in_kernel", batch.nothing_once_hanging)
    began = time.monotonic()
    readers.start_others()
    assert time.monotonic() - began < PATIENCE
    readers._started[0].abandon_silent()
    found = [bool(reading.problem(holders_only=False)) for reading in batch.readings()]
    assert found == [True, False, False]


def test_whose_turn_comes_later_is_not_started_when_a_call_has_got_stuck_since(
    batch: Batch, in_kernel: set[tuple[int, str]]
) -> None:
    readers = batch.start(f"echo '{GOOD}'", 34)
    readers.start_others()
    before = readers.of(batch.targets[32])
    assert not before.lost
    assert not before.hung
    before.abandon_silent()
    before.close()
    in_kernel.add((4711, "1"))
    assert "an earlier nvidia-smi (pid 4711) is stuck" in readers.of(batch.targets[33]).lost
    batch.targets = batch.targets[:32]
    assert not any(reading.problem(holders_only=False) for reading in batch.readings())


def test_nothing_is_started_where_a_call_is_stuck_already(
    batch: Batch, in_kernel: set[tuple[int, str]]
) -> None:
    in_kernel.add((4711, "1"))
    batch.start(f"echo '{GOOD}'", 2).start_others()
    assert all("is stuck in the driver" in each.problems[0] for each in batch.readings())
    assert batch.starts == 0


@pytest.mark.usefixtures("in_kernel")
def test_the_reader_of_a_target_that_is_refused_is_closed(batch: Batch) -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    readers = batch.start(f"echo '{GOOD}'", 3)
    # Two with one name have one reader, which can be closed.
    readers._ahead[2]["name"] = "n1"
    readers.start_others()
    assert len(readers._started) == 2
    for name in ("n0", "n1", "n1", "never started"):
        readers.drop(name)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        ([{(7, "1")}], True),
        ([{(7, "1")}, set()], False),
        ([{(7, "1")}, {(8, "1")}], False),
        # The number has passed to another call: two healthy ones, one after the other.
        ([{(7, "1")}, {(7, "2")}], False),
        ([{(7, "1"), (8, "1")}, {(8, "1")}], True),
        ([set(), {(7, "1")}], False),
    ],
)
@pytest.mark.parametrize("patience", [0.15, 0.0], ids=["looks in time", "a look that took longer"])
def test_only_a_call_that_stays_in_the_kernel_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
    looks: list[set[tuple[int, str]]],
    stuck: bool,
    patience: float,
) -> None:
    left = list(looks)
    monkeypatch.setattr(
        nvidia_smi, "_calls_in_kernel", lambda: set(left.pop(0) if len(left) > 1 else left[0])
    )
    assert bool(nvidia_smi.stuck_call(patience)) is stuck


def test_a_call_is_known_by_number_and_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "/proc/7/stat": "7 (nvidia-smi) D " + " ".join(map(str, range(1, 50))),
        "/proc/8/stat": "8 (nvidia-smi) S " + " ".join(map(str, range(1, 50))),
        "/proc/9/stat": "9 (nvidia-smi-x) D " + " ".join(map(str, range(1, 50))),
        # Anybody can call a process of his so.
        "/proc/11/stat": "11 ((nvidia-smi) D) S " + " ".join(map(str, range(1, 50))),
        "/proc/12/stat": "12 (x(nvidia-smi) D) D " + " ".join(map(str, range(1, 50))),
        "/proc/13/stat": "13 (nvidia-smi) D 1",
    }
    names = ["7", "8", "9", "10", "11", "12", "13", "self"]
    monkeypatch.setattr(nvidia_smi.os, "listdir", lambda _: names)

    def opened(path: str, *_: object) -> io.BytesIO:
        if path not in stats:
            raise FileNotFoundError(path)
        return io.BytesIO(stats[path].encode())

    monkeypatch.setattr(nvidia_smi, "open", opened, raising=False)
    assert nvidia_smi._calls_in_kernel() == {(7, "19")}
