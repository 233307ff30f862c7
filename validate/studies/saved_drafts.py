"""The file of `ridgeplan study drafts`: what was measured under which conditions, so that a study can go on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.plan import MAX_TOKENS
from ridgeplan.planner.resolution import yarn_factor
from ridgeplan.roofline.catalog.checks import Checked, build, number, numbers, parts, text, texts_by_name, whole
from ridgeplan.roofline.catalog.documents import fields_of_schema, parse_json, read_document
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime import WorkloadError
from ridgeplan.validate.acceptance import MAX_TOKENS_MEASURED, quantizer_of
from ridgeplan.validate.studies.drafts import FEWEST_TOKENS, GAMMA, Draft, DraftAcceptance

SCHEMA = 1
REMEASURE = "make it again with `ridgeplan study drafts`"
CONDITIONS = ("model", "text", "tokens", "calibration")  # which all rows of a file share, beside the device


@dataclass(frozen=True)
class SavedRow(Checked):
    """A draft's acceptance at one context. format: what the draft reads, one of the study's formats."""

    error = WorkloadError
    context: int = whole(1, MAX_TOKENS)
    policy: str = text()
    ratio: float = number(0, 1)
    format: str = text()
    rounds: int = whole(1, MAX_TOKENS)
    mean: float = number(0, 1)
    tokens_per_round: float = number(1, MAX_TOKENS)
    by_position: tuple[float, ...] = numbers(0, 1)

    @property
    def draft(self) -> tuple[int, Draft]:
        """The context and the draft."""
        return self.context, Draft(self.policy, self.ratio, self.format)


def row_of(found: DraftAcceptance) -> SavedRow:
    """The row of a measured draft."""
    draft, mean = found.draft, min(1.0, found.mean)  # a sum of rounded quotients may pass 1
    return SavedRow(found.context, draft.policy, draft.ratio, draft.format, found.rounds, mean, found.tokens_per_round,
                    found.by_position)  # fmt: skip


@dataclass(frozen=True)
class SavedStudy(Checked):
    """The conditions that all rows share, and the rows. calibration: the text of 4-bit weights; "" for the model's own.

    device, date and software are those of the run that wrote the file last.
    """

    error = WorkloadError
    model: str = text()
    tokens: int = whole(FEWEST_TOKENS, MAX_TOKENS_MEASURED)
    calibration: str = text("")
    rows: tuple[SavedRow, ...] = parts(SavedRow, ())
    device: str = text("")
    date: str = text("")
    software: Mapping[str, str] = texts_by_name(dict)
    text: str = text("")  # last, as it hides the function of that name

    @property
    def known(self) -> frozenset[tuple[int, Draft]]:
        """Contexts and drafts that have a row."""
        return frozenset(row.draft for row in self.rows)

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values, without where they come from."""
        conditions = {name: getattr(self, name) for name in CONDITIONS}
        return {"schema": SCHEMA, **conditions, "rows": [vars(row) for row in self.rows]}

    def with_row(self, found: DraftAcceptance) -> SavedStudy:
        """With one more row."""
        return replace(self, rows=(*self.rows, row_of(found)))

    def resumed(self, path: Path) -> SavedStudy:
        """With the rows of a file. Raises WorkloadError for a damaged one, and for one of other conditions."""
        saved = read_study(path)
        for name in (*CONDITIONS, "device"):
            there, here = getattr(saved, name), getattr(self, name)
            if there != here:
                raise WorkloadError(f"cannot resume {str(path)!r}: its {name} is {there!r}; allowed: {here!r}")
        return replace(self, rows=saved.rows)


def acceptance_rows(study: SavedStudy, shape: ModelShape, checkpoint: str) -> list[AcceptanceRow]:
    """What `recommend` can know from a study that was made on this machine: its drafts that plans can have.

    shape: of the model. checkpoint: as `AcceptanceRow` has it.
    """
    return [_acceptance_row(study, row, shape, checkpoint) for row in study.rows if row.draft[1].row_name]


def _acceptance_row(study: SavedStudy, row: SavedRow, shape: ModelShape, checkpoint: str) -> AcceptanceRow:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    factor = yarn_factor(shape, row.context + study.tokens)
    return AcceptanceRow(
        draft=row.draft[1].row_name,
        model=study.model,
        parameters=shape.parameters / 1e9,
        context=row.context,
        acceptance=max(1e-6, row.mean),
        source="measured",
        where=f"teacher-forced over {study.tokens} tokens of {study.text}, {study.device}"
        + (f", YaRN x{factor:g}" if factor > 1 else ""),
        ratio=row.ratio,
        gamma=GAMMA,
        quantizer=quantizer_of(device_type, bool(study.calibration)),
        dtype="bfloat16" if device_type == "cuda" else "float32",
        checkpoint=checkpoint,
        tokens=study.tokens,
        date=datetime.date.today().isoformat(),
        text=study.text,
    )


def read_study(path: Path) -> SavedStudy:
    """A file that `ridgeplan study drafts` wrote. Raises WorkloadError."""
    try:
        fields = fields_of_schema(parse_json(read_document(path)), SCHEMA, REMEASURE, WorkloadError)
        return build(SavedStudy, fields)
    except (OSError, ValueError) as error:
        raise WorkloadError(f"cannot read {str(path)!r}: {error}") from None
