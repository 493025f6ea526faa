# SPDX-License-Identifier: GPL-3.0-or-later
"""From the events of real runs to reports: what is said, and that nothing is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuops.events import Collector, Step
from gpuops.report import Report, signalled
from tests.wrapper.conftest import RECORDED, Replay


def verdicts(report: Report) -> dict[str, str]:
    return {host.name: host.verdict for host in report.hosts}


@pytest.mark.parametrize(
    ("name", "expected", "code"),
    [
        ("reset-held", {"ct129": "clean", "node1": "clean"}, 0),
        ("reset-clean", {"ct129": "clean", "ct130": "clean", "node1": "clean"}, 0),
        ("reset-check", {"ct129": "held"}, 10),
        ("reset-blocked", {"ct129": "blocked"}, 11),
        ("reset-unkillable", {"ct129": "unkillable", "node1": "clean"}, 12),
        (
            "reset-unreachable",
            {"ct129": "unreachable", "ct130": "unreachable", "node1": "clean"},
            14,
        ),
        ("reset-refused", {"ct129": "refused", "node1": "clean"}, 2),
        ("status-held", {"ct129": "held", "ct130": "blocked"}, 11),
        ("status-unknown", {"ct129": "unknown"}, 13),
        ("plan-held", {"ct129": "held", "node1": "clean"}, 10),
        ("verify-held", {"ct129": "held"}, 10),
        ("verify-some", {"ct129": "clean", "node1": "clean"}, 0),
    ],
)
def test_verdicts_and_exit_codes(
    replay: Replay, name: str, expected: dict[str, str], code: int
) -> None:
    report = replay(name)
    assert verdicts(report) == expected
    assert report.exit_code == code
    assert report.clean is (code == 0)


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "reset-no-hosts"])
def test_whoever_is_not_clean_has_a_reason_and_a_remedy(replay: Replay, name: str) -> None:
    for host in replay(name).hosts:
        assert host.reason and "\n" not in host.reason
        assert bool(host.remedy) is (host.verdict != "clean")
        assert not host.reason.startswith(host.name)


@pytest.mark.parametrize("name", RECORDED)
def test_totals_agree_with_the_hosts(replay: Replay, name: str) -> None:
    report = replay(name)
    assert report.totals.hosts == len(report.hosts)
    assert report.totals.clean == sum(host.verdict == "clean" for host in report.hosts)
    assert report.totals.killed == sum(len(signalled(host)) for host in report.hosts)


def test_a_held_container(replay: Replay) -> None:
    report = replay("reset-held")
    host = report.hosts[0]
    assert host.route == "pve1 for container 129"
    assert host.changed
    assert [gpu.used_mib for gpu in host.before] == [76115, 76115]
    assert [gpu.used_mib for gpu in host.after] == [0, 0]
    assert [gpu.uuid for gpu in host.before] == [gpu.uuid for gpu in host.after]
    assert host.after[0].driver == "580.159.04"
    assert [(rung.name, rung.verdict) for rung in host.rungs] == [
        ("terminate", "held"),
        ("kill", "clean"),
    ]
    assert 5 <= host.rungs[0].seconds < 7
    assert host.rungs[1].second_zero is not None
    assert [str(action).split(" (")[0] for action in host.killed] == [
        "terminate: TERM sent: python3",
        "kill: KILL sent: python3",
    ]
    assert len(signalled(host)) == 1, "one process, signalled twice"
    assert host.killed[0].process.evidence
    assert host.timings["total"] > host.rungs[0].seconds
    assert [each.name for each in report.skipped] == ["pve1"]
    assert not report.hosts[1].changed


def test_check_mode_names_whom_it_would_signal(replay: Replay) -> None:
    report = replay("reset-check")
    assert report.check
    assert [action.result for action in report.hosts[0].killed] == ["would be sent"]
    assert report.totals.killed == 1


def test_a_neighbour_is_spared_and_named(replay: Replay) -> None:
    host = replay("reset-blocked").hosts[0]
    assert [each.process.owner for each in host.spared] == ["lxc 130"]
    assert "foreign" in host.spared[0].reason
    assert "foreign" in host.reason


def test_where_a_reset_would_help_it_is_named_as_it_is_typed(replay: Replay) -> None:
    for name in ("status-held", "plan-held", "verify-held"):
        assert replay(name).hosts[0].remedy == "gpuops reset -l ct129"
    assert "reset" not in replay("status-held").hosts[1].remedy, "who is blocked"


def test_who_outlived_sigkill_is_still_a_holder(replay: Replay) -> None:
    host = replay("reset-unkillable").hosts[0]
    assert "outlived SIGKILL" in host.reason
    assert len(host.holders) == 1


def test_a_host_of_which_some_gpus_were_looked_at_says_which(replay: Replay) -> None:
    """GPU 0 of node1 is held; the inventory limits the run to GPU 1 there."""
    whole, part = replay("verify-some").hosts
    assert (whole.only_gpus, whole.part) == ((), "")
    assert (part.only_gpus, part.part) == (("1",), "only GPU 1")
    assert part.holders[0].gpus == (0,)
    assert replay("verify-some").part == "only some GPUs of 1 host"


def test_unreachable_says_where(replay: Replay) -> None:
    host = replay("reset-unreachable").hosts[0]
    assert host.remedy == "see whether 'ssh pve1' works, with the user and address of the inventory"
    assert host.reason == "ssh: connect to host 10.77.0.11 port 22: Connection refused"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "Make sure this host can be reached over ssh: ",
            "Make sure this host can be reached over ssh:",
        ),
        (
            "Failed to connect to the host via ssh: no route",
            "Failed to connect to the host via ssh: no route",
        ),
        ("", "no connection"),
    ],
)
def test_unreachable_always_has_a_reason(words: str, reason: str) -> None:
    collector = Collector("reset", False)
    data = {"host": "a", "res": {"unreachable": True, "msg": words}}
    collector.take({"event": "runner_on_unreachable", "event_data": data})
    assert collector.report().hosts[0].reason == reason


def test_a_refusal_says_what_to_write(replay: Replay) -> None:
    host = replay("reset-refused").hosts[0]
    assert host.reason == "gpuops_scope is 'user:alice'"
    assert host.remedy.startswith("write one of")


@pytest.mark.parametrize(("looked", "verdict"), [(False, "refused"), (True, "unknown")])
def test_what_the_roles_do_not_take_is_refused(looked: bool, verdict: str) -> None:
    """And not what cannot be read; but who was looked at before may have been signalled."""
    action = {"resolved_action": "ansible.builtin.validate_argument_spec"}
    said = "Validation of arguments failed:\nargument 'gpuops_expected_gpus' is 'x'"
    collector = Collector("reset", False)
    if looked:
        hosts = {"a": {"verdict": "clean", "settled": True}}
        data = {"host": "a", "resolved_action": "gpuops.gpu.gpu_release", "res": {"hosts": hosts}}
        collector.take({"event": "runner_on_ok", "event_data": data})
    data = {"host": "a", **action, "res": {"msg": said}}
    collector.take({"event": "runner_on_failed", "event_data": data})
    host = collector.report().hosts[0]
    assert host.verdict == verdict
    assert "argument 'gpuops_expected_gpus' is 'x'" in host.reason
    assert ("Validation" in host.reason) == looked


def failed(action: str, result: dict[str, Any], ended: str = "") -> Any:
    """What the report says of a host of which this was the only event."""
    collector = Collector("reset", False)
    data = {"host": "a", "resolved_action": action, "res": result}
    collector.take({"event": "runner_on_failed", "event_data": data})
    return collector.report(ended=ended).hosts[0]


def test_a_vault_without_its_password_is_told_what_to_name() -> None:
    said = "Attempting to decrypt but no vault secrets found"
    for action in ("gpuops.gpu.gpu_state", "gpuops.gpu.gpu_route"):
        host = failed(action, {"msg": said})
        assert (host.reason, "ANSIBLE_VAULT_PASSWORD_FILE" in host.remedy) == (said, True)


def test_of_a_loop_the_turn_that_failed_says_why() -> None:
    turns = [{"msg": "well"}, {"failed": True, "msg": "no such rung"}, {"failed": True, "msg": "x"}]
    whole = {"msg": "One or more items failed", "results": turns}
    assert failed("gpuops.gpu.gpu_release", whole).reason.startswith("no such rung")


@pytest.mark.parametrize(
    ("ended", "remedy"),
    [("interrupted", "run it again"), ("timed out after 3 s", "run it again, with more time")],
)
def test_who_had_too_little_time_is_told_to_give_more(ended: str, remedy: str) -> None:
    collector = Collector("verify", False)
    hosts = {"a": {"verdict": "held", "reason": "GPU 0: 7 MiB"}}
    data = {"host": "a", "resolved_action": "gpuops.gpu.gpu_state", "res": {"hosts": hosts}}
    collector.take({"event": "runner_on_ok", "event_data": data})
    host = collector.report(ended=ended).hosts[0]
    assert (host.verdict, host.remedy) == ("unknown", remedy)
    assert "held at the last look: GPU 0: 7 MiB" in host.reason


def test_no_hosts_at_all_leaves_ansibles_words(recorded: Callable[[str], dict[str, Any]]) -> None:
    collector = Collector("reset", False)
    for event in recorded("reset-no-hosts")["events"]:
        collector.take(event)
    assert collector.stats is None
    assert "Could not match supplied host pattern, ignoring: ct999" in " ".join(collector.text)


# --- cut off anywhere ---


@pytest.mark.parametrize("name", RECORDED)
def test_cut_off_anywhere_nobody_is_clean_without_a_certificate(
    recorded: Callable[[str], dict[str, Any]], name: str
) -> None:
    run = recorded(name)
    certified: set[str] = set()
    last = {"status": "gpu_state", "plan": "gpu_release"}.get(run["verb"], "gpu_verify")
    collector = Collector(run["verb"], run["check"])
    started: set[str] = set()
    for event in run["events"]:
        collector.take(event)
        data = event["event_data"]
        if event["event"].startswith("runner_") and data.get("host"):
            started.add(data["host"])
        result = data.get("res") or {}
        if str(data.get("resolved_action")).endswith(last) and "verdict" in result:
            certified.add(data["host"])
        report = collector.report(ended="interrupted")
        clean = {host.name for host in report.hosts if host.verdict == "clean"}
        assert clean <= certified
        there = {host.name for host in report.hosts} | {each.name for each in report.skipped}
        assert started <= there, "who was begun with is in the report"
        assert report.exit_code == 130


@pytest.mark.parametrize("ended", ["interrupted", "timed out after 3 s", ""])
@pytest.mark.parametrize(("results", "rung"), [(0, "terminate"), (1, "kill"), (2, "")])
def test_cut_off_in_a_rung_its_signals_are_not_denied(
    replay: Replay, ended: str, results: int, rung: str
) -> None:
    """The container climbs two rungs, the node is clean in the first."""
    seen = 0

    def over(event: dict[str, Any]) -> bool:
        nonlocal seen
        data = event["event_data"]
        mine = data.get("host") == "ct129" and data["resolved_action"].endswith("gpu_release")
        seen += mine and event["event"] == "runner_item_on_ok"
        return seen > results or (mine and event["event"] == "runner_on_ok")

    container, node = replay("reset-held", upto=over, ended=ended).hosts
    assert container.verdict == node.verdict == "unknown"
    said = f"; signals of step {rung} may have been sent and are not in this report"
    assert container.reason.endswith(said) if rung else "signals" not in container.reason
    assert "signals" not in node.reason


@pytest.mark.parametrize("name", RECORDED)
def test_cut_off_anywhere_who_signals_nobody_speaks_of_no_signals(
    recorded: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Whatever the verb, in check mode; and whatever the mode, every verb but one."""
    run = recorded(name)
    collector = Collector(run["verb"], run["check"] or run["verb"] == "reset")
    for event in run["events"]:
        collector.take(event)
        report = collector.report(ended="interrupted")
        assert not any("signals of step" in host.reason for host in report.hosts)


