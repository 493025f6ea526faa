# SPDX-License-Identifier: GPL-3.0-or-later
"""The commit that a document of figures was measured at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Its short hash, marked where files that the figures depend on were changed since.

    GPU_TEST_COMMIT says it where there is no git, as in an unpacked `git archive`.
    """
    if told := os.environ.get("GPU_TEST_COMMIT"):
        return told
    # A repository further up is another one.
    if not (ROOT / ".git").exists():
        return "not known: no git here, and GPU_TEST_COMMIT is not set"
    found = git("rev-parse", "--short=12", "HEAD")
    # The documents are what a run writes.
    changed = git("status", "--porcelain", "--", ".", ":!docs")
    return f"{found.strip()}, with changes that are in no commit" if changed else found.strip()


def git(*arguments: str) -> str:
    """What git says of this checkout, also where it belongs to somebody else."""
    ran = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout if not ran.returncode else f"not known: {ran.stderr.strip()}"
