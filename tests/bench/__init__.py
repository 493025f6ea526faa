# SPDX-License-Identifier: GPL-3.0-or-later
"""The benchmark: the tool against what people type instead of it. See README.md."""
