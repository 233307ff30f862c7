"""Acceptance of a plan's drafts: known rows, a regression over them, and its predictions with bands.

Not here: measuring acceptance on a text (validate/acceptance.py), and tokens per round (roofline/round.py).
"""

from ridgeplan.planner.acceptance.model import Acceptance, AcceptanceModel
from ridgeplan.planner.acceptance.rows import (
    AcceptanceRow,
    commands_of,
    load_rows,
    merged,
    row_name,
    rows_json,
    shipped_rows,
)

__all__ = [
    "Acceptance", "AcceptanceModel", "AcceptanceRow", "commands_of", "load_rows", "merged", "row_name", "rows_json",
    "shipped_rows",
]  # fmt: skip
