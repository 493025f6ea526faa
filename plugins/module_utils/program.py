# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program of the acting host: read, and if told so release, a batch of targets.

One execution serves any number of targets of this host: one scan of its processes is shared, and
each target has its own thread and deadlines, so that one that hangs does not hold up the rest.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import threading
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    holders,
    node,
    nvidia_smi,
    turns,
    verdict,
    work,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a quarter as long to import as Python takes to start
    from typing import Any

# The answer is the rest of the line after this word; whatever else reaches stdout is noise.
SENTINEL = "gpuops-answer "


# No descriptor, process or memory to be had.
SHORT = (*holders.EXHAUSTED, errno.EAGAIN, errno.ENOMEM)

# From include/uapi/linux/capability.h.
CAP_SYS_PTRACE = 19

# The values of hidepid with which /proc lists every process, by number and as Linux 5.8 calls them.
SHOWING = ("", "0", "off", "1", "noaccess")

# Descriptors for which this program asks: what it starts inherits that, so not without end.
MOST_FILES = 65536


def run(request: dict[str, Any], readers: nvidia_smi.Readers | None = None) -> dict[str, Any]:
    """Serve one request: ``verb`` (state or release), ``targets``, ``earlier`` (by target, the
    actions of this run so far), and for release ``rung`` and ``check``.

    :param readers: those of the targets, if they were started already.

    Returns what :func:`summary` says; a target whose work failed in an unforeseen way is
    ``unknown`` with the error as its reason.
    """
    asked = request["targets"]
    judged = unfit()
    refused = {each["name"]: judged for each in asked} if judged else refusals(request)
    specs = [each for each in asked if each["name"] not in refused]
    results = {name: work.bare_result(name, why) for name, why in refused.items()}
    if not specs:
        return summary(results, 0)
    request = dict(request, targets=specs)
    open_more_files()
    until = time.monotonic() + deadline.of_request(request)
    readers = readers or nvidia_smi.Readers(specs)
    readers.start_others()
    for name in refused:
        readers.drop(name)
    timeout = max(verdict.Target(spec).smi_timeout for spec in specs)
    host = node.Node(timeout, readers.stuck)
    parts: dict[str, work.Work] = {}
    queue = list(reversed(specs))

    def worker() -> None:
        while True:
            try:
                spec = queue.pop()
            except IndexError:
                return
            name = spec["name"]
            try:
                session = readers.of(spec)
                results[name] = _serve(host, verdict.Target(spec), session, request, parts)
            except Exception as error:  # It must not take the others' answers along.
                results[name] = failed(name, parts.get(name), error)

    workers = min(deadline.TARGETS_AT_ONCE, len(specs))
    threads = [threading.Thread(target=worker, daemon=True) for _ in range(workers)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # As many as there can be; they take the others' turns too.
        threads = [thread for thread in threads if thread.ident]
    if not threads:
        worker()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    host.session.close()
    for name in {spec["name"] for spec in specs} - set(results):
        results[name] = overdue(name, parts.get(name), request)
    answers = {spec["name"]: results[spec["name"]] for spec in asked}
    return summary(answers, time.monotonic() - host.began)


def open_more_files() -> None:
    """Take as many descriptors as are needed for a handle on each of very many holders."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, MOST_FILES):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST_FILES), hard))
        except (OSError, ValueError):
            pass  # Whoever has no descriptor left says so.


def unfit() -> verdict.Verdict | None:
    """Why nothing that this program sees or does here would be right, or ``None`` if it is fit."""
    if os.geteuid() != 0:
        return verdict.Verdict(
            verdict.UNKNOWN,
            "gpuops must be root on the acting host; it runs as user id %d" % os.geteuid(),
            "set ansible_user: root or become: true",
        )
    try:
        number = os.readlink("/proc/self")
    except OSError:
        number = "no process"
    # With the /proc of another namespace each number there would be another process's here.
    if number != str(os.getpid()):
        return verdict.Verdict(
            verdict.UNKNOWN,
            "/proc on the acting host is not that of its own PID namespace: it shows %s where this "
            "program is process %d" % (number, os.getpid()),
            "mount its own there (mount -t proc proc /proc), or act from the node around it",
        )
    hidden = hidepid(holders.read_bytes("/proc/self/mounts").decode("utf-8", "replace"))
    if hidden not in SHOWING and not may_trace():
        return verdict.Verdict(
            verdict.UNKNOWN,
            "/proc on the acting host hides processes from gpuops: it is mounted with hidepid=%s, "
            "and gpuops has not the capability CAP_SYS_PTRACE" % hidden,
            "give it that capability, mount /proc without hidepid, or act from the node around it",
        )
    return None


def hidepid(mounts: str) -> str:
    """What the mount on ``/proc`` says of it, the last where there are several; ``""`` if nothing.

    :param mounts: the text of ``/proc/self/mounts``.
    """
    options: list[str] = []
    for line in mounts.split("\n"):
        words = line.split(" ")
        if words[1:3] == ["/proc", "proc"]:
            options = words[3].split(",")
    return "".join(each[len("hidepid=") :] for each in options if each.startswith("hidepid="))


def may_trace() -> bool:
    """Has this program the capability by which nothing in ``/proc`` is hidden from it?"""
    status = holders.parse_status(holders.read_bytes("/proc/self/status"))
    return bool(int(status["CapEff"][0], 16) >> CAP_SYS_PTRACE & 1)


def refusals(request: dict[str, Any]) -> dict[str, verdict.Verdict]:
    """The targets, by name, that cannot be worked on in the way that they were asked for."""
    names = [spec["name"] for spec in request["targets"]]
    found = {}
    for name, spec in zip(names, request["targets"]):
        try:
            if names.count(name) > 1:
                raise verdict.TargetError("two targets are called %s; name each once" % name)
            verdict.Target(spec)
            verdict.seconds("wait of the rung", (request.get("rung") or {}).get("wait") or 0)
        except verdict.TargetError as error:
            advice = "correct that, and try again; nothing was read or signalled"
            found[name] = verdict.Verdict(verdict.UNKNOWN, str(error), advice)
    return found


def failed(name: str, part: work.Work | None, error: Exception) -> dict[str, Any]:
    """The result of a target whose work failed: in an unforeseen way, or for want of something."""
    if isinstance(error, OSError) and error.errno in SHORT:
        judged = verdict.Verdict(
            verdict.UNKNOWN,
            "the acting host does not give gpuops what it needs: %s" % error.strerror,
            "see what it is short of: files (ulimit -H -n), processes (ulimit -u), memory; or name "
            "fewer hosts in one run",
        )
    elif isinstance(error, turns.TurnError):
        judged = verdict.Verdict(verdict.UNKNOWN, str(error), error.remedy)
    else:
        reason = "internal error: %s: %s" % (type(error).__name__, error)
        judged = verdict.Verdict(verdict.UNKNOWN, reason, "report this as a bug")
    return dict(work.bare_result(name, judged), **(part.record() if part else {}))


def overdue(name: str, part: work.Work | None, request: dict[str, Any]) -> dict[str, Any]:
    """The result of a target whose work did not come to an end.

    :param part: that work, as far as it came; ``None`` if its turn did not come.
    """
    judged = verdict.Verdict(
        verdict.UNKNOWN,
        "the work on %s was given up after %g s" % (name, deadline.of_request(request)),
        "something hangs in the kernel of the acting host: see dmesg there, and reboot it",
    )
    return dict(work.bare_result(name, judged), **(part.record() if part else {}))


def _serve(
    host: node.Node,
    target: verdict.Target,
    session: nvidia_smi.Session,
    request: dict[str, Any],
    parts: dict[str, work.Work],
) -> dict[str, Any]:
    part = work.Work(host, target, session, request["earlier"].get(target.name, []))
    parts[target.name] = part
    try:
        result = _result(part, request)
    finally:
        part.close()
    # When it was so: an old proof must not pass for a fresh one because the batch took long.
    result["done"] = part.proved_at() - host.began
    return result


def _result(part: work.Work, request: dict[str, Any]) -> dict[str, Any]:
    if request["verb"] == "state":
        return part.verify()
    if request["check"]:
        return part.plan(request["rung"])
    return part.release(request["rung"])


def summary(results: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The answer for a batch: the results, and what is true of any or all of them."""
    each = results.values()
    return {
        "hosts": results,
        "changed": any(result["changed"] for result in each),
        "settled": all(result["settled"] for result in each),
        "waiting": any(result["waiting"] for result in each),
        "seconds": seconds,
    }


def main(request: dict[str, Any], readers: nvidia_smi.Readers | None) -> None:
    """Answer a request on standard output, and end without waiting for anything stuck."""
    sys.stdout.write("\n" + SENTINEL + json.dumps(run(request, readers)) + "\n")
    sys.stdout.flush()
    os._exit(0)
