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
USER_UNITS = "etc/systemd/user"
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
# Debian's needs logind for its runtime directory, and PAM.
USER_MANAGER = """\
[Unit]
Description=User Manager for UID %i

[Service]
User=%i
Type=notify
Environment=XDG_RUNTIME_DIR=/run/user/%i
ExecStartPre=+/usr/bin/install -d -m 700 -o %i -g %i /run/user/%i
ExecStart=/lib/systemd/systemd --user
Slice=user-%i.slice
KillMode=mixed
KillSignal=SIGRTMIN+3
Delegate=yes
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
RestartSec={after}
"""
# How soon systemd starts it again, by what --restart says.
RESTART_AFTER = {"no": "200ms", "always": "200ms", "slowly": "5s", "loading": "200ms"}


def hidden() -> list[str]:
    """The directories of the machine that say what to start, and what generates more of it."""
    wants = sorted(Path("/usr/lib/systemd").glob("*/*.wants"))
    return [
        UNITS,
        USER_UNITS,
        "usr/lib/systemd/user-generators",
        "usr/lib/systemd/user-environment-generators",
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
    write(layer / UNITS / "user@.service", USER_MANAGER)
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
        restart="no" if restart == "no" else "always",
        after=RESTART_AFTER[restart],
    )


def unit_file(name: str, uid: int | None) -> str:
    """Where the file of a service of the host, or of a user's systemd, is below the root."""
    return f"{UNITS if uid is None else USER_UNITS}/{name}.service"


def as_user(uid: int | None, command: str) -> str:
    """A systemctl command line for the host's systemd or for a user's."""
    if uid is None:
        return f"systemctl {command}"
    who = f"setpriv --reuid={uid} --regid={uid} --clear-groups"
    return f"{who} env XDG_RUNTIME_DIR=/run/user/{uid} systemctl --user {command}"


def start_command(name: str, uid: int | None) -> str:
    """Start a service whose file is new or another one than before; a shell command."""
    start = shlex.quote(f"{name}.service")
    manager = [] if uid is None else [f"systemctl start user@{uid}.service"]
    return " && ".join([*manager, as_user(uid, "daemon-reload"), as_user(uid, f"start {start}")])


def stop_command(name: str, uid: int | None) -> str:
    """Have systemd give a service up, without waiting for its processes; a shell command."""
    stop = as_user(uid, f"stop --no-block {shlex.quote(f'{name}.service')}")
    return f"rm -f {shlex.quote('/' + unit_file(name, uid))}; {stop}"
