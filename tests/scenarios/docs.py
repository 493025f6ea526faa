# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of all scenarios, out of their files."""

from __future__ import annotations

from tests.scenarios.scenario import Outcome, Scenario

HEAD = """\
# Scenarios

Made from the files in `tests/scenarios/` by `python -m tests.scenarios --write-docs`; do not edit.

Each is played on the lab (real sshd, containers, processes; only the driver is simulated). Besides
what the table says, after each of them: every bystander (the machines' sshd and process 1, monitors
that have a GPU open, an editor, a server without a GPU, a neighbour's workload) is the same living
process as before, nothing of gpuops still runs on any machine, nobody else was signalled, no memory
is in use where the verdict is `clean`, a refusal is one line, a run that is refused executed
nothing on any machine, one that ends clean took at most two remote executions on a host and one
more for each rung (both unless its file says how many), and who outlived SIGKILL was reported
within 10 s of it.

*Signalled* names the rung; a process in *italics* is still there afterwards. `then` stands for
the same command typed a second time.

"""
COLUMNS = ("scenario", "what is found, and what is typed", "exit", "verdict", "signalled")


def table(scenarios: list[Scenario]) -> str:
    """The whole file."""
    count = f"{len(scenarios)} scenarios.\n\n"
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for each in sorted(scenarios, key=lambda each: each.name):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row(each)) + " |")
    return HEAD + count + "\n".join(lines) + "\n"


def row(each: Scenario) -> tuple[str, ...]:
    """One scenario's cells."""
    link = f"[{each.name}](../tests/scenarios/{each.name}.yml)"
    before = [event["type"] for event in each.given if "type" in event]
    typed = "".join(f"<br>`{command.strip()}`" for command in [*before, each.typed])
    text = each.title + (f" ({each.seen})" if each.seen else "") + typed
    outcomes = [each.then] + ([each.again] if each.again else [])
    return (
        link,
        text,
        " then ".join(str(outcome.exit) for outcome in outcomes),
        " then ".join(verdicts(outcome) for outcome in outcomes),
        " then ".join(signals(outcome) for outcome in outcomes),
    )


def verdicts(outcome: Outcome) -> str:
    """The verdict; with hosts where they differ."""
    words = set(outcome.verdict.values())
    if len(words) == 1:
        return words.pop()
    return ", ".join(f"{host} {word}" for host, word in outcome.verdict.items()) or "-"


def signals(outcome: Outcome) -> str:
    """Who by which rung."""
    parts = [f"{who}: {rung}" for who, rung in outcome.killed.items()]
    parts += [f"*{who}*: {rung}" for who, rung in outcome.survives.items()]
    parts += [f"would: {who}: {rung}" for who, rung in outcome.would_kill.items()]
    return ", ".join(parts) or "nobody"
