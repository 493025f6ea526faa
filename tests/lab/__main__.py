"""python -m tests.lab VERB: JSON on standard output, errors as one line on standard error."""

from __future__ import annotations

import os
import sys

RUN_HELP = """usage: python -m tests.lab run -- COMMAND...

Run a command in the lab's network, with its host names, keys and inventory.
Input, output, signals and exit code are the command's own."""


def run_directly(arguments: list[str]) -> None:
    """`run` becomes its command at once, without loading the rest of the lab."""
    name = os.environ.get("GPUOPS_LAB", "lab")
    script = f"/run/gpuops-lab/{name}/run"
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or command[0] in ("-h", "--help"):
        print(RUN_HELP)
        sys.exit(0 if command else 2)
    if not os.path.exists(script):
        sys.exit(f"lab: lab {name} is not up (python -m tests.lab up)")
    os.execv("/bin/sh", ["sh", script, *command])  # /run may be mounted noexec


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_directly(sys.argv[2:])
    from .cli import main

    sys.exit(main(sys.argv[1:]))
