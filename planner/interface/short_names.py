"""Plans' descriptions in fewer letters, where columns or labels are narrow."""

from __future__ import annotations

# What descriptions of plans say in fewer letters where columns are narrow.
BRIEFLY = (
    ("drafts on upper codes", "upper"), ("drafts on full codes", "full"), (" of ", ":"), (", w4 drafts", "/w4"),
    (" KV", ""), (" + ", "+"),
)  # fmt: skip


def briefly(name: str) -> str:
    """A plan's description for a narrow column: `w8+int4x2+upper:quest/w4`. Presets keep their names."""
    for words, letters in BRIEFLY:
        name = name.replace(words, letters)
    return name
