"""What studies do with their results: files that were asked for, and the JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ridgeplan.dashboards.cli.output import print_json, write_atomically


def delivered(
    document: Mapping[str, Any],
    output: Path | None,
    html: Path | None,
    as_json: bool,
    write_page: Callable[[Mapping[str, Any], Path], None],
) -> bool:
    """Writes the files, with where results come from. True if they were printed as JSON too, so no table is wanted."""
    from ridgeplan.validate.machine import measured_here  # imports torch, which takes seconds

    document = {**measured_here(), **document}
    if output is not None:
        write_atomically(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if html is not None:
        write_page(document, html)
    if as_json:
        print_json(document)
    return as_json
