# SPDX-License-Identifier: GPL-3.0-or-later
"""The product on a real GPU, one state that operators meet after the other.

The playbook is run as they run it. What nvidia-smi says afterwards decides, and a stopwatch that
reads NVML in a process of its own says how long the driver itself took.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu import parts, report
from tests.gpu.parts import Bench, Process

# Looks for our own readers: while they were told by asking for their parent afterwards, about one
# look in seventy had one that had ended by then.
LOOKS = 150


@dataclass(frozen=True)
class Scenario:
    """One state of the GPU, and what must come of it.

    ``setup`` returns those that must be ended and those that must survive, which allocate ``gib``;
    ``rung`` is the last one climbed, or several of which any will do; ``missing`` says what of this
    machine's own lacks for it.
    """

    name: str
    setup: Callable[[Bench], tuple[list[Process], list[Process]]]
    rung: str
    gib: float = 8
    host: str = "gpu1"
    verdict: str = "clean"
    inside: int = 0
    more: tuple[str, ...] = ()
    says: str = ""
    missing: Callable[[], str] = lambda: ""


def holds(
    kind: str, gib: float = 1.0, count: int = 1, vmid: int = 0
) -> Callable[[Bench], tuple[list[Process], list[Process]]]:
    """Holders of one kind, all to be ended."""

    def setup(bench: Bench) -> tuple[list[Process], list[Process]]:
        victims = [bench.start(kind, gib, vmid=vmid, wait=False) for _ in range(count)]
        for victim in victims:
            bench.settle(victim, vmid)
        return victims, []

    return setup


def importer(bench: Bench) -> tuple[list[Process], list[Process]]:
    """The exporter has died; whoever has mapped its memory keeps it."""
    exporter = bench.start("ipc-exporter", 20)
    left = bench.start("ipc-importer", environment={"CUDA_HOLDER_IPC": exporter.ready})
    exporter.end()
    return [left], []


def exporter_and_importer(bench: Bench) -> tuple[list[Process], list[Process]]:
    """Both alive."""
    exporter = bench.start("ipc-exporter", 8)
    return [
        exporter,
        bench.start("ipc-importer", environment={"CUDA_HOLDER_IPC": exporter.ready}),
    ], []


def only_neighbours(bench: Bench) -> tuple[list[Process], list[Process]]:
    """A holder in container 130."""
    return [], [bench.start("plain", 2, vmid=130)]


def mine_and_neighbours(bench: Bench) -> tuple[list[Process], list[Process]]:
    """Holders in 129 and in 130."""
    return [bench.start("plain", 4, vmid=129)], [bench.start("plain", 2, vmid=130)]


def nobody(bench: Bench) -> tuple[list[Process], list[Process]]:
    """The monitors are there as always, and nobody else."""
    return [], []


def busy(bench: Bench) -> tuple[list[Process], list[Process]]:
    """Kernels on every multiprocessor, back to back; the tool must have noticed."""
    victim = bench.start("busy", 8)
    parts.wait_for("it is busy", lambda: parts.utilisation() > 95)
    return [victim], []


def pytorch(bench: Bench) -> tuple[list[Process], list[Process]]:
    """A tensor of 8 GiB, and a matrix product before, as a server's warm-up."""
    ready = bench.ready_file()
    code = (
        "import os, sys, time, torch\n"
        "kept = torch.zeros(2 << 30, dtype=torch.float32, device='cuda')\n"
        "x = torch.rand(2048, 2048, device='cuda'); (x @ x).sum().item()\n"
        "open(sys.argv[1] + '.part', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "time.sleep(3600)\n"
    )
    argv = [parts.torch_python(), "-c", code, str(ready)]
    return [bench.launch("PyTorch, 8 GiB", argv, ready)], []