def test_a_failure_that_only_the_recap_knows_is_not_clean(
    recorded: Callable[[str], dict[str, Any]],
) -> None:
    run = recorded("reset-clean")
    collector = Collector("reset", False)
    for event in run["events"]:
        if event["event"] == "playbook_on_stats":
            event = {**event, "event_data": {"failures": {"ct129": 1}}}
        collector.take(event)
    assert verdicts(collector.report())["ct129"] == "unknown"


def test_an_answer_lost_on_the_way_is_unknown(replay: Replay) -> None:
    """As when the strategy or a callback swallows a host's last result."""
    report = replay(
        "reset-clean",
        upto=lambda event: str(event["event_data"].get("resolved_action")).endswith("gpu_verify"),
    )
    assert set(verdicts(report).values()) == {"unknown"}
    assert "no answer" in report.hosts[0].reason


def test_every_event_of_any_shape_is_survived() -> None:
    collector = Collector("reset", False)
    for event in (
        {},
        {"event": "runner_on_ok"},
        {"event": "runner_on_ok", "event_data": {"host": "a"}},
        {"event": "runner_on_ok", "event_data": {"host": "a", "res": {"censored": "no_log"}}},
        {"event": "runner_on_failed", "event_data": {"host": "a", "res": {"msg": ["b", "c"]}}},
        {"event": "verbose", "stdout": "\x1b[1;35m[WARNING]: it\r\n is late\x1b[0m"},
    ):
        collector.take(event)
    report = collector.report()
    assert verdicts(report) == {"a": "unknown"}
    assert report.hosts[0].reason == "b; c"
    assert report.warnings == ("it is late",)


