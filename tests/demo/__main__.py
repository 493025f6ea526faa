# SPDX-License-Identifier: GPL-3.0-or-later
"""python -m tests.demo: a reset from held to clean on a lab of its own, told while it happens.

The exit code is 0 only if it ended as told. Nothing of the lab is left, also after Ctrl-C.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lab.lab import Lab
from tests.lab.plan import LabError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "ansible-playbook reset_gpus.yml -l ct129"
SMI = "ssh ct129 nvidia-smi"


class Demo:
    """The lab, what was started in it, and what of the story came true."""

    def __init__(self) -> None:
        self.lab = Lab("demo")
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.masters = Path(tempfile.mkdtemp(prefix="gd"))
        self.claims: list[tuple[bool, str]] = []
        self.seconds = 0.0
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PYTHONUNBUFFERED"] = "1"
        if self.colour:
            environment["ANSIBLE_FORCE_COLOR"] = "1"
        self.environment = environment

    def close(self) -> None:
        """Take the lab away."""
        self.lab.down()
        shutil.rmtree(self.masters, ignore_errors=True)

    # --- telling ---

    def tell(self, text: str) -> None:
        """What happens next, in words."""
        print(f"\n{self.bold('#')} {text}", flush=True)

    def bold(self, text: str) -> str:
        """For a terminal."""
        return f"\033[1m{text}\033[0m" if self.colour else text

    def claim(self, true: object, text: str) -> None:
        """Something that the story says; told at the end."""
        self.claims.append((bool(true), text))

    def typed(self, command: str, keep: str = "") -> tuple[int, str]:
        """Type a command on the lab's controller and show what it prints.

        :param keep: show only lines in which this pattern is found.
        """
        print(self.bold(f"$ {command}"), flush=True)
        argv = ["env", f"ANSIBLE_SSH_CONTROL_PATH_DIR={self.masters}", *shlex.split(command)]
        process = self.lab.popen(
            argv,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        for line in process.stdout or []:
            lines.append(line)
            if re.search(keep, line):
                print(line, end="", flush=True)
        text = re.sub(r"\033\[[0-9;]*m", "", "".join(lines))
        return process.wait(), text

    # --- the story ---

    def used(self) -> list[int]:
        """MiB by GPU, as the lab's driver has it."""
        used: list[int] = self.lab.ask("pve1", {"op": "status"})["used"]
        return used

    def hang(self) -> list[dict[str, Any]]:
        """The hung server and what is left of its workers."""
        hold = self.lab.hold
        server = hold("ct129", gpus="0-7", mib=76115, ignore_term=True)
        worker = {"name": "sglang::scheduler_TP1", "ignore_term": True}
        orphan = hold("ct129", gpus="1", mib=1200, kind="orphan", **worker)
        mapped = hold("ct129", gpus="4", mib=900, kind="mapped-only", **worker)
        late = hold("ct129", gpus="5", mib=900, name="sglang::detokenizer", respawn=1)
        return [server, orphan, mapped, late]

    def play(self) -> None:
        """From held to clean, and once more."""
        began = time.monotonic()
        self.lab.up(cts="129,130", nodes=0)
        self.tell(
            "A lab: Proxmox host pve1 with container 129 and eight simulated H200 GPUs. The host,\n"
            "  its sshd, the container and the processes are real; only the driver is simulated."
        )
        hung = self.hang()
        monitor = self.lab.hold("pve1", gpus="0", kind="open-only", name="dcgm-exporter")
        self.tell(
            "A hung inference server in container 129 holds 76115 MiB on each GPU and ignores\n"
            "  SIGTERM. A worker on GPU 1 outlived its parent, another on GPU 4 has closed its\n"
            "  descriptors and has only mappings left; one on GPU 5 is started anew when it is\n"
            "  ended. On pve1 a monitor has GPU 0 open."
        )
        _, text = self.typed(SMI, keep="MiB|NVIDIA H200|python|sglang")
        self.claim(text.count("76115MiB /") == 5, "before, nvidia-smi read 76115 MiB and more")

        self.tell("One command.")
        code, text = self.typed(COMMAND)
        self.claim(code == 0, "the command ended with exit code 0")
        self.claim(
            "changed=1" in text and "failed=0" in text, "it changed ct129 and nothing failed"
        )
        for process in hung:
            pid = f"(pid {process['pid']}, {process['node_pid']} on the node)"
            self.claim(pid in text, f"its record names {process['name']} {pid}")

        self.tell("The same look again.")
        _, text = self.typed(SMI, keep="MiB|NVIDIA H200|python|sglang|No running")
        self.claim(text.count(" 0MiB /") == 8, "after, nvidia-smi read 0 MiB on eight GPUs")
        self.claim(not any(self.used()), "the driver has nothing in use")
        ids = [process["id"] for process in hung]
        self.claim(not any(self.lab.alive(*ids).values()), "those processes are gone")
        alive = self.lab.alive(monitor["id"])[monitor["id"]]
        self.claim(alive, "the monitor on pve1 is still alive")

        self.tell("Typed again: there is nothing to do, and nothing is done.")
        code, text = self.typed(COMMAND)
        self.claim(code == 0, "the second run ended with exit code 0")
        self.claim("changed=0" in text and "sent" not in text, "it changed and signalled nothing")
        self.seconds = time.monotonic() - began

    def judge(self) -> bool:
        """Say what came true."""
        self.tell(f"Did it end as told? ({self.seconds:.0f} s)")
        for true, text in self.claims:
            print(f"  {'yes' if true else self.bold('NO ')}  {text}")
        return all(true for true, _ in self.claims)


def stop(*_: object) -> None:
    """SIGTERM ends the demo as Ctrl-C does, so that it cleans up."""
    raise KeyboardInterrupt


def main() -> int:
    """Play it; 0 if it ended as told."""
    signal.signal(signal.SIGTERM, stop)
    try:
        demo = Demo()
    except LabError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    code = 1
    try:
        demo.lab.down()  # what an earlier demo may have left
        demo.play()
        code = 0 if demo.judge() else 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        code = 130
    except (LabError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        demo.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
