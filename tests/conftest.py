# SPDX-License-Identifier: GPL-3.0-or-later
"""What every test shares."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout, which is also the root of the collection."""
    return Path(__file__).resolve().parent.parent
