"""Real LXC containers on a namespace-built Proxmox host."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from . import linux, systemd
from .plan import PREFIX, Container, Host

# The rules of Proxmox's and Debian's common.conf, written out instead of included: the include
# would also run lxcfs hooks, which cost a few milliseconds and are not what is tested here.
CONFIG = """\
lxc.arch = amd64
lxc.uts.name = {name}
lxc.rootfs.path = dir:/var/lib/lxc/{vmid}/rootfs
lxc.apparmor.profile = unconfined
lxc.seccomp.profile = /usr/share/lxc/config/common.seccomp
lxc.cap.drop = mac_admin mac_override sys_time sys_module sys_rawio
lxc.cgroup.dir.container = lxc/{vmid}
lxc.cgroup.dir.container.inner = ns
lxc.cgroup.dir.monitor = lxc.monitor/{vmid}
lxc.mount.auto = cgroup:mixed proc:mixed sys:mixed
lxc.autodev = 1
lxc.pty.max = 1024
lxc.tty.max = 0
lxc.init.cmd = /sbin/init
lxc.console.path = none
lxc.net.0.type = veth
lxc.net.0.link = vmbr0
lxc.net.0.veth.pair = veth{vmid}i0
lxc.net.0.name = eth0
lxc.net.0.hwaddr = {mac}
lxc.net.0.flags = up
lxc.net.0.ipv4.address = {address}/{prefix}
lxc.cgroup2.devices.deny = a
lxc.cgroup2.devices.allow = c *:* m
lxc.cgroup2.devices.allow = b *:* m
lxc.cgroup2.devices.allow = c 1:3 rwm
lxc.cgroup2.devices.allow = c 1:5 rwm
lxc.cgroup2.devices.allow = c 1:7 rwm
lxc.cgroup2.devices.allow = c 1:8 rwm
lxc.cgroup2.devices.allow = c 1:9 rwm
lxc.cgroup2.devices.allow = c 5:* rwm
lxc.cgroup2.devices.allow = c 136:* rwm
lxc.cgroup2.devices.allow = c 10:229 rwm
lxc.cgroup2.devices.allow = c 195:* rwm
lxc.cgroup2.devices.allow = c 511:* rwm
lxc.cgroup2.devices.allow = c 508:* rwm
lxc.mount.entry = tmpfs dev/shm tmpfs nosuid,nodev,create=dir 0 0
lxc.mount.entry = /proc/driver proc/driver none bind 0 0
lxc.mount.entry = /proc/driver/devices proc/devices none bind 0 0
"""
UNPRIVILEGED = """\
lxc.idmap = u 0 {first} 65536
lxc.idmap = g 0 {first} 65536
"""
FIRST_UID = 100000
# What belongs to the container's root, where the rest of its file system belongs to the machine's:
# what sshd insists on, and what is written to.
OWNED = ("root", "tmp", "run", "mnt", "etc/ssh", "var/lib/lxc", "var/lib/containers", "etc")
PVE_CONFIG = """\
arch: amd64
cores: 16
features: nesting=1
hostname: {name}
memory: 131072
net0: name=eth0,bridge=vmbr0,hwaddr={mac},ip={address}/{prefix},type=veth
ostype: debian
rootfs: local-lvm:vm-{vmid}-disk-0,size=100G
swap: 0
unprivileged: {unprivileged}
"""
OWN_NODES = """\
#!/bin/sh
# Device nodes of the container's own, with other inodes than the host's: as Proxmox's dev0: does.
cd "$LXC_ROOTFS_MOUNT/dev" && mkdir -p nvidia-caps || exit 1
"""


def node_names(host: Host) -> list[tuple[str, int, int]]:
    """The driver's device nodes: name, major, minor."""
    names = [(f"nvidia{gpu.minor}", 195, gpu.minor) for gpu in host.gpus]
    names += [("nvidiactl", 195, 255), ("nvidia-uvm", 511, 0), ("nvidia-uvm-tools", 511, 1)]
    return [*names, *((f"nvidia-caps/nvidia-cap{n}", 508, n) for n in (1, 2))]


def mac_address(container: Container) -> str:
    """Always the same, or its peers would not find it for a while after a restart."""
    digest = hashlib.sha256(f"{container.host}/{container.vmid}".encode()).hexdigest()
    return ":".join(["BC", "24", "11", digest[:2], digest[2:4], digest[4:6]]).upper()


