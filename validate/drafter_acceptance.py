"""Acceptance of drafters in real rounds: a model continues a text, and the statistics of its generation are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.planner.acceptance.drafter_rows import DrafterRow
from ridgeplan.planner.acceptance.speculation_profile import NAME, head_rows, head_settings, profile_document
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Plan, PlanError, Speculation, Weights
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.acceptance import Passage, named_shape
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import device_name
from ridgeplan.validate.prompts import prompt_batch

SUFFIX, HEAD, CASCADE, SELF = "suffix", "head", "cascade", "w4"
CASES = (SUFFIX, HEAD, CASCADE, SELF)  # a cascade feeds 4-bit drafts, which "w4" measures alone
PASSES = 2  # of a cascade's round


@dataclass(frozen=True)
class DrafterMeasurement:
    """What a case did at one context. row: for the planner, of a drafter that feeds the target."""

    case: str
    context: int
    window: int
    statistics: Statistics
    row: DrafterRow | None

    @property
    def document(self) -> dict[str, object]:
        """The figures as plain JSON values."""
        figures = self.statistics
        return {
            "case": self.case, "context": self.context, "window": self.window,
            "tokens_per_round": figures.tokens_per_round, "acceptance_at": list(figures.acceptance_at),
            "verified_at": list(figures.verified_at), "hit": figures.hit_rate,
            "proposal_acceptance": figures.proposal_acceptance, "drafts_per_pass": figures.drafts_per_pass,
            "rounds": figures.sequence_rounds, "decode_s": figures.decode_s,
        }  # fmt: skip


def case_plan(plain: Plan, case: str, depth: int, window: int) -> Plan:
    """A plan for the same workload, in full precision but for 4-bit drafts. A cascade's drafter is the head, if any."""
    if case == SELF:
        return replace(plain, weights=Weights(16, 4), speculation=Speculation(depth))
    kind = DrafterKind.HEAD if case == HEAD or (case == CASCADE and plain.workload.drafter_head) else DrafterKind.SUFFIX
    passes = PASSES if case == CASCADE else 0
    drafter = Drafter(kind, depth, passes, window=window if kind is DrafterKind.HEAD else 0)
    weights = Weights(16, 4) if passes else Weights()
    speculation = Speculation(min(depth * max(1, passes), MAX_GAMMA), drafter=drafter)
    return replace(plain, weights=weights, speculation=speculation)


def measure_drafters(
    model: str,
    passage: Passage,
    cases: Sequence[str],
    kind_of_text: str,
    *,
    head: str = "",
    windows: Sequence[int] = (),
    depth: int = 4,
    passages: int = 1,
    temperature: float = 1.0,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> Iterator[DrafterMeasurement]:
    """Every case at every context of a passage. head: a folder, for heads and for a cascade over one.

    windows: that a head reads, each measured; by default its own. Raises what `load` raises, and PlanError for lengths
    and for a head that is missing.
    """
    if HEAD in cases and not head:
        raise PlanError("no head to measure; allowed: a folder of `ridgeplan distill --drafter` (--drafter-head)")
    shape = named_shape(model)
    settings = head_settings(head) if head else None
    default_windows = (settings.window,) if settings else (0,)
    shared, draft_weights = SharedWeights(model, device), None
    plans = list(passage.plans(shape))
    for plain in plans:
        workload = replace(plain.workload, batch=passages, text=kind_of_text, drafter_head=head)
        for case in cases:
            for window in windows or default_windows if case in (HEAD, CASCADE) else (0,):
                plan = case_plan(replace(plain, workload=workload), case, depth, window)
                on_progress(f"{case} at {workload.context} tokens", 0, 1)
                with shared.engine(plan, draft_weights if plan.weights.draft_copy else None) as engine:
                    if plan.weights.draft_copy:
                        draft_weights = engine.draft_weights
                    prompts = prompt_batch(engine.tokenizer, workload.context, passages, passage.text)
                    sampling = SamplingParams(temperature=temperature)
                    figures = engine.generate(prompts, workload.new_tokens, sampling).statistics
                    where = (
                        f"{passages} x {workload.new_tokens} tokens after {passage.name}, temperature {temperature:g}, "
                        f"{device_name(engine.device)}"
                    )
                row = None
                if case in (SUFFIX, HEAD):
                    name = settings.row_name(window) if settings and case == HEAD else "suffix lookup"
                    row = DrafterRow(
                        kind=plan.speculation.drafter.kind, name=name, model=shape.name, depth=depth,
                        source="measured", where=where, parameters=shape.parameters / 1e9, context=workload.context,
                        text=kind_of_text, hit=figures.hit_rate, acceptance=figures.acceptance,
                        rounds=figures.sequence_rounds, acceptance_at=tuple(figures.acceptance_at[:depth]),
                    )  # fmt: skip
                yield DrafterMeasurement(case, workload.context, window, figures, row)


def head_profile(folder: str, measured: Sequence[DrafterMeasurement]) -> tuple[Path, dict[str, Any]]:
    """A head's speculation_profile.json with what was measured; rows of the same text, context and name are replaced.

    The path, and the document to write there.
    """
    of_head = [each for each in measured if each.case == HEAD]
    new = [each.row for each in of_head if each.row is not None]
    keys = [(row.text, row.context, row.name) for row in new]
    kept = [row for row in head_rows(folder) if (row.text, row.context, row.name) not in keys]
    figures = of_head[-1].statistics
    counts = figures.sequence_rounds, figures.verified_at, figures.accepted_at
    return Path(folder) / NAME, profile_document([*kept, *new], *counts, head_settings(folder).method)
