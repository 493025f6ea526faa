"""The lab's plan: what the arguments of `up` and `hold` mean."""

from __future__ import annotations

import json

import pytest

from tests.lab.plan import (
    BadValue,
    LabError,
    Plan,
    check_name,
    container_address,
    make_gpus,
    make_plan,
    parse_cts,
    parse_gpus,
)


def test_cts_lists_ranges_and_hosts() -> None:
    assert parse_cts("129,130") == [(129, "pve1"), (130, "pve1")]
    assert parse_cts("129-131,231@pve2") == [
        (129, "pve1"),
        (130, "pve1"),
        (131, "pve1"),
        (231, "pve2"),
    ]
    assert parse_cts("none") == []


@pytest.mark.parametrize(
    "text", ["12", "129,129", "x", "131-129", "129@node1", "129@pve0", "70000"]
)
def test_cts_refuses(text: str) -> None:
    with pytest.raises(LabError):
        parse_cts(text)


def test_gpus() -> None:
    assert parse_gpus("0-2,7", 8) == [0, 1, 2, 7]
    assert parse_gpus("all", 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["8", "", "a", "0-9", "-1"])
def test_gpus_refuses(text: str) -> None:
    with pytest.raises(LabError):
        parse_gpus(text, 8)


def test_default_plan() -> None:
    plan = make_plan()
    assert [host.name for host in plan.hosts] == ["pve1", "node1"]
    assert [(c.name, c.address) for c in plan.containers()] == [
        ("ct129", "10.77.1.129"),
        ("ct130", "10.77.1.130"),
    ]
    assert plan.host("ct130").name == "pve1"
    assert plan.hosts[1].address == "10.77.2.1"


def test_a_number_used_twice_gets_the_host_in_its_name() -> None:
    plan = make_plan(cts="129,129@pve2,231@pve2", nodes=0)
    assert [c.name for c in plan.containers()] == ["ct129", "ct129-pve2", "ct231"]


def test_addresses_do_not_collide() -> None:
    wanted = [(vmid, pve) for pve in (1, 2, 3) for vmid in range(100, 3000)]
    addresses = {container_address(vmid, pve) for vmid, pve in wanted}
    assert len(addresses) == len(wanted)
    assert not addresses & {f"10.77.0.{n}" for n in range(256)}
    assert not addresses & {f"10.77.2.{n}" for n in range(256)}


def test_gpus_are_the_same_each_time_and_differ_between_hosts() -> None:
    assert make_gpus("pve1", 8) == make_gpus("pve1", 8)
    uuids = {gpu.uuid for host in ("pve1", "pve2", "node1") for gpu in make_gpus(host, 16)}
    assert len(uuids) == 48
    assert len({gpu.bus_id for gpu in make_gpus("pve1", 16)}) == 16


def test_minor_shift() -> None:
    assert [gpu.minor for gpu in make_gpus("pve1", 4, 1)] == [1, 2, 3, 0]


def test_plan_survives_json() -> None:
    plan = make_plan(cts="129,231@pve2", own_nodes="129", minor_shift=2)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    "options",
    [
        {"delay_ms": -5},
        {"minor_shift": -3},
        {"minor_shift": 8},
        {"minor_shift": 250},
        {"gpus": 4, "minor_shift": 4},
        {"gpus": 0},
        {"nodes": -1},
    ],
)
def test_numbers_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(BadValue):
        make_plan(**options)  # type: ignore[arg-type]


def test_own_nodes_must_exist() -> None:
    with pytest.raises(LabError):
        make_plan(own_nodes="200")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 60])
def test_lab_names_that_cannot_be(name: str) -> None:
    with pytest.raises(LabError):
        check_name(name)


def test_systemd_and_unprivileged_are_added_to_the_others() -> None:
    plan = make_plan(cts="129,131", nodes=1, systemd="131,133@pve2,node9", unprivileged="129,132")
    kinds = {c.name: (c.systemd, c.unprivileged) for c in plan.containers()}
    assert kinds == {
        "ct129": (False, True),
        "ct131": (True, False),
        "ct132": (False, True),
        "ct133": (True, False),
    }
    nodes = [(host.name, host.systemd) for host in plan.hosts if not host.proxmox]
    assert nodes == [("node1", False), ("node9", True)]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_node_with_systemd_alone_needs_no_proxmox_host() -> None:
    plan = make_plan(cts="none", nodes=0, systemd="node9")
    assert [host.name for host in plan.hosts] == ["node9"]


@pytest.mark.parametrize("text", ["node0", "node201", "pve1", "12"])
def test_systemd_refuses(text: str) -> None:
    with pytest.raises(LabError):
        make_plan(systemd=text)