# --- watching ---


def test_who_watches_sees_each_rung(replay: Replay) -> None:
    steps: list[Step] = []
    replay("reset-held", watch=steps.append)
    mine = [step for step in steps if step.host == "ct129"]
    assert [step.phase for step in mine] == ["route", "terminate", "kill", "verify", "done"]
    assert [max(step.used_mib, default=None) for step in mine] == [None, None, 76115, 0, 0]
    assert mine[-1].verdict == "clean"
    assert "python3" in mine[2].waits_for


@pytest.mark.parametrize("name", RECORDED)
def test_no_host_goes_back_to_a_rung(replay: Replay, name: str) -> None:
    """Though the role that verifies it routes it once more."""
    steps: list[Step] = []
    replay(name, watch=steps.append)
    for host in {step.host for step in steps}:
        phases = [step.phase for step in steps if step.host == host]
        order = list(dict.fromkeys(phases))
        assert sorted(phases, key=order.index) == phases


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "reset-no-hosts"])
def test_every_host_is_done_in_the_end(replay: Replay, name: str) -> None:
    steps: dict[str, Step] = {}
    report = replay(name, watch=lambda step: steps.update({step.host: step}))
    for host in report.hosts:
        if host.route or host.name in steps:
            assert steps[host.name].phase == "done"
            assert steps[host.name].verdict == host.verdict
