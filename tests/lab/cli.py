"""The command line: each verb is a method of Lab."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any, NoReturn

from .faults import FAULTS
from .lab import Lab
from .plan import BadValue, LabError
from .smi import error_names
from .wish import KINDS


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read more."""
        self.exit(2, f"lab: {message} ({self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = Parser(
        prog="python -m tests.lab",
        description="GPU machines from real parts; only the NVIDIA driver is simulated.",
        epilog="GPUOPS_LAB=NAME chooses one of several labs on one machine (default: lab).",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, **options)

    up = verb(
        "up",
        "Build the lab. When it is up with the same arguments, just answer; a lab that is up with"
        ' others is taken down first, with all in it ("replaced": true).',
    )
    up.add_argument(
        "--cts",
        default="129,130",
        metavar="LIST",
        help="containers: 129,130 or 129-168 or 231@pve2; none (default: 129,130)",
    )
    up.add_argument("--nodes", type=int, default=1, metavar="N", help="bare nodes (default: 1)")
    up.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs per host (default: 8)")
    up.add_argument(
        "--minor-shift",
        type=int,
        default=0,
        metavar="N",
        help="GPU i is /dev/nvidia(i+N), the last ones /dev/nvidia0 and so on: minor number and"
        " index differ",
    )
    up.add_argument(
        "--delay-ms",
        type=int,
        default=150,
        metavar="MS",
        help="memory is freed that long after a holder's death (default: 150)",
    )
    up.add_argument(
        "--own-nodes",
        default="none",
        metavar="LIST",
        help="containers whose device nodes are their own, with other inodes",
    )
    up.add_argument(
        "--systemd",
        default="none",
        metavar="LIST",
        help="containers and bare nodes, besides the others, whose process 1 is systemd: 131,node9",
    )
    up.add_argument(
        "--unprivileged",
        default="none",
        metavar="LIST",
        help="containers, besides the others, whose root is uid 100000 on the Proxmox host: 132",
    )
    verb("down", "Take everything of the lab away, also after a crash.")
    verb("status", "Hosts, containers, holders, faults, memory as the driver has it.")

    hold = verb("hold", "Start a real process that holds GPUs; returns when it does.")
    hold.add_argument("host", help="ct129, pve1, node1, ...")
    hold.add_argument("--gpus", default="all", metavar="LIST", help="0-3,7 or all (default: all)")
    hold.add_argument("--mib", type=int, help="MiB per GPU (default: 76115, of --kind mps 66)")
    hold.add_argument("--kind", choices=KINDS, default="plain", help="how it holds them")
    hold.add_argument(
        "--name",
        help="comm and argv[0] (default: python3); with :: in it the"
        " whole command line, as setproctitle does",
    )
    hold.add_argument(
        "--user", help="run as that user, made if there is none (default: root, with --slurm alice)"
    )
    hold.add_argument("--ignore-term", action="store_true", help="ignore TERM, INT and HUP")
    hold.add_argument(
        "--respawn",
        type=int,
        nargs="?",
        const=-1,
        default=0,
        metavar="N",
        help="a supervisor starts it again N times, or for ever",
    )
    hold.add_argument(
        "--count", type=int, default=1, metavar="N", help="that many (answers a list)"
    )
    hold.add_argument("--busy", action="store_true", help="utilisation reads 100 while it lives")
    hold.add_argument(
        "--cgroup",
        metavar="PATH",
        help="run in that cgroup below the host's own root, e.g. system.slice/vllm.service;"
        " with a leading / below the Proxmox host's (an escape, for a container)",
    )
    hold.add_argument(
        "--slurm", metavar="JOB[.STEP]", help="in a cgroup and environment as Slurm makes them"
    )
    hold.add_argument("--pod", metavar="UID", help="in a cgroup as Kubernetes makes it for a pod")
    hold.add_argument(
        "--opens",
        metavar="GPUS",
        help="GPUs that it has open as well without computing on them, as CUDA has all it can see",
    )
    hold.add_argument(
        "--mps-client", action="store_true", help="a client of the MPS server (--kind mps) there"
    )
    hold.add_argument(
        "--unit", metavar="NAME", help="run it as the systemd service NAME of the host"
    )
    hold.add_argument(
        "--user-session",
        metavar="USER",
        help="run it as a service (--unit, default: vllm) of that user's own systemd",
    )
    hold.add_argument(
        "--podman", metavar="NAME", help="run it in a podman container NAME in the host"
    )
    hold.add_argument(
        "--restart",
        choices=("no", "always", "slowly", "loading"),
        default="no",
        help="of the service or podman container (default: no); slowly: after 5 s; loading: at "
        "once, but it takes 8 s until it opens a GPU (also with --respawn)",
    )
    drop = verb("drop", "End holders, also stopped and unkillable ones, and wait for their end.")
    drop.add_argument("which", nargs="?", default="all", metavar="ID|HOST|all")
    alive = verb("alive", "Which holders are alive.")
    alive.add_argument("ids", nargs="+", metavar="ID")

    faults = "\n".join(f"  {name:14}{text}" for name, text in FAULTS.items())
    fault = verb(
        "fault",
        "Break something. A fault on a Proxmox host applies to its containers too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"kinds:\n{faults}\n\nsmi-error names: {', '.join(error_names())}",
    )
    fault.add_argument("target", metavar="HOST|HOST:GPU")
    fault.add_argument("kind", choices=FAULTS, metavar="KIND")
    fault.add_argument("value", nargs="*", metavar="VALUE")
    heal = verb("heal", "Undo the faults of a host or container, or all.")
    heal.add_argument("host", nargs="?")
    for name, text in (("stop", "Stop a container."), ("start", "Start a stopped container.")):
        verb(name, text).add_argument("name", metavar="CT")
    cut = verb("cut", "Make a host or container unreachable: connections are refused.")
    cut.add_argument("name", metavar="HOST")
    cut.add_argument("--silent", action="store_true", help="take the cable away: no answer at all")
    verb("mend", "Make it reachable again.").add_argument("name", metavar="HOST")
    run = verb("run", "Run a controller command in the lab's network: run -- COMMAND...")
    run.add_argument("command", nargs=argparse.REMAINDER)
    return top


def act(lab: Lab, options: dict[str, Any]) -> Any:
    """Call the method that the verb names."""
    verb = options.pop("verb")
    if verb == "hold":
        holders = lab.hold_many(**options)
        return holders if options["count"] > 1 else holders[0]
    if verb == "fault":
        return lab.fault(options["target"], options["kind"], " ".join(options["value"]))
    if verb == "alive":
        return lab.alive(*options["ids"])
    return getattr(lab, verb)(**options)


def say(text: str) -> int:
    """Print an answer; the exit code, of 141 as a shell has it when the reader has left."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is still in the buffer would be written, and complained about, at the very end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def main(arguments: list[str]) -> int:
    """Entry of the command line."""
    options = vars(parser().parse_args(arguments))
    try:
        answer = act(Lab(), options)
    except BadValue as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except (LabError, OSError, subprocess.CalledProcessError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return say(json.dumps(answer, indent=2))
