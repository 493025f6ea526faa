"""Build one machine (Proxmox host or bare node) out of namespaces.

Runs in a process forked by `Lab.up`. The root file system is an overlay over the machine's own
root, so that nothing has to be downloaded: below, the real `/`; above it a small layer with the
lab's files (keys, nvidia-smi, pct, the workload); on top, a tmpfs that takes all writes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import traceback
from pathlib import Path

from . import linux, podman, systemd
from .plan import PREFIX, Host, Paths

HERE = Path(__file__).parent
# What a machine's own root has there must not be seen on a lab host: other people's keys, slow
# login scripts, sockets of the real machine's daemons.
HIDDEN = {
    "root": 0o700,
    "tmp": 0o1777,
    "run": 0o755,
    "var/lib/lxc": 0o755,
    "etc/pve": 0o755,
    "etc/ssh": 0o755,
    "mnt": 0o755,
}
SSHD_CONFIG = """\
# Stock limits on purpose (MaxSessions 10, MaxStartups 10:30:100): they are what a real host has.
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""
# Process 1. `wait` reaps whatever is orphaned, at once (busybox's own init takes up to a second),
# and blocks while sshd lives; on a host that was cut it becomes a slow loop. On a host, not in a
# container, sshd moves to the cgroup that systemd would give it.
INIT = """\
#!/bin/busybox sh
(
    cd /sys/fs/cgroup/system.slice/ssh.service 2>/dev/null && echo 0 >cgroup.procs
    cd /
    exec /usr/sbin/sshd -D -e
) </dev/null >>/run/sshd.log 2>&1 &
while :; do
    wait
    sleep 0.2
done
"""
BASE_NODES = (
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
    ("fuse", 10, 229),
)
NVIDIA_MAJOR, UVM_MAJOR, CAPS_MAJOR = 195, 511, 508


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def hide(root: Path, name: str, mode: int) -> Path:
    """Make an empty directory that hides what the layers below have there."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(mode)
    os.setxattr(directory, "trusted.overlay.opaque", b"y")
    return directory


def make_layer(layer: Path, paths: Paths) -> None:
    """The files that every host and container of this lab has on top of the machine's own."""
    for name, mode in HIDDEN.items():
        hide(layer, name, mode)
    write(layer / "root/.ssh/authorized_keys", (paths.state / "id_ed25519.pub").read_text(), 0o600)
    (layer / "root/.ssh").chmod(0o700)
    write(layer / "root/.bashrc", "")
    (layer / "run/sshd").mkdir()
    (layer / "run/lock").mkdir()
    write(layer / "etc/ssh/sshd_config", SSHD_CONFIG)
    host_key = layer / "etc/ssh/ssh_host_ed25519_key"
    write(host_key, (paths.state / "host_ed25519").read_text(), 0o600)
    write(layer / "etc/hosts", (paths.state / "hosts.txt").read_text())
    if Path("/.dockerenv").exists():  # what builds the lab is a container; its hosts are not
        os.mknod(layer / ".dockerenv", stat.S_IFCHR, 0)
    write(layer / "usr/sbin/init", INIT, 0o755)
    for name in ("nvidia-smi", "nvidia-cuda-mps-control"):
        write(layer / "usr/bin" / name, (HERE / "bin" / name).read_text(), 0o755)
    write(layer / "usr/local/bin/serve-forever", (HERE / "bin/serve-forever").read_text(), 0o755)
    podman.install(layer)
    # The workload, importable under the names that real servers have.
    code = (HERE / "holder.py").read_text()
    for package, module in (
        ("sglang", "launch_server"),
        ("vllm.entrypoints.openai", "api_server"),
        ("torch.distributed", "run"),
    ):
        directory = layer / "usr/lib/python3/dist-packages" / package.replace(".", "/")
        directory.mkdir(parents=True, exist_ok=True)
        write(directory / f"{module}.py", code)
    libraries = layer / "usr/lib/python3/dist-packages"
    write(libraries / "nvidia_cuda_mps.py", (HERE / "mps.py").read_text())
    for name in ("sglang", "vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        write(libraries / name / "__init__.py", "")
    for name in ("torch", "torch/distributed"):
        write(libraries / name / "__init__.py", "")


def proc_driver(directory: Path, host: Host) -> None:
    """The tree that the real driver shows as /proc/driver (captured in captures/procinfo.out)."""
    capture = (HERE / "captures/procinfo.out").read_text().splitlines(keepends=True)
    nvidia = directory / "nvidia"
    write(nvidia / "version", "".join(capture[:2]), 0o444)
    for name in ("params", "registry", "suspend", "suspend_depth"):
        write(nvidia / name, "default\n" if name == "suspend_depth" else "", 0o444)
    for name in ("patches", "warnings"):
        write(nvidia / name / "README", "", 0o444)
    (nvidia / "capabilities/mig").mkdir(parents=True)
    for name in ("fabric-imex-mgmt", "mig/config", "mig/monitor"):
        write(nvidia / "capabilities" / name, "", 0o444)
    for gpu in host.gpus:
        (nvidia / f"capabilities/gpu{gpu.minor}/mig").mkdir(parents=True)
        location = gpu.bus_id[4:].lower()
        text = "".join(capture[2:13])
        text = text.replace("GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9", gpu.uuid)
        text = text.replace("0000:00:06.0", location)
        text = text.replace("Device Minor: \t 0", f"Device Minor: \t {gpu.minor}")
        write(nvidia / "gpus" / location / "information", text, 0o444)
        for name in ("power", "registry"):
            write(nvidia / "gpus" / location / name, "", 0o444)
    (directory / "lab/stuck").mkdir(parents=True)


def proc_devices() -> str:
    """The machine's /proc/devices with the driver's majors, as a loaded driver adds them."""
    lines = Path("/proc/devices").read_text().splitlines()
    at = lines.index("Block devices:") - 1
    lines[at:at] = [
        f"{NVIDIA_MAJOR} nvidia",
        f"{NVIDIA_MAJOR} nvidiactl",
        f"{CAPS_MAJOR} nvidia-caps",
        f"{UVM_MAJOR} nvidia-uvm",
    ]
    return "\n".join(lines) + "\n"


def make_dev(dev: Path, host: Host) -> None:
    """A /dev of its own, with the device nodes of the driver."""
    linux.mount("udev", dev, "tmpfs", linux.MS_NOSUID, "mode=755")
    nodes = [*BASE_NODES, ("nvidiactl", NVIDIA_MAJOR, 255)]
    nodes += [("nvidia-uvm", UVM_MAJOR, 0), ("nvidia-uvm-tools", UVM_MAJOR, 1)]
    nodes += [(f"nvidia-caps/nvidia-cap{n}", CAPS_MAJOR, n) for n in (1, 2)]
    nodes += [(f"nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor) for gpu in host.gpus]
    for name, major, minor in nodes:
        (dev / name).parent.mkdir(exist_ok=True)
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        (dev / name).symlink_to(target)
    (dev / "pts").mkdir()
    (dev / "shm").mkdir()
    linux.mount("devpts", dev / "pts", "devpts", 0, "newinstance,ptmxmode=666,mode=620,gid=5")
    linux.mount("tmpfs", dev / "shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)


def overlay(lower: str, upper: Path, work: Path, target: Path) -> None:
    """Mount an overlay, making the directories it needs."""
    for directory in (upper, work, target):
        directory.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    linux.mount("overlay", target, "overlay", 0, options)


def protect_settings(root: Path) -> None:
    """Make the machine's own settings read only, as LXC does; systemd would change some."""
    settings = root / "proc/sys"
    linux.bind(settings, settings)
    linux.mount("none", settings, "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
    linux.bind(settings / "net", settings / "net")  # the host's own
    linux.mount("none", settings / "net", "", linux.MS_REMOUNT | linux.MS_BIND)
    linux.mount("none", root / "sys", "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)


def make_root(host: Host, paths: Paths) -> Path:
    """The host's whole file tree; returns where it is before pivot_root."""
    base = paths.host(host.name) / "mnt"
    base.mkdir(exist_ok=True)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("lab", base, "tmpfs", 0, "mode=755")
    layer = base / "layer"
    layer.mkdir()
    make_layer(layer, paths)
    lower, root = f"{layer}:/", base / "root"
    own = base / "host"
    write(own / "etc/hostname", host.name + "\n")
    if host.systemd:
        systemd.install(own, host.name)
    if host.proxmox:
        write(own / "usr/sbin/pct", (HERE / "bin/pct").read_text(), 0o755)
    overlay(lower, own, base / "work", root)
    linux.mount("proc", root / "proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("sysfs", root / "sys", "sysfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    if host.systemd:
        protect_settings(root)
    # Only v2 here, whatever the machine itself has: what Proxmox (7 and later) and Debian have.
    linux.mount("cgroup2", root / "sys/fs/cgroup", "cgroup2", linux.MS_NOSUID | linux.MS_NOEXEC)
    make_dev(root / "dev", host)
    driver = paths.driver(host.name)
    write(driver / "devices", proc_devices(), 0o444)
    linux.bind(driver, root / "proc/driver")
    linux.bind(driver / "devices", root / "proc/devices")
    if any(container.unprivileged for container in host.containers):
        # The kernel lets an unprivileged container mount /proc only where one is to be seen whole,
        # without what is bound over parts of this one; LXC's own nesting.conf does the same.
        whole = root / "dev/.lxc/proc"
        whole.mkdir(parents=True)
        linux.mount("proc", whole, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    from .container import prepare

    for container in host.containers:
        prepare(container, host, base, lower, root)
    return root


def configure_network(host: Host) -> None:
    """Give the host its address; a Proxmox host has it on the bridge of its containers."""
    address = f"{host.address}/{PREFIX}"
    if host.proxmox:
        lines = [
            "link set lo up",
            "link add vmbr0 type bridge",
            "link set eth0 master vmbr0",
            "link set eth0 up",
            f"addr add {address} dev vmbr0",
            "link set vmbr0 up",
        ]
    else:
        lines = ["link set lo up", f"addr add {address} dev eth0", "link set eth0 up"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def make_cgroups() -> None:
    """The first directories that systemd makes, so that paths look as on a real machine."""
    root = Path("/sys/fs/cgroup")
    for name in ("init.scope", "system.slice/ssh.service", "user.slice/user-0.slice"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "init.scope/cgroup.procs").write_text("1")


def become_init(host: Host, paths: Paths, network_ready: int) -> None:
    """The life of process 1 of the host, up to the exec of its init."""
    root = make_root(host, paths)
    socket.sethostname(host.name)
    if os.read(network_ready, 1) != b"+":
        raise RuntimeError("the lab gave up before the network was ready")
    configure_network(host)
    os.chdir(root)
    os.mkdir(".old")
    linux.pivot_root(".", ".old")
    os.chdir("/")
    linux.umount("/.old")
    os.rmdir("/.old")
    make_cgroups()
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    linux.die_with_parent(0)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    if host.systemd:
        environment["container"] = "lxc"  # so that systemd leaves devices and mounts alone
    os.execve("/sbin/init", ["/sbin/init"], environment)


def build(host: Host, paths: Paths, report: int, network_ready: int, parent: int) -> None:
    """Body of the forked builder: never returns.

    Writes 'PID' of the host's process 1 and a newline to `report`, later an error text if there is
    one. The report ends (closed by exec) when the host runs its init.
    """
    try:
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked
        cgroup = paths.host_cgroup(host.name)
        cgroup.mkdir(parents=True, exist_ok=True)
        (cgroup / "cgroup.procs").write_text("0")
        linux.unshare(linux.ALL_NAMESPACES)
        gone, keep = os.pipe()
        pid = os.fork()
        if pid:
            os.write(report, f"{pid}\n".encode())
            os.close(report)
            os.close(keep)
            # The host's init must not outlive a killed `up`: it dies with this process until it
            # has become /sbin/init, which closes the pipe.
            os.read(gone, 1)
            os._exit(0)
        os.close(gone)
        linux.die_with_parent(signal.SIGKILL)
        os.setsid()
        become_init(host, paths, network_ready)
    except BaseException:  # whatever it is, `up` must hear of it
        text = traceback.format_exc(limit=3)
        os.write(report, text.encode())
    finally:
        os._exit(1)


def which_missing() -> list[str]:
    """Programs that the lab needs and this machine does not have."""
    needed = ("ip", "lxc-start", "sshd", "ssh", "fuser", "perl", "nsenter", "busybox")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in needed if not shutil.which(name, path=path)]
