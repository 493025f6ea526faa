"""A host or container whose process 1 is a real systemd, and servers that are units of it.

Only what the lab writes is started: the units that the machine below has enabled are hidden,
because sysctl, udev and the like would act on the machine itself.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

INIT = "/lib/systemd/systemd"
UNITS = "etc/systemd/system"
MULTI_USER = """\
[Unit]
Description=Multi-User System
Requires=basic.target
After=basic.target
AllowIsolate=yes
Wants=ssh.service
"""
# Debian's, without its check of the configuration, which would double the time until it answers.
SSH = """\
[Unit]
Description=OpenBSD Secure Shell server

[Service]
ExecStart=/usr/sbin/sshd -D
ExecReload=/bin/kill -HUP $MAINPID
KillMode=process
Restart=on-failure
RestartPreventExitStatus=255
RuntimeDirectory=sshd
RuntimeDirectoryMode=0755
"""
# Without "Audit=" it would turn on the audit of the whole machine.
JOURNAL = "[Journal]\nStorage=volatile\nForwardToSyslog=no\nReadKMsg=no\nAudit=\n"
SERVICE = """\
[Unit]
Description={name}
StartLimitIntervalSec=0

[Service]
{environment}
ExecStart=@{program} {command}
Restart={restart}
RestartSec=200ms
"""


def hidden() -> list[str]:
    """The directories of the machine that say what to start, and what generates more of it."""
    wants = sorted(Path("/usr/lib/systemd/system").glob("*.wants"))
    return [
        UNITS,
        "etc/systemd/system-generators",
        "usr/lib/systemd/system-generators",
        *(str(path).lstrip("/") for path in wants),
    ]


def install(layer: Path, name: str) -> None:
    """The files that make systemd process 1, in the host's or container's own layer."""
    from .node import hide, write

    for directory in hidden():
        hide(layer, directory, 0o755)
    write(layer / UNITS / "multi-user.target", MULTI_USER)
    write(layer / UNITS / "ssh.service", SSH)
    (layer / UNITS / "default.target").symlink_to("multi-user.target")
    (layer / UNITS / "systemd-journald-audit.socket").symlink_to("/dev/null")
    wants = layer / "usr/lib/systemd/system/sockets.target.wants"
    for socket in ("systemd-journald.socket", "systemd-journald-dev-log.socket"):
        (wants / socket).symlink_to(f"../{socket}")
    write(layer / "etc/systemd/journald.conf", JOURNAL)
    write(layer / "etc/fstab", "")
    write(layer / "etc/machine-id", hashlib.md5(name.encode()).hexdigest() + "\n")
    init = layer / "usr/sbin/init"
    init.parent.mkdir(parents=True, exist_ok=True)
    init.symlink_to(INIT)


def quote(text: str) -> str:
    """One word of a unit file."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def service(
    name: str, program: str, command: list[str], environment: dict[str, str], restart: str
) -> str:
    """A unit file as people write them for a server."""
    # In Environment= a $ is only a $.
    lines = [
        "Environment=" + quote(f"{key}={value}").replace("$$", "$")
        for key, value in environment.items()
    ]
    return SERVICE.format(
        name=name,
        environment="\n".join(lines),
        program=program,
        command=" ".join(quote(word) for word in command),
        restart=restart,
    )


def start_command(name: str) -> str:
    """Start a unit whose file is new or another one than before; a shell command."""
    unit = shlex.quote(f"{name}.service")
    return f"systemctl daemon-reload && systemctl start {unit}"


def stop_command(name: str) -> str:
    """Have systemd give a unit up, without waiting for its processes; a shell command."""
    unit = shlex.quote(f"{name}.service")
    return f"rm -f /{UNITS}/{unit}; systemctl stop --no-block {unit}"
