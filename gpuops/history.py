# SPDX-License-Identifier: GPL-3.0-or-later
"""What was found and done, run after run: an append-only file with one line a host.

All lines of a run are appended at once and under a lock, so that runs at the same time do not mix
and a reader never sees half a line.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpuops.errors import UsageError
from gpuops.report import Host, Process, Report, only

SCHEMA = "gpuops.history/1"
NAME = "history.jsonl"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def folder() -> Path:
    """Where the history is kept if nobody says otherwise: XDG's place for state."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    home = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return home / "gpuops"


def append(report: Report, where: Path) -> None:
    """Add the hosts of a report.

    :raises OSError: it cannot be written; then it is as it was.
    """
    lines = "".join(json.dumps(entry(report, host)) + "\n" for host in report.hosts)
    if not lines:
        return
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    # To be read as well: whether the last line was finished.
    handle = os.open(where / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            lines = "\n" + lines  # somebody was killed in the middle of a line
        data = lines.encode()
        try:
            while data:
                data = data[os.write(handle, data) :]
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def entry(report: Report, host: Host) -> dict[str, Any]:
    """What is remembered of a host: the verdict, the GPUs, and who held them before."""
    after = {gpu.uuid: gpu.used_mib for gpu in host.after}
    return {
        "schema": SCHEMA,
        "time": report.started,
        "verb": report.verb,
        "check": report.check,
        "host": host.name,
        "verdict": host.verdict,
        "only_gpus": list(host.only_gpus),
        "changed": host.changed,
        "reason": host.reason,
        "route": host.route,
        "held": list(_held(host)),
        "gpus": [
            {"uuid": gpu.uuid, "before_mib": gpu.used_mib, "after_mib": after.get(gpu.uuid)}
            for gpu in host.before
        ],
        "seconds": host.timings.get("total", report.seconds),
    }


def _held(host: Host) -> Iterator[dict[str, Any]]:
    """Who held GPUs, each once, with what became of them."""
    fates: dict[tuple[int, int], tuple[Process, str]] = {}
    for action in host.killed:
        key = (action.process.node_pid, action.process.start)
        fates[key] = (action.process, f"{action.signal} {action.result}")
    for process in host.holders:
        fates.setdefault((process.node_pid, process.start), (process, "left"))
    for each in host.spared:
        fates.setdefault((each.process.node_pid, each.process.start), (each.process, "spared"))
    for process, fate in fates.values():
        yield {
            "pid": process.pid,
            "node_pid": process.node_pid,
            "name": process.name,
            "user": process.user,
            "owner": process.owner,
            "command": process.command,
            "gpus": list(process.gpus),
            "fate": fate,
        }


def read(
    where: Path, hosts: Iterable[str] = ("*",), since: datetime | None = None
) -> Iterator[dict[str, Any]]:
    """The entries of these hosts (names, shell wildcards work), the oldest first.

    What is no entry is passed over: an old version, or a line that was cut off.
    """
    patterns = list(hosts)
    try:
        file = (where / NAME).open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"{where / NAME} cannot be read ({error.strerror})", "name its folder with --log-dir"
        ) from error
    with file:
        for line in file:
            found = _parse(line)
            if found is None or not any(fnmatchcase(found["host"], each) for each in patterns):
                continue
            if since is None or datetime.fromisoformat(found["time"]) >= since:
                yield found


def _parse(line: str) -> dict[str, Any] | None:
    """The entry of a line, with its time in UTC; ``None`` if it is none, or not in full."""
    try:
        found = json.loads(line)
        if found["schema"] != SCHEMA:
            return None
        began = datetime.fromisoformat(found["time"])
        found["time"] = (began if began.tzinfo else began.replace(tzinfo=UTC)).isoformat()
        list(tell([found]))
        return dict(found) if isinstance(found["host"], str) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def moment(text: str) -> datetime:
    """A time ago, as ``7d`` or ``12h``, or a date, as ``2026-11-01`` or ISO 8601 with a time.

    :raises ValueError: it is neither.
    """
    ago = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip())
    if ago:
        try:
            return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * UNITS[ago[2]])
        except OverflowError as error:
            raise ValueError(f"{text} ago there were no GPUs") from error
    found = datetime.fromisoformat(text.strip())
    try:
        return found if found.tzinfo else found.astimezone()
    except OverflowError as error:
        raise ValueError(f"{text} is no time of a clock") from error


def tell(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The entries as lines, then for each host when it was last proved clean, and who held it.

    A proof about some GPUs of a host is none of the host, so it is told beside that.
    """
    last_clean: dict[str, dict[str, dict[str, Any]]] = {}
    holders: dict[str, dict[str, Any]] = {}
    names: dict[str, None] = {}
    for each in entries:
        name = each["host"]
        names[name] = None
        verb = (
            f"{each['verb']} --check" if each["check"] and each["verb"] == "reset" else each["verb"]
        )
        some = part(each)
        about = f"{each['verdict']} ({some})" if some else each["verdict"]
        yield f"{when(each['time'])}  {name}  {verb}: {about}; {each['reason']}"
        for held in each["held"]:
            yield f"    {who(held)}"
        if each["held"] and not (each["verdict"] == "clean" and not each["changed"]):
            holders[name] = each
        if each["verdict"] == "clean":
            # One of the whole host is one of all its parts too.
            last_clean[name] = {**(last_clean.get(name, {}) if some else {}), some: each}
    for name in names:
        proofs, held = last_clean.get(name, {}), holders.get(name)
        if "" not in proofs:
            yield f"{name}: not proved clean{' as a whole' if proofs else ''} in this time"
        for some, clean in proofs.items():
            about = f"{name}, {some}" if some else name
            yield f"{about}: last proved clean {when(clean['time'])} ({clean['verb']})"
        if held is not None:
            people = "; ".join(who(each) for each in held["held"])
            yield f"{name}: last held ({when(held['time'])}) by {people}"


def part(entry: dict[str, Any]) -> str:
    """Which GPUs an entry is about, if not all of the host; older versions did not note it."""
    gpus = entry.get("only_gpus")
    return "all or some GPUs (not noted)" if gpus is None else only(gpus)


def when(time: str) -> str:
    """The time of an entry, in UTC and to the second."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def who(held: dict[str, Any]) -> str:
    """One who held GPUs, in a few words."""
    gpus = ",".join(map(str, held["gpus"])) or "-"
    return (
        f"{held['name']} (pid {held['pid']}, {held['user']}, {held['owner']}) "
        f"on GPU {gpus}, {held['fate']}: {held['command']}"
    )
