# SPDX-License-Identifier: GPL-3.0-or-later
"""What every test shares."""

import signal
from pathlib import Path

import pytest

# A shell that starts the tests in the background lets them ignore Ctrl-C. What they start would
# inherit that, and some of it is sent one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout, which is also the root of the collection."""
    return Path(__file__).resolve().parent.parent
