# SPDX-License-Identifier: GPL-3.0-or-later
"""What README.md and docs/wrapper.md tell people to type does what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpuops import cli, options, runner
from gpuops.report import EXIT_CODES
from tests.lab import Lab

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## The command `gpuops`\n")[2].partition("\n## ")[0]
DETAILS = (ROOT / "docs/wrapper.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", SECTION + DETAILS, re.M | re.S)


def jobs(kind: str, body: str) -> dict[str, list[str]]:
    """The jobs of a snippet by name, each with what it types, as its own format holds them."""
    if kind == "sh":
        return {"shell": [body]}
    if kind == "cron":
        return {"cron": [line.split(None, 5)[5] for line in body.splitlines()]}
    if kind == "python":
        return {"python": [f"python - <<'END'\n{body}END"]}
    whole = yaml.safe_load(body)
    found = {}
    for name, job in whole.get("jobs", whole).items():
        steps = [step["run"] for step in job.get("steps", []) if "run" in step]
        found[f"{'github' if 'jobs' in whole else 'gitlab'} {name}"] = steps or job["script"]
    return found


JOBS = {name: lines for block in BLOCKS for name, lines in jobs(*block).items()}


def test_both_usages_are_there_in_all_forms() -> None:
    assert set(JOBS) == {
        *("shell", "cron", "github benchmark", "github nightly", "gitlab benchmark"),
        *("gitlab nightly", "python"),
    }


def test_the_page_tells_which_settings_are_switched_off_and_which_errors_hold_a_report() -> None:
    for setting in runner.UNFIT:
        assert f"`{setting.removeprefix('ANSIBLE_').lower()}`" in DETAILS
    for error in ("AnsibleError", "Interrupted", "NotCleanError", "PlanError"):
        assert error in DETAILS


def test_exit_codes_and_formats_are_those_of_the_program() -> None:
    told = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", SECTION, re.M))
    assert {word: int(code) for code, word in told.items()} == EXIT_CODES
    assert re.findall(r"^\| (\d+) \| \|", SECTION, re.M) == ["1", "130"]
    assert "or a file other than the history could not be written" in SECTION
    assert "A history that cannot be written brings a warning" in " ".join(DETAILS.split())
    for format in options.FORMATS:
        assert f"| `{format}` |" in DETAILS


def test_every_command_that_it_shows_is_one() -> None:
    shown = re.findall(r"^    gpuops (\w+)(.*?)(?: +#.*)?$", SECTION, re.M)
    assert {verb for verb, _ in shown} == set(cli.gpuops.commands) - {"completion", "report"}
    for verb, rest in shown:
        command = cli.gpuops.commands[verb]
        command.make_context(verb, rest.split(), parent=click.Context(cli.gpuops))


Job = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Job:
    """Do a job in a folder of its own, step by step until one fails, as CI systems do."""
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text(lab.paths.inventory.read_text())
    (tmp_path / "benchmark").write_text("#!/bin/sh\ntouch began\n")
    (tmp_path / "benchmark").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if "ANSIBLE" not in key}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def do(name: str) -> subprocess.CompletedProcess[str]:
        for line in JOBS[name]:
            done = lab.run(
                ["bash", "-ec", line.replace("/srv/gpuops", str(tmp_path))],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if done.returncode:
                break
        return done

    return do


@pytest.mark.lab
@pytest.mark.parametrize("name", JOBS)
def test_each_snippet_on_a_fleet_with_a_node_down(
    lab: Lab, job: Job, tmp_path: Path, name: str
) -> None:
    """Three containers on two Proxmox hosts and two bare nodes, one of them down."""
    lab.cut("node2")
    text = "\n".join(JOBS[name])
    reset = "reset" in text
    host = "ct129" if name == "python" else "ct131"
    server = lab.hold(host, gpus="0-7") if reset else None
    done = job(name)
    assert done.returncode == (0 if name == "python" else 14), done.stdout + done.stderr
    if server:
        assert not lab.alive(server["id"])[server["id"]]
    assert not (tmp_path / "began").exists(), "no benchmark beside a node that was not proved clean"
    for format, file in re.findall(r'--output (\w+)="?([^ "\n]+)', text):
        told = (tmp_path / file.replace("$GITHUB_STEP_SUMMARY", "summary.md")).read_text()
        if format == "junit":
            assert ElementTree.fromstring(told).attrib["errors"] == "1"
        elif format == "prometheus":
            families = text_string_to_metric_families(told)
            (clean,) = (each for each in families if each.name == "gpuops_run_clean")
            assert clean.samples[0].value == 0
        else:
            assert "node2" in told and "unreachable" in told


@pytest.mark.lab
@pytest.mark.parametrize("name", [name for name in JOBS if "benchmark" in "".join(JOBS[name])])
def test_the_benchmark_begins_once_all_is_clean(job: Job, tmp_path: Path, name: str) -> None:
    done = job(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "began").exists()
