# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the tool against what people type instead of it, in pairs, in a lab of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import scan
from tests.bench.bench import Bench, BenchError, Run
from tests.bench.report import Row
from tests.lab import driver
from tests.lab.lab import wait_until

RESET = "ansible-playbook reset_gpus.yml -l ct129"
RESET_NOW = f"{RESET} -e gpuops_profile=now"
PING = "ansible pve1 -m ping"
# What people type instead; {ssh} is `ssh`, and for the warm row `ssh` with a kept connection.
ONE_LINER = (
    """{ssh} pve1 'pct exec 129 -- bash -c "fuser -k -9 /dev/nvidia*; sleep 2"; """
    """pct exec 129 -- nvidia-smi --query-gpu=index,memory.used --format=csv,noheader'"""
)
KEPT = "ssh -o ControlMaster=auto -o ControlPersist=300s -o ControlPath={place}/typed"

DEFAULT = {"cts": "129,130", "nodes": 1}
FORTY = {"cts": "129-168", "nodes": 0}
CONTAINERS = 40
RUNS_OF_FORTY = 10


def held(bench: Bench) -> Iterator[Row]:
    """From held to eight zeros, against the one-liner; the connection cold, then warm."""
    bench.up(**DEFAULT)
    typed = ONE_LINER.format(ssh="ssh")

    def ours(masters: Path | None = None) -> float:
        bench.hold()
        run = bench.command(RESET_NOW, masters) if masters else bench.cold(RESET_NOW)
        bench.must_be_clean(RESET_NOW)
        return run.seconds

    def theirs(text: str = typed) -> float:
        bench.hold()
        run = bench.cold(text)
        if len([line for line in run.output.splitlines() if line.endswith(" MiB")]) != 8:
            raise BenchError(f"the one-liner did not print eight readings: {run.output.strip()}")
        return run.seconds

    ours()  # the first run compiles Python files
    pair = bench.alternate(ours, theirs)
    what = f"{RESET_NOW} ÷ {typed}"
    yield Row("held", f"{what}; ssh cold", *pair, must=0.9, aim=0.65)
    with bench.masters() as place:
        kept = ONE_LINER.format(ssh=KEPT.format(place=place))
        bench.command(PING, place)
        bench.command(f"{KEPT.format(place=place)} pve1 true", place)
        pair = bench.alternate(lambda: ours(place), lambda: theirs(kept))
    yield Row("held, ssh warm", f"{what}; ssh connections of both kept", *pair)


def clean(bench: Bench) -> Iterator[Row]:
    """Nothing to do, against a ping; the connection cold, then warm."""
    bench.up(**DEFAULT)
    bench.clean()

    def ours(masters: Path | None = None) -> float:
        run = bench.command(RESET, masters) if masters else bench.cold(RESET)
        if "changed=0" not in run.output:
            raise BenchError(f"{RESET} changed something on a clean container")
        return run.seconds

    bench.cold(PING)
    ours()
    what = f"{RESET} ÷ {PING}"
    pair = bench.alternate(ours, lambda: bench.cold(PING).seconds)
    yield Row("clean", f"{what}; ssh cold", *pair, must=1.3, aim=1.0)
    with bench.masters() as place:
        bench.command(PING, place)
        pair = bench.alternate(lambda: ours(place), lambda: bench.command(PING, place).seconds)
    yield Row("clean, ssh warm", f"{what}; ssh connection kept", *pair)


def release(bench: Bench) -> Iterator[Row]:
    """On the node from the signals to the second zero, against the driver's release delay."""
    bench.up(**DEFAULT)
    delay = bench.lab.plan().delay_ms / 1000
    bench.notes["release_delay_s"] = delay

    def second_zero(worker: bool) -> float:
        bench.hold(worker)
        return timing(bench.cold(RESET_NOW, record=True))

    second_zero(worker=False)
    times = [second_zero(worker=False) for _ in range(bench.pairs)]
    what = "timings.second_zero of gpu_release ÷ the driver's release delay"
    yield Row("release", f"{what}; one process", times, [delay] * len(times), 2.5, 1.5)
    times = [second_zero(worker=True) for _ in range(bench.pairs)]
    last = delay + driver.NEXT_RELEASE_AFTER
    what += f"; with the worker, whose memory the driver releases after {last * 1000:.0f} ms"
    yield Row("release, two processes", what, times, [delay] * len(times))


