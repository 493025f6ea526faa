# SPDX-License-Identifier: GPL-3.0-or-later
"""python -m tests.bench: measure, print a table, write build/bench.json."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from tests.bench import figures, report
from tests.bench.bench import Bench, BenchError
from tests.lab.plan import LabError


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(prog="python -m tests.bench", description=figures.__doc__)
    top.add_argument(
        "--pairs", type=int, default=7, metavar="N", help="pairs for each figure (default: 7)"
    )
    top.add_argument(
        "--only",
        action="append",
        choices=list(figures.FIGURES),
        metavar="FIGURE",
        help=f"only this figure; can be repeated ({', '.join(figures.FIGURES)})",
    )
    return top


def stop(*_: object) -> None:
    """SIGTERM ends the benchmark as Ctrl-C does, so that it cleans up."""
    raise KeyboardInterrupt


def main() -> int:
    """Measure; 0 unless something did not run. How fast it was decides nothing here."""
    options = parser().parse_args()
    if options.pairs < 1:
        parser().error("--pairs is 0; write 1 or more")
    signal.signal(signal.SIGTERM, stop)
    bench = Bench(options.pairs)
    conditions = report.conditions(options.pairs)
    rows: list[report.Row] = []
    code = 0
    try:
        for name in options.only or figures.FIGURES:
            for row in figures.FIGURES[name](bench):
                rows.append(row)
                bench.say(row.line())
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        code = 130
    except (BenchError, LabError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        code = 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        bench.close()
    if code == 0:
        print(report.table(rows))
        report.RESULT.parent.mkdir(exist_ok=True)
        text = json.dumps(report.document(conditions | bench.notes, rows), indent=2)
        report.RESULT.write_text(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
