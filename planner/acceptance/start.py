"""Where the regression over the shipped rows starts: the effects that it ended at when start.json was written.

From there it takes one step instead of eighteen. Once rows have changed it starts from nothing, until
`python -P -m ridgeplan.planner.acceptance.write_start` has written the file anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ridgeplan.planner.acceptance.regression import Fit, Start
from ridgeplan.planner.acceptance.rows import AcceptanceRow

START = Path(__file__).with_name("start.json")
DIGITS = 6


def start_of(rows: Sequence[AcceptanceRow]) -> Start:
    """The start that ships if it is of these rows, else none."""
    found = json.loads(START.read_text(encoding="utf-8"))
    if found["rows"] != digest(rows):
        return Start()
    return Start({tuple(effect): value for *effect, value in found["effects"]}, found["variances"])


def digest(rows: Sequence[AcceptanceRow]) -> str:
    """What changes when any row does."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def start_json(fitted: Fit, rows: Sequence[AcceptanceRow]) -> str:
    """A fit's effects and variances, one effect to a line, and what rows they are of."""
    pairs = zip(fitted.index, fitted.mean.tolist(), strict=True)
    effects = ",\n".join(json.dumps([*effect, round(value, DIGITS)]) for effect, value in pairs)
    variances = json.dumps({name: round(value, DIGITS) for name, value in fitted.variances.items()})
    return f'{{"rows": "{digest(rows)}",\n"variances": {variances},\n"effects": [\n{effects}\n]}}\n'
