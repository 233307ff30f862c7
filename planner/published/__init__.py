"""The papers' published tables, cell by cell, beside the model's predictions: `ridgeplan papers`.

Each paper's cells are in a TOML file here, as printed; engines.toml says what sets the papers' engines apart from this
package's runtime. Not here: derivations of papers' formulas (roofline/papers), and published acceptances that plans are
predicted with (planner/acceptance.toml).
"""

from ridgeplan.planner.published.comparison import Cell, TableResult, compare_all
from ridgeplan.planner.published.engine import list_engines
from ridgeplan.planner.published.rows import PAPERS, PublishedError
from ridgeplan.planner.published.targets import Target, targets_of

__all__ = ["PAPERS", "Cell", "PublishedError", "TableResult", "Target", "compare_all", "list_engines", "targets_of"]
