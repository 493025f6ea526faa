# SPDX-License-Identifier: GPL-3.0-or-later
"""The report as a document: whatever is in it comes back, and its schema describes it."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import arguments, owners
from ansible_collections.gpuops.gpu.plugins.modules import gpu_release
from gpuops import NotCleanError, Report, ReportError, json_schema, report
from gpuops.render import FORMATS, render
from gpuops.report import EXIT_CODES, OPTIONAL, SCHEMA, SEVERITY, Host, Verdict, totals
from tests.wrapper.conftest import RECORDED, Replay

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the report, small: what matters is each field, not their number."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in OPTIONAL:
        return st.none() | anything(args[0])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(anything(args[0]), max_size=1).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), anything(args[1]), max_size=1)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{name: anything(hint) for name, hint in hints.items()})
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text(max_size=3)
    return st.booleans() if kind is bool else st.integers()


REPORTS = anything(Report).map(lambda report: replace(report, schema=SCHEMA))


def plain(name: str, verdict: Verdict) -> Host:
    return Host(name=name, verdict=verdict, changed=False, route=name, reason="why", remedy="do")


def of(*verdicts: Verdict, ended: str = "") -> Report:
    hosts = tuple(plain(f"h{n}", verdict) for n, verdict in enumerate(verdicts))
    return Report(hosts=hosts, totals=totals(hosts), ended=ended)


@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(REPORTS)
def test_a_thousand_reports_come_back_as_they_were(report: Report) -> None:
    text = report.to_json(indent=None)
    assert "\n" not in text
    assert Report.from_json(text) == report


@pytest.mark.parametrize("count", [1, 2])
def test_a_line_alone_comes_back_as_it_was(replay: Replay, count: int) -> None:
    """Of a run over one host as well, where the line is all of it."""
    run = replay("reset-held")
    line = replace(run.of(run.hosts[:1]), part_of=count)
    assert Report.from_json(line.to_json()) == line
    assert bool(line.part) == (count == 2)


@settings(suppress_health_check=list(HealthCheck))
@given(REPORTS)
def test_the_schema_accepts_every_report(report: Report) -> None:
    VALIDATOR.validate(json.loads(report.to_json()))


@pytest.mark.parametrize("name", RECORDED)
def test_real_reports_come_back_and_are_valid(replay: Replay, name: str) -> None:
    report = replay(name)
    VALIDATOR.validate(json.loads(report.to_json()))
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json().encode()) == report


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json_schema()["properties"]["schema"] == {"const": "gpuops.report/1"}


def broken(replay: Replay, change: Any) -> str:
    data = json.loads(replay("reset-held").to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(schema="gpuops.report/2"), "gpuops.report/2"),
        (lambda data: data.pop("schema"), "null"),
        (lambda data: data["hosts"][0].update(verdict="fine"), "report.hosts[0].verdict"),
        (lambda data: data["hosts"][0]["after"][1].update(used_mib="0"), "after[1].used_mib"),
        (lambda data: data["hosts"][0].update(changed=1), "changed"),
        (lambda data: data.update(totals=None), "report.totals"),
        (lambda data: data["hosts"][0].pop("verdict"), "lacks some of"),
        (lambda data: data["hosts"].append([]), "report.hosts[2]"),
    ],
)
def test_what_is_no_report_is_refused_and_says_where(
    replay: Replay, change: Any, says: str
) -> None:
    with pytest.raises(ReportError, match=says.replace("[", r"\[").replace("]", r"\]")):
        Report.from_json(broken(replay, change))
    if "lacks" not in says:
        assert not VALIDATOR.is_valid(json.loads(broken(replay, change)))


@pytest.mark.parametrize("text", ["", "[]", "{", "1", "null", '"x"'])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ReportError):
        Report.from_json(text)


@pytest.mark.parametrize("depth", [50, 500, 900, 5_000, 200_000])
@pytest.mark.parametrize(
    "place", ["{}", '{{"schema": {}}}', '{{"schema": "gpuops.report/1", "hosts": {}}}']
)
def test_what_is_nested_without_end_is_refused(place: str, depth: int) -> None:
    with pytest.raises(ReportError):
        Report.from_json(place.format("[" * depth + "]" * depth))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(seconds=10**400),
        lambda data: data["hosts"][0]["after"][0].update(used_mib=10**400),
        lambda data: data["hosts"][0]["timings"].update(total=-(10**400)),
        lambda data: data["totals"].update(killed=10**400),
    ],
)
def test_a_number_that_cannot_be_reckoned_with_is_refused(replay: Replay, change: Any) -> None:
    with pytest.raises(ReportError, match="100000"):
        Report.from_json(broken(replay, change))


@pytest.mark.parametrize(
    "started", ["0001-01-01T00:00:00+05:00", "0001-01-01", "9999-12-31T23:59:59"]
)
def test_odd_reports_can_be_shown_in_each_format(replay: Replay, started: str) -> None:
    def change(data: dict[str, Any]) -> None:
        data.update(started=started)
        data["hosts"][0]["after"][0].update(used_mib=10**308, total_mib=1)

    report = Report.from_json(broken(replay, change))
    for format in FORMATS:
        assert render(report, format)


def test_a_field_of_a_later_version_is_left_out(replay: Replay) -> None:
    text = broken(replay, lambda data: data["hosts"][0].update(moon="full"))
    assert Report.from_json(text) == replay("reset-held")


# --- what the fields are said to hold ---


def told(record: str, name: str) -> set[str]:
    """The words that are written as code in the description of a field."""
    (found,) = (
        each
        for each in ast.parse(Path(report.__file__).read_text()).body
        if isinstance(each, ast.ClassDef) and each.name == record
    )
    for each, after in pairwise(found.body):
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name:
            return set(re.findall(r"``(.+?)``", ast.unparse(after)))
    raise AssertionError(f"{record} has no {name}")


def test_the_outcomes_and_signals_are_those_of_the_collection() -> None:
    outcomes = re.search(r"and result \((V.*?)\)\.\n", gpu_release.RETURN, re.S)
    assert outcomes and told("Action", "result") == set(re.findall(r"V\((.+?)\)", outcomes[1]))
    assert told("Action", "signal") == set(arguments.RUNG["options"]["signal"]["choices"])


def test_the_owners_are_such_as_the_collection_names() -> None:
    groups = (
        "/lxc/129/ns",
        "/system.slice/slurmstepd.scope/job_6/step_batch/user/task_0",
        "/system.slice/ollama.service",
        "/user.slice/user-0.slice/session-1.scope",
        "/",
        "/elsewhere",
    )
    named = {str(owners.owner_of(f"0::{group}\n", [1], [1])) for group in groups}
    assert told("Process", "owner") == named


# --- verdict, exit code, raising ---


def test_every_verdict_has_its_exit_code() -> None:
    assert set(EXIT_CODES) == set(get_args(Verdict))
    assert [of(verdict).exit_code for verdict in SEVERITY] == [0, 10, 11, 12, 13, 14, 2]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("clean", "clean"), 0),
        (("clean", "held", "clean"), 10),
        (("held", "blocked"), 11),
        (("unreachable", "unknown", "unkillable"), 14),
        (("refused", "unreachable"), 2),
        ((), 13),
    ],
)
def test_the_worst_host_wins(verdicts: tuple[Verdict, ...], code: int) -> None:
    assert of(*verdicts).exit_code == code
    assert of(*verdicts).clean is (code == 0)


def test_what_ended_early_is_never_clean() -> None:
    assert not of("clean", ended="interrupted").clean
    assert of("clean", ended="interrupted").exit_code == 130
    assert not of("clean", ended="timed out after 5 s").clean
    assert of("clean", ended="timed out after 5 s").exit_code == 13


def test_raise_for_verdict_names_the_worst() -> None:
    of("clean").raise_for_verdict()
    with pytest.raises(NotCleanError, match=r"h2 is unknown \(and 1 more\): why; do") as caught:
        of("held", "clean", "unknown").raise_for_verdict()
    assert caught.value.report.totals.held == 1
    with pytest.raises(NotCleanError, match="no host"):
        of().raise_for_verdict()
    with pytest.raises(NotCleanError, match="timed out"):
        of("clean", ended="timed out after 5 s").raise_for_verdict()
