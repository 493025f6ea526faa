# SPDX-License-Identifier: GPL-3.0-or-later
"""The scenario suite: what an operator finds and types, and what must come of it.

Each ``*.yml`` here is one scenario; :mod:`tests.scenarios.scenario` says what may stand in it,
:mod:`tests.scenarios.runner` plays it on the lab. ``python -m tests.scenarios --write-docs``
writes the table in ``docs/scenarios.md``.
"""
