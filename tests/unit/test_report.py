# SPDX-License-Identifier: GPL-3.0-or-later
"""The report's records: frozen, writable as JSON, and clean only when every host is."""

import json
from dataclasses import FrozenInstanceError, asdict
from typing import get_args

import pytest

import gpuops
from gpuops.report import Action, Gpu, Host, Process, Report, Rung, Spared, Totals, Verdict

VERDICTS = get_args(Verdict)


def gpu(used_mib: int | None) -> Gpu:
    return Gpu(
        index=4,
        uuid="GPU-5c1f3a52-0000-0000-0000-000000000004",
        minor=4,
        name="NVIDIA H200",
        used_mib=used_mib,
        total_mib=143771,
        reserved_mib=600,
        utilisation=0,
        temperature=31,
        pstate="P0",
    )


def process(pid: int) -> Process:
    return Process(
        pid=pid,
        node_pid=pid + 90000,
        ppid=90001,
        start=123456,
        state="S",
        user="root",
        command="python -m server",
        owner="container 129",
        owner_evidence="cgroup /lxc/129/ns",
        gpus=(4,),
        evidence=("descriptor 7",),
    )


def host(verdict: Verdict) -> Host:
    return Host(
        name="ct129",
        verdict=verdict,
        changed=True,
        route="pve1 for container 129",
        before=(gpu(20480),),
        after=(gpu(0),),
        killed=(Action(process=process(7), signal="TERM", rung="terminate", result="exited"),),
        spared=(Spared(process=process(8), reason="protected: nvidia-persistenced"),),
        rungs=(Rung(name="terminate", seconds=1.5, verdict=verdict),),
    )


def report(*verdicts: Verdict) -> Report:
    counts = {name: verdicts.count(name) for name in VERDICTS}
    return Report(
        hosts=tuple(host(verdict) for verdict in verdicts),
        totals=Totals(hosts=len(verdicts), killed=len(verdicts), spared=len(verdicts), **counts),
    )


def test_clean_when_every_host_is() -> None:
    assert report("clean").clean
    assert report("clean", "clean").clean


@pytest.mark.parametrize("verdict", [name for name in VERDICTS if name != "clean"])
def test_one_host_that_is_not_clean_spoils_it(verdict: Verdict) -> None:
    assert not report("clean", verdict, "clean").clean


def test_a_run_over_no_host_is_not_clean() -> None:
    assert not report().clean


def test_totals_count_every_verdict() -> None:
    assert set(VERDICTS) <= set(asdict(report("clean").totals))


def test_survives_json() -> None:
    read = json.loads(json.dumps(asdict(report("clean", "held"))))
    assert read["schema"] == "gpuops.report/1"
    assert read["version"] == gpuops.__version__
    assert [entry["verdict"] for entry in read["hosts"]] == ["clean", "held"]
    assert read["hosts"][0]["before"][0]["used_mib"] == 20480
    assert read["hosts"][0]["killed"][0]["process"]["owner"] == "container 129"
    assert read["hosts"][0]["spared"][0]["reason"].startswith("protected")


def test_a_gpu_that_could_not_be_read_stays_null() -> None:
    assert json.loads(json.dumps(asdict(gpu(None))))["used_mib"] is None


def test_records_are_frozen() -> None:
    record = host("held")
    with pytest.raises(FrozenInstanceError):
        record.verdict = "clean"  # type: ignore[misc]
