# SPDX-License-Identifier: GPL-3.0-or-later
"""Every rendering, read by the parser of its own format; also when names try to be markup."""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt
from prometheus_client.parser import text_string_to_metric_families

from gpuops import Report, UsageError
from gpuops.render import FORMATS, render, write
from gpuops.report import totals
from tests.wrapper.conftest import RECORDED, Replay
from tests.wrapper.parsers import PARSERS, cells, html_of, parse
from tests.wrapper.test_report import REPORTS

# A command line that would be markup in each of the formats.
EVIL = "`x` | </td></script><b>&amp; \\ \" ' *a* [b](c) ]]> \x07\x1b[31m ${{ 7*7 }} {{ 7*7 }}\n# d"


@pytest.mark.parametrize("format", PARSERS)
@pytest.mark.parametrize("name", RECORDED)
def test_each_format_parses_and_says_the_same(replay: Replay, name: str, format: str) -> None:
    report = replay(name)
    parse(report, format)


def evil(replay: Replay) -> Report:
    """A report in which the neighbours chose their names with care."""
    report = replay("reset-blocked")
    host = report.hosts[0]
    process = replace(host.killed[0].process, command=EVIL, user=EVIL, owner=EVIL, name=EVIL)
    bad = replace(
        host,
        reason=EVIL,
        remedy=EVIL,
        holders=(process,),
        killed=(replace(host.killed[0], process=process),),
        spared=(replace(host.spared[0], process=process, reason=EVIL),),
    )
    return replace(report, hosts=(bad,), warnings=(EVIL,), totals=totals([bad]))


@pytest.mark.parametrize("format", PARSERS)
def test_a_command_line_that_is_markup_stays_text(replay: Replay, format: str) -> None:
    report = evil(replay)
    parse(report, format)


def test_markup_is_shown_as_it_was_typed(replay: Replay) -> None:
    row = cells(render(evil(replay), "markdown"))[0]
    seen = " ".join(EVIL.split()).replace("\x07", "�").replace("\x1b", "�")
    assert row[5] == f"{seen}; to do: {seen}"
    case = ElementTree.fromstring(render(evil(replay), "junit"))[0][0]
    assert case[0].attrib["message"].startswith("`x` | </td></script><b>&amp; ")


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(REPORTS)
def test_random_reports_parse(report: Report) -> None:
    for format in PARSERS:
        text = render(report, format)
        if format in ("json", "jsonl"):
            PARSERS[format](text, report)
        elif format == "junit":
            ElementTree.fromstring(text)
        elif format == "html":
            html_of(text, report)
        elif format == "prometheus":
            list(text_string_to_metric_families(text))
        else:
            MarkdownIt("commonmark").enable("table").parse(text)


def test_every_format_is_tested() -> None:
    assert set(FORMATS) == set(PARSERS)


# --- files ---


