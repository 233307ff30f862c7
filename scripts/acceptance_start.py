"""Writes planner/acceptance/start.json anew: the regression over the shipped rows, and bands by cross-validation."""

from __future__ import annotations

from cross_validation import conformal_bands, context_group, leave_out, model_group

from ridgeplan.planner.acceptance.model import observation
from ridgeplan.planner.acceptance.regression import START, fit, start_json
from ridgeplan.planner.acceptance.rows import shipped_rows


def main() -> None:
    """Writes planner/acceptance/start.json."""
    rows = shipped_rows()
    held = [row for group_of in (model_group, context_group) for row in leave_out(rows, group_of)]
    fitted = fit([observation(row) for row in rows])
    START.write_text(start_json(fitted, rows, conformal_bands(held)), encoding="utf-8")


if __name__ == "__main__":
    main()
