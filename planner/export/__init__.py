"""Export of plans to other engines: their serve commands, what they cannot carry, and what they will reach.

Not here: how their arguments are extracted (scripts/engine_arguments.py), and the papers' engines (validate/papers).
"""

from ridgeplan.planner.engines.formats import ENGINES, engine_named
from ridgeplan.planner.export.export import Exported, export
from ridgeplan.planner.export.options import ServeCommandOptions
from ridgeplan.planner.export.plugin import export_with_plugin, fastest_with_plugin
from ridgeplan.planner.export.schema import schema_for, versions

__all__ = [
    "ENGINES",
    "Exported",
    "ServeCommandOptions",
    "engine_named",
    "export",
    "export_with_plugin",
    "fastest_with_plugin",
    "schema_for",
    "versions",
]
