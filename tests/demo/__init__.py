# SPDX-License-Identifier: GPL-3.0-or-later
"""The demo: a hung server on eight GPUs, and one command. See __main__.py."""
