# SPDX-License-Identifier: GPL-3.0-or-later
"""Where to act for a host; what cannot be is refused, with what to write instead."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.plugin_utils import routes

KNOWN = {"pve1", "pve2", "ct129", "node1"}
CARRIERS = {"pve1", "pve2"}


def route(name: str, **variables: Any) -> dict[str, Any]:
    return routes.route(name, variables, KNOWN, CARRIERS)


def place(vmid: int) -> dict[str, Any]:
    return {"proxmox_vmid": vmid, "gpuops_proxmox_host": "pve1"} if vmid else {}


def target(**different: Any) -> dict[str, Any]:
    return {
        "name": "node1",
        "vmid": 0,
        "expected_gpus": 0,
        "gpus": [],
        "baseline_mib": 0,
        "protect": [],
        "scope": "node",
        "mps": "keep",
        "holders_only": False,
        "smi_timeout": 10.0,
        **different,
    }


def test_a_node_is_acted_on_itself() -> None:
    assert route("node1") == {"route": "node", "acting": "node1", "target": target()}


def test_a_container_is_acted_on_from_its_host() -> None:
    assert route("ct129", proxmox_vmid=129, gpuops_proxmox_host="pve1") == {
        "route": "container",
        "acting": "pve1",
        "target": target(name="ct129", vmid=129, scope="container"),
    }


def test_the_dynamic_inventory_names_the_host_too() -> None:
    dynamic = route("ct129", proxmox_vmid=129, proxmox_node="pve2")
    assert dynamic["acting"] == "pve2"
    both = route("ct129", proxmox_vmid=129, proxmox_node="pve2", gpuops_proxmox_host="pve1")
    assert both["acting"] == "pve1"


def test_a_host_that_carries_containers_is_left_out() -> None:
    assert route("pve1")["route"] == "carrier"
    assert route("pve1")["acting"] == "pve1"


def test_a_container_may_itself_be_named_among_the_carriers() -> None:
    found = routes.route(
        "ct129", {"proxmox_vmid": 129, "gpuops_proxmox_host": "pve1"}, KNOWN, {"ct129", "pve1"}
    )
    assert (found["route"], found["acting"]) == ("container", "pve1")


@pytest.mark.parametrize("vmid", [None, 0, "0"])
def test_no_number_is_no_container(vmid: Any) -> None:
    assert route("node1", proxmox_vmid=vmid)["route"] == "node"
    # A number that got lost must not turn the container's run into one over a whole machine.
    with pytest.raises(routes.RouteError, match="but proxmox_vmid is not"):
        route("node1", proxmox_vmid=vmid, gpuops_proxmox_host="pve1")


@pytest.mark.parametrize("vmid", [100, "100", 129, 999_999_999, "999999999"])
def test_numbers_of_containers(vmid: Any) -> None:
    found = route("ct129", proxmox_vmid=vmid, gpuops_proxmox_host="pve1")
    assert found["target"]["vmid"] == int(vmid)


def test_what_the_modules_need_to_know() -> None:
    found = route(
        "node1",
        gpuops_expected_gpus="8",
        gpuops_gpus="0, 3,GPU-1",
        gpuops_baseline_mib=4,
        gpuops_protect=["sshd", "dcgm*"],
        gpuops_protect_more="mine",
        gpuops_smi_timeout="2.5",
        unrelated=object(),
    )
    assert found["target"] == target(
        expected_gpus=8,
        gpus=["0", "3", "GPU-1"],
        baseline_mib=4,
        protect=["sshd", "dcgm*", "mine"],
        smi_timeout=2.5,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], []),
        (3, ["3"]),
        (0, ["0"]),
        ("3", ["3"]),
        ("3, 4", ["3", "4"]),
        ([0, " GPU-1 "], ["0", "GPU-1"]),
        ((1, 2), ["1", "2"]),
    ],
)
def test_lists(value: Any, words: list[str]) -> None:
    assert route("node1", gpuops_gpus=value)["target"]["gpus"] == words


@pytest.mark.parametrize("value", [None, "", " , ", [""], ["3", " "]])
@pytest.mark.parametrize("key", ["gpuops_gpus", "gpuops_protect", "gpuops_protect_more"])
def test_what_holds_a_run_back_and_names_nothing_is_no_licence_to_widen_it(
    key: str, value: Any
) -> None:
    with pytest.raises(routes.RouteError, match=f"{key} is given and names nothing"):
        route("node1", **{key: value})


@pytest.mark.parametrize("value", [None, "", " , ", [""], ["3", " "]])
@pytest.mark.parametrize("key", ["gpuops_rungs", "gpuops_plan"])
def test_nor_is_what_names_the_rungs_or_the_plan(key: str, value: Any) -> None:
    with pytest.raises(routes.RouteError, match=f"{key} is given and names nothing"):
        routes.named({key: value}, key)


@pytest.mark.parametrize(
    "key", ["gpuops_scope", "gpuops_expected_gpus", "gpuops_verify_retries", "proxmox_vmid"]
)
def test_an_empty_word_is_not_the_same_as_none(key: str) -> None:
    with pytest.raises(routes.RouteError, match=f"{key} is ''; write"):
        route("node1", **{key: ""})


def test_who_wants_nobody_protected_says_so_with_a_list() -> None:
    found = route("node1", gpuops_protect=[], gpuops_protect_more=[" x "])
    assert found["target"]["protect"] == ["x"]


WHOLE = "write a whole number of zero or more"
SECONDS = "write a number of seconds above zero"
UNSOUND = [
    ({"proxmox_vmid": 99, "gpuops_proxmox_host": "pve1"}, "proxmox_vmid is 99", "100 or more"),
    ({"proxmox_vmid": "ct129"}, "proxmox_vmid is 'ct129'", WHOLE),
    ({"proxmox_vmid": -1}, "proxmox_vmid is '-1'", WHOLE),
    ({"proxmox_vmid": 129.0}, "proxmox_vmid is '129.0'", WHOLE),
    ({"proxmox_vmid": True}, "proxmox_vmid is 'True'", WHOLE),
    ({"proxmox_vmid": [129]}, "proxmox_vmid is '[129]'", WHOLE),
    ({"proxmox_vmid": "\u0661\u0662\u0669"}, "proxmox_vmid is", WHOLE),
    (
        {"proxmox_vmid": 10**9, "gpuops_proxmox_host": "pve1"},
        "proxmox_vmid is 1000000000",
        "number",
    ),
    ({"proxmox_vmid": 129}, "gpuops_proxmox_host is not", "write the inventory name"),
    (
        {"proxmox_vmid": 129, "gpuops_proxmox_host": ""},
        "gpuops_proxmox_host is not",
        "write the inventory name of the Proxmox host",
    ),
    (
        {"proxmox_vmid": 129, "gpuops_proxmox_host": "pve9"},
        "gpuops_proxmox_host is 'pve9'",
        "add it there",
    ),
    ({"gpuops_expected_gpus": "eight"}, "gpuops_expected_gpus is 'eight'", WHOLE),
    ({"gpuops_expected_gpus": -8}, "gpuops_expected_gpus is '-8'", WHOLE),
    ({"gpuops_baseline_mib": "4 MiB"}, "gpuops_baseline_mib is '4 MiB'", WHOLE),
    ({"gpuops_baseline_mib": 1.5}, "gpuops_baseline_mib is '1.5'", WHOLE),
    ({"gpuops_smi_timeout": 0}, "gpuops_smi_timeout is '0'", SECONDS),
    ({"gpuops_smi_timeout": -1}, "gpuops_smi_timeout is '-1'", SECONDS),
    ({"gpuops_smi_timeout": "soon"}, "gpuops_smi_timeout is 'soon'", SECONDS),
    ({"gpuops_smi_timeout": "inf"}, "gpuops_smi_timeout is 'inf'", SECONDS),
    ({"gpuops_smi_timeout": float("nan")}, "gpuops_smi_timeout is 'nan'", SECONDS),
    ({"gpuops_gpus": {"a": 1}}, "gpuops_gpus is", "write a list"),
    ({"gpuops_gpus": 1.5}, "gpuops_gpus is '1.5'", "write a list"),
    ({"gpuops_protect": {"sshd"}}, "gpuops_protect is", "write a list"),
    ({"gpuops_protect_more": {"a": 1}}, "gpuops_protect_more is", "write a list"),
    ({"gpuops_verify_retries": 0}, "gpuops_verify_retries is '0'", "whole number of 1 or more"),
    ({"gpuops_verify_retries": "x"}, "gpuops_verify_retries is 'x'", "whole number of 1 or more"),
    ({"gpuops_verify_delay": -1}, "gpuops_verify_delay is '-1'", SECONDS),
]


@pytest.mark.parametrize(("variables", "wrong", "instead"), UNSOUND)
def test_what_cannot_be_is_refused_with_what_to_write(
    variables: dict[str, Any], wrong: str, instead: str
) -> None:
    with pytest.raises(routes.RouteError) as error:
        route("ct129", **variables)
    assert wrong in str(error.value)
    assert instead in str(error.value)
    assert "\n" not in str(error.value)


LADDER: dict[str, Any] = {
    "gpuops_ladder": [{"name": "terminate"}, {"name": "kill"}, {"name": "fuser"}],
    "gpuops_profiles": {"gentle": ["terminate", "kill", "fuser"], "now": ["fuser", "kill"]},
    "gpuops_profile": "gentle",
}


@pytest.mark.parametrize(
    ("different", "names"),
    [
        ({}, ["terminate", "kill", "fuser"]),
        ({"gpuops_profile": "now"}, ["kill", "fuser"]),
        ({"gpuops_rungs": []}, ["terminate", "kill", "fuser"]),
        ({"gpuops_rungs": "fuser,terminate"}, ["terminate", "fuser"]),
        ({"gpuops_rungs": ["kill"]}, ["kill"]),
    ],
)
def test_rungs_in_the_order_of_the_ladder(different: dict[str, Any], names: list[str]) -> None:
    assert [rung["name"] for rung in routes.rungs({**LADDER, **different})] == names


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"gpuops_profile": "fast"}, "gpuops_profile is 'fast'; write one of gentle, now"),
        ({"gpuops_profile": None}, "gpuops_profile is 'None'; write one of gentle, now"),
        ({"gpuops_rungs": "kil"}, "there is no rung 'kil'; write some of terminate, kill, fuser"),
        ({"gpuops_rungs": ["kill", "reset"]}, "there is no rung 'reset'"),
        ({"gpuops_profiles": {"gentle": ["nuke"]}}, "there is no rung 'nuke'"),
        ({"gpuops_ladder": []}, "gpuops_ladder has no rung; write one of each name"),
        ({"gpuops_ladder": [{"name": "kill"}] * 2}, "gpuops_ladder has two rungs called 'kill'"),
    ],
)
def test_rungs_that_do_not_exist_are_refused(different: dict[str, Any], message: str) -> None:
    with pytest.raises(routes.RouteError, match="write") as error:
        routes.rungs({**LADDER, **different})
    assert message in str(error.value)
    # The route is refused too, so that nobody is reached before.
    with pytest.raises(routes.RouteError):
        route("node1", **{**LADDER, **different})


def test_the_defaults_of_the_roles_are_sound(root: Any) -> None:
    variables: dict[str, Any] = {}
    for role in ("gpu_route", "gpu_release", "gpu_verify"):
        text = (root / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8")
        variables.update(yaml.safe_load(text) or {})
    found = route("node1", **variables)
    assert found["route"] == "node"
    assert "nvidia-persistenced" in found["target"]["protect"]
    for profile in variables["gpuops_profiles"]:
        names = variables["gpuops_profiles"][profile]
        quits = routes.rungs({**variables, "gpuops_profile": profile, "gpuops_mps": "quit"})
        assert [rung["name"] for rung in quits] == names
        # A rung that could select nobody is not climbed: each is an execution.
        keeps = routes.rungs({**variables, "gpuops_profile": profile})
        assert [rung["name"] for rung in keeps] == [name for name in names if name != "mps"]


def test_mps_is_kept_or_told_to_quit_and_nothing_else() -> None:
    assert route("node1", gpuops_mps="quit")["target"]["mps"] == "quit"
    with pytest.raises(routes.RouteError, match="gpuops_mps is 'kill'; write one of keep, quit"):
        route("node1", gpuops_mps="kill")


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(),
    st.binary(max_size=4),
    st.sampled_from(["pve1", "129", "0", "1e3", " 8", "GPU-1,2"]),
)
nested = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
ANY = (
    "proxmox_vmid",
    "gpuops_expected_gpus",
    "gpuops_gpus",
    "gpuops_baseline_mib",
    "gpuops_protect",
    "gpuops_protect_more",
    "gpuops_smi_timeout",
    "gpuops_verify_retries",
    "gpuops_verify_delay",
    "gpuops_rungs",
)
PLAIN = ("gpuops_proxmox_host", "proxmox_node", "gpuops_profile")
mostly = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(ANY, nested), **dict.fromkeys(PLAIN, values)}
)


@given(mostly, st.booleans())
def test_whatever_is_written_there_is_a_route_or_a_sentence(
    variables: dict[str, Any], ladder: bool
) -> None:
    if ladder:
        variables = {**LADDER, **variables}
    try:
        found = route("ct129", **variables)
    except routes.RouteError as error:
        advice = ("write", "add it there", "name something", "name others", "name some of")
        assert any(words in str(error) for words in advice)
        return
    assert found["route"] in ("node", "container")
    assert found["acting"] in KNOWN
    made = found["target"]
    assert (found["route"] == "container") is (made["vmid"] in routes.VMIDS)
    assert made["expected_gpus"] >= 0
    baseline = made["baseline_mib"]
    assert all(
        mib >= 0 for mib in (baseline.values() if isinstance(baseline, dict) else [baseline])
    )
    assert 0 < made["smi_timeout"] < float("inf")
    assert all(isinstance(word, str) for word in made["gpus"] + made["protect"])


@given(st.sampled_from(ANY), nested)
def test_one_odd_variable_at_a_time(key: str, value: Any) -> None:
    try:
        found = route("ct129", **{"proxmox_vmid": 129, "gpuops_proxmox_host": "pve1", key: value})
    except routes.RouteError as error:
        assert key in str(error) or key in ("gpuops_rungs", "gpuops_baseline_mib")
    else:
        assert found["acting"] in ("pve1", "ct129")


@pytest.mark.parametrize(
    "variables",
    [
        {"proxmox_vmid": 129, "gpuops_proxmox_host": ["pve1"]},
        {"proxmox_vmid": 129, "gpuops_proxmox_host": {"pve1": 1}},
        {"proxmox_vmid": "9" * 5000},
        {"gpuops_smi_timeout": 10**400},
        {**LADDER, "gpuops_profile": ["now"]},
        {**LADDER, "gpuops_profiles": 5},
        {**LADDER, "gpuops_profiles": {1: ["kill"]}},
        {**LADDER, "gpuops_profiles": {"gentle": 5}},
        {**LADDER, "gpuops_ladder": "kill"},
        {**LADDER, "gpuops_ladder": [{"select": "devices"}]},
        {**LADDER, "gpuops_ladder": 5},
    ],
)
def test_values_of_the_wrong_kind_are_refused_too(variables: dict[str, Any]) -> None:
    with pytest.raises(routes.RouteError):
        route("ct129", **variables)


def test_a_rung_named_by_a_number_is_climbed() -> None:
    ladder = [{"name": 1}, {"name": 2}]
    variables = {"gpuops_ladder": ladder, "gpuops_profiles": {"p": ["2"]}, "gpuops_profile": "p"}
    assert routes.rungs(variables) == [{"name": 2}]


def test_the_message_names_the_variable_that_is_wrong() -> None:
    with pytest.raises(routes.RouteError, match="proxmox_node is 'pve9'"):
        route("ct129", proxmox_vmid=129, proxmox_node="pve9")


@pytest.mark.parametrize(
    ("vmid", "scope"),
    [
        (0, "everything"),
        (0, "node"),
        (0, "job:6"),
        (0, "user:ada"),
        (129, "everything"),
        (129, "container"),
    ],
)
def test_scopes(vmid: int, scope: str) -> None:
    found = route("ct129", **place(vmid), gpuops_scope=scope)
    assert found["target"]["scope"] == scope


@pytest.mark.parametrize(
    ("vmid", "scope"),
    [
        (0, "container"),
        (0, "job"),
        (0, "job:"),
        (0, "job:*"),
        (0, "job:abc"),
        (0, "job:6 7"),
        (0, "everything:1"),
        (0, "node:"),
        (0, "all"),
        (129, "node"),
        (129, "user:ada"),
        (129, "job:6"),
        (129, ":"),
        (129, ["container"]),
    ],
)
def test_scopes_that_cannot_be(vmid: int, scope: Any) -> None:
    with pytest.raises(routes.RouteError, match=r"gpuops_scope is .*; write one of everything, "):
        route("ct129", **place(vmid), gpuops_scope=scope)


def test_a_baseline_for_each_gpu() -> None:
    found = route("node1", gpuops_baseline_mib={0: "4", "GPU-1": 5})
    assert found["target"]["baseline_mib"] == {"0": 4, "GPU-1": 5}
    with pytest.raises(routes.RouteError, match="write a whole number"):
        route("node1", gpuops_baseline_mib={0: "4 MiB"})


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (True, True),
        ("yes", True),
        ("True", True),
        (1, True),
        (False, False),
        ("no", False),
        ("", False),
        (None, False),
        (0, False),
    ],
)
def test_holders_alone_decide_only_where_that_is_said(value: Any, meaning: bool) -> None:
    assert route("node1", gpuops_holders_only=value)["target"]["holders_only"] is meaning


@pytest.mark.parametrize("value", ["maybe", 2, ["yes"], {}])
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    with pytest.raises(routes.RouteError, match=r"gpuops_holders_only is .*; write true or false"):
        route("node1", gpuops_holders_only=value)


def test_a_wrong_baseline_of_one_gpu_names_the_variable() -> None:
    with pytest.raises(routes.RouteError, match=r"gpuops_baseline_mib\[0\] is '4 MiB'"):
        route("node1", gpuops_baseline_mib={0: "4 MiB"})


def test_the_names_are_those_of_the_roles_and_playbooks() -> None:
    roles = Path(__file__).parents[2] / "roles"
    documented = {
        name
        for path in roles.glob("*/meta/argument_specs.yml")
        for name in yaml.safe_load(path.read_text())["argument_specs"]["main"].get("options", {})
        if name.startswith("gpuops_")
    }
    assert documented | {"gpuops_hosts", "gpuops_plan_is_made"} == routes.NAMES


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpuops_gpu", "did you mean gpuops_gpus"),
        ("gpuops_scop", "did you mean gpuops_scope"),
        ("gpuops_rung", "did you mean gpuops_rungs"),
        ("gpuops_qqqqqqqqqqqqqqqq", "leave it out"),
        ("gpuops_force", "leave it out"),
        ("gpuops_dryrun", "leave it out"),
        ("gpuops_x", "leave it out"),
    ],
)
def test_a_mistyped_name_is_no_variable_that_is_not_set(name: str, hint: str) -> None:
    with pytest.raises(routes.RouteError, match=f"no variable {name}; {hint}"):
        route("node1", **{name: 4})
    assert route("node1", proxmox_nodes=4, other_gpuops_gpu=4)


INVENTORY = {"ct129", "pve1", "gpu_nodes", "2001:db8::21"}


@pytest.mark.parametrize(
    "limit",
    [
        *(None, "ct129", "ct129,pve1", "all:!ct129", "all,!ct129", "gpu_nodes:&ct129"),
        *("ct*", "~ct1.*", "!ct*", "2001:db8::21", ["ct129", "pve1"], "gpu_nodes[0:2]"),
    ],
)
def test_limits_that_are_there_or_patterns(limit: Any) -> None:
    routes.check_limit(limit, INVENTORY, "-l")


@pytest.mark.parametrize(
    "limit",
    [
        *("ct999", "ct129,ct999", "ct129:ct999", "ct129, ct999 ", "all,!ct999", "all:!ct999"),
        *("gpu_nodes:&ct999", "gpu_nodes,&ct999", ["ct129", "ct999"], "CT129"),
    ],
)
def test_a_limit_that_is_not_there(limit: Any) -> None:
    wanted = r"no host or group .(ct999|CT129). in the inventory; correct gpuops_hosts"
    with pytest.raises(routes.RouteError, match=wanted):
        routes.check_limit(limit, INVENTORY, "gpuops_hosts")


@pytest.mark.parametrize("limit", ["", [], ",", ":", " , ,", [""], ["", ","]])
def test_a_limit_that_means_every_host(limit: Any) -> None:
    with pytest.raises(routes.RouteError, match="means every host"):
        routes.check_limit(limit, {"ct129"}, "-l")


def test_a_limit_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.retry"
    file.write_text("ct129\n\n pve1 \n", encoding="utf-8")
    routes.check_limit(f"@{file}", INVENTORY, "-l")
    file.write_text("ct129\nct999\n", encoding="utf-8")
    with pytest.raises(routes.RouteError, match="no host or group 'ct999'"):
        routes.check_limit(f"@{file}", INVENTORY, "-l")
    for empty in ("", "\n", " \n\n"):
        file.write_text(empty, encoding="utf-8")
        with pytest.raises(routes.RouteError, match="means every host"):
            routes.check_limit(f"@{file}", INVENTORY, "-l")
        with pytest.raises(routes.RouteError, match="means every host"):
            routes.check_limit(f"@{file},@{file}", INVENTORY, "-l")
    with pytest.raises(routes.RouteError, match="cannot be read; correct it"):
        routes.check_limit(f"@{tmp_path}/none", INVENTORY, "-l")


@pytest.mark.parametrize("value", [[["python3"]], False, True, [True], [None], [{"a": 1}], 1.5])
@pytest.mark.parametrize("key", ["gpuops_protect_more", "gpuops_gpus", "gpuops_protect"])
def test_a_list_of_anything_but_words_is_none(key: str, value: Any) -> None:
    with pytest.raises(routes.RouteError, match=f"{key} is .*; write a list"):
        route("node1", **{key: value})


def test_a_range_of_gpus() -> None:
    assert route("node1", gpuops_gpus="0-2,5")["target"]["gpus"] == ["0", "1", "2", "5"]
    assert route("node1", gpuops_gpus=["7-7", "GPU-1-2"])["target"]["gpus"] == ["7", "GPU-1-2"]
    with pytest.raises(routes.RouteError, match="write the smaller number first"):
        route("node1", gpuops_gpus="3-0")


@pytest.mark.parametrize("wait", ["nan", -5, 0, "inf", True, "soon"])
def test_a_wait_that_never_ends_or_never_begins(wait: Any) -> None:
    rung = {"name": "t", "select": "workloads", "signal": "TERM", "wait": wait}
    variables = {"gpuops_ladder": [rung], "gpuops_profiles": {"p": ["t"]}, "gpuops_profile": "p"}
    with pytest.raises(routes.RouteError, match=r"wait of the rung .t. is .* seconds above zero"):
        routes.rungs(variables)


@pytest.mark.parametrize(
    "different",
    [
        {"gpuops_rungs": "mps"},
        {"gpuops_profiles": {"p": []}},
        {"gpuops_ladder": []},
        {"gpuops_ladder": None},
    ],
)
def test_no_rung_at_all_is_said(different: dict[str, Any]) -> None:
    ladder = [{"name": "mps", "select": "mps"}, {"name": "kill"}]
    variables = {
        "gpuops_ladder": ladder,
        "gpuops_profiles": {"p": ["kill"]},
        "gpuops_profile": "p",
        **different,
    }
    with pytest.raises(routes.RouteError, match=r"no rung|no list of rungs"):
        routes.rungs(variables)
