"""What `hold` was asked for: checked, and turned into what the holder is told. No side effects."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from .plan import BadValue, Host, parse_gpus

KINDS = (
    "plain",
    "orphan",
    "stopped",
    "zombie-parent",
    "dead-main-thread",
    "mapped-only",
    "open-only",
    "unkillable",
    "hung-exit",
    "mps",
)
SERVER_MIB = 76115
MPS_MIB = 66  # what nvidia-cuda-mps-server keeps for itself, measured
FOR_EVER = -1
TITLES = {"orphan": "sglang::scheduler_TP0", "mps": "nvidia-cuda-mps-server"}


def slurm_place(text: str) -> str:
    """'6' or '6.batch' or '6.0': the cgroup v2 in which Slurm puts that step's first task."""
    match = re.fullmatch(r"(\d{1,9})(?:\.(batch|extern|interactive|\d{1,9}))?", text)
    if not match:
        raise BadValue(f"--slurm: cannot read {text!r}; write 6, 6.batch or 6.0")
    return f"system.slice/slurmstepd.scope/job_{match[1]}/step_{match[2] or 'batch'}/user/task_0"


def slurm_environment(text: str, gpus: list[int]) -> dict[str, str]:
    """What Slurm tells a job, and a step of it that is not the batch script."""
    job, _, step = text.partition(".")
    devices = ",".join(str(index) for index in gpus)
    environment = {
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_JOB_GPUS": devices,
        "SLURM_GPUS_ON_NODE": str(len(gpus)),
    }
    if step.isdigit():
        environment |= {"SLURM_STEP_ID": step, "SLURM_STEPID": step, "SLURM_STEP_GPUS": devices}
    return environment


def pod_place(uid: str, holder: str) -> str:
    """The cgroup v2 in which a kubelet with systemd and cri-containerd puts a pod's container."""
    if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uid):
        raise BadValue(f"--pod: {uid!r} is no UID of a pod")
    pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    container = hashlib.sha256(holder.encode()).hexdigest()
    return f"kubepods.slice/kubepods-burstable.slice/{pod}/cri-containerd-{container}.scope"


