"""Files that a user names: errors that are shown as one line, and whole or no files on disk."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class FileProblem(ValueError):
    """A file that a user named cannot be read or written."""


def is_user_error(error: ValueError) -> bool:
    """Whether the user's input caused an error: the package defines its class. Other errors keep their traceback."""
    return type(error).__module__.startswith("ridgeplan.")


def is_writable(path: Path) -> bool:
    """Whether a regular file can be written there. A device or a pipe of that name would be replaced, so it cannot."""
    try:
        target = Path(os.path.realpath(path))
        regular = target.is_file() or not target.exists()
        return regular and target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError):  # an invalid file name
        return False


def require_writable(path: Path) -> None:
    """Creates the folder of `path`. Raises FileProblem where no file can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise FileProblem(
            f"cannot write {str(path)!r}: {error.strerror}; allowed: XDG_CACHE_HOME set to a writable folder"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole file or nothing; a symbolic link stays one. Raises FileProblem."""
    target = Path(os.path.realpath(path))
    staging = target.with_name(f".ridgeplan-{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(target)
    except OSError as error:
        raise FileProblem(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)


def json_text(data: Any) -> str:
    """`data` as indented JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_json(path: Path | None, data: Any) -> None:
    """Writes `data` as JSON where a path is given. Raises FileProblem."""
    if path is not None:
        write_atomically(path, json_text(data))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat rows as CSV with a header; a value that a row lacks is empty."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
