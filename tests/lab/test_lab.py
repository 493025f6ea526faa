"""The lab itself, on a real lab of its own: is what it builds as the facts say?

Needs root and the packages of packages.txt; skipped without them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, LabError
from tests.lab.cli import main
from tests.lab.lab import REPOSITORY, listening, wait_until
from tests.lab.linux import process_state
from tests.lab.look import (
    APPS,
    USED,
    descriptors,
    fuser,
    left_behind,
    mapped,
    sh,
    stat,
    used,
)
from tests.lab.node import which_missing
from tests.patience import PATIENCE, until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0 or bool(which_missing()), reason="needs root and LXC"),
]
NAME = f"test-lab-{os.getpid()}"


@pytest.fixture(scope="module")
def the_lab() -> Iterator[Lab]:
    """One lab for the module."""
    lab = Lab(NAME)
    answer = lab.up()
    print(f"up: {answer['seconds']} s")
    yield lab
    print(f"down: {lab.down()['seconds']} s")


@pytest.fixture
def lab(the_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The lab, without holders and faults before and after; the command line means it too."""
    monkeypatch.setenv("GPUOPS_LAB", NAME)
    yield the_lab
    the_lab.heal()
    the_lab.drop()
    assert until(lambda: not any(used(the_lab, "pve1") + used(the_lab, "node1")))


# --- hosts ---


def test_hosts_answer_by_ssh_under_their_names(lab: Lab) -> None:
    for host in ("pve1", "ct129", "ct130", "node1"):
        result = lab.run(["ssh", f"root@{host}", "hostname"], capture_output=True, text=True)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"{host}\n", "")