def timing(run: Run) -> float:
    """The last rung's time to the second zero, as the node measured it."""
    rungs = [event["rungs"] for event in run.events if "rungs" in event]
    try:
        return float(rungs[-1][-1]["timings"]["second_zero"])
    except (IndexError, KeyError):
        raise BenchError("the result of gpu_release has no second_zero") from None


def look(bench: Bench) -> Iterator[Row]:
    """The scan of a whole host with a crowd on it, against fuser there."""
    bench.up(**DEFAULT)
    bench.clean()
    bench.lab.hold("ct129", gpus="0-7")
    with scan.crowd(bench):
        quick = scan.Scanner(bench, deep=False)
        deep = scan.Scanner(bench, deep=True)
        fuser = scan.Fuser(bench)
        quick.found = deep.found = fuser.found = bench.lab.holders()[0]["node_pid"]
        quick.seconds(), fuser.seconds()
        what = f"the scan for holders ÷ {fuser.TEXT}, {scan.PROCESSES} processes"
        pair = bench.alternate(quick.seconds, fuser.seconds)
        yield Row("scan", what, *pair, must=1.0, aim=0.5)
        pair = bench.alternate(deep.seconds, fuser.seconds)
        yield Row("scan, deep", f"{what}; with all mappings and tasks", *pair)


def forty(bench: Bench) -> Iterator[Row]:
    """Forty containers of one host at once, whose sshd has the stock limits; who gets lost?"""
    bench.up(**FORTY)
    bench.notes["sshd"] = limits(bench)
    command = "ansible-playbook reset_gpus.yml -l 'gpu_nodes'"
    lost, seconds = [], []
    for _ in range(RUNS_OF_FORTY):
        run = bench.cold(command, record=True, code=None)
        recap = next((event["recap"] for event in run.events if "recap" in event), {})
        fine = [h for h in recap.values() if h["ok"] and not h["unreachable"] and not h["failures"]]
        lost.append(float(CONTAINERS - len(fine)))
        seconds.append(round(run.seconds, 3))
        for reason in {e.get("failed") or e.get("unreachable") for e in run.events} - {None}:
            bench.say(f"forty: {reason}")
    what = f"of {CONTAINERS} containers unreachable or failed, in each of {RUNS_OF_FORTY} runs"
    yield Row("forty, hosts lost", what, lost, must=0, aim=0)
    yield Row("forty, seconds of a run", "all clean; ssh cold", seconds)
    yield from executions(bench, "forty, clean", command, at_most=2)


def remote(bench: Bench) -> Iterator[Row]:
    """How often the acting host is asked to execute something."""
    bench.up(**DEFAULT)
    bench.clean()
    yield from executions(bench, "clean", RESET, at_most=2)
    bench.hold()
    yield from executions(bench, "held, one rung", RESET_NOW, at_most=3)
    bench.hold()
    yield from executions(bench, "held, two rungs", RESET, at_most=4)


def executions(bench: Bench, figure: str, command: str, at_most: int) -> Iterator[Row]:
    """Commands that pve1's sshd writes down while one typed command runs."""
    log = Path(f"/proc/{bench.lab.running_init('pve1')}/root/run/sshd.log")
    if "LogLevel" not in bench.lab.inside("pve1", ["cat", "/etc/ssh/sshd_config"]).stdout:
        listening = log.read_text().count("Server listening")
        script = "echo LogLevel VERBOSE >>/etc/ssh/sshd_config; kill -HUP $(cat /run/sshd.pid)"
        bench.lab.inside("pve1", ["sh", "-c", script], check=True)
        wait_until(
            lambda: log.read_text().count("Server listening") > listening, 10, "sshd to restart"
        )
        time.sleep(0.1)
    before = log.read_text(errors="replace").count("Starting session: command")
    bench.cold(command)
    count = log.read_text(errors="replace").count("Starting session: command") - before
    what = f"commands that pve1's sshd executed for: {command}"
    yield Row(f"executions, {figure}", what, [float(count)], must=at_most, aim=at_most)


def limits(bench: Bench) -> dict[str, str]:
    """What pve1's sshd itself says about its limits."""
    text = bench.lab.inside("pve1", ["/usr/sbin/sshd", "-T"], check=True).stdout
    words = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return {name: words[name] for name in ("maxsessions", "maxstartups")}


FIGURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "held": held,
    "clean": clean,
    "release": release,
    "scan": look,
    "executions": remote,
    "forty": forty,
}
