"""Writes the measured rows of drafters that ship, from results of `ridgeplan study drafts` in validate/results.

    python scripts/fill_drafter_rows.py

Rows of suffix lookup get their counts and acceptance by position. Heads were trained for minutes, and stay results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeplan.planner.acceptance.drafter_rows import DrafterRow, load_drafter_rows
from ridgeplan.planner.acceptance.rows import commands_of, rows_json

ROOT = Path(__file__).parents[1]
SHIPPED, STUDIES = ROOT / "planner/acceptance/measured/h200_drafters.json", ROOT / "validate/results"


def row_of(study: dict[str, Any], figures: dict[str, Any], parameters: float) -> DrafterRow:
    """The row of one context of a study. parameters: of its model, in billions."""
    where = (
        f"{study['passages']} x {study['tokens']} tokens after {study['text']}, temperature {study['temperature']:g}, "
        f"{study['device']}"
    )
    compared = figures["verified_at"]
    accepted = sum(rate * count for rate, count in zip(figures["acceptance_at"], compared, strict=True))
    return DrafterRow(
        kind="suffix", name="suffix lookup", model=study["model"], depth=study["depth"], source="measured", where=where,
        context=figures["context"], hit=figures["hit"], acceptance=accepted / sum(compared), parameters=parameters,
        rounds=figures["rounds"], acceptance_at=tuple(figures["acceptance_at"]), text=study["kind"],
    )  # fmt: skip


def main() -> None:
    """See the module's docstring."""
    parameters = {row.model: row.parameters for row in load_drafter_rows(SHIPPED)}
    rows = []
    for path in sorted(STUDIES.glob("study_drafters_*.json")):
        study = json.loads(path.read_text(encoding="utf-8"))
        of_suffix = (figures for figures in study["rows"] if figures["case"] == "suffix")
        rows += [row_of(study, figures, parameters[study["model"]]) for figures in of_suffix]
    SHIPPED.write_text(rows_json((), commands_of(SHIPPED), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