@dataclass(frozen=True)
class Wish:
    """The options of `hold`; see the README."""

    gpus: str = "all"
    opens: str | None = None  # GPUs that it has merely open besides
    mib: int | None = None
    kind: str = "plain"
    name: str | None = None
    user: str | None = None
    ignore_term: bool = False
    respawn: int = 0  # a supervisor starts the holder again that many times, or FOR_EVER
    busy: bool = False
    cgroup: str | None = None  # below the host's or container's own root; with / the Proxmox host's
    slurm: str | None = None  # JOB or JOB.STEP: in a cgroup as Slurm's
    pod: str | None = None  # UID: in a cgroup as a kubelet's
    unit: str | None = None  # it is that systemd service of the host
    user_session: str | None = None  # the service (default: vllm) is of that user's own systemd
    podman: str | None = None  # it is process 1 of that podman container in the host
    restart: str = "no"  # of the service or podman container: no, always, loading, (service) slowly
    mps_client: bool = False  # it computes through the MPS server of the host

    def check(self, count: int) -> None:
        """Refuse what cannot be and what does not go together."""
        self.check_values(count)
        if self.kind not in KINDS:
            raise BadValue(f"no kind {self.kind!r}; there are: {', '.join(KINDS)}")
        if self.respawn and self.kind not in ("plain", "open-only", "mapped-only"):
            raise BadValue(f"--respawn does not go with --kind {self.kind}")
        if self.kind == "mps" and (self.mps_client or count > 1):
            raise BadValue("--kind mps: one a host, and it is no client")
        places = [self.cgroup, self.slurm, self.pod, self.service() or None, self.podman]
        if sum(place is not None for place in places) > 1:
            raise BadValue("only one of --cgroup, --slurm, --pod, --unit, --podman")
        if self.restart not in ("no", "always", "loading", "slowly") or (
            self.podman and self.restart == "slowly"
        ):
            raise BadValue("--restart: no, always or loading; of a service also slowly")
        if self.user_session and self.user:
            raise BadValue("--user-session says who the user is; no --user")
        if not (self.service() or self.podman):
            if self.restart != "no" and not (self.respawn and self.restart == "loading"):
                raise BadValue("--restart goes with --unit or --podman, loading with --respawn too")
            self.place("")
            return
        self.check_managed(count)

    def check_values(self, count: int) -> None:
        """Refuse what an option cannot be by itself."""
        for option, value in vars(self).items():
            if value == "":
                raise BadValue(f"--{option.replace('_', '-')}: empty")
        if count < 1:
            raise BadValue(f"--count {count}: 1 or more")
        if self.mib is not None and self.mib < 0:
            raise BadValue(f"--mib {self.mib}: 0 or more")
        if self.respawn < FOR_EVER:
            raise BadValue(f"--respawn {self.respawn}: 0 or more, or no number: for ever")
        # A process may have any other name, lines and all.
        if "\0" in (self.name or ""):
            raise BadValue(f"--name {self.name!r}: no name ends in the middle")
        # These make a program of that name in /usr/local/bin.
        if "/" in (self.name or "") and (self.respawn or self.podman):
            raise BadValue(f"--name {self.name}: without / where --respawn or --podman is")
        for user in (self.user, self.user_session):
            if user and not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", user):
                raise BadValue(f"{user!r} cannot be the name of a user")

    def check_managed(self, count: int) -> None:
        """Refuse what a systemd service or a podman container cannot be."""
        name = self.service() or self.podman or ""
        if count > 1 or self.kind == "orphan" or self.respawn:
            raise BadValue("--unit and --podman: not with --count, --respawn, --kind orphan")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9@_.-]{0,200}", name):
            raise BadValue(f"{name!r} cannot be the name of a service or container")
        if self.service() and name.endswith(".service"):
            raise BadValue(f"--unit {name}: write the name without .service")
        if self.user_session and self.kind == "mps":
            raise BadValue("--kind mps does not go with --user-session")
        if self.podman and self.kind in ("unkillable", "hung-exit", "zombie-parent", "mps"):
            raise BadValue(f"--podman does not go with --kind {self.kind}")

    def service(self) -> str:
        """The name of the systemd service that it is, if it is one."""
        return self.unit or ("vllm" if self.user_session else "")

    def place(self, holder: str) -> str | None:
        """The cgroup that the wish asks for, if it does."""
        if self.slurm:
            return slurm_place(self.slurm)
        if self.pod:
            return pod_place(self.pod, holder)
        return self.cgroup

    def spec(self, host: str, where: Host) -> dict[str, Any]:
        """What one holder is told."""
        indexes = parse_gpus(self.gpus, len(where.gpus))
        opened = (
            [n for n in parse_gpus(self.opens, len(where.gpus)) if n not in indexes]
            if self.opens
            else []
        )
        title = self.name or TITLES.get(self.kind, "python3")
        default = MPS_MIB if self.kind == "mps" else SERVER_MIB
        mib = default if self.mib is None else self.mib
        return {
            "claim": {
                "id": f"h{secrets.token_hex(4)}",
                "gpus": indexes,
                "opened": opened,
                "mib": 0 if self.kind == "open-only" else mib,
                "kind": self.kind,
                "host": host,
                "name": title,
                "busy": self.busy,
                "listed": self.kind not in ("open-only", "mapped-only"),
                "helper_parent": self.respawn != 0,
            },
            "minors": [where.gpus[index].minor for index in [*indexes, *opened]],
            "ignore_term": self.ignore_term,
            "loads": self.restart == "loading",
            "name": title,
            "whole_line": "::" in title or self.kind == "mps",
            "user": self.user_session or self.user or ("alice" if self.slurm else "root"),
            "mps_client": self.mps_client,
            "environment": slurm_environment(self.slurm, indexes) if self.slurm else {},
        }
