# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs one playbook of the collection through ansible-runner, and hands on its events.

ansible-runner works in a thread of its own, which only puts events into a queue: whoever takes
them out may be as slow as they like, and Ctrl-C reaches the caller at once. What ansible-runner
would write down of the environment goes nowhere, and its folder is gone when the run is over.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.metadata
import os
import queue
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.errors import AnsibleError, UsageError

ROOT = Path(__file__).resolve().parent.parent
CALLBACKS = Path(__file__).resolve().parent / "callback"
STARTER = Path(__file__).resolve().parent / "ansible_playbook.py"
COLLECTION = "gpuops.gpu"

# Seconds between looks at whether the run was cancelled.
POLL = 0.2
# Seconds that Ansible gets to end by itself before it is killed.
PATIENCE = 5.0

# For those who have no configuration of Ansible at all; the ansible.cfg of the checkout says why.
DEFAULTS = {
    "ANSIBLE_CALLBACKS_ENABLED": "gpuops.gpu.quick_end",
    "ANSIBLE_FORKS": "50",
    "ANSIBLE_PIPELINING": "True",
    "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
    "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=300s "
    "-o ServerAliveInterval=15 -o ServerAliveCountMax=3 -o ConnectTimeout=10",
    "ANSIBLE_SSH_RETRIES": "1",
}

# A mistyped host or half an inventory must not drop out with a warning, and the run be clean.
STRICT = {
    "ANSIBLE_HOST_PATTERN_MISMATCH": "error",
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
}

# Settings that may be sound elsewhere. At a prompt a run would wait for ever, since its terminal is
# ansible-runner's; results that are hidden say nothing to us either; and a host that fails would
# end the run of all others.
UNFIT = {
    "ANSIBLE_ASK_PASS": "False",
    "ANSIBLE_BECOME_ASK_PASS": "False",
    "ANSIBLE_ASK_VAULT_PASS": "False",
    "ANSIBLE_NO_LOG": "False",
    "ANSIBLE_ANY_ERRORS_FATAL": "False",
}
# A prompt that no setting forbids, of vault_identity_list = NAME@prompt; Ansible then says so.
NO_ANSWER = {r"Vault password.*: ?$": ""}

Inventory = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Ended(Exception):
    """The run was ended before it was through; ``why`` goes into the report."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def run(
    playbook: str,
    take: Callable[[Mapping[str, Any]], None],
    *,
    limit: str = "",
    inventory: Inventory | None = None,
    variables: Mapping[str, Any] | None = None,
    check: bool = False,
    words: bool = False,
    verbosity: int = 0,
    timeout: float | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Run a playbook to its end, and give each event to ``take``.

    :param playbook: its name in the collection, such as ``reset_gpus``.
    :param words: have all that Ansible says as well, in ``stdout`` of events of all kinds.
    :param timeout: seconds after which the run is ended.
    :param cancel: ends the run when it is set.

    :raises Ended: it was cancelled or took too long.
    :raises UsageError: there is no inventory, or no room for a temporary folder.
    :raises AnsibleError: Ansible could not be run.
    :raises KeyboardInterrupt: Ctrl-C, after Ansible has been ended.
    """
    with temporary("gpuops-") as folder:
        config = _configure(folder, playbook, limit, inventory, variables, check, verbosity)
        if not words:
            config.env["ANSIBLE_STDOUT_CALLBACK"] = "gpuops_events"
            config.env["ANSIBLE_CALLBACK_PLUGINS"] += f":{CALLBACKS}"
        with _swallow(Path(config.artifact_dir, "command")):
            _Job(config, take).run(timeout, cancel)


def temporary(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that only its owner can read, and that is gone afterwards.

    :raises UsageError: there is no room for one.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"a temporary folder cannot be made ({error.strerror})",
            "name a folder in TMPDIR that can be written to",
        ) from error


