"""Writes the acceptance of stored decode runs as rows: planner/acceptance/measured/decode_h200.json.

A run at a large model's shape computes the function of a small one (validate/decode_bench/inflation.py), so its
acceptance is the small model's: rows are of that model, at its size. Runs of one draft and workload are pooled. Runs
whose target evicts are left out, as their context is not the prompt's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeplan.planner.acceptance import AcceptanceRow, row_name, rows_json
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "validate" / "results"
ROWS = ROOT / "planner" / "acceptance" / "measured" / "decode_h200.json"
TEXT = "American Adventures, as the model continues it"


@dataclass(frozen=True)
class Runs:
    """What runs of one model, draft and workload have in common."""

    model: str
    parameters: int
    shape: str
    draft: str
    context: int
    yarn: float
    ratio: float
    gamma: int


@dataclass
class Judged:
    """Drafts of some runs: how many were judged and accepted, in how many runs, the last on which day."""

    accepted: int = 0
    judged: int = 0
    runs: int = 0
    date: str = ""

    def add(self, measured: dict[str, Any], date: str) -> None:
        """One run."""
        self.accepted += sum(measured["accepted_at"])
        self.judged += sum(measured.get("verified_at") or measured["judged_at"])  # as version 0.1 named them
        self.runs += 1
        self.date = max(self.date, date)


def judged_drafts() -> dict[Runs, Judged]:
    """The drafts of all stored runs that draft without an eviction."""
    pooled: dict[Runs, Judged] = {}
    for path in sorted(RESULTS.glob("decode_*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        function = report["function"]
        for row in report["rows"]:
            context, batch, measured = row["context"], row["batch"], row["measured"]
            workload = Workload(report["shape"], "h200", context, measured["generated"] // batch, batch)
            plan = Plan.from_dict(row["given"]) if row.get("given") else preset(row["preset"], workload)
            if not row["gamma"] or plan.eviction.active:
                continue
            runs = Runs(
                function["name"], function["parameters"], report["shape"], row_name(plan), context,
                stretch(workload.final_context, function["max_context"]),
                plan.speculation.ratio if plan.speculation.sparse else 1.0, row["gamma"],
            )  # fmt: skip
            pooled.setdefault(runs, Judged()).add(measured, report["date"])
    return pooled


def stretch(tokens: int, limit: int) -> float:
    """YaRN's factor for sequences of that length, in the steps of 0.5 that a workload has."""
    return math.ceil(2 * tokens / limit) / 2 if tokens > limit else 1.0


def rows() -> Iterator[AcceptanceRow]:
    """A row for each model, draft, context and gamma."""
    for runs, drafts in judged_drafts().items():
        where = f"{drafts.judged} drafts of {drafts.runs} runs at temperature 1 inside the shape of {runs.shape}"
        yield AcceptanceRow(
            draft=runs.draft,
            model=runs.model,
            parameters=runs.parameters / 1e9,
            context=runs.context,
            acceptance=drafts.accepted / drafts.judged,
            source="measured",
            where=f"{where}, NVIDIA H200",
            ratio=runs.ratio,
            gamma=runs.gamma,
            quantizer="gptq",
            dtype="bfloat16",
            checkpoint="GGUF, decoded",
            yarn=runs.yarn,
            tokens=drafts.judged,
            date=drafts.date,
            text=TEXT,
        )


def main() -> None:
    """Writes the rows."""
    ROWS.write_text(rows_json(tuple(rows()), ["python scripts/decode_acceptance.py"]), encoding="utf-8")


if __name__ == "__main__":
    main()
