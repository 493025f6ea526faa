# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible ends without looking through everything for garbage, in a checkout and by the wheel."""

from __future__ import annotations

import configparser
import gc
import os
import subprocess
import sys
from pathlib import Path

from ansible_collections.gpuops.gpu.plugins.callback.quick_end import CallbackModule
from gpuops.runner import DEFAULTS

# Also tells whether it was there when everything else has been said.
WATCH = """
import atexit, gc, sys
from ansible.cli.playbook import main
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 10_000))
sys.argv = ["ansible-playbook", "-i", "localhost,", *sys.argv[1:]]
main()
"""
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks: [{ansible.builtin.meta: noop}]
"""


def test_nothing_is_looked_through_after_the_recap() -> None:
    gc.unfreeze()  # what the end of the package's own commands has frozen in other tests
    assert gc.get_freeze_count() == 0
    try:
        CallbackModule().v2_playbook_on_stats(None)
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_ansible_does_so_in_a_checkout(root: Path, tmp_path: Path) -> None:
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    for cfg, frozen in ((root / "ansible.cfg", True), (tmp_path / "none.cfg", False)):
        cfg.touch()
        ran = subprocess.run(
            [sys.executable, "-c", WATCH, str(play)],
            cwd=root,
            env={**os.environ, "ANSIBLE_CONFIG": str(cfg)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.splitlines()[-1] == f"frozen: {frozen}", ran.stdout + ran.stderr


def test_it_is_asked_for_by_its_name(root: Path) -> None:
    config = configparser.ConfigParser()
    config.read(root / "ansible.cfg")
    name = CallbackModule.CALLBACK_NAME
    assert config["defaults"]["callbacks_enabled"] == name
    assert DEFAULTS["ANSIBLE_CALLBACKS_ENABLED"] == name