def here() -> Path:
    """The working folder.

    :raises UsageError: it has been deleted.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the working folder cannot be used ({error.strerror})", "go to one that is there"
        ) from error


def inventory_sources(inventory: Inventory | None) -> list[str]:
    """What to give to Ansible's ``-i``, files as absolute paths.

    Without one: what Ansible's own configuration names, else ``inventory/hosts.yml`` where we are.

    :raises UsageError: a file that is not there, or none at all.
    """
    if inventory is None:
        settings = _settings()
        if os.environ.get("ANSIBLE_INVENTORY") or (settings and _names_inventory(settings)):
            return []
        local = Path("inventory/hosts.yml")
        if local.exists():
            return [str(local.absolute())]
        if Path("/etc/ansible/hosts").exists():  # where Ansible looks by itself
            return []
        raise UsageError(
            "there is no inventory here", "name one with -i, or write one: gpuops init"
        )
    given = [inventory] if isinstance(inventory, str | os.PathLike) else list(inventory)
    sources = []
    for each in (os.fspath(source) for source in given):
        if "," in each:
            sources.append(each)
        elif Path(each).exists():
            sources.append(str(Path(each).absolute()))
        else:
            raise UsageError(
                f"the inventory {each} is not there",
                "name one with -i, or write one with gpuops init",
            )
    return sources


def _settings() -> Path | None:
    """The file of settings that Ansible will take.

    Ansible could be asked, but loading what answers takes a twentieth of the time of a run.
    """
    places = [Path.home() / ".ansible.cfg", Path("/etc/ansible/ansible.cfg")]
    if not Path().stat().st_mode & stat.S_IWOTH:  # there anybody could have written it
        places.insert(0, Path("ansible.cfg"))
    if given := os.environ.get("ANSIBLE_CONFIG"):
        named = Path(os.path.expandvars(given)).expanduser()
        places.insert(0, named / "ansible.cfg" if named.is_dir() else named)
    return next((each for each in places if os.access(each, os.R_OK)), None)


def _names_inventory(settings: Path) -> bool:
    """Whether a file of settings says where the inventory is."""
    parser = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None)
    try:
        parser.read_string(settings.read_text(encoding="utf-8", errors="replace"))
    except (OSError, configparser.Error):
        return True  # Ansible will say what is wrong with it
    return bool(parser.get("defaults", "inventory", fallback=""))


def versions() -> dict[str, str]:
    """Of what a run is made with."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("ansible-core", "ansible-runner"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def environment() -> dict[str, str]:
    """What Ansible needs beside the environment as it is."""
    added = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"} | STRICT | UNFIT
    # It does not start in a locale that is not UTF-8, and only Linux is sure to have this one.
    if sys.platform == "linux":
        added["LC_ALL"] = "C.UTF-8"
    if _settings() is None:
        added |= {name: value for name, value in DEFAULTS.items() if name not in os.environ}
    if (ROOT / "collections").is_dir():  # a checkout, installed or not
        others = os.environ.get(
            "ANSIBLE_COLLECTIONS_PATH", "~/.ansible/collections:/usr/share/ansible/collections"
        )
        added["ANSIBLE_COLLECTIONS_PATH"] = f"{ROOT / 'collections'}:{others}"
    return added


