# SPDX-License-Identifier: GPL-3.0-or-later
"""Clean is proved or not said; every other verdict names its reason."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    holders,
    nvidia_smi,
    owners,
    verdict,
)

D, LIST, MAP = "descriptor", "driver list", "mapping"


def gpu(index: int, used: int | None, minor: int | None = -1) -> nvidia_smi.Gpu:
    """A GPU; its minor number is its index unless told otherwise."""
    made = nvidia_smi.Gpu(index, uuid_of(index))
    made.bus_id = f"00000000:{index + 0x1A:02X}:00.0"
    made.used_mib = used
    made.used_text = "[N/A]" if used is None else str(used)
    made.minor = index if minor == -1 else minor
    return made


def uuid_of(index: int) -> str:
    return f"GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80{index:02x}"


def reading(*gpus: nvidia_smi.Gpu, problems: tuple[str, ...] = ()) -> nvidia_smi.Reading:
    return nvidia_smi.Reading(list(gpus), list(problems))


def holder(pid: int, evidence: dict[str, set[str]], name: str = "python3") -> holders.Holder:
    made = holders.Holder(pid)
    made.evidence = evidence
    made.name = name
    made.command = f"/usr/bin/{name} serve"
    made.owner = owners.Owner("lxc", "130", "cgroup /lxc/130/ns")
    return made


def workload(pid: int, *minors: int, name: str = "python3") -> holders.Holder:
    made = holder(pid, {f"gpu{minor}": {D} for minor in minors} | {"nvidia-uvm": {D}}, name)
    for minor in minors:
        made.used_mib[minor] = 100
    return made


def monitor(pid: int, *minors: int) -> holders.Holder:
    return holder(pid, {f"gpu{minor}": {D} for minor in minors} | {"ctl": {D}}, "nv-hostengine")


STUCK = {"state": "D", "wait_channel": "fuse_wait", "stack": "", "mounts": "/mnt/models"}


@dataclass
class Case:
    """All that a verdict is made from."""

    readings: list[nvidia_smi.Reading]
    mine: list[holders.Holder] = field(default_factory=list)
    foreign: list[holders.Holder] = field(default_factory=list)
    protected: list[holders.Holder] = field(default_factory=list)
    stuck: tuple[int, ...] = ()
    unreadable: int = 0
    nodes: int = 0
    inside: bool = False
    spec: dict[str, Any] = field(default_factory=dict)

    def target(self) -> verdict.Target:
        made = verdict.Target({"name": "node1", **self.spec})
        made.inside = self.inside
        return made

    def view(self) -> verdict.View:
        made = verdict.View()
        made.mine = self.mine
        made.spared = [(each, "foreign: it belongs to lxc 130") for each in self.foreign]
        made.spared += [(each, "protected by name (nv-hostengine)") for each in self.protected]
        made.protected = {each.pid for each in self.protected}
        made.stuck = {pid: STUCK for pid in self.stuck}
        made.unreadable = [f"python3 (pid {each})" for each in range(self.unreadable)]
        return made

    def judge(self) -> verdict.Verdict:
        return verdict.judge(self.target(), self.readings, self.view(), self.nodes)


def twice(*used: int | None) -> list[nvidia_smi.Reading]:
    return [reading(*(gpu(index, mib) for index, mib in enumerate(used))) for _ in range(2)]


def ends(*used: int | None) -> list[nvidia_smi.Reading]:
    """A first reading at zero, and then this one."""
    return [twice(*([0] * len(used)))[0], twice(*used)[1]]


TABLE = {
    "two zeros and nobody": (Case(twice(0, 0)), "clean", "2 of 2 GPUs at 0 MiB in two readings"),
    "as many as expected": (Case(twice(0, 0), spec={"expected_gpus": 2}), "clean", "2 of 2 GPUs"),
    "as many as nodes": (Case(twice(0, 0), nodes=2), "clean", "2 of 2 GPUs"),
    "within the baseline": (
        Case(twice(4, 0), spec={"baseline_mib": 4}),
        "clean",
        "at 4 MiB or less, within the declared baseline",
    ),
    "in a container": (Case(twice(0), spec={"vmid": 129}), "clean", "in container 129"),
    "a protected monitor at zero": (Case(twice(0), protected=[monitor(9, 0)]), "clean", "1 of 1"),
    "foreign on another GPU": (
        Case(twice(0, 50), foreign=[workload(9, 1)], spec={"gpus": ["0"]}),
        "clean",
        "1 of 2 GPUs",
    ),
    "mine on another GPU": (
        Case(twice(0, 50), mine=[workload(9, 1)], spec={"gpus": ["0"]}),
        "clean",
        "1 of 2 GPUs",
    ),
    # Not readable, or not enough of it.
    "one reading only": (Case(twice(0)[:1]), "unknown", "only one of the two readings"),
    "zero only now": (
        Case([twice(5)[0], twice(0)[0]]),
        "unknown",
        "only one of the two readings showed zero",
    ),
    "two zeros, but not of the same GPU": (
        Case([reading(gpu(1, 0)), reading(gpu(0, 0))]),
        "unknown",
        "only one of the two readings showed zero",
    ),
    "a GPU lost": (
        Case(twice(0, 0), spec={"expected_gpus": 3}),
        "unknown",
        "nvidia-smi lists 2 GPUs where 3 are expected",
    ),
    "a GPU too many": (
        Case(twice(0, 0), spec={"expected_gpus": 1}),
        "unknown",
        "nvidia-smi lists 2 GPUs where 1 are expected",
    ),
    "fewer than device nodes": (
        Case(twice(0), nodes=8),
        "unknown",
        "nvidia-smi lists 1 GPUs where 8 are expected",
    ),
    "a GPU lost in the first reading": (
        Case([twice(0)[0], twice(0, 0)[0]], spec={"expected_gpus": 2}),
        "unknown",
        "nvidia-smi lists 1 GPUs where 2 are expected",
    ),
    "no value": (Case(ends(0, None)), "unknown", "memory.used of GPU 1 reads '[N/A]'"),
    "no value of a GPU not asked for": (
        Case(ends(0, None), spec={"gpus": ["0"]}),
        "unknown",
        "memory.used of GPU 1 reads '[N/A]'",
    ),
    "no value, though somebody holds it": (
        Case(ends(None), mine=[workload(9, 0)]),
        "unknown",
        "memory.used of GPU 0 reads",
    ),
    "no answer": (
        Case([reading(problems=("node1: nvidia-smi did not answer within 10 s",))]),
        "unknown",
        "node1: nvidia-smi did not answer within 10 s",
    ),
    "no GPU": (Case([reading(), reading()]), "unknown", "nvidia-smi listed no GPU"),
    "an earlier answer failed": (
        Case([reading(problems=("it failed",)), twice(0)[0]]),
        "unknown",
        "it failed",
    ),
    "not the GPU asked for": (
        Case(twice(0), spec={"gpus": ["5"]}),
        "unknown",
        "the GPU asked for (5) is not listed",
    ),
    "one of the GPUs asked for is not there": (
        Case(twice(0, 0), spec={"gpus": ["0", "5"]}),
        "unknown",
        "the GPU asked for (5) is not listed",
    ),
    "processes that could not be looked at": (
        Case(twice(0), unreadable=3),
        "unknown",
        "3 processes could not be looked at",
    ),
    # Held.
    "memory of mine": (
        Case(twice(0, 76115), mine=[workload(9, 1)]),
        "held",
        "GPU 1: 76115 MiB, held by python3 (pid 9, lxc 130)",
    ),
    "mine without memory": (
        Case(twice(0), mine=[holder(9, {"gpu0": {D}})]),
        "held",
        "GPU 0: 0 MiB, held by python3 (pid 9, lxc 130)",
    ),
    "mine by a mapping": (Case(twice(5), mine=[holder(9, {"gpu0": {MAP}})]), "held", "pid 9"),
    "mine on control nodes only": (
        Case(twice(0), mine=[holder(9, {"nvidia-uvm": {D}})]),
        "held",
        "the driver's control nodes are held, held by python3 (pid 9",
    ),
    "memory that nobody holds": (
        Case(twice(0, 7)),
        "held",
        "GPU 1: 7 MiB, and no process holds it",
    ),
    "above the baseline": (Case(twice(5), spec={"baseline_mib": 4}), "held", "GPU 0: 5 MiB"),
    "memory beside a monitor": (Case(twice(7), protected=[monitor(9, 0)]), "held", "nobody but"),
    "memory beside a monitor and a display": (
        Case(twice(312), protected=[monitor(8, 0), holder(9, {"gpu0": {D, MAP}})]),
        "held",
        "GPU 0: 312 MiB, and nobody but python3 (pid 9, lxc 130) and 1 more holds it",
    ),
    "mine and foreign": (
        Case(twice(7), mine=[workload(8, 0)], foreign=[workload(9, 0)]),
        "held",
        "pid 8",
    ),
    "more holders than one can read": (
        Case(twice(7), mine=[workload(pid, 0) for pid in range(10, 15)]),
        "held",
        "and 2 more",
    ),
    "memory of an unknown minor number": (
        Case([reading(gpu(0, 5, None))] * 2, mine=[workload(9, 3)]),
        "held",
        "pid 9",
    ),
    # Blocked.
    "foreign memory": (
        Case(twice(7), foreign=[workload(9, 0)]),
        "blocked",
        "GPU 0: 7 MiB, held by python3 (pid 9, lxc 130), foreign: it belongs to lxc 130",
    ),
    "foreign without memory": (
        Case(twice(0), foreign=[holder(9, {"gpu0": {D}})]),
        "blocked",
        "python3 (pid 9, lxc 130), foreign",
    ),
    "protected that computes": (
        Case(twice(66), protected=[workload(9, 0, name="nvidia-cuda-mps")]),
        "blocked",
        "nvidia-cuda-mps (pid 9, lxc 130), protected by name",
    ),
    "foreign on a GPU of unknown minor number": (
        Case([reading(gpu(0, 0, None))] * 2, foreign=[monitor(9, 4)]),
        "blocked",
        "pid 9",
    ),
    "memory of others, seen from inside": (
        Case(twice(7), inside=True),
        "blocked",
        "GPU 0: 7 MiB, and no process visible in this container holds it",
    ),
    # Unkillable.
    "outlived KILL": (
        Case(twice(7), mine=[workload(9, 0)], stuck=(9,)),
        "unkillable",
        "python3 (pid 9, lxc 130) outlived SIGKILL: state D in fuse_wait, waiting on /mnt/models",
    ),
    "outlived KILL without memory": (
        Case(twice(0), mine=[workload(9, 0)], stuck=(9,)),
        "unkillable",
        "outlived SIGKILL",
    ),
    "outlived KILL on control nodes": (
        Case(twice(0), mine=[holder(9, {"ctl": {D}})], stuck=(9,)),
        "unkillable",
        "outlived SIGKILL",
    ),
    # The worst GPU is the host.
    "held beats blocked": (
        Case(twice(7, 7), mine=[workload(8, 0)], foreign=[workload(9, 1)]),
        "held",
        "GPU 0: 7 MiB, held by python3 (pid 8",
    ),
    "unkillable beats held": (
        Case(twice(7, 7), mine=[workload(8, 0), workload(9, 1)], stuck=(9,)),
        "unkillable",
        "pid 9",
    ),
    "blocked beats unreadable processes": (
        Case(twice(7), foreign=[workload(9, 0)], unreadable=1),
        "blocked",
        "pid 9",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_verdicts(name: str) -> None:
    case, word, reason = TABLE[name]
    judged = case.judge()
    assert judged.word == word, judged.reason
    assert reason in judged.reason
    assert bool(judged.remedy) is (word != "clean")


WIDEN = "stop it where it belongs, or widen gpuops_scope or -l to include its owner"
STOP = "stop Xorg, or take its name off gpuops_protect or gpuops_protect_more"
QUIT = "set gpuops_mps=quit to have MPS told to quit"


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        (Case(twice(7), foreign=[workload(9, 0)]), WIDEN),
        (Case(twice(7), protected=[workload(9, 0, name="Xorg")]), STOP),
        (
            Case(twice(7), foreign=[workload(8, 0)], protected=[workload(9, 0, name="Xorg")]),
            f"{WIDEN}; {STOP}",
        ),
        (Case(twice(7), foreign=[workload(8, 0), workload(9, 0)]), WIDEN),
    ],
)
def test_what_to_do_about_who_is_in_the_way(case: Case, remedy: str) -> None:
    """Nobody's scope reaches a protected process, so widening it does not help."""
    judged = case.judge()
    assert (judged.word, judged.remedy) == ("blocked", remedy)