def test_run_passes_input_output_and_exit_code(lab: Lab) -> None:
    result = lab.run(["sh", "-c", "cat; exit 37"], input="x", capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (37, "x")
    inventory = lab.run(["sh", "-c", "cat $ANSIBLE_INVENTORY"], capture_output=True, text=True)
    assert "ct129-ssh" in inventory.stdout


def test_a_reader_that_leaves_is_no_error_to_speak_of(lab: Lab) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "tests.lab", "status"]
    result = subprocess.run(argv, cwd=REPOSITORY, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_up_again_only_answers(lab: Lab) -> None:
    assert lab.up()["already_up"]


def test_proxmox_host_is_pure_cgroup_v2(lab: Lab) -> None:
    assert sh(lab, "pve1", "stat -fc %T /sys/fs/cgroup").strip() == "cgroup2fs"
    init = sh(lab, "pve1", "cat /sys/fs/cgroup/lxc/129/ns/cgroup.procs").split()[0]
    assert "0::/lxc/129/ns\n" in sh(lab, "pve1", f"cat /proc/{init}/cgroup")
    assert sh(lab, "pve1", "cat /sys/fs/cgroup/lxc.monitor/129/cgroup.procs").strip()


def test_driver_shows_itself_in_proc(lab: Lab) -> None:
    for host in ("pve1", "ct129", "node1"):
        assert "580.159.04" in sh(lab, host, "cat /proc/driver/nvidia/version")
        assert len(sh(lab, host, "ls /proc/driver/nvidia/gpus").split()) == 8
        assert sh(lab, host, "grep -c nvidia /proc/devices").strip() == "4"


def test_pct_speaks_like_the_real_one(lab: Lab) -> None:
    def pct(arguments: str, **options: Any) -> tuple[int, str, str]:
        result = lab.inside("pve1", ["sh", "-c", f"pct {arguments}"], **options)
        return result.returncode, result.stdout, result.stderr

    assert pct("exec 129 -- sh -c 'cat; exit 37'", input="in") == (37, "in", "")
    assert pct("exec 999 -- true") == (
        2,
        "",
        "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n",
    )
    assert pct("status 129") == (0, "status: running\n", "")
    lab.stop("ct129")
    try:
        assert pct("exec 129 -- true") == (255, "", "container '129' not running!\n")
        assert pct("status 129") == (0, "status: stopped\n", "")
    finally:
        lab.start("ct129")
    lab.hold("ct129")
    nobody = "su -s /bin/sh nobody -c '/usr/sbin/pct list'"
    result = lab.inside("pve1", ["sh", "-c", nobody])
    assert (result.returncode, result.stderr) == (255, "please run as root\n")


def test_cut_and_mend(lab: Lab) -> None:
    lab.cut("node1")
    result = lab.run(["ssh", "node1", "true"], capture_output=True, text=True)
    assert result.returncode == 255 and "refused" in result.stderr
    lab.mend("node1")
    assert lab.run(["ssh", "node1", "true"]).returncode == 0


def test_sshd_is_ready_when_it_has_its_title_and_not_before(lab: Lab) -> None:
    init = lab.init("node1")
    pid_file = Path(f"/proc/{init}/root/run/sshd.pid")
    assert listening(init)
    lab.cut("node1")
    assert not listening(init)
    pid_file.write_text("")  # sshd has opened it, and not yet written to it
    assert not listening(init)
    pid_file.write_text("1\n")  # there, but of another title
    assert not listening(init)
    lab.mend("node1")
    title = sh(lab, "node1", "cat /proc/$(cat /run/sshd.pid)/cmdline")
    assert title.startswith("sshd: ") and "[listener]" in title


# --- holders: one test per row of the facts ---


@pytest.mark.parametrize("host", ["ct129", "node1"])
def test_plain(lab: Lab, host: str) -> None:
    holder = lab.hold(host, gpus="2-3", mib=1000)
    assert used(lab, host) == [0, 0, 1000, 1000, 0, 0, 0, 0]
    assert fuser(lab, host, 2) == fuser(lab, host, 3) == [holder["pid"]]
    assert not fuser(lab, host, 4)
    assert sh(lab, host, APPS).splitlines() == [f"{holder['pid']}, python3, 991"] * 2
    links = sh(lab, host, f"readlink /proc/{holder['pid']}/fd/*")
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(links.split())


def test_host_and_containers_agree_and_neighbours_do_not_see_each_other(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="4", mib=76115)
    assert used(lab, "pve1") == used(lab, "ct129") == used(lab, "ct130")
    assert used(lab, "ct130")[4] == 76115
    assert not fuser(lab, "ct130", 4)
    assert not sh(lab, "ct130", APPS)
    assert "No running processes found" in sh(lab, "ct130", "nvidia-smi")
    assert fuser(lab, "pve1", 4) == [holder["node_pid"]]
    assert sh(lab, "pve1", APPS) == f"{holder['node_pid']}, python3, 76106\n"
    assert not any(used(lab, "node1"))


def test_some_memory_is_in_no_figure(lab: Lab) -> None:
    lab.hold("node1", gpus="0", mib=1000)
    lab.hold_many("node1", 2, gpus="1", mib=1000)
    lab.hold_many("node1", 8, gpus="2", mib=1000)
    apps = "nvidia-smi --format=csv,noheader,nounits --query-compute-apps=used_memory -i"
    listed = [sum(map(int, sh(lab, "node1", f"{apps} {gpu}").split())) for gpu in range(8)]
    in_no_figure = [mib - rest for mib, rest in zip(used(lab, "node1"), listed, strict=True)]
    assert in_no_figure == [9, 15, 48, 0, 0, 0, 0, 0]


def test_orphan(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0", kind="orphan")
    line = sh(lab, "ct129", f"ps -o ppid=,comm=,args= -p {holder['pid']}").split()
    assert line == ["1", "sglang::schedul", "sglang::scheduler_TP0"]
    assert "sglang::scheduler_TP0" in sh(lab, "ct129", APPS)


def test_stopped_dies_of_kill_only(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", kind="stopped")
    sh(lab, "node1", f"kill {holder['pid']}")
    assert stat(lab, "node1", holder["pid"]).startswith("T")
    sh(lab, "node1", f"kill -9 {holder['pid']}")
    assert until(lambda: not lab.alive(holder["id"])[holder["id"]])


def test_ignore_term(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", ignore_term=True)
    sh(lab, "node1", f"kill {holder['pid']}; sleep 0.1")
    assert lab.alive(holder["id"]) == {holder["id"]: True}


def test_zombie_holds_no_memory(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0", kind="zombie-parent")
    sh(lab, "ct129", f"kill -9 {holder['pid']}")
    assert until(lambda: not any(used(lab, "ct129")))
    assert stat(lab, "ct129", holder["pid"]).startswith("Z")
    assert not fuser(lab, "ct129", 0)
    lab.drop(holder["id"])
    assert until(lambda: not stat(lab, "ct129", holder["pid"]))


def test_dead_main_thread(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0", kind="dead-main-thread", mib=5638)
    pid = holder["pid"]
    assert stat(lab, "ct129", pid) == "Zsl"
    assert not sh(lab, "ct129", f"ls /proc/{pid}/fd; cat /proc/{pid}/maps")
    assert "/dev/nvidia0" in sh(lab, "ct129", f"readlink /proc/{pid}/task/*/fd/*")
    assert not fuser(lab, "ct129", 0)
    assert sh(lab, "ct129", APPS) == f"{pid}, [No data], 5629\n"
    sh(lab, "ct129", f"kill -9 {pid}")
    assert until(lambda: not any(used(lab, "ct129")))


def test_a_server_has_descriptors_and_mappings_like_a_cuda_process(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0,6", user="alice")
    nodes = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia6", "/dev/nvidiactl"]
    for host, pid in (("ct129", holder["pid"]), ("pve1", holder["node_pid"])):
        assert descriptors(lab, host, pid) == mapped(lab, host, pid) == nodes
    namespaces = sh(lab, "ct129", f"readlink /proc/1/ns/mnt /proc/{holder['pid']}/ns/mnt").split()
    assert len(set(namespaces)) == 1  # everybody's /dev is the same


def test_mapped_only(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0,6", kind="mapped-only", mib=6256)
    assert used(lab, "ct129")[6] == 6256
    assert not sh(lab, "ct129", APPS)
    for host, pid in (("ct129", holder["pid"]), ("pve1", holder["node_pid"])):
        assert descriptors(lab, host, pid) == []
        nodes = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia6", "/dev/nvidiactl"]
        assert mapped(lab, host, pid) == nodes


def test_open_only(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", kind="open-only")
    assert not any(used(lab, "node1"))
    assert not sh(lab, "node1", APPS)
    assert fuser(lab, "node1", 0) == [holder["pid"]]
    caps = ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    nodes = [*caps, "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
    assert descriptors(lab, "node1", holder["pid"]) == nodes
    assert mapped(lab, "node1", holder["pid"]) == []


@pytest.mark.parametrize("host", ["ct129", "node1"])
def test_unkillable(lab: Lab, host: str) -> None:
    holder = lab.hold(host, gpus="0", kind="unkillable")
    sh(lab, host, f"kill -9 {holder['pid']}; sleep 0.2")
    # It wakes up for a moment.
    assert until(lambda: stat(lab, host, holder["pid"]).startswith("D"))
    assert used(lab, host)[0] == 76115
    assert "request_wait_answer" in sh(lab, host, f"cat /proc/{holder['pid']}/wchan")
    lab.drop(holder["id"])
    assert not process_state(holder["outer_pid"])
    assert "/models" not in sh(lab, host, "cat /proc/mounts")


def test_respawn(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0", respawn=1, name="vllm")
    supervisor = holder["helpers"][0]
    assert Path(f"/proc/{supervisor}/comm").read_text() == "serve-forever\n"
    sh(lab, "ct129", f"kill -9 {holder['pid']}")
    assert until(lambda: fuser(lab, "ct129", 0) not in ([], [holder["pid"]]))
    again = fuser(lab, "ct129", 0)[0]
    assert until(lambda: lab.alive(holder["id"])[holder["id"]])
    assert sh(lab, "ct129", f"ps -o comm= -p {again}") == "vllm\n"
    sh(lab, "ct129", f"kill -9 {again}")
    assert until(lambda: process_state(supervisor) in ("", "Z"))


def test_respawn_for_ever_is_dropped_with_its_supervisor(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0", respawn=-1)
    lab.drop(holder["id"])
    time.sleep(0.4)
    assert not fuser(lab, "node1", 0)


def test_user_name_and_cgroup(lab: Lab) -> None:
    holder = lab.hold("node1", user="alice", name="vllm", cgroup="system.slice/vllm.service")
    line = sh(lab, "node1", f"ps -o user=,comm=,args= -p {holder['pid']}").split()
    assert line[:3] == ["alice", "vllm", "vllm"]
    cgroup = sh(lab, "node1", f"cat /proc/{holder['pid']}/cgroup")
    assert "0::/system.slice/vllm.service\n" in cgroup


def test_a_container_process_can_escape_its_cgroup(lab: Lab) -> None:
    holder = lab.hold("ct129", gpus="0", cgroup="/system.slice/escaped.service")
    cgroup = sh(lab, "pve1", f"cat /proc/{holder['node_pid']}/cgroup")
    assert "0::/system.slice/escaped.service\n" in cgroup
    assert fuser(lab, "ct129", 0) == [holder["pid"]]


# --- the driver ---


def test_release_takes_its_time(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0")
    started = time.monotonic()
    sh(lab, "node1", f"kill -9 {holder['pid']}")
    assert until(lambda: not any(used(lab, "node1")))
    assert time.monotonic() - started > 0.13


def test_one_reading_right_after_a_kill_proves_nothing(lab: Lab) -> None:
    lab.fault("node1", "slow-release", "3000")  # more than a slow shell needs to ask
    holder = lab.hold("node1", gpus="0")
    after = sh(lab, "node1", f"kill -9 {holder['pid']}; {USED}").split()
    assert after[0] == "76115"


def test_slow_release_and_stuck(lab: Lab) -> None:
    lab.fault("ct129", "slow-release", "3000")
    holder = lab.hold("ct129", gpus="0")
    lab.drop(holder["id"])
    time.sleep(0.3)
    assert used(lab, "ct130")[0] == 76115
    assert until(lambda: not any(used(lab, "ct130")))
    lab.fault("pve1:3", "stuck", "512")
    assert used(lab, "ct129") == [0, 0, 0, 512, 0, 0, 0, 0]


def test_faults_of_a_container_do_not_touch_its_neighbour(lab: Lab) -> None:
    lab.fault("ct129", "smi-error", "no_ctl")
    result = lab.inside("ct129", ["nvidia-smi"])
    assert (result.returncode, result.stdout) == (
        17,
        "Failed to initialize NVML: GPU access blocked by the operating system\n",
    )
    assert len(used(lab, "ct130")) == 8
    lab.heal("ct129")
    assert len(used(lab, "ct129")) == 8


def test_fewer_gpus_lost_gpus_and_odd_values(lab: Lab) -> None:
    lab.fault("ct129", "wrong-count", "7")
    assert len(used(lab, "ct129")) == 7
    lab.heal()
    lab.fault("pve1:5", "gpu-lost")
    assert "Unable to determine the device handle for GPU" in sh(lab, "ct130", USED)
    lab.heal()
    lab.fault("ct129:2", "value", "memory.used [N/A]")
    assert sh(lab, "ct129", USED).splitlines()[2] == "[N/A]"
    lab.heal()
    assert main(["fault", "pve1", "value", "[N/A]"]) == 0
    assert sh(lab, "ct130", USED).split() == ["[N/A]"] * 8


def test_missing_tool(lab: Lab) -> None:
    lab.fault("pve1", "smi-missing")
    for host in ("pve1", "ct129"):
        assert lab.inside(host, ["sh", "-c", "nvidia-smi"]).returncode == 127
    lab.heal()
    assert len(used(lab, "ct129")) == 8


def test_the_tool_holds_what_it_reads_while_it_runs(lab: Lab) -> None:
    loop = "exec 3< <(exec nvidia-smi --query-gpu=index --format=csv -lms 50); read -u 3 line; "
    held = loop + "readlink /proc/$!/fd/* | grep nvidia; kill $!; wait $!; fuser /dev/nvidia7"
    seen = lab.inside("node1", ["bash", "-c", held]).stdout.split()
    nodes = ["ctl", "-uvm", "-caps/nvidia-cap1", "-caps/nvidia-cap2", *map(str, range(8))]
    assert sorted(seen) == sorted(f"/dev/nvidia{node}" for node in nodes)


def test_the_tool_has_nvidiactl_mapped_and_nothing_else(lab: Lab) -> None:
    loop = "exec 3< <(exec nvidia-smi --query-gpu=index --format=csv -lms 50); read -u 3 line; "
    maps = loop + "grep -o '/dev/nvidia.*' /proc/$!/maps; kill $!"
    for host in ("node1", "ct129"):
        assert lab.inside(host, ["bash", "-c", maps]).stdout.split() == ["/dev/nvidiactl"]


def test_hang_that_can_be_killed(lab: Lab) -> None:
    lab.fault("ct129", "smi-hang")
    assert lab.inside("ct129", ["timeout", "-s", "KILL", "0.2", "nvidia-smi"]).returncode in (
        137,
        -9,
    )


def test_hang_that_cannot_be_killed(lab: Lab) -> None:
    lab.fault("ct129", "smi-hang-d")
    in_d = 'for i in $(seq 200); do grep -q "State:.D" /proc/$!/status && break; sleep 0.1; done'
    command = f"nvidia-smi >/dev/null 2>&1 & {in_d}; sleep 0.2; kill -9 $!; sleep 0.1; "
    command += "ps -o stat= -p $!"
    assert sh(lab, "ct129", command).startswith("D")
    lab.heal()
    assert until(lambda: not sh(lab, "ct129", "pgrep nvidia-smi"))
    assert len(used(lab, "ct129")) == 8


def test_device_nodes_decide_what_the_tool_finds(lab: Lab) -> None:
    sh(lab, "node1", "chmod 600 /dev/nvidiactl")
    try:
        result = lab.inside("node1", ["su", "-s", "/bin/sh", "nobody", "-c", "nvidia-smi"])
        assert (result.returncode, result.stdout) == (
            4,
            "Failed to initialize NVML: Insufficient Permissions\n",
        )
    finally:
        sh(lab, "node1", "chmod 666 /dev/nvidiactl")


def test_bad_requests_are_one_line(lab: Lab) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: lab.hold("nowhere"),
        lambda: lab.hold("ct129", gpus="9"),
        lambda: lab.fault("ct129", "nonsense"),
        lambda: lab.fault("ct129", "smi-error", "nonsense"),
        lambda: lab.drop("nothing"),
    )
    for call in calls:
        with pytest.raises(LabError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "hold node1 --count 0",
        "hold --mib -5 node1",
        "hold node1 --respawn -3",
        "hold node1 --name=",
        "hold node1 --gpus 8",
        "hold nowhere",
        "fault pve1 stuck abc",
        "fault pve1 stuck -5",
        "fault pve1 wrong-count -1",
        "fault pve1 wrong-count 99",
        "fault pve1 slow-release -5",
        "fault pve1 value bogus.field xx",
        "fault pve1 ghost abc",
        "fault pve1:8 busy",
        "up --delay-ms -5",
        "up --minor-shift -3",
        "up --minor-shift 250",
        "up --systemd ct129",
        "drop nothing",
        "alive nosuch",
        "stop ct999",
    ],
)
def test_bad_values_end_with_2_and_one_line(
    lab: Lab, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = lab.status()
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lab: ") and said.err.count("\n") == 1
    assert lab.status() == before


def test_what_cannot_be_done_to_a_container_is_said_at_once(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting what runs, mending or cutting what is stopped: one line, and nothing is broken."""

    def said(line: str) -> str:
        assert main(line.split()) == 1
        return capsys.readouterr().err

    assert said("start ct130") == "lab: ct130 is running; to start it anew, first: stop ct130\n"
    lab.mend("ct130")
    assert lab.run(["ssh", "ct130", "true"]).returncode == 0
    lab.stop("ct130")
    for line in ("mend ct130", "cut ct130", "cut ct130 --silent"):
        assert said(line) == "lab: ct130 is not running; run: start ct130\n"
    lab.start("ct130")


def test_what_an_option_cannot_be_names_that_option(lab: Lab) -> None:
    for option in ("systemd", "unprivileged", "own_nodes"):
        with pytest.raises(LabError, match=f"^--{option.replace('_', '-')}: cannot read 'ct129'"):
            lab.up(**{option: "ct129"})


def test_a_holder_that_was_dropped_is_known_and_not_alive(lab: Lab) -> None:
    holder = lab.hold("node1", gpus="0")
    lab.drop(holder["id"])
    assert lab.alive(holder["id"]) == {holder["id"]: False}


# --- other shapes, and the end ---


def test_two_hosts_own_nodes_and_shifted_minors() -> None:
    lab = Lab(f"{NAME}-b")
    try:
        lab.up(cts="129,130,129@pve2", nodes=0, gpus=4, minor_shift=1, own_nodes="130")
        holder = lab.hold("ct130", gpus="0", mib=1000)
        assert used(lab, "pve1") == [1000, 0, 0, 0]
        assert not any(used(lab, "ct129-pve2"))
        links = sh(lab, "ct130", f"readlink /proc/{holder['pid']}/fd/*")
        assert "/dev/nvidia1" in links and "/dev/nvidia0" not in links
        assert "Minor Number                                       : 1" in sh(
            lab, "ct130", "nvidia-smi -q -i 0"
        )
        assert "<minor_number>1</minor_number>" in sh(lab, "ct130", "nvidia-smi -q -x -i 0")
        # Other inodes: fuser on the host does not find it, by number it is found.
        assert fuser(lab, "ct130", 1) == [holder["pid"]]
        assert not fuser(lab, "pve1", 1)
    finally:
        lab.down()


def test_down_leaves_nothing_with_every_kind_alive() -> None:
    name = f"{NAME}-c"
    lab = Lab(name)
    lab.up(cts="129", nodes=1)
    for host in ("ct129", "node1"):
        for kind in ("plain", "stopped", "zombie-parent", "dead-main-thread", "unkillable"):
            lab.hold(host, kind=kind)
        lab.hold(host, respawn=-1)
    lab.fault("pve1", "smi-hang-d")
    lab.inside("ct129", ["sh", "-c", "nvidia-smi >/dev/null 2>&1 & sleep 0.3"])
    sleeper = lab.popen(["ssh", "ct129", "sleep 60"])
    lab.down()
    sleeper.wait(PATIENCE)
    assert left_behind(name) == []


def test_down_after_a_crash_of_the_drivers() -> None:
    name = f"{NAME}-d"
    lab = Lab(name)
    lab.up(cts="129", nodes=1)
    lab.hold("ct129", kind="unkillable")
    for group in ("drivers", "helpers"):
        for pid in (lab.paths.cgroup / group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: lab.hold("node1"),
        lambda: lab.fault("pve1", "busy"),
        lab.drop,
    )
    for call in calls:
        with pytest.raises(LabError, match=r"driver of .* is gone .*; run: .* down"):
            call()
    assert lab.status()["hosts"]["node1"]["driver"] is None
    lab.down()
    assert left_behind(name) == []


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_up_killed_in_the_middle(delay: float) -> None:
    name = f"{NAME}-e"
    argv = [sys.executable, "-m", "tests.lab", "up", "--cts", "129,130"]
    environment = {**os.environ, "GPUOPS_LAB": name}
    process = subprocess.Popen(argv, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    assert until(Lab(name).paths.state.exists), "up has not begun"
    time.sleep(delay)
    process.kill()
    process.wait()
    Lab(name).down()
    assert left_behind(name) == []


def test_up_cleans_what_a_crash_left() -> None:
    name = f"{NAME}-f"
    lab = Lab(name)
    try:
        lab.up(cts="none", nodes=1)
        os.kill(lab.init("node1"), signal.SIGKILL)
        assert until(lambda: not lab.init("node1"))
        assert not lab.up(cts="none", nodes=1)["already_up"]
        assert len(used(lab, "node1")) == 8
    finally:
        lab.down()


def test_up_says_when_it_replaces_another_lab() -> None:
    lab = Lab(f"{NAME}-g")
    try:
        answers = [lab.up(cts="none", nodes=nodes) for nodes in (1, 1, 2)]
        assert [(each["already_up"], each["replaced"]) for each in answers] == [
            (False, False),
            (True, False),
            (False, True),
        ]
    finally:
        lab.down()


def test_a_frozen_holder_outlives_sigkill_until_it_is_thawed(lab: Lab) -> None:
    held = lab.hold("ct129", gpus="0", mib=500)
    lab.fault("ct129", "frozen")
    pid = held["outer_pid"]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    assert until(lambda: process_state(pid) == "D")
    assert lab.status()["hosts"]["pve1"]["driver"]["used"][0] == 500
    lab.heal("ct129")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), PATIENCE, "its end")


def test_down_takes_frozen_holders_along(lab: Lab) -> None:
    held = lab.hold("node1", gpus="0", mib=500)
    lab.fault("node1", "frozen")
    group = lab.paths.state / "freezer" / lab.frozen_group("node1")
    assert group.exists()
    lab.down()
    assert not Path(f"/proc/{held['outer_pid']}").exists()
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(lab.paths.state) not in mounts
    for freezer in {line.split()[4] for line in mounts.splitlines() if "rw,freezer" in line}:
        assert not Path(freezer, group.name).exists()
    lab.up()
