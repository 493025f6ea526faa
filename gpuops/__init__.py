# SPDX-License-Identifier: GPL-3.0-or-later
"""gpuops: take GPUs from whatever state they are in to a proved clean slate.

The work is done by the Ansible collection ``gpuops.gpu``, which this distribution installs next
to the package. The package is the thin wrapper around it: it turns what a run did into a report.
"""

from gpuops._version import __version__

__all__ = ["__version__"]
