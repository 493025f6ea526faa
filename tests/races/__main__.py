# SPDX-License-Identifier: GPL-3.0-or-later
"""python -m tests.races [--rounds N]: play the races in full and write docs/races.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from tests.races import pids, report
from tests.races.operators import Played, Site

FULL = 200
NAMES = ("pids", "two", "kill", "cut")


def main() -> int:
    """Exit code 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.races", description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=FULL,
        metavar="N",
        help="rounds of the race of PIDs; the others in proportion (200 to 50, 20 and 20)",
    )
    parser.add_argument("--only", choices=NAMES, help="one race only; docs/races.md stays as it is")
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    wanted = [arguments.only] if arguments.only else NAMES
    began = time.monotonic()
    rows: list[report.Row] = []

    def part(most: int) -> int:
        return max(1, round(most * arguments.rounds / FULL))

    def tell(name: str) -> Callable[[Played], None]:
        def line(played: Played) -> None:
            last = [each for each in played.wrong if each.startswith(f"round {played.rounds}:")]
            say("\n".join([f"{name}: round {played.rounds}, wrong {len(played.wrong)}", *last]))

        return line

    here, there = multiprocessing.Pipe(duplex=False)
    apart = multiprocessing.Process(
        target=numbers, args=(arguments.rounds, part(20), arguments.seed, there)
    )
    if "pids" in wanted:  # beside the others, which wait most of the time
        apart.start()
        there.close()
    if set(wanted) - {"pids"}:
        with Site(f"races-{os.getpid()}", arguments.seed) as site:
            if "two" in wanted:
                played = site.two_operators(part(50), tell("two"))
                rows.append(report.of_played("two operators at once", played))
            if "kill" in wanted:
                played = site.interrupted(part(20), site.kill_controller, tell("kill"))
                rows.append(report.of_played("controller killed", played))
            if "cut" in wanted:
                played = site.interrupted(part(20), site.cut_connection, tell("cut"))
                rows.append(report.of_played("connection cut", played))
    if "pids" in wanted:
        rows = here.recv() + rows
        apart.join()
    for row in rows:
        print(row.line())
        print("\n".join(row.wrong))
    if not arguments.only:
        report.write(rows, time.monotonic() - began, shlex.join(sys.argv[1:]) or "the full numbers")
    return 1 if any(row.wrong for row in rows) else 0


def numbers(rounds: int, aimed: int, seed: int, answer: Connection) -> None:
    """The races of PIDs, in a process of their own."""
    result = pids.race(rounds, seed=seed, tell=lambda text: say(f"pids: {text}"))
    other = pids.race(aimed, seed=seed, aimed=True, tell=lambda text: say(f"aimed: {text}"))
    answer.send(
        [report.of_pids("PIDs change hands", result), report.of_pids("the same, aimed", other)]
    )


def say(text: str) -> None:
    """How far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
