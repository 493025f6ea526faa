"""What `fault` was asked for: the kinds, and what their values can be. No side effects."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import smi
from .plan import BadValue, Host

FAULTS = {
    "slow-release": "MS: memory is freed that long after the holder's death",
    "stuck": "MIB: memory in use that nobody holds",
    "busy": "utilisation reads 100 with nobody there (latched)",
    "ghost": "'PID MIB': the driver lists a process that does not exist",
    "smi-hang": "nvidia-smi never answers; SIGKILL ends it",
    "smi-hang-d": "nvidia-smi never answers and sits in state D; SIGKILL does not end it",
    "smi-slow": "MS: nvidia-smi takes that long",
    "smi-error": "NAME: nvidia-smi fails with that text and exit code",
    "smi-missing": "there is no nvidia-smi",
    "value": "'[FIELD] TEXT': that field reads TEXT, e.g. 'pstate P8'; without a field memory.used,"
    " e.g. '[N/A]'",
    "gpu-lost": "this GPU (HOST:GPU) has fallen off the bus",
    "frozen": "its holders of now are in a frozen control group of v1: SIGKILL waits until heal",
    "wrong-count": "N: only the first N GPUs are there",
}


def number(text: str) -> str:
    """A whole number that is not negative."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadValue(f"{text!r} is no whole number from 0")
    return text


def ghost(text: str) -> str:
    """The number of a process, and MiB."""
    if not re.fullmatch(r"[1-9][0-9]{0,8} [0-9]{1,9}", text):
        raise BadValue(f"{text!r} is not a PID and a number of MiB")
    return text


def error_name(text: str) -> str:
    """An error of nvidia-smi."""
    if text not in smi.error_names():
        raise BadValue(f"no error {text!r}; there are: {', '.join(smi.error_names())}")
    return text


def reading(text: str) -> str:
    """FIELD TEXT, of memory.used where no field is named; all names of fields begin in lower case.

    >>> reading("[N/A]")
    'memory.used [N/A]'
    """
    if not re.match("[a-z]", text):
        return f"memory.used {text}"
    name, space, shown = text.partition(" ")
    field = smi.field_name(name)
    if field is None:
        raise BadValue(f"nvidia-smi here has no field {name!r}")
    if not space:
        raise BadValue(f"what does {name} read? Write '{name} TEXT'")
    return f"{field} {shown}"


VALUES: dict[str, Callable[[str], str]] = {
    "slow-release": number,
    "stuck": number,
    "ghost": ghost,
    "smi-slow": number,
    "smi-error": error_name,
    "value": reading,
    "wrong-count": number,
}


def check(where: Host, gpu: str, kind: str, value: str) -> str:
    """The value as the driver takes it; BadValue for what cannot be on that host."""
    if kind not in FAULTS:
        raise BadValue(f"no fault {kind!r}; there are: {', '.join(FAULTS)}")
    count = len(where.gpus)
    if gpu and not (re.fullmatch("[0-9]{1,3}", gpu) and int(gpu) < count):
        raise BadValue(f"no GPU {gpu} on {where.name}: it has 0 to {count - 1}")
    if kind == "gpu-lost" and not gpu:
        raise BadValue("gpu-lost needs HOST:GPU")
    if kind not in VALUES:
        if value:
            raise BadValue(f"{kind} takes no value")
        return ""
    if not value:
        raise BadValue(f"{kind} needs a value ({FAULTS[kind]})")
    try:
        checked = VALUES[kind](value)
    except BadValue as error:
        raise BadValue(f"{kind}: {error}") from None
    if kind == "wrong-count" and int(checked) > count:
        raise BadValue(f"wrong-count: {where.name} has {count} GPUs")
    return checked
