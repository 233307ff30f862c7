"""Writes start.json anew, from a regression over the shipped rows that starts from nothing."""

from __future__ import annotations

from ridgeplan.planner.acceptance.model import observation
from ridgeplan.planner.acceptance.regression import fit
from ridgeplan.planner.acceptance.rows import shipped_rows
from ridgeplan.planner.acceptance.start import START, start_json


def main() -> None:
    """Writes the file beside start.py."""
    rows = shipped_rows()
    START.write_text(start_json(fit([observation(row) for row in rows]), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
