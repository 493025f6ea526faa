# SPDX-License-Identifier: GPL-3.0-or-later
"""What docs/wrapper.md tells people to type does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpuops import cli, options
from gpuops.report import EXIT_CODES
from tests.lab import Lab

TEXT = (Path(__file__).parents[2] / "docs/wrapper.md").read_text(encoding="utf-8")
BLOCKS = [(kind, body) for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)]


def commands(kind: str, body: str) -> Iterator[str]:
    """The lines of a snippet that call gpuops, as its own format holds them."""
    if kind == "yaml":
        for job in (yaml.safe_load(body).get("jobs") or yaml.safe_load(body)).values():
            for step in [*job.get("steps", []), *job.get("script", [])]:
                line = step if isinstance(step, str) else step.get("run", "")
                if line.startswith("gpuops"):
                    yield line
    elif kind == "cron":
        yield from (line.split(None, 5)[5] for line in body.splitlines())
    elif kind == "sh":
        yield from body.splitlines()


SNIPPETS = [line for kind, body in BLOCKS for line in commands(kind, body)]


def test_all_four_kinds_are_there() -> None:
    assert [kind for kind, _ in BLOCKS] == ["sh", "yaml", "yaml", "cron", "python"]
    assert len(SNIPPETS) == 4


def test_exit_codes_and_formats_are_those_of_the_program() -> None:
    told = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", TEXT, re.M))
    assert {word: int(code) for code, word in told.items()} == EXIT_CODES
    for format in options.FORMATS:
        assert f"| `{format}` |" in TEXT


def test_every_command_that_it_shows_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.findall(r"^    gpuops (\w+)(.*?)(?: +#.*)?$", TEXT, re.M)
    assert {verb for verb, _ in shown} == set(cli.gpuops.commands) - {"completion"}
    for verb, rest in shown:
        if verb == "report":  # its file would have to be there
            continue
        command = cli.gpuops.commands[verb]
        command.make_context(verb, rest.split(), parent=click.Context(cli.gpuops))


@pytest.fixture
def place(lab: Lab, tmp_path: Path) -> Callable[[str], Any]:
    """Type a line in a folder of its own, where one of five machines is down."""
    lab.cut("node2")
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text(lab.paths.inventory.read_text())
    environment = {key: value for key, value in os.environ.items() if "ANSIBLE" not in key}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return lab.run(
            ["bash", "-ec", line.replace("/srv/gpuops", str(tmp_path))],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.lab
@pytest.mark.parametrize("line", SNIPPETS)
def test_each_snippet_on_a_fleet_with_a_node_down(
    lab: Lab, place: Callable[[str], Any], tmp_path: Path, line: str
) -> None:
    server = lab.hold("ct131", gpus="0-7") if "reset" in line else None
    done = place(line)
    assert done.returncode == 14, done.stdout + done.stderr
    if server:
        assert not lab.alive(server["id"])[server["id"]]
    for format, name in re.findall(r'--output (\w+)="?([^ "]+)', line):
        file = tmp_path / name.replace("$GITHUB_STEP_SUMMARY", "summary.md")
        text = file.read_text()
        if format == "junit":
            assert ElementTree.fromstring(text).attrib["errors"] == "1"
        elif format == "prometheus":
            (clean,) = (
                each
                for each in text_string_to_metric_families(text)
                if each.name == "gpuops_run_clean"
            )
            assert clean.samples[0].value == 0
        else:
            assert "node2" in text and "unreachable" in text
