# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m gpuops`` is the command ``gpuops``."""

from gpuops.cli import main

if __name__ == "__main__":
    main()
