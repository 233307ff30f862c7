"""Writes planner/acceptance/start.json anew, from a regression over the shipped rows that starts from nothing."""

from __future__ import annotations

from ridgeplan.planner.acceptance.model import observation
from ridgeplan.planner.acceptance.regression import START, fit, start_json
from ridgeplan.planner.acceptance.rows import shipped_rows


def main() -> None:
    """Writes planner/acceptance/start.json."""
    rows = shipped_rows()
    START.write_text(start_json(fit([observation(row) for row in rows]), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