SCENARIOS = [
    Scenario("plain, 1 GiB", holds("plain", 1), "terminate", gib=1),
    Scenario("plain, 20 GiB", holds("plain", 20), "terminate", gib=20),
    Scenario("plain, 130 GiB", holds("plain", 130), "terminate", gib=130),
    Scenario(
        "plain, 20 GiB, profile now",
        holds("plain", 20),
        "kill",
        gib=20,
        more=("-e", "gpuops_profile=now"),
    ),
    Scenario("eight processes, 2 GiB each", holds("plain", 2, 8), "terminate", gib=16),
    Scenario("ignores TERM, 8 GiB", holds("ignore-term", 8), "kill"),
    Scenario("stopped, 8 GiB", holds("stopped", 8), "kill"),
    Scenario("orphan under another name, 8 GiB", holds("orphan", 8), "terminate"),
    Scenario("main thread dead, 8 GiB", holds("dead-main", 8), "terminate"),
    Scenario("descriptors closed, mapped, 8 GiB", holds("mapped-only", 8), "terminate/targeted"),
    Scenario("IPC importer, exporter dead, 20 GiB", importer, "terminate", gib=20),
    Scenario("IPC exporter and importer, 8 GiB", exporter_and_importer, "terminate"),
    Scenario("busy at 100 %, 8 GiB", busy, "terminate"),
    Scenario("PyTorch, 8 GiB", pytorch, "terminate", missing=parts.no_torch),
    Scenario("device only opened, 0 MiB", holds("open-only"), "fuser", gib=0),
    Scenario(
        "container 129, from the host", holds("plain", 8, vmid=129), "terminate", host="ct129"
    ),
    Scenario(
        "container 129, mapped only, from the host",
        holds("mapped-only", 8, vmid=129),
        "terminate/targeted",
        host="ct129",
    ),
    Scenario("container 129, from inside", holds("plain", 8, vmid=129), "terminate", inside=129),
    Scenario(
        "neighbour 130 only, for 129 from the host",
        only_neighbours,
        "",
        gib=2,
        host="ct129",
        verdict="blocked",
        says="lxc 130",
    ),
    Scenario(
        "129 and neighbour 130, for 129 from the host",
        mine_and_neighbours,
        "terminate",
        gib=6,
        host="ct129",
        verdict="blocked",
        says="lxc 130",
    ),
    Scenario(
        "neighbour 130 only, from inside 129",
        only_neighbours,
        "",
        gib=2,
        inside=129,
        verdict="blocked",
        says="no process visible in this container",
    ),
    Scenario(
        "container 130, for the bare node",
        only_neighbours,
        "",
        gib=2,
        verdict="blocked",
        says="lxc 130",
    ),
    Scenario("monitors only, 0 MiB", nobody, "", gib=0),
]


def play_only_if(figures: report.Figures, name: str, why_not: str) -> None:
    """Skip what cannot be played on this machine, and have the document say so."""
    if why_not:
        figures.not_played[name] = why_not
        pytest.skip(f"not played: {why_not}")


def judge(
    scenario: Scenario,
    figures: report.Figures,
    watcher: parts.Watcher,
    bystanders: list[Process],
    victims: list[Process],
    survivors: list[Process],
    folder: Path,
) -> None:
    """Run the playbook, keep the figures, then compare with what must come of it."""
    used, _ = parts.truth()
    assert used[0] >= scenario.gib * 1024, f"the scenario holds only {used[0]} MiB"
    seen = parts.look(129 if scenario.host == "ct129" else 0)
    watcher.watch(victims)
    vmid = scenario.inside
    played = parts.play(
        scenario.host if not vmid else "gpu1", *scenario.more, vmid=vmid, folder=folder
    )
    used_after, apps_after = parts.truth()
    harmed = [each.label for each in bystanders + survivors if not each.alive]
    row = report.Row(scenario.name, played, seen, used[0], used_after[0], apps_after)
    row.measure(watcher, victims)
    row.harmed = harmed
    row.left = [each.label for each in victims if each.alive]
    row.expected = scenario.verdict
    figures.rows.append(row)
    assert row.verdict == scenario.verdict, f"{row.verdict}: {row.reason}\n{played.output}"
    assert not row.false_clean, f"clean, but nvidia-smi says {used_after} {apps_after}"
    assert not harmed, f"harmed: {harmed}\n{played.output}"
    assert not row.left, f"still alive: {row.left}\n{played.output}"
    assert (played.exit_code == 0) == (scenario.verdict == "clean"), played.output
    assert row.rung in scenario.rung.split("/"), f"ended at rung '{row.rung}'\n{played.output}"
    assert scenario.says in row.reason, row.reason
    assert not row.readers_seen, f"our own reader in the result: {row.readers_seen}"
    if scenario.verdict == "clean":
        # It is an average over a while, but it must not stay where it was.
        parts.wait_for("utilisation is back at 0", lambda: parts.utilisation() == 0, 5)
    if scenario.verdict == "clean" and row.ratio is not None:
        assert row.ratio <= report.MUST, f"{row.second_zero} s against {row.driver_seconds} s"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_scenario(
    scenario: Scenario,
    bench: Bench,
    figures: report.Figures,
    watcher: parts.Watcher,
    bystanders: list[Process],
    folder: Path,
) -> None:
    """From this state to the verdict that is due, and nobody else harmed."""
    play_only_if(figures, scenario.name, parts.too_small(scenario.gib) or scenario.missing())
    victims, survivors = scenario.setup(bench)
    judge(scenario, figures, watcher, bystanders, victims, survivors, folder)


@pytest.mark.parametrize("told_to_quit", [False, True], ids=["without quit", "with quit"])
def test_mps(
    told_to_quit: bool,
    bench: Bench,
    figures: report.Figures,
    watcher: parts.Watcher,
    bystanders: list[Process],
    folder: Path,
    tmp_path: Path,
) -> None:
    """MPS keeps memory of its own: it is named and spared, or told to quit where asked for."""
    mps = parts.Mps(tmp_path)
    name = "MPS with a client, 4 GiB, " + ("gpuops_mps=quit" if told_to_quit else "without quit")
    try:
        mps.start()
    except (OSError, subprocess.CalledProcessError) as error:
        play_only_if(figures, name, f"MPS cannot be started here: {error}")
    try:
        client = bench.start("plain", 4, environment=mps.environment)
        service = parts.wait_for("MPS runs", lambda: len(found := mps.find()) > 1 and found)
        for process in service:
            note(figures, process.label, process.pid)
        if told_to_quit:
            scenario = Scenario(
                name,
                nobody,
                "mps/terminate",
                gib=4,
                more=("-e", "gpuops_mps=quit"),
            )
            judge(scenario, figures, watcher, bystanders, [client, *service], [], folder)
            return
        scenario = Scenario(
            name,
            nobody,
            "terminate",
            gib=4,
            verdict="blocked",
            says="nvidia-cuda-mps",
        )
        judge(scenario, figures, watcher, bystanders, [client], service, folder)
    finally:
        mps.close()


