# SPDX-License-Identifier: GPL-3.0-or-later
"""Races: PIDs that change hands, two operators at once, a controller or a connection that dies."""
