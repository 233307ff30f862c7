"""The file that a benchmark's rows are saved in one by one, as runs take minutes and may be interrupted."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeplan.dashboards.files import locked, write_json
from ridgeplan.validate.machine import measured_here

Rows = dict[str, Callable[[], dict[str, Any]]]  # by name; each is measured when it is called


@dataclass(frozen=True, eq=False)
class ResultsFile:
    """Results as JSON, by section, with where they were measured; a file that is there is continued."""

    path: Path
    results: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> ResultsFile:
        """The results that a file has, or none."""
        return cls(path, {**_saved(path), **measured_here()})

    def save(self, section: str, value: Any) -> None:
        """Adds a section, or replaces it."""
        with locked(self.path):  # and read again: another run may have saved other sections meanwhile
            self.results.update({**_saved(self.path), **measured_here(), section: value})
            write_json(self.path, self.results)

    def measure(self, section: str, rows: Rows, named: Sequence[str] = ()) -> None:
        """Measures the rows that are missing, or of these the ones that are `named`, and saves each."""
        saved = self.results.get(section, [])
        known = {row["row"] for row in saved}
        for name, make in rows.items():
            if name in known or (named and name not in named):
                continue
            print(f"{section}: {name} ...", flush=True)
            started = time.perf_counter()
            saved = [*saved, {"row": name, **make(), "took_s": round(time.perf_counter() - started, 1)}]
            print(json.dumps(saved[-1]), flush=True)
            self.save(section, saved)
            free()


def _saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def free() -> None:
    """Frees what the last row held on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
