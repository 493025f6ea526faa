"""What `fault` understands and refuses, without a lab."""

from __future__ import annotations

import pytest

from tests.lab import smi
from tests.lab.faults import check
from tests.lab.plan import BadValue, Host, make_gpus

HOST = Host("pve1", "10.77.0.11", True, make_gpus("pve1", 8))


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("[N/A]", "memory.used [N/A]"),
        ("[GPU is lost]", "memory.used [GPU is lost]"),
        ("-1", "memory.used -1"),
        ("memory.used [N/A]", "memory.used [N/A]"),
        ("gpu_uuid x", "uuid x"),
        ("used_memory [N/A]", "used_gpu_memory [N/A]"),
        ("pstate ", "pstate "),
    ],
)
def test_a_value_is_of_memory_used_unless_it_names_a_field(value: str, meant: str) -> None:
    assert check(HOST, "", "value", value) == meant


def test_a_fault_of_a_value_is_what_the_tool_prints() -> None:
    for given in ("[N/A]", "gpu_uuid x", "clocks.sm 7"):
        name, _, text = check(HOST, "", "value", given).partition(" ")
        gpu = smi.GpuView(0, 0, "", "00000000:00:00.0", "", values={name: text})
        query = [f"--query-gpu={name}", "--format=csv,noheader,nounits"]
        assert smi.render(query, smi.View([gpu], [])).text == f"{text}\n"


@pytest.mark.parametrize(
    ("kind", "value"),
    [("slow-release", "0"), ("stuck", "512"), ("ghost", "1 900"), ("wrong-count", "8")],
)
def test_numbers(kind: str, value: str) -> None:
    assert check(HOST, "3", kind, value) == value


@pytest.mark.parametrize(
    ("gpu", "kind", "value"),
    [
        ("", "nonsense", ""),
        ("", "stuck", ""),
        ("", "stuck", "abc"),
        ("", "stuck", "-5"),
        ("", "stuck", "1.5"),
        ("", "stuck", "9" * 5000),
        ("", "slow-release", "-5"),
        ("", "smi-slow", "soon"),
        ("", "wrong-count", "-1"),
        ("", "wrong-count", "9"),
        ("", "wrong-count", "99"),
        ("", "ghost", "abc"),
        ("", "ghost", "1"),
        ("", "ghost", "0 900"),
        ("", "value", "bogus.field xx"),
        ("", "value", "bogus.field"),
        ("", "value", "memory.used"),
        ("", "smi-error", "nonsense"),
        ("", "busy", "5"),
        ("", "gpu-lost", ""),
        ("8", "busy", ""),
        ("x", "busy", ""),
        ("\u00b2", "busy", ""),
    ],
)
def test_refused_in_one_line(gpu: str, kind: str, value: str) -> None:
    with pytest.raises(BadValue) as caught:
        check(HOST, gpu, kind, value)
    assert "\n" not in str(caught.value)