def test_what_to_do_about_an_mps_in_the_way() -> None:
    service = workload(9, 0, name="nvidia-cuda-mps")
    service.command = "nvidia-cuda-mps-server"
    assert Case(twice(7), protected=[service]).judge().remedy == QUIT


def test_the_verdict_on_each_gpu() -> None:
    case = Case(twice(0, 7, 7, 7, None), mine=[workload(8, 1)], foreign=[workload(9, 2)])
    words = [verdict.judge_gpu(case.target(), each, case.view()) for each in case.readings[-1].gpus]
    assert words == ["clean", "held", "blocked", "held", "unknown"]


def test_what_explains_memory() -> None:
    listed = workload(1, 0)
    listed.used_mib = {0: 100, 1: None, 2: 0}
    listed.evidence["gpu3"] = {D}
    many = [(0, True), (1, True), (2, False), (3, False), (4, False), (None, True)]
    for minor, owns in many:
        # 1: listed without a number: it may own any amount. 3: merely opened.
        assert verdict.explains(listed, gpu(0, 76115, minor)) is owns, minor
    assert verdict.explains(listed, gpu(3, verdict.OPENED_MIB))
    assert not verdict.explains(listed, gpu(3, verdict.OPENED_MIB + 1))
    assert not verdict.explains(listed, gpu(4, 4))
    assert verdict.explains(holder(1, {"gpu0": {D}, "nvidia-uvm": {D, MAP}}), gpu(0, 5))
    assert verdict.explains(holder(1, {"gpu0": {MAP}}), gpu(0, 5))
    assert verdict.explains(holder(1, {"gpu0": {"task descriptor"}}), gpu(0, 5))
    assert not verdict.explains(holder(1, {"gpu0": {MAP}}), gpu(1, 5))
    assert not verdict.explains(monitor(1, 0), gpu(0, 5))
    assert not verdict.explains(monitor(1, 0), gpu(0, 5, None))