def lxc_config(container: Container, host: Host) -> str:
    """The container's LXC configuration."""
    text = CONFIG.format(
        name=f"ct{container.vmid}",
        vmid=container.vmid,
        address=container.address,
        prefix=PREFIX,
        mac=mac_address(container),
    )
    if container.systemd:
        text += "lxc.signal.halt = SIGRTMIN+3\n"
    if container.unprivileged:
        text += UNPRIVILEGED.format(first=FIRST_UID)
    if container.own_nodes:
        return text + f"lxc.hook.autodev = /var/lib/lxc/{container.vmid}/own-nodes\n"
    for name, _, _ in node_names(host):
        text += f"lxc.mount.entry = /dev/{name} dev/{name} none bind,optional,create=file 0 0\n"
    return text


def pve_config(container: Container, host: Host) -> str:
    """The container's /etc/pve/lxc/VMID.conf, with the device entries people write there."""
    text = PVE_CONFIG.format(
        name=f"ct{container.vmid}",
        vmid=container.vmid,
        address=container.address,
        prefix=PREFIX,
        mac=mac_address(container),
        unprivileged=int(container.unprivileged),
    )
    if container.own_nodes:
        names = enumerate(node_names(host))
        return text + "".join(f"dev{n}: /dev/{name},mode=0666\n" for n, (name, _, _) in names)
    text += "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 511:* rwm\n"
    for name, _, _ in node_names(host):
        text += f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file\n"
    return text


def prepare(container: Container, host: Host, base: Path, lower: str, root: Path) -> None:
    """Mount the container's root file system and write its configuration, before pivot_root."""
    from .node import overlay, write

    own = base / "ct" / str(container.vmid)
    directory = root / "var/lib/lxc" / str(container.vmid)
    write(own / "up/etc/hostname", f"ct{container.vmid}\n")
    if container.systemd:
        systemd.install(own / "up", container.name)
    overlay(lower, own / "up", own / "work", directory / "rootfs")
    if container.unprivileged:
        give_to_container_root(directory / "rootfs")
        for name in ("subuid", "subgid"):  # whom LXC asks whether root may use these numbers
            write(root / "etc" / name, f"root:{FIRST_UID}:65536\n")
    write(directory / "config", lxc_config(container, host))
    write(root / "etc/pve/lxc" / f"{container.vmid}.conf", pve_config(container, host))
    if container.own_nodes:
        lines = [
            f"mknod -m 666 {name} c {major} {minor}\n" for name, major, minor in node_names(host)
        ]
        write(directory / "own-nodes", OWN_NODES + "".join(lines), 0o755)


def give_to_container_root(rootfs: Path) -> None:
    """Make the first uid of an unprivileged container the owner of what it has to own."""
    for name in OWNED:
        top = rootfs / name
        found = [top] if name == "etc" else [top, *top.rglob("*")]
        for path in found:
            os.chown(path, FIRST_UID, FIRST_UID, follow_symlinks=False)
    for name in ("passwd", "group", "shadow"):
        if (rootfs / "etc" / name).exists():
            os.chown(rootfs / "etc" / name, FIRST_UID, FIRST_UID)


def init_pid(cgroup: Path) -> int:
    """The outer pid of the container's process 1, or 0 when it does not run."""
    for directory in (cgroup, cgroup / "init.scope"):
        try:
            pids = (directory / "cgroup.procs").read_text().split()
        except OSError:
            continue
        for pid in pids:
            numbers = linux.namespace_pids(int(pid))
            if numbers and numbers[-1] == 1:
                return int(pid)
    return 0


def start_all(vmids: list[int], workers: int = 4) -> list[str]:
    """Start containers, a few at a time; runs inside the Proxmox host. Returns error texts."""
    errors: list[str] = []
    running: dict[int, int] = {}
    waiting = list(vmids)
    while waiting or running:
        while waiting and len(running) < workers:
            vmid = waiting.pop(0)
            log = f"/var/lib/lxc/{vmid}/start.log"
            argv = ["lxc-start", "-n", str(vmid), "-l", "ERROR", "-o", log]
            running[os.posix_spawn("/usr/bin/lxc-start", argv, os.environ)] = vmid
        pid, status = os.wait()
        vmid = running.pop(pid, 0)
        if vmid and status:
            path = Path(f"/var/lib/lxc/{vmid}/start.log")
            text = path.read_text().splitlines() if path.exists() else []
            errors.append(f"lxc-start {vmid}: " + " | ".join(text[:3]))
    return errors
