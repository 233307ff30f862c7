"""The file of acceptance rows that commands merge what they measure into."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeplan.dashboards.cli.output import require_writable, write_atomically
from ridgeplan.planner.acceptance import AcceptanceRow, commands_of, load_rows, merged, rows_json
from ridgeplan.roofline.catalog.profile_lookup import user_acceptance_path


@dataclass(frozen=True)
class SavedRows:
    """A file's rows, and the commands that made them."""

    path: Path
    rows: tuple[AcceptanceRow, ...] = ()
    commands: tuple[str, ...] = ()


def saved_in(path: Path | None) -> SavedRows:
    """What a file holds, by default the one where `recommend` looks; nothing if there is none yet.

    Raises FileProblem for one that cannot be written, and PlanError for damaged rows.
    """
    path = path or user_acceptance_path()
    require_writable(path)
    return SavedRows(path, load_rows(path), commands_of(path)) if path.exists() else SavedRows(path)


def save_rows(known: SavedRows, rows: Sequence[AcceptanceRow]) -> None:
    """Writes the file with `rows`, which replace those that they repeat, and the command that runs."""
    write_atomically(known.path, rows_json(merged(known.rows, rows), (*known.commands, _command())))


def _command() -> str:
    """What was typed, for the file's reader: files without their folders."""
    return shlex.join(["ridgeplan", *(Path(one).name if os.sep in one else one for one in sys.argv[1:])])
