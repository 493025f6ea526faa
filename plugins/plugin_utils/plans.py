# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan: whom a check run found, so that a later run may signal these and nobody else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ansible_collections.gpuops.gpu.plugins.plugin_utils.routes import RouteError

SCHEMA = "gpuops.plan/1"


def make(hosts: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for these hosts: for each a list of holders, and a digest over all of them."""
    plain = json.loads(json.dumps(hosts))
    return {"schema": SCHEMA, "digest": digest(plain), "hosts": plain}


def digest(hosts: Mapping[str, Any]) -> str:
    """Of the hosts and their holders, whatever the order of the keys in the file."""
    text = json.dumps(hosts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256(text.encode()).hexdigest()


def read(path: Path, name: str) -> list[dict[str, Any]]:
    """Whom a plan allows to be signalled for a host.

    :raises RouteError: it cannot be read, was altered, or says nothing of the host.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        hosts, kept = plan["hosts"], plan["digest"]
        altered = kept != digest(hosts)
    except OSError as error:
        raise RouteError(
            f"the plan {path} cannot be read ({error.strerror}); make one with plan_gpus.yml"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RouteError(f"{path} is no plan; make one with plan_gpus.yml") from error
    if altered:
        raise RouteError(f"the plan {path} was altered after it was made; make a new one")
    if not isinstance(hosts, dict) or name not in hosts:
        raise RouteError(f"the plan {path} says nothing of this host; make one that does")
    found: Any = hosts[name]
    # No list would be no limit.
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise RouteError(f"the plan {path} has no list of holders for this host; make a new one")
    return found
