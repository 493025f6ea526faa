"""A plan can be made, read back, and not be altered in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.plugin_utils import plans
from ansible_collections.gpuops.gpu.plugins.plugin_utils.routes import RouteError

ENTRY = {"node_pid": 16, "start": 5039, "name": "python3", "gpus": [0, 1]}
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {
            "node_pid": st.integers(2, 4_194_304),
            "start": st.integers(0, 2**40),
            "name": st.text(max_size=15),
            "gpus": st.lists(st.integers(0, 15), max_size=8),
        }
    ),
    max_size=4,
)
HOSTS = st.dictionaries(st.text(min_size=1, max_size=10), ENTRIES, min_size=1, max_size=3)


def written(path: Path, plan: Any) -> Path:
    path.write_text(plan if isinstance(plan, str) else json.dumps(plan), encoding="utf-8")
    return path


@given(hosts=HOSTS)
def test_what_was_planned_is_read_back(
    hosts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("plan") / "plan.json", plans.make(hosts))
    for name, entries in hosts.items():
        assert plans.read(path, name) == entries


@given(hosts=HOSTS, pid=st.integers(2, 4_194_304))
def test_a_holder_that_was_added_by_hand_is_noticed(
    hosts: dict[str, Any], pid: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = plans.make(hosts)
    name = next(iter(hosts))
    plan["hosts"][name].append(dict(ENTRY, node_pid=pid))
    path = written(tmp_path_factory.mktemp("plan") / "plan.json", plan)
    with pytest.raises(RouteError, match="was altered after it was made"):
        plans.read(path, name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no plan"),
        ("[]", "is no plan"),
        ("{}", "is no plan"),
        ('{"hosts": 5, "digest": "x"}', "was altered"),
        (plans.make({"ct130": [ENTRY]}), "says nothing of this host"),
        ('{"hosts": ' + "[" * 100_000, "is no plan"),
        ({"hosts": None, "digest": plans.digest(None)}, "says nothing of this host"),  # type: ignore[arg-type]
        # No list would be no limit.
        (plans.make({"ct129": None}), "no list of holders"),
        (plans.make({"ct129": {"node_pid": 7}}), "no list of holders"),
        (plans.make({"ct129": [7]}), "no list of holders"),
    ],
)
def test_what_is_no_plan_for_this_host_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        plans.read(written(tmp_path / "plan.json", content), "ct129")


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RouteError, match=r"nowhere\.json cannot be read \(No such file"):
        plans.read(tmp_path / "nowhere.json", "ct129")
