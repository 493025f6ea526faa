# SPDX-License-Identifier: GPL-3.0-or-later
"""What can go wrong, each in one sentence of what and one of what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuops.report import Report


class GpuopsError(Exception):
    """Something that has to be put right; ``what`` happened and ``remedy``, what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class UsageError(GpuopsError):
    """What was asked for cannot be: a wrong option, an inventory that is not there."""


class PlanError(UsageError):
    """The plan that was to be written was not; ``report`` holds what was found all the same."""

    def __init__(self, report: Report, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.report = report


class AnsibleError(GpuopsError):
    """Ansible ended before it had a result; ``text`` holds its own words, all of them."""

    def __init__(self, what: str, remedy: str, text: str = "") -> None:
        self.text = text or what
        super().__init__(what, remedy)


class ReportError(GpuopsError):
    """A document that is no report of a schema that this version knows."""


class NotCleanError(GpuopsError):
    """Not every host was proved clean; ``report`` says which, and why."""

    def __init__(self, report: Report, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.report = report


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a cancelled task; ``report`` holds what was known by then."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report