def test_a_file_is_there_in_full_or_not_at_all(replay: Replay, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    write(replay("reset-held"), "json", path)
    assert Report.from_json(path.read_text()) == replay("reset-held")
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    mask = os.umask(0o022)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_is_no_file_is_written_into(replay: Replay, tmp_path: Path) -> None:
    """A pipe by its name, one by its descriptor, and a device."""
    report = replay("reset-held")
    text = render(report, "json")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(report, "json", pipe)
    assert pipe.is_fifo() and os.read(reads, 1 << 16).decode() == text
    os.close(reads)
    reads, writes = os.pipe()
    write(report, "json", Path(f"/dev/fd/{writes}"))
    assert os.read(reads, 1 << 16).decode() == text
    os.close(reads)
    os.close(writes)
    master, slave = os.openpty()
    write(report, "json", Path(os.ttyname(slave)))
    assert os.read(master, 10) == text.encode()[:1] + b"\r\n" + text.encode()[2:9]
    assert Path(os.ttyname(slave)).is_char_device()
    os.close(master)
    os.close(slave)


def test_a_reader_that_has_left_is_no_error(replay: Replay) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    write(replay("reset-held"), "json", Path(f"/dev/fd/{writes}"))
    os.close(writes)


def test_a_file_that_is_open_is_written_into(replay: Replay, tmp_path: Path) -> None:
    with (tmp_path / "log").open("a+") as log:
        print("begun", file=log, flush=True)
        write(replay("reset-held"), "json", Path(f"/dev/fd/{log.fileno()}"))
        print("done", file=log, flush=True)
        log.seek(0)
        assert log.read() == f"begun\n{render(replay('reset-held'), 'json')}done\n"


def test_a_link_to_what_is_open_is_written_into(replay: Replay, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    link, other = tmp_path / "out.log", tmp_path / "logs/link"
    with (tmp_path / "log").open("a+") as log:
        other.symlink_to(f"/dev/fd/{log.fileno()}")
        link.symlink_to("logs/link")
        print("begun", file=log, flush=True)
        write(replay("reset-held"), "json", link)
        log.seek(0)
        assert log.read() == f"begun\n{render(replay('reset-held'), 'json')}"
    assert link.is_symlink() and other.is_symlink()


def test_a_link_to_standard_output_is_written_into(replay: Replay, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(replay("reset-blocked").to_json())
    link = tmp_path / "x.log"
    link.symlink_to("/dev/fd/1")
    argv = [sys.executable, "-m", "gpuops", "report", str(tmp_path / "old.json")]
    for mode in ("a+", "w+"):  # as after >> and >
        with (tmp_path / "all").open(mode) as out:
            out.truncate(0)
            print("begun", file=out, flush=True)
            subprocess.run([*argv, "--output", f"json={link}"], stdout=out, check=False)
            out.seek(0)
            assert out.read().startswith(f"begun\n{render(replay('reset-blocked'), 'json')}ct129 ")
    assert link.is_symlink()


def test_links_in_a_circle_do_no_harm(replay: Replay, tmp_path: Path) -> None:
    for name, target in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(target)
    write(replay("reset-held"), "json", tmp_path / "a")
    assert Report.from_json((tmp_path / "a").read_text()) == replay("reset-held")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a folder below /dev")
def test_a_file_below_dev_is_replaced(replay: Replay, tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        files = (Path(folder, "out.json"), Path(f"/dev/..{tmp_path}/out.json"))
        for file in files:
            for name in ("reset-held", "reset-clean"):
                write(replay(name), "json", file)
                assert Report.from_json(file.read_text()) == replay(name)


def test_of_a_link_the_target_is_replaced(replay: Replay, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, before in (("there/old.json", "old"), ("there/new.json", "")):
        target, link = tmp_path / name, tmp_path / Path(name).name
        if before:
            target.write_text(before)
        link.symlink_to(target)
        write(replay("reset-held"), "json", link)
        assert link.is_symlink()
        assert Report.from_json(target.read_text()) == replay("reset-held")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a device")
def test_a_full_device_says_so(replay: Replay, tmp_path: Path) -> None:
    full = tmp_path / "full"
    os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    with pytest.raises(UsageError, match="full cannot be written"):
        write(replay("reset-held"), "json", full)
    assert full.is_char_device()


def test_a_file_that_cannot_be_written_says_so(replay: Replay) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write(replay("reset-held"), "json", Path("/proc/self/out.json"))


def test_bytes_that_are_no_text_do_not_stop_a_file(replay: Replay, tmp_path: Path) -> None:
    report = replace(replay("reset-held"), warnings=("a\udcffb",))
    for format in PARSERS:
        write(report, format, tmp_path / format)


def test_an_unknown_format_is_refused(replay: Replay) -> None:
    with pytest.raises(UsageError, match="write one of json"):
        render(replay("reset-held"), "pdf")


def test_bars_of_nothing_read(replay: Replay) -> None:
    text: Any = render(replay("status-unknown"), "markdown")
    assert "unknown" in text


# --- the page in a real browser ---

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = Path(__file__).parents[2] / "build" / "wrapper"


def sized(replay: Replay, hosts: int) -> Report:
    """A report over so many hosts: held, blocked, unkillable, unreachable, and the rest clean."""
    names = ("reset-held", "reset-blocked", "reset-unkillable", "reset-unreachable")
    some = [host for name in names for host in replay(name).hosts]
    every = [replace(some[n % len(some)], name=f"host{n:03}") for n in range(min(hosts, 8))]
    clean = replay("reset-clean").hosts[0]
    eight = replace(clean, before=clean.before * 4, after=clean.after * 4)
    every += [replace(eight, name=f"host{n:03}") for n in range(len(every), hosts)]
    return replace(replay("reset-held"), hosts=tuple(every), totals=totals(every))


def browse(page: Path, *options: str) -> tuple[str, str]:
    """What Chromium makes of a page: its document and what it complained of."""
    assert CHROMIUM
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    argv += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", *options]
    done = subprocess.run([*argv, page.as_uri()], capture_output=True, text=True, timeout=60)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def first_pixel(png: Path) -> tuple[int, int, int]:
    """The pixel in the upper left corner: the page's background."""
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    place, packed = 8, b""
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        packed += data[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += size + 12
    red, green, blue = zlib.decompress(packed)[1:4]
    return red, green, blue


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("hosts", [1, 8, 500])
def test_the_page_in_a_browser(replay: Replay, tmp_path: Path, hosts: int) -> None:
    report = sized(replay, hosts)
    page = tmp_path / "report.html"
    write(report, "html", page)
    dom, complaints = browse(page, "--dump-dom")
    assert complaints == ""
    gpus = sum(len(host.before) + len(host.after) for host in report.hosts)
    assert (
        len(re.findall(r'<i class="gpu \w+"(?! data-legend| style="--full:.6" data)', dom)) == gpus
    )
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = SHOTS / f"{hosts}-hosts.png"
    browse(page, "--window-size=1200,1500", f"--screenshot={shot}")
    assert first_pixel(shot) == (255, 255, 255)
    if hosts == 8:
        dark = SHOTS / "8-hosts-dark.png"
        scheme = "--blink-settings=preferredColorScheme=0"
        browse(page, scheme, "--window-size=1200,1500", f"--screenshot={dark}")
        assert max(first_pixel(dark)) < 40


Colour = tuple[float, ...]


def printed(page: Path) -> list[tuple[Colour, str]]:
    """What Chromium puts on paper: each glyph, with its colour."""
    paper = page.with_suffix(".pdf")
    browse(page, "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    data = paper.read_bytes()
    glyphs: list[tuple[Colour, str]] = []
    for stream in re.finditer(rb"stream\r?\n", data):
        try:
            drawn = zlib.decompressobj().decompress(data[stream.end() :]).decode("latin-1")
        except zlib.error:
            continue
        now: Colour = ()
        for red, green, blue, text in re.findall(rf"{3 * '([.0-9]+) '}rg|<(\w+)> Tj", drawn):
            if text:
                glyphs += [(now, glyph) for glyph in re.findall("....", text)]
            else:
                now = (float(red), float(green), float(blue))
    return glyphs


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_on_paper(replay: Replay, tmp_path: Path) -> None:
    """Black or dark on white, and nothing is cut off: on paper no pointer shows the rest."""
    page = tmp_path / "report.html"
    report = replay("reset-blocked")
    rung = replace(report.hosts[0].rungs[0], name="Q" * 30)
    host = replace(report.hosts[0], name="W" * 200, rungs=(rung,) * 12)
    write(replace(report, hosts=(host,)), "html", page)
    glyphs = printed(page)
    colours = Counter(colour for colour, _ in glyphs)
    assert colours[0, 0, 0] > 400
    assert colours.pop((1, 1, 1), 0) <= 1, "the mark in a cell that is filled"
    assert all(min(colour) < 0.3 for colour in colours)
    (_, names), (_, rungs) = Counter(glyph for _, glyph in glyphs).most_common(2)
    assert names == 2 * 200, "in the fleet and above its own part"
    assert rungs == 12 * 30


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_names_that_are_markup_do_nothing_in_a_browser(replay: Replay, tmp_path: Path) -> None:
    page = tmp_path / "evil.html"
    report = evil(replay)
    bad = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    hosts = (replace(report.hosts[0], reason=bad, name=bad),)
    write(replace(report, hosts=hosts), "html", page)
    dom, complaints = browse(page, "--dump-dom")
    assert complaints == ""
    assert "<title>GPUs: reset ct129: blocked</title>" in dom
    assert "<script" not in dom and "<img" not in dom
