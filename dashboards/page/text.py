"""Texts that Markdown shows as they are."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    """`text` for Markdown to show as it is: names from files could hold links, images or formulas."""
    return re.sub(r"([\\`*_\[\]<>$~:#|])", r"\\\1", text)