def opened(pid: int, computes: int, *others: int, name: str = "python3") -> holders.Holder:
    """A process as CUDA makes it: on one GPU, with others open."""
    made = workload(pid, computes, name=name)
    made.evidence.update({f"gpu{minor}": {D} for minor in others})
    return made


LIMITED = {
    "on it alone": (workload(8, 0), ""),
    "on both": (workload(8, 0, 1), ""),
    "on it, the other opened": (opened(8, 0, 1), ""),
    "on the other, it opened": (opened(8, 1, 0), "it computes on other GPUs only"),
    "on the other alone": (workload(8, 1), ""),
    "not listed, it alone": (holder(8, {"gpu0": {MAP}}), ""),
    "not listed, both": (
        holder(8, {"gpu0": {MAP}, "gpu1": {MAP}}),
        "the driver does not say where it computes",
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_run_about_one_gpu_spares_who_has_merely_opened_it(name: str) -> None:
    each, why = LIMITED[name]
    view = Case([], mine=[each]).view()
    view.limit({0})
    assert bool(view.mine) is not bool(why)
    assert [reason for _, reason in view.spared if why not in reason] == []
    assert len(view.spared) == bool(why)


@pytest.mark.parametrize("of", ["mine", "foreign"])
def test_who_has_merely_opened_a_gpu_blocks_it_by_its_few_mib_only(of: str) -> None:
    each = opened(8, 1, 0)

    def judged(used: int, **spec: Any) -> verdict.Verdict:
        case = Case(twice(used, 2575), spec={"gpus": ["0"], **spec})
        view = case.view()
        if of == "mine":
            view.mine.append(each)
            view.limit({0})
        else:
            view.spared.append((each, "foreign: it belongs to lxc 130"))
        return verdict.judge(case.target(), case.readings, view, 0)

    few = judged(4)
    assert (few.word, "pid 8" in few.reason) == ("blocked", True)
    assert "reboot" not in few.remedy
    assert judged(4, baseline_mib=4).word == "clean"
    many = judged(76115)
    assert (many.word, "nobody but python3 (pid 8" in many.reason) == ("held", True)


def test_an_mps_that_serves_strangers_is_kept() -> None:
    service = workload(7, 0, name="nvidia-cuda-mps-server")
    for foreign, protected, left, kept in (
        ([], [], [], False),
        ([workload(9, 0)], [], [], True),
        ([workload(9, 1)], [], [], False),
        ([], [monitor(9, 0)], [], False),
        # Of mine, but on a GPU that the run is not about.
        ([], [], [workload(9, 0)], True),
        ([], [], [workload(9, 1)], False),
        ([], [], [workload(9, 0, name="nvidia-cuda-mps-server")], False),
    ):
        view = Case([], mine=[service], foreign=foreign, protected=protected).view()
        view.keep_shared_mps(left, verdict.LEFT_OUT)
        assert (service not in view.mine) is kept
        assert (service.pid in view.protected) is kept
        if left and kept:
            way = verdict.way_out(verdict.Target({"name": "n", "mps": "quit"}), *view.spared[-1])
            assert "name its other GPUs in gpuops_gpus too" in way


@pytest.mark.parametrize(("used", "word"), [(0, "clean"), (4, "blocked"), (None, "blocked")])
def test_from_inside_only_zero_proves_anything(used: int | None, word: str) -> None:
    spec = {"baseline_mib": 616, "holders_only": used is None}
    assert Case(twice(used), inside=True, spec=spec).judge().word == word


def test_where_the_driver_tells_no_memory_a_protected_process_that_it_lists_blocks() -> None:
    spec = {"holders_only": True}
    listed, silent = workload(9, 0, name="nv-hostengine"), monitor(10, 0)
    assert Case(twice(None), protected=[silent], spec=spec).judge().word == "clean"
    assert Case(twice(None), protected=[listed], spec=spec).judge().word == "blocked"


def test_a_holder_with_two_numbers_is_given_both() -> None:
    mine = workload(90007, 0)
    mine.ns_pid = 7
    assert "pid 7, 90007 on the node" in Case(twice(5), mine=[mine]).judge().reason


def wanted_in(case: Case, which: nvidia_smi.Reading) -> list[nvidia_smi.Gpu]:
    """The GPUs asked for, decided without the code under test."""
    asked = case.spec.get("gpus") or []
    return [each for each in which.gpus if not asked or str(each.index) in asked]


def proved_clean(case: Case) -> bool:
    """Every single thing that clean needs, written a second time."""
    if len(case.readings) < 2 or case.unreadable:
        return False
    last = case.readings[-2:]
    expected = case.spec.get("expected_gpus") or case.nodes
    for each in last:
        if each.problems or not each.gpus or any(one.used_mib is None for one in each.gpus):
            return False
        if expected and len(each.gpus) != expected:
            return False
        wanted = wanted_in(case, each)
        if not wanted or len(wanted) < len(case.spec.get("gpus") or []):
            return False
        for one in wanted:
            most = 0 if case.inside else case.spec.get("baseline_mib", 0)
            if one.used_mib is None or one.used_mib > most:
                return False
    if [one.uuid for one in wanted_in(case, last[0])] != [
        one.uuid for one in wanted_in(case, last[1])
    ]:
        return False
    if case.mine and not case.spec.get("gpus") and any(not each.gpus for each in case.mine):
        return False
    return not any(
        one.minor is None or one.minor in each.gpus
        for one in wanted_in(case, last[1])
        for each in [*case.mine, *(each for each in case.foreign if not only_opened(each, one))]
    )


def only_opened(one: holders.Holder, which: nvidia_smi.Gpu) -> bool:
    """Does the driver list it for other GPUs, and not for this one?"""
    listed = set(one.used_mib)
    return which.minor is not None and len(listed - {which.minor}) > 0 and which.minor not in listed


used = st.one_of(st.just(0), st.integers(0, 5), st.none(), st.just(76115))
ways = st.sets(st.sampled_from([D, LIST, MAP, "task descriptor"]), min_size=1)
devices = st.dictionaries(
    st.sampled_from(["gpu0", "gpu1", "gpu2", "gpu3", "gpu9", "ctl", "nvidia-uvm"]), ways, min_size=1
)


@st.composite
def some_holders(draw: st.DrawFn, first: int) -> list[holders.Holder]:
    made = []
    for pid in range(first, first + draw(st.sampled_from([0, 0, 0, 1, 2]))):
        one = holder(pid, draw(devices))
        for minor in sorted(one.gpus):
            if LIST in one.evidence[f"gpu{minor}"]:
                one.used_mib[minor] = draw(used)
        made.append(one)
    return made


def rarely(draw: st.DrawFn, often: Any, seldom: Any) -> Any:
    """One of two values; the second in about one of twelve draws."""
    return seldom if draw(st.integers(0, 11)) == 7 else often


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that may be read, but mostly things that can be judged."""
    count = rarely(draw, draw(st.integers(1, 4)), 0)
    values = draw(st.sampled_from([st.just(0), st.integers(0, 5), st.integers(0, 5), used]))
    minors = [rarely(draw, index, None) for index in range(count)]
    readings = []
    for _ in range(rarely(draw, draw(st.integers(2, 3)), 1)):
        gpus = [gpu(index, draw(values), minors[index]) for index in range(count)]
        if gpus and rarely(draw, False, True):
            del gpus[draw(st.integers(0, count - 1))]
        readings.append(reading(*gpus, problems=rarely(draw, (), ("it failed",))))
    mine = draw(some_holders(100))
    stuck = draw(st.sets(st.sampled_from(mine))) if mine else set()
    asked = draw(st.sets(st.integers(0, max(0, count - 1)))) if draw(st.booleans()) else set()
    return Case(
        readings=readings,
        mine=mine,
        foreign=draw(some_holders(200)),
        protected=draw(some_holders(300)),
        stuck=tuple(each.pid for each in stuck),
        unreadable=rarely(draw, 0, 1),
        nodes=rarely(draw, count, draw(st.integers(0, 8))),
        inside=draw(st.booleans()),
        spec={
            "vmid": draw(st.sampled_from([0, 129])),
            "expected_gpus": rarely(draw, draw(st.sampled_from([0, count])), 4),
            "baseline_mib": draw(st.sampled_from([0, 3, 5])),
            "gpus": rarely(draw, [str(index) for index in sorted(asked)], ["7"]),
        },
    )


@given(cases())
def test_clean_is_said_where_it_is_proved_and_nowhere_else(case: Case) -> None:
    judged = case.judge()
    assert (judged.word == "clean") is proved_clean(case), judged.reason
    assert judged.word in verdict.SEVERITY
    assert judged.reason
    assert bool(judged.remedy) is (judged.word != "clean")


@given(cases())
def test_a_value_not_known_anywhere_is_unknown(case: Case) -> None:
    if any(each.used_mib is None for last in case.readings[-2:] for each in last.gpus):
        assert case.judge().word == "unknown"
    if any(last.problems or not last.gpus for last in case.readings[-2:]):
        assert case.judge().word == "unknown"


@given(cases())
def test_whoever_is_stuck_on_a_readable_host_is_named(case: Case) -> None:
    judged = case.judge()
    if judged.word == "unkillable":
        assert case.stuck
        assert "outlived SIGKILL" in judged.reason
    on_wanted = [
        each
        for each in case.mine
        if each.pid in case.stuck
        and any(one.minor in each.gpus for one in wanted_in(case, case.readings[-1]))
    ]
    if on_wanted:
        assert judged.word in ("unkillable", "unknown")


@given(cases())
def test_blocked_names_somebody_or_says_that_nobody_is_visible(case: Case) -> None:
    judged = case.judge()
    if judged.word == "blocked":
        others = [*case.foreign, *case.protected]
        named = any(f"pid {each.pid}" in judged.reason for each in others)
        assert named or (case.inside and "no process visible" in judged.reason)
        assert not any(f"pid {each.pid}" in judged.reason for each in case.mine)


@st.composite
def clean_cases(draw: st.DrawFn) -> Case:
    """A machine at zero, in every way in which one may be."""
    count = draw(st.integers(1, 8))
    baseline = draw(st.integers(0, 5))
    readings = [
        reading(*(gpu(index, draw(st.integers(0, baseline))) for index in range(count)))
        for _ in range(draw(st.integers(2, 4)))
    ]
    asked = draw(st.sets(st.integers(0, count - 1)))
    return Case(
        readings,
        protected=[monitor(300, *range(count))],
        nodes=count,
        spec={"baseline_mib": baseline, "gpus": [str(index) for index in sorted(asked)]},
    )


@given(clean_cases(), st.data())
def test_one_thing_wrong_and_it_is_not_clean(case: Case, data: st.DataObject) -> None:
    assert case.judge().word == "clean"
    last = case.readings[-1]
    one = data.draw(st.sampled_from(wanted_in(case, last)))
    wrong = data.draw(
        st.sampled_from(["used", "value", "mine", "foreign", "lost", "more", "twin", "scan"])
    )
    before = data.draw(st.booleans())
    spoilt = case.readings[-2] if before else last
    same = next(each for each in spoilt.gpus if each.index == one.index)
    assert one.minor is not None
    expected = "unknown"
    if wrong == "used":
        same.used_mib = case.spec["baseline_mib"] + 1
        expected = "unknown" if before else "held"
    elif wrong == "value":
        same.used_mib = None
        case.readings[-2 if before else -1] = reading(*spoilt.gpus)
    elif wrong == "mine":
        case.mine = [holder(9, {f"gpu{one.minor}": {D}})]
        expected = "held"
    elif wrong == "foreign":
        case.foreign = [holder(9, {f"gpu{one.minor}": {D}})]
        expected = "blocked"
    elif wrong == "lost":
        spoilt.gpus.remove(same)
    elif wrong == "more":
        case.spec["expected_gpus"] = len(last.gpus) + 1
    elif wrong == "twin":
        same.uuid = uuid_of(99)
        expected = "unknown"
    else:
        case.unreadable = 1
    assert case.judge().word == expected


GPU = gpu(4, 0)  # GPU-…04 at 00000000:1E:00.0


@pytest.mark.parametrize(
    "asked",
    [
        "4",
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc8004",
        "gpu-A5EDDDAA-6E4A-9986-B9B5-DAB572BC8004",
        "00000000:1E:00.0",
        "00000000:1e:00.0",
        "0000:1E:00.0",
        "0000:1e:00.0",
        "1E:00.0",
        "1e:00.0",
    ],
)
def test_ways_to_ask_for_a_gpu(asked: str) -> None:
    target = verdict.Target({"name": "node1", "gpus": [asked]})
    assert target.wants(GPU)
    assert [index for index in range(16) if target.wants(gpu(index, 0))] == [4]
    assert verdict.Target({"name": "node1", "gpus": ["0", asked]}).wants(GPU)


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "40",
        "04",
        "GPU-a5edddaa",
        "GPU-4",
        "0001:1E:00.0",
        "00010000:1E:00.0",
        "1E",
        "*",
        "0000:1E:00.1",
    ],
)
def test_what_asks_for_another_gpu(asked: str) -> None:
    assert not verdict.Target({"name": "node1", "gpus": [asked]}).wants(GPU)


def test_a_domain_of_a_pci_address_counts() -> None:
    other = gpu(4, 0)
    other.bus_id = "00010000:1E:00.0"
    assert verdict.Target({"name": "node1", "gpus": ["10000:1e:00.0"]}).wants(other)
    assert not verdict.Target({"name": "node1", "gpus": ["0000:1e:00.0"]}).wants(other)


def test_no_list_asks_for_every_gpu() -> None:
    assert verdict.Target({"name": "node1"}).wants(GPU)
    assert verdict.Target({"name": "node1", "gpus": None}).wants(GPU)


@pytest.mark.parametrize(
    ("comm", "command", "entry"),
    [
        ("nvidia-persiste", "/usr/bin/nvidia-persistenced --user x", "nvidia-persistenced"),
        ("nvidia-persiste", "", "nvidia-persistenced"),
        ("nvidia-cuda-mps", "nvidia-cuda-mps-server", "nvidia-cuda-mps-server"),
        ("nv-hostengine", "/usr/bin/nv-hostengine -n", "nv-hostengine"),
        ("dcgm-exporter", "/usr/bin/dcgm-exporter", "dcgm*"),
        ("MainThread", "/usr/bin/dcgmi dmon", "dcgm*"),
        ("prometheus-nvid", "/opt/prometheus-nvidia-exporter", "prometheus-*"),
        ("sshd", "sshd: root@pts/0", "sshd"),
        ("Xorg", "/usr/lib/xorg/Xorg :0", "Xorg"),
        ("kwin_x11", "kwin_x11", "kwin_[xw]*"),
    ],
)
def test_who_is_protected(comm: str, command: str, entry: str) -> None:
    one = holder(9, {"gpu0": {D}}, comm)
    one.command = command
    assert verdict.protected_by(one, ["other", entry, "*"]) == entry
    assert verdict.protected_by(one, ["other"]) == ""
    assert verdict.protected_by(one, []) == ""


@pytest.mark.parametrize(
    ("comm", "command", "entry"),
    [
        ("python3", "/usr/bin/python3 nv-hostengine", "nv-hostengine"),
        ("python3", "python3 -m sglang.launch_server", "python"),
        ("xorg", "/usr/lib/xorg", "Xorg"),
        ("my-sshd", "my-sshd", "sshd"),
        ("sshd2", "sshd2", "sshd"),
        ("nvidia-persist", "nvidia-persist", "nvidia-persistenced"),
        ("python3", "/opt/dcgm/python3", "dcgm*"),
    ],
)
def test_who_is_not_protected(comm: str, command: str, entry: str) -> None:
    one = holder(9, {"gpu0": {D}}, comm)
    one.command = command
    assert verdict.protected_by(one, [entry]) == ""


@given(st.text(), st.text(), st.lists(st.text()))
def test_any_list_of_names_is_taken(comm: str, command: str, names: list[str]) -> None:
    one = holder(9, {}, comm)
    one.command = command
    assert verdict.protected_by(one, names) in ("", *names)
    if comm and comm[:15] == comm and not any(mark in comm for mark in "*?["):
        assert verdict.protected_by(one, [comm]) == comm


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("container 129: cannot read there: CT 129 not running!", "pct start"),
        ("container 129: nvidia-smi did not answer within 10 s", "hangs"),
        ("nvidia-smi is not installed there", "user-space tools"),
        ("nvidia-smi failed with exit code 6: No devices were found", "/dev/nvidia*"),
        (
            "nvidia-smi failed with exit code 17: Failed to initialize NVML: GPU access blocked by "
            "the operating system",
            "restart the container",
        ),
        (
            "nvidia-smi failed with exit code 4: Failed to initialize NVML: "
            "Insufficient Permissions",
            "allow the container",
        ),
        (
            "nvidia-smi failed with exit code 18: Failed to initialize NVML: "
            "Driver/library version mismatch",
            "version of the loaded driver",
        ),
        ("nvidia-smi lists 7 GPUs where 8 are expected", "gpuops_expected_gpus"),
        ("something never seen", "run nvidia-smi there by hand"),
    ],
)
def test_what_to_do_about_a_reading_that_failed(problem: str, remedy: str) -> None:
    judged = Case([reading(problems=(problem,))]).judge()
    assert (judged.word, judged.reason) == ("unknown", problem)
    assert remedy in judged.remedy


def test_memory_is_not_ascribed_to_who_is_on_other_gpus() -> None:
    judged = Case(twice(7, 500), mine=[workload(9, 1)], spec={"gpus": ["0"]}).judge()
    assert judged.word == "held"
    assert judged.reason == "GPU 0: 7 MiB, and no process holds it"


def test_a_wildcard_protects_also_who_shows_only_a_name_that_was_cut_off() -> None:
    # In state D the command line is not read.
    one = holder(9, {"gpu0": {D}}, "nvidia-fabricma")
    one.command = ""
    assert verdict.protected_by(one, ["nvidia-fabricmanager*"]) == "nvidia-fabricmanager*"
    assert verdict.protected_by(one, ["nvidia-persistenced*"]) == ""


@pytest.mark.parametrize("name", ["0", 0, uuid_of(0), "0000:1a:00.0"])
def test_a_baseline_for_one_gpu_is_for_no_other(name: Any) -> None:
    spec = {"baseline_mib": {name: 5}}
    assert Case(twice(5, 0), spec=spec).judge().word == "clean"
    assert Case(twice(6, 0), spec=spec).judge().word == "held"
    assert Case(twice(0, 5), spec=spec).judge().word == "held"


def test_where_holders_alone_decide_memory_may_be_unknown() -> None:
    spec = {"holders_only": True}
    assert Case(twice(None), spec=spec).judge().word == "clean"
    assert "cannot be read" in Case(twice(None), spec=spec).judge().reason
    assert Case(twice(None), mine=[workload(9, 0)], spec=spec).judge().word == "held"
    assert Case(twice(None), foreign=[workload(9, 0)], spec=spec).judge().word == "blocked"
    assert Case(twice(7), spec=spec).judge().word == "held"
    assert Case([reading(gpu(0, None), problems=("it failed",))] * 2, spec=spec).judge().word == (
        "unknown"
    )
    assert Case(twice(None)[:1], spec=spec).judge().word == "unknown"


ROW = "0, GPU-1, 00000000:00:06.0, {}, 143771, 616, 0, 31, P0, 580.159.04, NVIDIA GB10\n"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("[N/A]", "clean"),
        ("[Not Supported]", "clean"),
        ("[GPU is lost]", "unknown"),
        ("[GPU requires reset]", "unknown"),
        ("[Unknown Error]", "unknown"),
        ("[Insufficient Permissions]", "unknown"),
        ("", "unknown"),
        ("0 MiB", "unknown"),
        ("-1", "unknown"),
    ],
)
def test_holders_only_forgives_not_available_and_nothing_else(value: str, word: str) -> None:
    target = verdict.Target({"name": "n", "holders_only": True})
    readings = [nvidia_smi.parse_gpus(ROW.format(value), 0)] * 2
    assert verdict.judge(target, readings, verdict.View(), 1).word == word


def test_the_same_gpu_asked_for_twice_is_one_gpu() -> None:
    target = verdict.Target({"name": "n", "gpus": ["0", "GPU-1"]})
    assert verdict.unreadable(target, nvidia_smi.parse_gpus(ROW.format(0), 0), 1) == ""


def test_who_holds_a_clean_gpu_and_may_is_not_called_nobody() -> None:
    judged = Case(twice(0, 0), protected=[monitor(9, 0), monitor(10, 1)]).judge()
    assert judged.word == "clean"
    assert "nobody but nv-hostengine (pid 9, lxc 130) and 1 more holds them" in judged.reason
    elsewhere = Case(twice(0, 0), protected=[monitor(9, 1)], spec={"gpus": ["0"]}).judge()
    assert "nobody holds them" in elsewhere.reason


def test_gpus_with_the_same_in_use_are_named_together() -> None:
    def said(*used: int | None) -> str:
        gpus = [gpu(index, mib) for index, mib in enumerate(used)]
        return verdict.memory_sentence(gpus[:3] + gpus[4:])

    assert said(7, 7, 7, 0, 7, 4, None, None, 4) == (
        "GPU 0-2: 7 MiB each, GPU 4: 7 MiB, GPU 5: 4 MiB, GPU 6-7: memory not told, GPU 8: 4 MiB"
    )
