# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles in plays of other people: conditions, rescues, tasks between, variables of one role."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.patience import PATIENCE, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = f"plays-{os.getpid()}"

# So many containers of one Proxmox host that the first have failed when the last are begun with.
LAST = 140

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab(NAME)
    made.up(cts=f"129-{LAST}", nodes=1)
    yield made
    made.down()


@pytest.fixture(autouse=True)
def nobody_is_left(lab: Lab) -> Iterator[None]:
    yield
    lab.drop()


class Played:
    """A play that has ended."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.words = re.sub(r"\s+", " ", output)


@pytest.fixture
def play(lab: Lab, tmp_path: Path) -> Callable[..., Played]:
    """Type a play of this folder; ``meanwhile`` is called where it says that it waits."""

    def run(
        play: str, *more: str, meanwhile: Callable[[], Any] = lambda: None, cwd: Path = ROOT
    ) -> Played:
        folder = tmp_path / "signs"
        folder.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(lab.paths.state / "cp"),
        }
        typed = [str(ROOT / ".venv/bin/ansible-playbook"), str(HERE / play), *more]
        output = tmp_path / "output"
        with output.open("w") as screen:
            popen = lab.popen(
                [*typed, "-e", f"plays_folder={folder}"],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )
            try:
                waits = folder / "waits"
                if until(lambda: popen.poll() is not None or waits.exists(), 6 * PATIENCE):
                    if popen.poll() is None:
                        meanwhile()
                    (folder / "go").touch()
                code = popen.wait(3 * PATIENCE)
            finally:
                popen.kill()
        return Played(code, output.read_text())

    return run


def used(lab: Lab) -> list[int]:
    """MiB in use on the GPUs of the Proxmox host."""
    found: list[int] = lab.status()["hosts"]["pve1"]["driver"]["used"]
    return found


@pytest.mark.parametrize(("wanted", "other"), [("ct129", "ct130"), ("ct130", "ct129")])
def test_a_host_that_a_condition_leaves_out_is_left_alone(
    lab: Lab, play: Callable[..., Played], wanted: str, other: str
) -> None:
    mine, theirs = lab.hold(wanted, gpus="0-3"), lab.hold(other, gpus="4-7")
    done = play("condition.yml", "-e", f"plays_wanted={wanted}")
    assert lab.alive(mine["id"], theirs["id"]) == {mine["id"]: False, theirs["id"]: True}
    assert done.code == 2, done.words
    assert f"foreign: it belongs to lxc {other[2:]}" in done.words
    # He is looked at with the others, and says what is true of him.
    assert "held: GPU 4-7: 76115 MiB each" in done.words


@pytest.mark.parametrize("name", ["between.yml", "between_in_one_play.yml"])
def test_a_proof_is_of_now(lab: Lab, play: Callable[..., Played], name: str) -> None:
    done = play(
        name,
        *("-e", "gpuops_hosts=ct129", "-e", "gpuops_verify_retries=1"),
        meanwhile=lambda: lab.hold("ct129", gpus="0-7"),
    )
    assert done.code == 2, done.words
    assert "held: GPU 0-7: 76115 MiB each" in done.words
    assert used(lab) == [76115] * 8


def test_who_fails_is_reset_by_itself(lab: Lab, play: Callable[..., Played]) -> None:
    done = play("rescue.yml", meanwhile=lambda: lab.hold("ct130", gpus="0-7"))
    assert done.code == 0, done.words
    assert "terminate: TERM sent" in done.words
    assert used(lab) == [0] * 8


@pytest.mark.parametrize("name", ["reset_gpus.yml", "verify_gpus.yml"])
def test_a_leader_that_fails_takes_nobody_along(
    lab: Lab, play: Callable[..., Played], tmp_path: Path, name: str
) -> None:
    """Those that are begun with when it has failed already know all the same what it found."""
    lab.hold("ct129", gpus="0", ignore_term=True)
    inventory = tmp_path / "more.yml"
    inventory.write_text(
        "all: {vars: {gpuops_gpus: 1}}\ngpu_nodes: {hosts: {ct129: {gpuops_gpus: 0}}}\n"
    )
    done = play(
        f"../../playbooks/{name}",
        *("-i", str(lab.paths.inventory), "-i", str(inventory), "-l", "gpu_nodes:!node1"),
        *("-e", "gpuops_rungs=terminate", "-e", "gpuops_verify_retries=1"),
    )
    failed = dict(re.findall(r"(ct\d+) : ok=.*? failed=(\d)", done.words))
    assert failed == {f"ct{n}": "1" if n == 129 else "0" for n in range(129, LAST + 1)}, done.words


def test_variables_of_one_role_hold_for_it(lab: Lab, play: Callable[..., Played]) -> None:
    goes = lab.hold("ct129", gpus="0")
    kept = lab.hold("ct129", gpus="0", mib=500, name="keep-me")
    stays = lab.hold("ct129", gpus="1")
    rude = lab.hold("ct129", gpus="0", ignore_term=True)
    done = play("role_variables.yml", "-e", "gpuops_verify_retries=1")
    assert done.code == 2, done.words
    assert lab.alive(*(each["id"] for each in (goes, kept, stays, rude))) == {
        goes["id"]: False,
        kept["id"]: True,
        stays["id"]: True,
        rude["id"]: True,
    }


@pytest.mark.parametrize("public", [True, False])
def test_roles_that_are_included(lab: Lab, play: Callable[..., Played], public: bool) -> None:
    """They work, or nothing is done and it is said what to write instead."""
    server = lab.hold("ct129", gpus="0")
    done = play("included.yml", "-e", f"plays_public={public}")
    assert lab.alive(server["id"])[server["id"]] is not public
    assert (done.code == 0) is public, done.words
    if not public:
        assert "the defaults of the role gpu_route are not known here; list that role" in done.words


@pytest.mark.parametrize("name", ["verify_gpus.yml", "gpu_status.yml", "plan_gpus.yml"])
def test_no_tag_ends_well_without_a_look(play: Callable[..., Played], lab: Lab, name: str) -> None:
    lab.fault("pve1", "value", "[N/A]")
    try:
        done = play(f"../../playbooks/{name}", "-l", "ct129", "--tags", "mistyped")
    finally:
        lab.heal()
    assert done.code == 2, done.words
    assert "unknown: memory.used of GPU 0 reads '[N/A]'" in done.words


def test_what_cannot_be_read_fails_in_check_mode_too(play: Callable[..., Played], lab: Lab) -> None:
    lab.fault("pve1", "value", "[N/A]")
    try:
        done = play("../../playbooks/verify_gpus.yml", "-l", "ct129", "--check")
    finally:
        lab.heal()
    assert done.code == 2, done.words
    assert "unknown: memory.used of GPU 0 reads '[N/A]'" in done.words


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["-e", "gpuops_hosts=ct129,ct13O"], "no host or group 'ct13O' in the inventory"),
        (["-l", "gpu_nodes:!ct13O"], "no host or group 'ct13O' in the inventory"),
        (["-l", "@empty"], "-l is '@empty', which names nothing and means every host"),
    ],
)
def test_a_mistyped_host_stops_the_run(
    play: Callable[..., Played],
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    more: list[str],
    says: str,
) -> None:
    """Also with an ansible.cfg of one's own, which lets Ansible warn of it only."""
    monkeypatch.setenv("ANSIBLE_HOST_PATTERN_MISMATCH", "warning")
    (tmp_path / "empty").write_text("\n")
    server = lab.hold("ct129", gpus="0")
    done = play("../../playbooks/reset_gpus.yml", *more, cwd=tmp_path)
    assert lab.alive(server["id"]) == {server["id"]: True}
    assert done.code != 0, done.words
    assert says in done.words


