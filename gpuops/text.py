# SPDX-License-Identifier: GPL-3.0-or-later
"""Text of others made fit to be shown: command lines and messages may hold anything."""

from __future__ import annotations

import re

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# What no text should hold: it would move the cursor of a terminal, and XML cannot say it.
CONTROL = {
    number: "�"
    for numbers in (range(9), range(11, 13), range(14, 32), range(127, 160), range(0xD800, 0xE000))
    for number in numbers
} | {0xFFFE: "�", 0xFFFF: "�"}


def plain(text: object) -> str:
    """Without control characters and halves of characters."""
    return str(text).translate(CONTROL)


def squeeze(text: str) -> str:
    """On one line, without colours."""
    return " ".join(ANSI.sub("", text).split())
