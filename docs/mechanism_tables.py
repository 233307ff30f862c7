"""Tables of the papers' mechanisms and published figures, from docs/mechanisms.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from readme_tables import table

FILE = Path(__file__).with_name("mechanisms.toml")
PRESENT = {(True, True): "executed and priced", (True, False): "executed", (False, True): "priced only",
           (False, False): "left out"}  # fmt: skip
NEWER_NAMES = {"SpecAttn": "[Vegas](https://arxiv.org/abs/2602.07223)"}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One mechanism of a paper. Fields as docs/mechanisms.toml explains them."""

    paper: str
    name: str
    source: str
    executed: Sequence[str] = ()
    priced: Sequence[str] = ()
    preset: str = ""
    shown: Sequence[str] = ()
    missing: str = ""

    @property
    def status(self) -> str:
        """Whether the package executes it, and whether it predicts its cost."""
        return PRESENT[bool(self.executed), bool(self.priced)]


@dataclass(frozen=True, kw_only=True)
class PublishedItem:
    """Tables and figures of a paper, the test or command that shows their like, and what of them is left out."""

    paper: str
    items: str
    what: str
    shown: str = ""
    missing: str = ""


def load_mechanisms() -> list[Mechanism]:
    """All mechanisms, in the file's order. Raises TypeError for an unknown or missing field."""
    return [Mechanism(**row) for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["mechanism"]]


def load_published() -> list[PublishedItem]:
    """All published items, in the file's order. Raises TypeError for an unknown or missing field."""
    return [PublishedItem(**row) for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["published"]]


def mechanisms(paper: str) -> str:
    """A paper's mechanisms: which run and are priced, the files that do so, what demonstrates it, what is left out."""
    rows = [
        (
            f"{row.name} ({row.source})",
            row.status,
            _code(row.executed),
            _code(row.priced),
            _code(row.shown),
            row.missing,
        )
        for row in load_mechanisms()
        if row.paper == paper
    ]
    columns = ("mechanism", "here", "executed by", "priced by", "shown by", "left out, and why")
    return table(columns, rows)


def published_items() -> str:
    """Every published table and figure, what shows its like, and what of it is left out."""
    rows = [(row.paper, row.items, row.what, _code([row.shown]), row.missing) for row in load_published()]
    return table(("paper", "items", "what they show", "shown by", "left out, or other than in the paper"), rows)


def contributions() -> str:
    """For each paper: mechanisms that run, those that run with differences, and those that do not run."""
    by_paper: dict[str, list[Mechanism]] = {}
    for row in load_mechanisms():
        by_paper.setdefault(row.paper, []).append(row)
    rows = [
        (
            f"{paper}, now {NEWER_NAMES[paper]}" if paper in NEWER_NAMES else paper,
            _names(row.name for row in listed if row.executed and not row.missing),
            _names(row.name for row in listed if row.executed and row.missing),
            _names(f"{row.name} ({row.status})" for row in listed if not row.executed),
        )
        for paper, listed in by_paper.items()
    ]
    return table(("paper", "runs", "runs, but not all of it as published", "does not run"), rows)


def _names(names: Iterable[str]) -> str:
    return "; ".join(names)


def _code(texts: Sequence[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts if text)
