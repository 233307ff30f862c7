"""Files of results: JSON that one version writes and later ones check before they use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from ridgeplan.roofline.catalog.files import fields_of_schema, json_or, naming_file, read_document
from ridgeplan.roofline.catalog.validation import Checked, build

SCHEMA = 1


class ResultFile(Checked):
    """Base of the dataclasses that hold the results of a file. Subclasses write "schema": SCHEMA beside their fields.

    title: what error messages call the file. advice: what to do about a file of an older schema. derived: by field of
    rows, a key of each row that follows from the others. Such keys are for readers of the JSON and are left out here.
    """

    title: ClassVar[str]
    advice: ClassVar[str]
    derived: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_json(cls, document: str | bytes) -> Self:
        """Parses and validates untrusted JSON. Raises the class's error with one line that lists what is wrong."""
        data = json_or(cls.error, document, f"a JSON {cls.title}")
        fields = fields_of_schema(data, SCHEMA, cls.advice, cls.error)
        return build(cls, fields | {name: _without(fields.get(name, []), key) for name, key in cls.derived.items()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file. Raises the class's error naming the file."""
        with naming_file(cls.title, path, cls.error):
            return cls.from_json(read_document(path))


def _without(rows: Any, key: str) -> Any:
    """Rows of untrusted JSON without one key. Anything else is left for the validation to refuse."""
    if not isinstance(rows, list):
        return rows
    return [{k: v for k, v in row.items() if k != key} if isinstance(row, dict) else row for row in rows]
