# SPDX-License-Identifier: GPL-3.0-or-later
"""The one place that holds the version; pyproject.toml reads it, a test holds galaxy.yml to it."""

__version__ = "0.1.0"
