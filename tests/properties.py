# SPDX-License-Identifier: GPL-3.0-or-later
"""How hypothesis plays in these tests. The tests on a real GPU run where there is none."""

import hypothesis


def load() -> None:
    """No database: a test run leaves nothing behind. Nothing is timed: others share the machine."""
    hypothesis.settings.register_profile(
        "gpuops",
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        max_examples=100,
    )
    hypothesis.settings.load_profile("gpuops")
