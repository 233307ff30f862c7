"""The papers' published times and memory, cell by cell, beside the model's predictions: `ridgeplan papers`.

Each paper's cells are in a TOML file here, as printed; engines.toml says what sets the papers' engines apart from this
package's runtime. Formulas that papers derive are here too, each in a file of its own. Not here: drawing
(dashboards/figures), and published acceptances that plans are predicted with (planner/acceptance).
"""

from ridgeplan.validate.papers.comparison import Cell, TableResult, Target, compare_all, targets_of
from ridgeplan.validate.papers.rows import PAPERS, PublishedError, list_engines

__all__ = ["PAPERS", "Cell", "PublishedError", "TableResult", "Target", "compare_all", "list_engines", "targets_of"]