def test_a_plan_lies_where_it_was_typed(
    play: Callable[..., Played], lab: Lab, tmp_path: Path
) -> None:
    server = lab.hold("ct129", gpus="0")
    given = ("-l", "ct129", "-e", "gpuops_plan=plan.json")
    assert play("../../playbooks/plan_gpus.yml", *given, cwd=tmp_path).code == 0
    assert (tmp_path / "plan.json").exists()
    done = play("../../playbooks/reset_gpus.yml", *given, cwd=tmp_path)
    assert done.code == 0, done.words
    assert lab.alive(server["id"]) == {server["id"]: False}


def test_a_proxmox_host_that_is_a_gpu_node_too(
    play: Callable[..., Played], lab: Lab, tmp_path: Path
) -> None:
    """It is read and reset as a node; what belongs to its containers stays theirs."""
    inventory = tmp_path / "more.yml"
    inventory.write_text("gpu_nodes: {hosts: {pve1: {}}}\n")
    given = ("-i", str(lab.paths.inventory), "-i", str(inventory), "-l", "pve1")
    own = lab.hold("pve1", gpus="0")
    done = play("../../playbooks/reset_gpus.yml", *given)
    assert done.code == 0, done.words
    theirs = lab.hold("ct129", gpus="1")
    done = play("../../playbooks/reset_gpus.yml", *given)
    assert done.code == 2, done.words
    assert "foreign: it belongs to lxc 129" in done.words
    assert lab.alive(own["id"], theirs["id"]) == {own["id"]: False, theirs["id"]: True}