def test_check_mode_touches_nobody(
    bench: Bench,
    figures: report.Figures,
    watcher: parts.Watcher,
    bystanders: list[Process],
    folder: Path,
) -> None:
    """It names exactly whom it would signal, and all live on."""
    victim = bench.start("plain", 2)
    played = parts.play("gpu1", "--check", "--diff", folder=folder)
    actions = played.release["actions"]
    assert [(each["node_pid"], each["result"]) for each in actions] == [
        (victim.pid, "would be sent")
    ]
    assert all(each.alive for each in [victim, *bystanders])


def test_the_node_program_directly(
    bench: Bench, figures: report.Figures, watcher: parts.Watcher, bystanders: list[Process]
) -> None:
    """Without Ansible: one rung, sent to one Python over standard input."""
    play_only_if(figures, "the node program without Ansible, 20 GiB", parts.too_small(20))
    victim = bench.start("plain", 20)
    watcher.watch([victim])
    rung = {"name": "kill", "select": "workloads", "signal": "KILL", "wait": 30}
    began = time.monotonic()
    answer = parts.node_program("release", {"targets": [parts.target()], "rung": rung})
    seconds = time.monotonic() - began
    used, apps = parts.truth()
    result = answer["hosts"]["direct"]
    assert result["verdict"] == "clean", result["reason"]
    figures.direct = {
        "seconds": seconds,
        "second_zero": result["timings"].get("second_zero"),
        "driver": (watcher.zero_after(began) or 0) - watcher.died(victim),
        "scan": result["scan"],
    }
    assert not any(used) and not apps and not victim.alive
    assert all(each.alive for each in bystanders)


def note(figures: report.Figures, kind: str, pid: int) -> None:
    """What the scan sees of a process, and which devices it has open and mapped."""
    seen = parts.look()
    everyone = seen["holders"] + seen["spared"]
    row = next((each for each in everyone if each["node_pid"] == pid), None)
    figures.kinds[kind] = dict(row or {}, workload=bool(row and parts.is_workload(row)))
    figures.kinds[kind]["files"] = report.device_files(pid)


def test_who_is_who(bench: Bench, figures: report.Figures, bystanders: list[Process]) -> None:
    """What the scan sees of each kind, and whether it takes it for one that computes."""
    computing = ["plain", "busy", "dead-main", "mapped-only"]
    tool_name = "nvidia-smi of somebody else"
    for kind in [*computing, "nvml", "open-only"]:
        process = bench.start(kind, 1, name=f"kind-{kind}")
        note(figures, kind, process.pid)
        process.end()
    tool = report.Loop(100)
    try:
        tool.read(1)
        note(figures, tool_name, tool.popen.pid)
    finally:
        tool.close()
    for kind in [*computing, "nvml", "open-only", tool_name]:
        assert figures.kinds[kind].get("evidence"), kind
        assert figures.kinds[kind]["workload"] is (kind in computing), kind


def test_no_look_takes_our_own_reader_for_a_holder(
    figures: report.Figures, bystanders: list[Process]
) -> None:
    """It opens the devices as anybody's does, and ends at any moment of a look."""
    for _ in range(LOOKS):
        seen = parts.look(protect=[])
        names = [each["name"] for each in seen["holders"] + seen["spared"]]
        figures.looks.append([name for name in names if name in report.READERS])
    assert not any(figures.looks)


def test_how_fast_the_tool_reads(
    bench: Bench, figures: report.Figures, watcher: parts.Watcher, bystanders: list[Process]
) -> None:
    """One process per reading against one process that loops, timed against NVML."""
    play_only_if(figures, "how fast the tool reads, 20 GiB", parts.too_small(20))
    figures.reader = report.reader_speed(bench, watcher)
    assert figures.reader["loop"]["flushes_each_line"]


def test_driver_files(figures: report.Figures, bystanders: list[Process]) -> None:
    """The driver's own list of minor numbers agrees with the tool's."""
    tool, files = parts.minors()
    figures.minors = {"nvidia-smi -q": tool, "/proc/driver/nvidia/gpus": files}
    assert tool
    assert files in ({}, tool), "the driver's files and nvidia-smi -q disagree"


def test_nothing_is_left_of_us(bystanders: list[Process], figures: report.Figures) -> None:
    """The settings of the GPU are as they were found."""
    assert figures.settings() == figures.settings_before
    assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") is None
