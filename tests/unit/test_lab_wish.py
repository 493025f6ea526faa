"""What `hold` understands and refuses, without a lab."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.plan import BadValue, Host, LabError, make_gpus
from tests.lab.systemd import quote, service
from tests.lab.wish import Wish, pod_place, slurm_environment, slurm_place

HOST = Host("node1", "10.77.2.1", False, make_gpus("node1", 4, 1))
UID = "0a1b2c3d-0000-4000-8000-00000000beef"


@pytest.mark.parametrize(
    ("text", "step"),
    [("6", "batch"), ("6.batch", "batch"), ("6.extern", "extern"), ("6.0", "0")],
)
def test_slurm_place(text: str, step: str) -> None:
    expected = f"system.slice/slurmstepd.scope/job_6/step_{step}/user/task_0"
    assert slurm_place(text) == expected


@pytest.mark.parametrize("text", ["", "x", "6.", "6.x", "../6", "6.0.1"])
def test_slurm_place_refuses(text: str) -> None:
    with pytest.raises(LabError):
        slurm_place(text)


def test_slurm_environment() -> None:
    assert "SLURM_STEP_ID" not in slurm_environment("6", [0])
    environment = slurm_environment("6.2", [0, 3])
    assert environment["SLURM_JOB_ID"] == "6"
    assert environment["SLURM_STEP_ID"] == "2"
    assert environment["SLURM_STEP_GPUS"] == "0,3"


def test_pod_place() -> None:
    place = pod_place(UID, "h1")
    assert "pod0a1b2c3d_0000_4000_8000_00000000beef.slice/cri-containerd-" in place
    assert place == pod_place(UID, "h1") != pod_place(UID, "h2")
    with pytest.raises(LabError):
        pod_place("beef", "h1")


def test_defaults() -> None:
    spec = Wish(gpus="0,3").spec("node1", HOST)
    assert (spec["claim"]["mib"], spec["user"], spec["minors"]) == (76115, "root", [1, 0])
    assert Wish(kind="mps").spec("node1", HOST)["claim"]["mib"] == 66
    assert Wish(kind="open-only", mib=5).spec("node1", HOST)["claim"]["mib"] == 0
    assert Wish(slurm="6").spec("node1", HOST)["user"] == "alice"
    assert Wish(slurm="6", user="root").spec("node1", HOST)["user"] == "root"


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "nonsense"},
        {"kind": "orphan", "respawn": 1},
        {"kind": "mps", "mps_client": True},
        {"slurm": "6", "pod": UID},
        {"slurm": "6", "cgroup": "a"},
        {"slurm": "x"},
        {"pod": "x"},
        {"unit": "a", "podman": "b"},
        {"unit": "a.service"},
        {"unit": "a/b"},
        {"podman": "-x"},
        {"podman": "a", "kind": "unkillable"},
        {"restart": "always"},
        {"unit": "a", "restart": "sometimes"},
        {"mib": -5},
        {"respawn": -3},
        {"name": ""},
        {"name": "a\0b"},
        {"name": "../x", "respawn": 1},
        {"name": "/x", "podman": "a"},
        {"user": ""},
        {"user": "a:b"},
        {"user_session": "../a"},
        {"cgroup": ""},
        {"opens": ""},
    ],
)
def test_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        Wish(**options).check(1)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_holders_that_cannot_be(count: int) -> None:
    with pytest.raises(BadValue):
        Wish().check(count)


@pytest.mark.parametrize(
    "options", [{}, {"mib": 0}, {"respawn": -1}, {"name": "/opt/x/python3"}, {"user": "www-data"}]
)
def test_accepted(options: dict[str, Any]) -> None:
    Wish(**options).check(1)


def test_unit_file_says_what_was_meant() -> None:
    assert quote('a "b" \\ %h $x') == '"a \\"b\\" \\\\ %%h $$x"'
    text = service("vllm", "/usr/bin/python3", ["vllm", "$x"], {"A": '{"b": "$c"}'}, "always")
    assert 'Environment="A={\\"b\\": \\"$c\\"}"' in text
    assert 'ExecStart=@/usr/bin/python3 "vllm" "$$x"' in text
    assert "Restart=always" in text