def program(name: str) -> list[str]:
    """How to start one of Ansible's programs: the one that is installed beside us, if there is."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return [str(beside)]
    found = shutil.which(name)
    if not found:
        raise AnsibleError(f"there is no {name} here", "install ansible-core beside gpuops")
    return [found]


def ansible_playbook() -> list[str]:
    """How to start it: if it is installed beside us, in this Python and by our own starter."""
    found = program("ansible-playbook")
    if Path(found[0]).parent == Path(sys.executable).parent:
        return [sys.executable, "-P", str(STARTER)]  # -P: our modules are no modules of Ansible's
    return found


def _configure(
    folder: str,
    playbook: str,
    limit: str,
    inventory: Inventory | None,
    variables: Mapping[str, Any] | None,
    check: bool,
    verbosity: int,
) -> Any:
    from ansible_runner.config.runner import RunnerConfig

    config = RunnerConfig(
        private_data_dir=folder,
        project_dir=str(here()),  # where Ansible is started, so that it finds what it would
        playbook=f"{COLLECTION}.{playbook}",
        inventory=inventory_sources(inventory) or None,
        limit=limit or None,
        extravars=dict(variables or {}),
        cmdline="--check" if check else None,
        verbosity=verbosity,
        envvars=environment(),
        quiet=True,
        suppress_env_files=True,
        passwords=dict(NO_ANSWER),
    )
    config.prepare()
    # Given as settings these would be lost, since there is no file of settings to add them to.
    config.suppress_output_file = True
    config.pexpect_timeout = POLL
    # ansible-runner's callback would be made from the user's, which need not be fit for that.
    config.env.pop("ORIGINAL_STDOUT_CALLBACK", None)
    # ansible-runner would switch host keys off for those who have not said anything of them.
    if "ANSIBLE_HOST_KEY_CHECKING" not in os.environ:
        config.env.pop("ANSIBLE_HOST_KEY_CHECKING", None)
    config.command[:1] = ansible_playbook()
    return config


@contextlib.contextmanager
def _swallow(path: Path) -> Iterator[None]:
    """Be the reader of a pipe in place of a file.

    ansible-runner writes its whole environment, with whatever secrets are in it, to this file.
    """
    os.mkfifo(path, 0o600)

    def read() -> None:
        with path.open("rb") as pipe:
            while pipe.read(1 << 16):
                pass

    reader = threading.Thread(target=read, name="gpuops-pipe", daemon=True)
    reader.start()
    try:
        yield
    finally:
        # If nobody wrote, the reader still waits for somebody to open it.
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        reader.join(PATIENCE)


class _Job:
    """One run of ansible-runner in its thread, and how to end it."""

    def __init__(self, config: Any, take: Callable[[Mapping[str, Any]], None]) -> None:
        self.config = config
        self.take = take
        self.queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.kill = threading.Event()
        self.error: BaseException | None = None
        self.pid = 0

    def run(self, timeout: float | None, cancel: threading.Event | None) -> None:
        thread = threading.Thread(target=self._work, name="gpuops-run", daemon=True)
        deadline = time.monotonic() + timeout if timeout else float("inf")
        thread.start()
        try:
            while True:
                try:
                    event = self.queue.get(timeout=POLL)
                except queue.Empty:
                    event = {}
                if event is None:
                    break
                self._pass_on(event)
                if cancel is not None and cancel.is_set():
                    raise Ended("interrupted")
                if time.monotonic() > deadline:
                    raise Ended(f"timed out after {timeout:g} s")
        except BaseException:
            self._end()
            raise
        finally:
            thread.join(PATIENCE)
        if self.error is not None:
            raise AnsibleError(
                f"ansible-runner failed: {type(self.error).__name__}: {self.error}",
                "see whether ansible-playbook works here",
            ) from self.error

    def _work(self) -> None:
        from ansible_runner.runner import Runner

        try:
            Runner(self.config, event_handler=self._handle, cancel_callback=self.kill.is_set).run()
        except BaseException as error:
            self.error = error
        finally:
            self.queue.put(None)

    def _handle(self, event: dict[str, Any]) -> bool:
        """Microseconds: a slow one would make ansible-runner lose its child."""
        self.queue.put(event)
        return False  # so that no file is written for it

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        if event:
            self.pid = int(event.get("pid") or self.pid)
            self.take(event)

    def _end(self) -> None:
        """Ctrl-C for Ansible, which then ends its workers; death if it does not listen.

        Or if whoever waits for that types Ctrl-C once more.
        """
        try:
            if self.pid:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGINT)
                if self._ends_within(PATIENCE):
                    return
        except KeyboardInterrupt:
            pass
        self.kill.set()
        self._ends_within(PATIENCE)

    def _ends_within(self, seconds: float) -> bool:
        """Pass on what still comes until it has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                event = self.queue.get(timeout=POLL)
                if event is None:
                    return True
                with contextlib.suppress(Exception):  # the first error is the one that counts
                    self._pass_on(event)
        return False
