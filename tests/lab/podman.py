"""A holder in a podman container (runc) of a host: its settings, and the commands.

The container's root is a few links and files; programs come from the host's own /usr, so that no
image is needed.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

# runc, because Debian's crun refuses machines with cgroup v1 and v2; no limit of pids, because the
# hosts' cgroups have no controllers.
CONTAINERS = """\
[containers]
pids_limit = 0

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
STORAGE = """\
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""
DRIVER = "/run/lab-driver.sock"  # nothing can be mounted below a container's /proc
SOCKET = "/proc/driver/lab/driver.sock"


def install(layer: Path) -> None:
    """podman's settings, in the layer that all hosts and containers have."""
    from .node import hide, write

    for directory in ("etc/containers", "var/lib/containers"):
        hide(layer, directory, 0o755)
    write(layer / "etc/containers/containers.conf", CONTAINERS)
    write(layer / "etc/containers/storage.conf", STORAGE)


def make_root(host_root: Path, name: str, owner: int) -> str:
    """The container's root file system, made from outside below `host_root`; its path inside."""
    path = f"/var/lib/containers/rootfs/{name}"
    root = host_root / path.lstrip("/")
    for directory in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "mnt"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        if not (root / link).is_symlink():
            (root / link).symlink_to(f"usr/{link}")
    for file in ("passwd", "group", "ld.so.cache"):
        shutil.copy(host_root / "etc" / file, root / "etc" / file)
    for made in (root.parent, root, *root.rglob("*")):
        os.chown(made, owner, owner, follow_symlinks=False)
    return path


def run_command(
    name: str, root: str, command: list[str], environment: dict[str, str], restart: str
) -> list[str]:
    """Start the container."""
    options = ["--detach", "--name", name, "--network", "none", "--privileged"]
    options += ["--restart", restart, "--volume", "/usr:/usr:ro", "--volume", f"{SOCKET}:{DRIVER}"]
    for key, value in environment.items():
        options += ["--env", f"{key}={value}"]
    return ["podman", "run", *options, "--rootfs", root, *command]


def stop_command(name: str) -> str:
    """Remove the container, whatever its restart policy; a shell command."""
    word = shlex.quote(name)
    return f"podman rm --force --time 0 {word}; rm -rf /var/lib/containers/rootfs/{word}"
