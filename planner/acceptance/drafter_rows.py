"""Rows of drafters' acceptance, and those that ship."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance.rows import HERE, REMEASURE
from ridgeplan.roofline.catalog.files import json_or, naming_file, read_document
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.catalog.validation import Checked, brief, build, name_text, number, numbers, one_of, text, whole
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DrafterKind, PlanError, TextKind
from ridgeplan.roofline.round import conditional_acceptance

EAGLE3, MTP = "EAGLE-3", "MTP"  # names of rows
NOT_STATED = "not stated"  # a row's model
UNCOUNTED_ROUNDS = 1000  # passes that a row counts for if it does not say how many it has, as the shipped studies have
MOST_ROUNDS = 1 << 40


@dataclass(frozen=True)
class DrafterRow(Checked):
    """How often a drafter's proposals were accepted. Raises PlanError for values out of range.

    name: of the drafter. parameters: of the model, in billions; 0 if not known. text: the kind of text; "" if it is not
    known. context: tokens; 0 if it is not known. depth: proposals of a pass. hit: share of the passes before which it
    had proposals. acceptance: conditional, the mean of all proposals; acceptance_at: by position, if it is known.
    tokens: of a pass, its own included; acceptance follows from it, if not known. rounds: passes of the
    model that were measured; 0 if not known, or if a text stood for what it writes.
    """

    error = PlanError
    kind: DrafterKind = one_of(DrafterKind)
    name: str = name_text()
    model: str = name_text()
    depth: int = whole(1, MAX_GAMMA)
    source: str = one_of(SOURCES)
    where: str = text()
    context: int = whole(0, MAX_TOKENS, default=0)
    hit: float = number(0, 1, default=1.0)
    acceptance: float = number(0, 1, default=0.0)
    tokens: float = number(0, MAX_GAMMA + 1, default=0.0)
    parameters: float = number(0, 1e5, default=0.0)
    rounds: int = whole(0, MOST_ROUNDS, default=0)
    acceptance_at: tuple[float, ...] = numbers(0, 1, default=())
    text: str = one_of(("", *TextKind), default="")  # last, as it hides the function of that name

    def _contradiction(self) -> str | None:
        positions = len(self.acceptance_at)
        return f"acceptance_at has {positions} positions; allowed: {self.depth}" if positions > self.depth else None

    @property
    def proposal_acceptance(self) -> float:
        """The conditional acceptance that, equal at all positions, gives a pass its tokens."""
        return acceptance_of(self.pass_tokens, self.hit, self.depth)

    @property
    def pass_tokens(self) -> float:
        """Tokens of a pass, its own included."""
        if self.acceptance_at:
            return 1 + self.hit * sum(accumulate(self.acceptance_at, mul))
        return self.tokens or float(pass_tokens(self.hit, self.acceptance, self.depth))

    @property
    def counts(self) -> np.ndarray:
        """[1 + 2 x MAX_GAMMA]: passes; by position, proposals that were compared, and those that were accepted."""
        rounds, compared = self.rounds or UNCOUNTED_ROUNDS, np.zeros(MAX_GAMMA)
        reached = np.cumprod(self.acceptance_at or [self.proposal_acceptance] * self.depth)
        accepted = np.pad(rounds * self.hit * reached, (0, MAX_GAMMA - len(reached)))
        compared[: len(reached)] = rounds * self.hit * np.array([1.0, *reached[:-1]])
        return np.array([rounds, *compared, *accepted])

    @property
    def replaces(self) -> tuple[Any, ...]:
        """What a new measurement has in common with the one that it replaces."""
        return self.kind, self.name, self.model, self.text, self.context, self.depth

    def __str__(self) -> str:
        """The drafter, its model and context, and where the figure is from."""
        model = f" of {self.model}" if self.model != NOT_STATED else ""
        at = f" at {self.context} tokens" if self.context else ""
        return f"{self.name}{model}{at}: {self.where}"


@cache
def drafter_rows() -> tuple[DrafterRow, ...]:
    """The rows of measured/*drafters*.json, then those of drafters.toml; fields that entries share are written once.

    Entries may have `marginal_at` instead of `acceptance_at`: the chance by position that all up to it are accepted.
    """
    tables = tomllib.loads((HERE / "drafters.toml").read_text(encoding="utf-8"))["row"]
    measured = (row for path in sorted((HERE / "measured").glob("*drafters*.json")) for row in load_drafter_rows(path))
    return (*measured, *(_row_of({**table, **entry}) for table in tables for entry in table.pop("entries")))


def _row_of(fields: dict[str, Any]) -> DrafterRow:
    if marginal := fields.pop("marginal_at", ()):
        fields["acceptance_at"] = [each / before for each, before in zip(marginal, (1, *marginal), strict=False)]
    return DrafterRow(**fields)


def load_drafter_rows(path: str | Path) -> tuple[DrafterRow, ...]:
    """The rows of drafters in a file of `ridgeplan acceptance`; none if there is no such file.

    Raises PlanError naming the file for damaged rows.
    """
    path = Path(path)
    return _rows_of(path, path.stat().st_mtime_ns) if path.exists() else ()


@lru_cache(maxsize=8)
def _rows_of(path: Path, written_ns: int) -> tuple[DrafterRow, ...]:
    with naming_file("acceptance rows", path, PlanError):
        document = json_or(PlanError, read_document(path))
        rows = document.get("drafters", []) if isinstance(document, dict) else document
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise PlanError(f"drafters is {brief(rows)}; allowed: a list of rows of drafters; {REMEASURE}")
        return tuple(build(DrafterRow, row, "drafter row: ") for row in rows)


@lru_cache(maxsize=4096)
def acceptance_of(tokens: float, hit: float, depth: int) -> float:
    """The conditional acceptance at which a pass of `depth` proposals, made in a share `hit`, has so many tokens."""
    share = (tokens - 1) / (depth * hit) if hit else 0.0
    return conditional_acceptance(min(share, 1.0), depth) if share > 0 else 0.0
