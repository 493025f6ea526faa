"""The lab: GPU machines from real parts, with only the NVIDIA driver simulated. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lab import Lab
    from .plan import LabError

__all__ = ["Lab", "LabError"]


def __getattr__(name: str) -> Any:
    # Lazily, so that the driver and `run` start without loading all of the lab.
    if name == "Lab":
        from .lab import Lab

        return Lab
    if name == "LabError":
        from .plan import LabError

        return LabError
    raise AttributeError(name)
