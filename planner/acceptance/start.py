"""Where the regression over the shipped rows starts: the effects that it had when start.json was written.

From there it takes one step instead of eighteen. After rows have changed it takes a few more and ends at the same
effects; `python -P -c "from ridgeplan.planner.acceptance import start; start.write_start()"` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from ridgeplan.planner.acceptance.regression import Fit, Start

START = Path(__file__).with_name("start.json")
DIGITS = 6


def shipped_start() -> Start:
    """The start that ships."""
    found = json.loads(START.read_text(encoding="utf-8"))
    return Start({tuple(effect): value for *effect, value in found["effects"]}, found["variances"])


def start_json(fitted: Fit) -> str:
    """A fit's effects and variances, one to a line."""
    pairs = zip(fitted.index, fitted.mean.tolist(), strict=True)
    effects = ",\n".join(json.dumps([*effect, round(value, DIGITS)]) for effect, value in pairs)
    variances = json.dumps({name: round(value, DIGITS) for name, value in fitted.variances.items()})
    return f'{{"variances": {variances},\n"effects": [\n{effects}\n]}}\n'


def write_start() -> None:
    """Writes start.json from a fit that starts from nothing."""
    from ridgeplan.planner.acceptance.model import observation
    from ridgeplan.planner.acceptance.regression import fit
    from ridgeplan.planner.acceptance.rows import shipped_rows

    START.write_text(start_json(fit([observation(row) for row in shipped_rows()])), encoding="utf-8")
