# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a machine with two real GPUs can show: a run about one of them spares the other's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.commit import commit
from tests.gpu import parts
from tests.gpu.parts import Bench, Played, Process


def identity(field: str) -> list[str]:
    """A field of each GPU, in the order of their indices."""
    return parts.smi(f"--query-gpu={field}").strip().splitlines()


@pytest.fixture(autouse=True)
def two(gpu: None) -> None:
    """Only where there are two."""
    if len(identity("index")) < 2:
        pytest.skip("not run: there is one GPU here")


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """What came of each state; written down at the end, where there are two."""
    made: list[str] = []
    measured_at = commit()
    yield made
    path = os.environ.get("GPU_TEST_TWO_DOC")
    if path and made:
        Path(path).write_text(document(made, measured_at), encoding="utf-8")


def document(rows: list[str], measured_at: str) -> str:
    """docs/real-two-gpus.md."""
    names, drivers = identity("name"), identity("driver_version")
    return "\n".join(
        [
            "# On two real GPUs",
            "",
            "Written by `make gpu-test` (`tests/gpu/test_two_gpus.py`) on a machine that has two;",
            "do not edit. `+` lives afterwards, `-` was ended; MiB as the real tool says it.",
            "",
            f"{len(names)} {names[0]}, driver {drivers[0]}, "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {measured_at}.",
            "",
            "| state | typed | verdict | who | MiB after |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


@pytest.fixture
def ends(rows: list[str], bystanders: list[Process], folder: Path) -> Callable[..., Played]:
    """Type a reset, and compare verdict, survivors and memory with what must come of it."""

    def reset(
        state: str,
        holders: dict[str, Process],
        *more: str,
        host: str = "gpu1",
        verdict: str = "clean",
        alive: set[str] = frozenset(),
    ) -> Played:
        played = parts.play(host, *more, folder=folder)
        used, _ = parts.truth()
        said = str(played.final["verdict"])
        fates = {name: each.alive for name, each in holders.items()}
        typed = " ".join(["-l", host, *more])
        who = ", ".join(f"{name} {'+' if lives else '-'}" for name, lives in fates.items())
        rows.append(f"| {state} | `{typed}` | {said} | {who} | {used} |")
        assert said == verdict, played.output
        assert (played.exit_code == 0) == (verdict == "clean"), played.output
        assert {name for name, lives in fates.items() if lives} == set(alive)
        assert all(each.alive for each in bystanders)
        return played

    return reset


def only(gpu: str) -> tuple[str, str]:
    """The option that limits a run to a GPU."""
    return "-e", f"gpuops_gpus={gpu}"


NAMES: dict[str, Callable[[int], str]] = {
    "index": str,
    "UUID": lambda index: identity("uuid")[index],
    "PCI address": lambda index: identity("pci.bus_id")[index],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [0, 1])
def test_the_other_gpus_holder_lives(
    name: str, index: int, bench: Bench, ends: Callable[..., Played]
) -> None:
    """One on each; a run about one of them ends that one only, however the GPU is named."""
    holders = {f"on {device}": bench.start("plain", 2, sees=(device,)) for device in (0, 1)}
    ends("one on each", holders, *only(NAMES[name](index)), alive={f"on {1 - index}"})
    assert [mib > 0 for mib in parts.truth()[0]] == [index != 0, index != 1]


@pytest.mark.parametrize("kind", ["plain", "mapped-only", "dead-main"])
def test_who_has_merely_opened_a_gpu_lives_and_is_named(
    kind: str, bench: Bench, ends: Callable[..., Played]
) -> None:
    """Without CUDA_VISIBLE_DEVICES a process has every GPU open, and uses a little of each."""
    holders = {"on 0": bench.start("plain", 2), "on 1": bench.start(kind, 2, devices=(1,))}
    state = f"one on 0, one on 1 ({kind}); both see both"
    played = ends(state, holders, *only("0"), verdict="blocked", alive={"on 1"})
    assert "left out by gpuops_gpus" in played.final["reason"]
    if kind == "plain":
        more = (*only("0"), "-e", "gpuops_baseline_mib=4")
        ends(state, holders, *more, alive={"on 1"})


def test_a_process_on_both_goes_and_the_plan_says_so(
    bench: Bench, ends: Callable[..., Played], folder: Path
) -> None:
    """It cannot be ended on one GPU alone."""
    both, other = bench.start("plain", 2, devices=(0, 1)), bench.start("plain", 1, sees=(0,))
    planned = parts.play("gpu1", *only("1"), "--check", "--diff", folder=folder)
    assert [each["node_pid"] for each in planned.release["actions"]] == [both.pid]
    assert len(planned.release["actions"][0]["gpus"]) == 2
    assert both.alive
    ends("one on both, one on 0", {"on both": both, "on 0": other}, *only("1"), alive={"on 0"})
    assert [mib > 0 for mib in parts.truth()[0]] == [True, False]


def test_all_of_them(bench: Bench, ends: Callable[..., Played]) -> None:
    """A tensor-parallel server: one worker a GPU, and one process on both."""
    server = {
        "on " + "+".join(map(str, devices)): bench.start("plain", 8, devices=devices)
        for devices in ((0,), (1,), (0, 1))
    }
    played = ends("a server on both", server, "-e", "gpuops_expected_gpus=2")
    assert parts.truth() == ([0, 0], [])
    assert "2 of 2 GPUs" in played.output


def test_one_is_missing(bench: Bench, ends: Callable[..., Played]) -> None:
    """Two where three are due is never clean, and nobody is signalled."""
    holder = {"on 1": bench.start("plain", 1, devices=(1,))}
    more = ("-e", "gpuops_expected_gpus=3")
    ends("two where three are due", holder, *more, verdict="unknown", alive={"on 1"})


def test_a_neighbour_on_the_other_gpu(bench: Bench, ends: Callable[..., Played]) -> None:
    """130 computes on GPU 1 and sees both: it blocks 129, and the driver is never blamed."""
    holders = {
        "129 on 0": bench.start("plain", 2, vmid=129),
        "130 on 1": bench.start("plain", 2, devices=(1,), vmid=130),
    }
    state = "a neighbour on 1 that sees both"
    for more, verdict in (
        (only("0"), "blocked"),
        ((*only("0"), "-e", "gpuops_baseline_mib=4"), "clean"),
        ((), "blocked"),
    ):
        played = ends(state, holders, *more, host="ct129", verdict=verdict, alive={"130 on 1"})
        assert "no process" not in played.final["reason"]
        assert ("lxc 130" in played.final["reason"]) is (verdict == "blocked")


def test_files_and_tool_agree_on_the_minor_numbers() -> None:
    """/dev/nvidiaN counts minors; both ways to learn them say the same of both GPUs."""
    tool, files = parts.minors()
    assert sorted(tool) == sorted(identity("uuid"))
    assert files in ({}, tool)
    assert all(Path(f"/dev/nvidia{minor}").exists() for minor in tool.values())
