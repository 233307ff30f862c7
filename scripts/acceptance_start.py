"""Writes planner/acceptance/start.json anew: the regression over the shipped rows, and bands by cross-validation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from cross_validation import conformal_bands, context_group, leave_out, model_group

from ridgeplan.planner.acceptance.model import observation
from ridgeplan.planner.acceptance.regression import START, EffectsPosterior, digest, fit
from ridgeplan.planner.acceptance.rows import AcceptanceRow, shipped_rows

DIGITS = 6


def start_json(fitted: EffectsPosterior, rows: Sequence[AcceptanceRow], bands: Mapping[str, float]) -> str:
    """A fit's effects and variances, one effect to a line, what rows they are of, and its bands."""
    pairs = zip(fitted.index, fitted.mean.tolist(), strict=True)
    effects = ",\n".join(json.dumps([*effect, round(value, DIGITS)]) for effect, value in pairs)
    variances, ends = (
        json.dumps({name: round(value, DIGITS) for name, value in each.items()}) for each in (fitted.variances, bands)
    )
    return f'{{"rows": "{digest(rows)}",\n"bands": {ends},\n"variances": {variances},\n"effects": [\n{effects}\n]}}\n'


def main() -> None:
    """Writes planner/acceptance/start.json."""
    rows = shipped_rows()
    held = [row for group_of in (model_group, context_group) for row in leave_out(rows, group_of)]
    fitted = fit([observation(row) for row in rows])
    START.write_text(start_json(fitted, rows, conformal_bands(held)), encoding="utf-8")


if __name__ == "__main__":
    main()
