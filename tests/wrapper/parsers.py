# SPDX-License-Identifier: GPL-3.0-or-later
"""Each rendering read by a parser of its own format, and compared with its report."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import jsonschema
import pytest
from markdown_it import MarkdownIt
from prometheus_client.parser import text_string_to_metric_families

from gpuops import Report, ReportError, json_schema
from gpuops.render import render
from gpuops.text import plain

SCHEMA = jsonschema.Draft202012Validator(json_schema())


def parse(report: Report, format: str) -> None:
    """Render a report, and let the format's parser find in it what the report says.

    :raises AssertionError: it is not there, or (each parser's own error) it cannot be read.
    """
    PARSERS[format](render(report, format), report)


def json_of(text: str, report: Report) -> None:
    SCHEMA.validate(json.loads(text))
    assert Report.from_json(text) == report


def jsonl_of(text: str, report: Report) -> None:
    lines = text.splitlines()
    for line in lines:
        SCHEMA.validate(json.loads(line))
    each = [Report.from_json(line) for line in lines]
    count = max(report.part_of, len(lines))
    assert each == [replace(report.of([host]), part_of=count) for host in report.hosts]
    names = {host.name for host in report.hosts}
    if len(lines) > 1 and len(names) == count:
        assert Report.from_json(text) == replace(report.of(report.hosts), part_of=0)
        assert Report.from_json(text.encode()) == Report.from_json(text)
    elif len(lines) > 1:
        with pytest.raises(ReportError, match=r"hosts of its run|more than once"):
            Report.from_json(text)


def cells(text: str) -> list[list[str]]:
    """The rows of the first table of a Markdown text, as a reader sees them."""
    rows: list[list[str]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in pairwise(tokens):
        if before.type == "tr_open":
            rows.append([])
        if before.type == "td_open":
            rows[-1].append("".join(child.content for child in token.children or []))
            assert all(child.type in ("text", "text_special") for child in token.children or [])
        if before.type == "table_close":
            break
    return [row for row in rows if row]


def markdown_of(text: str, report: Report) -> None:
    rows = cells(text)
    assert sorted(row[0] for row in rows) == sorted(
        " ".join(host.name.split()) for host in report.hosts
    )
    assert all(len(row) == 6 for row in rows)
    for host in report.hosts:
        told = [f"{host.verdict} ({host.part})"] if host.part else [host.verdict]
        assert told in [row[1:2] for row in rows]


# What Jenkins' schema of JUnit files allows of what we write.
JUNIT = {
    "testsuites": ({"name", "tests", "failures", "errors", "time"}, ["testsuite"]),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        ["testcase"],
    ),
    "testcase": ({"name", "classname", "time"}, ["skipped", "error", "failure", "system-out"]),
    "skipped": ({"message"}, []),
    "error": ({"type", "message"}, []),
    "failure": ({"type", "message"}, []),
    "system-out": (set[str](), []),
}


def junit_of(text: str, report: Report) -> None:
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    for element in root.iter():
        attributes, children = JUNIT[element.tag]
        assert set(element.attrib) <= attributes, element.tag
        places = [children.index(child.tag) for child in element]
        assert places == sorted(places), f"the order of what is in {element.tag}"
    suite = root[0]
    cases = suite.findall("testcase")
    assert len(cases) == len(report.hosts) + len(report.skipped) == int(suite.attrib["tests"])
    for case, host in zip(cases, report.hosts, strict=False):
        assert case.attrib["name"].endswith(f"({host.part})" if host.part else host.name)
        bad = [*case.findall("failure"), *case.findall("error")]
        assert [each.attrib["type"] for each in bad] == (
            [] if host.verdict == "clean" else [host.verdict]
        )
        assert float(case.attrib["time"]) == pytest.approx(host.timings.get("total", 0.0), abs=1e-2)
    failed = [case for case in cases if case.findall("failure")]
    errors = [case for case in cases if case.findall("error")]
    assert (len(failed), len(errors)) == (
        int(suite.attrib["failures"]),
        int(suite.attrib["errors"]),
    )
    assert len([case for case in cases if case.findall("skipped")]) == len(report.skipped)


def prometheus_of(text: str, report: Report) -> None:
    families = {each.name: each for each in text_string_to_metric_families(text)}
    verdicts = {
        sample.labels["host"]: sample.labels["verdict"]
        for sample in families["gpuops_verdict"].samples
        if sample.value
    }
    assert verdicts == {
        host.name: host.verdict
        for host in report.hosts
        if not (host.only_gpus and host.verdict == "clean")
    }
    assert {
        (sample.labels["host"], sample.labels["gpus"]): sample.value
        for sample in families["gpuops_some_gpus_clean"].samples
    } == {
        (host.name, ",".join(host.only_gpus)): host.verdict == "clean"
        for host in report.hosts
        if host.only_gpus
    }
    if report.clean and any(host.only_gpus for host in report.hosts):
        assert "gpuops_run_clean" not in families
    else:
        assert families["gpuops_run_clean"].samples[0].value == report.clean
    for sample in families["gpuops_gpu_used_bytes"].samples:
        host = next(each for each in report.hosts if each.name == sample.labels["host"])
        used = {(str(gpu.index), gpu.uuid): gpu.used_mib for gpu in host.after}
        assert sample.value == (used[sample.labels["gpu"], sample.labels["uuid"]] or 0) * 1024**2


class Page(HTMLParser):
    """A strict reader: every tag is closed, in order; counts cells, and keeps the texts."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def cells(self, kind: str = "") -> int:
        """How many GPUs are drawn, without the legend."""
        return sum(
            tag == "i" and "data-legend" not in attrs and f"gpu {kind}" in (attrs["class"] or "")
            for tag, attrs in self.tags
        )


def html_of(text: str, report: Report) -> None:
    page = Page(text)
    gpus = [gpu for host in report.hosts for gpu in (*host.before, *host.after)]
    assert page.cells() == len(gpus)
    assert page.cells("zero") == sum(gpu.used_mib == 0 for gpu in gpus)
    assert page.cells("none") == sum(gpu.used_mib is None for gpu in gpus)
    if report.part:  # in the title and in the heading
        assert sum(word.endswith(f" ({plain(report.part)})") for word in page.words) >= 2
    for host in report.hosts:
        title = f"{host.name}: {host.verdict}" + (f" ({host.part})" if host.part else "")
        assert plain(title) in [attrs.get("title") for _, attrs in page.tags]
        assert not host.part or f" ({plain(host.part)})" in page.words
    allowed = {"html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "h3", "p"}
    allowed |= {"span", "b", "i", "section", "div", "small", "article", "header", "br"}
    assert {tag for tag, _ in page.tags} <= allowed | {"ul", "li", "code"}
    for _, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on")]
        assert {attrs.get("src"), attrs.get("href")} <= {None, "data:,"}


PARSERS = {
    "html": html_of,
    "json": json_of,
    "jsonl": jsonl_of,
    "markdown": markdown_of,
    "junit": junit_of,
    "prometheus": prometheus_of,
}
