"""What a lab consists of: hosts, containers, addresses, GPUs. Pure functions, no side effects."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STATE_ROOT = Path("/run/gpuops-lab")
PREFIX = 8  # all addresses live in 10.0.0.0/8 of the lab's own network namespace
BUSES = ("1b", "3b", "4c", "5d", "9b", "bb", "cb", "db")  # as on an eight-GPU H200 board


class LabError(Exception):
    """Something the user of the lab asked for cannot be done; the text is one line."""


class BadValue(LabError):
    """What was typed cannot be meant; the command line ends with 2, as for its own errors."""


@dataclass(frozen=True)
class Gpu:
    """One simulated GPU of a host."""

    index: int
    minor: int
    uuid: str
    bus_id: str  # as nvidia-smi prints it: 00000000:1B:00.0
    serial: str


@dataclass(frozen=True)
class Container:
    """One LXC container on a Proxmox host."""

    name: str
    vmid: int
    host: str
    address: str
    own_nodes: bool = False
    systemd: bool = False  # what its process 1 is
    unprivileged: bool = False  # its root is uid 100000 on the Proxmox host


@dataclass(frozen=True)
class Host:
    """One machine with its own kernel-like driver: a Proxmox host or a bare node."""

    name: str
    address: str
    proxmox: bool
    gpus: tuple[Gpu, ...]
    containers: tuple[Container, ...] = ()
    systemd: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything `up` was asked for."""

    hosts: tuple[Host, ...]
    gpu_count: int
    minor_shift: int = 0
    delay_ms: int = 150
    arguments: dict[str, Any] = field(default_factory=dict)

    def containers(self) -> list[Container]:
        """All containers of all hosts."""
        return [container for host in self.hosts for container in host.containers]

    def host(self, name: str) -> Host:
        """The host of that name, or the host a container of that name is on."""
        for host in self.hosts:
            if name == host.name or any(name == c.name for c in host.containers):
                return host
        raise BadValue(f"no host {name} in this lab")

    def container(self, name: str) -> Container | None:
        """The container of that name, or None when it names a host."""
        return next((c for c in self.containers() if c.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """A form that `Plan.from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        hosts = tuple(
            Host(
                **{
                    **host,
                    "gpus": tuple(Gpu(**gpu) for gpu in host["gpus"]),
                    "containers": tuple(Container(**c) for c in host["containers"]),
                }
            )
            for host in data["hosts"]
        )
        return Plan(**{**data, "hosts": hosts})


def check_name(name: str) -> str:
    """Refuse lab names that cannot be a file, a cgroup and a device name at once."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}", name):
        raise BadValue(f"GPUOPS_LAB={name!r}: use letters, digits, - and _ only")
    return name


def parse_systemd(text: str) -> tuple[str, set[int]]:
    """'131,node9' -> ('131', {9}): containers and bare nodes whose process 1 is systemd."""
    words = [word.strip() for word in text.split(",")]
    nodes = {int(word[4:]) for word in words if re.fullmatch(r"node[1-9]\d{0,2}", word)}
    if nodes and max(nodes) > 200:
        raise BadValue("--systemd: bare nodes are node1 to node200")
    others = [word for word in words if not re.fullmatch(r"node[1-9]\d{0,2}", word)]
    return ",".join(others), nodes


def parse_cts(text: str, option: str = "--cts") -> list[tuple[int, str]]:
    """'129,130,231@pve2' -> [(129, 'pve1'), (130, 'pve1'), (231, 'pve2')]; 'none' -> []."""
    result: list[tuple[int, str]] = []
    if text.strip() in ("", "none"):
        return result
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?(?:@(pve[1-9]\d?))?\s*", word)
        if not match:
            raise BadValue(f"{option}: cannot read {word!r}; write 129, 129-168 or 231@pve2")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 100 <= first <= last <= 65535:
            raise BadValue(f"{option}: {word!r}: container numbers run from 100 to 65535")
        result += [(vmid, match[3] or "pve1") for vmid in range(first, last + 1)]
    if len(set(result)) != len(result):
        raise BadValue(f"{option}: the same container twice")
    return result


def parse_gpus(text: str, count: int) -> list[int]:
    """'0-3,7' or 'all' -> sorted GPU indexes."""
    if text == "all":
        return list(range(count))
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise BadValue(f"--gpus: cannot read {word!r}; write 0-3,7 or all")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found or max(found) >= count:
        raise BadValue(f"--gpus {text}: this lab has GPUs 0 to {count - 1}")
    return sorted(found)


def make_gpus(host: str, count: int, minor_shift: int = 0) -> tuple[Gpu, ...]:
    """The GPUs of a host: the same ones each time for the same host name."""
    gpus = []
    for index in range(count):
        digest = hashlib.sha256(f"{host}/{index}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        bus = BUSES[index % len(BUSES)].upper()
        gpus.append(
            Gpu(
                index=index,
                minor=(index + minor_shift) % count,
                uuid=uuid,
                bus_id=f"{index // len(BUSES):08X}:{bus}:00.0",
                serial=f"16537{int(digest[:8], 16) % 10**8:08d}",
            )
        )
    return tuple(gpus)


def container_address(vmid: int, pve: int) -> str:
    """10.77.1.129 for 129 on pve1; other hosts and high numbers get addresses of their own."""
    if pve == 1 and vmid < 255:
        return f"10.77.1.{vmid}"
    return f"10.{100 + pve}.{vmid >> 8}.{vmid & 255}"


def make_plan(
    cts: str = "129,130",
    nodes: int = 1,
    gpus: int = 8,
    minor_shift: int = 0,
    delay_ms: int = 150,
    own_nodes: str = "none",
    systemd: str = "none",
    unprivileged: str = "none",
) -> Plan:
    """Turn the arguments of `up` into a plan."""
    if not 1 <= gpus <= 128:
        raise BadValue("--gpus: 1 to 128 GPUs")
    if not 0 <= nodes <= 200:
        raise BadValue("--nodes: 0 to 200 bare nodes")
    if not 0 <= minor_shift < gpus:
        raise BadValue(f"--minor-shift: 0 to {gpus - 1} with --gpus {gpus}")
    if delay_ms < 0:
        raise BadValue("--delay-ms: 0 or more")
    wanted = parse_cts(cts)
    own = {pair for pair in parse_cts(own_nodes, "--own-nodes")}
    if own - set(wanted):
        raise BadValue("--own-nodes: names a container that --cts does not")
    systemd_cts, systemd_nodes = parse_systemd(systemd)
    with_systemd = parse_cts(systemd_cts, "--systemd")
    mapped = parse_cts(unprivileged, "--unprivileged")
    wanted += [pair for pair in dict.fromkeys(with_systemd + mapped) if pair not in wanted]
    vmids = [vmid for vmid, _ in wanted]
    # pve1 is always there unless nothing but bare nodes was asked for.
    needed = {"pve1"} if wanted or not (nodes or systemd_nodes) else set()
    pves = sorted({host for _, host in wanted} | needed)
    hosts = []
    for pve in pves:
        number = int(pve[3:])
        containers = tuple(
            Container(
                # A number used on two hosts needs the host in its inventory name.
                name=f"ct{vmid}" if pve == "pve1" or vmids.count(vmid) == 1 else f"ct{vmid}-{pve}",
                vmid=vmid,
                host=pve,
                address=container_address(vmid, number),
                own_nodes=(vmid, pve) in own,
                systemd=(vmid, pve) in with_systemd,
                unprivileged=(vmid, pve) in mapped,
            )
            for vmid, host in wanted
            if host == pve
        )
        hosts.append(
            Host(pve, f"10.77.0.{10 + number}", True, make_gpus(pve, gpus, minor_shift), containers)
        )
    for number in sorted({*range(1, nodes + 1), *systemd_nodes}):
        name = f"node{number}"
        hosts.append(
            Host(
                name,
                f"10.77.2.{number}",
                False,
                make_gpus(name, gpus, minor_shift),
                systemd=number in systemd_nodes,
            )
        )
    arguments = {
        "cts": cts,
        "nodes": nodes,
        "gpus": gpus,
        "minor_shift": minor_shift,
        "delay_ms": delay_ms,
        "own_nodes": own_nodes,
        "systemd": systemd,
        "unprivileged": unprivileged,
    }
    return Plan(tuple(hosts), gpus, minor_shift, delay_ms, arguments)


@dataclass(frozen=True)
class Paths:
    """Where one lab keeps its things; all of it derives from the lab's name."""

    name: str
    cgroup: Path

    @property
    def state(self) -> Path:
        """The lab's directory."""
        return STATE_ROOT / self.name

    @property
    def netns(self) -> Path:
        """The lab's network namespace, as a file to enter."""
        return self.state / "netns"

    @property
    def plan(self) -> Path:
        """Written last by `up`: a lab without it is not up."""
        return self.state / "plan.json"

    @property
    def inventory(self) -> Path:
        """The generated Ansible inventory."""
        return self.state / "inventory.yml"

    @property
    def lock(self) -> Path:
        """Serialises up and down of this lab."""
        return STATE_ROOT / f".{self.name}.lock"

    def host(self, host: str) -> Path:
        """A host's directory, never visible inside the host."""
        return self.state / "hosts" / host

    def driver(self, host: str) -> Path:
        """What a host and its containers see as /proc/driver."""
        return self.host(host) / "driver"

    def admin(self, host: str) -> Path:
        """The driver's control socket, for the lab only."""
        return self.host(host) / "admin.sock"

    def host_cgroup(self, host: str) -> Path:
        """The cgroup that is the root of the host's own cgroup namespace."""
        return self.cgroup / host

    def ct_cgroup(self, container: Container) -> Path:
        """The cgroup in which a container's processes live."""
        return self.cgroup / container.host / "lxc" / str(container.vmid) / "ns"
