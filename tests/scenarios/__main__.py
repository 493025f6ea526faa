# SPDX-License-Identifier: GPL-3.0-or-later
"""python -m tests.scenarios: list the scenarios, or write the table of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.scenarios import docs
from tests.scenarios.scenario import load_all

TARGET = Path(__file__).resolve().parents[2] / "docs/scenarios.md"

parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
parser.add_argument("--write-docs", action="store_true", help="write docs/scenarios.md")
scenarios = load_all()
if parser.parse_args().write_docs:
    TARGET.write_text(docs.table(scenarios), encoding="utf-8")
    print(f"{TARGET}: {len(scenarios)} scenarios")
else:
    for scenario in scenarios:
        print(f"{scenario.name:40} {scenario.title}")
