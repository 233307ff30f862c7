"""Drafts of one plan, counted in a generation that continues a text; and the rows of acceptance that follow."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeplan.planner.acceptance import AcceptanceRow, row_name
from ridgeplan.planner.plan import Plan
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.drafting.gamma_controller import Evidence
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.validate.acceptance import device_name, quantizer_of

FEWEST_DRAFTS = 32  # of a position, for a row of its own


@dataclass(frozen=True)
class MeasuredDrafts:
    """How often the drafts of a plan were compared with the target, and accepted, by position in a round."""

    plan: Plan
    judged_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @classmethod
    def of(cls, engine: Engine, prompts: Sequence[Sequence[int]]) -> MeasuredDrafts:
        """From a generation of the engine's plan at temperature 1, of which stop tokens are ignored."""
        tokens = engine.plan.workload.new_tokens
        figures = engine.generate(prompts, tokens, SamplingParams(temperature=1.0)).statistics
        return cls(engine.plan, figures.judged_at, figures.accepted_at)

    @property
    def ratio(self) -> float:
        """The plan's share of the tokens that drafts read, unless its floor is more."""
        return self.plan.speculation.ratio

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Conditional acceptance by position; one that few drafts reached is about that of the one before."""
        mean = (sum(self.accepted_at) + 0.5) / (sum(self.judged_at) + 1)
        return tuple(Evidence(self.judged_at, self.accepted_at).acceptance_at(mean))

    def rows(self, engine: Engine, shape: ModelShape, text: str, calibrated: bool) -> Iterator[AcceptanceRow]:
        """A row for every position that enough drafts reached; none for drafts that read what the target reads.

        shape: by the name that the rows have. Acceptance is the mean of Jeffreys' posterior, so it is never 0 or 1.
        """
        name, drafts, context = row_name(self.plan), self.plan.speculation.selection, self.plan.workload.context
        for position, (judged, accepted) in enumerate(zip(self.judged_at, self.accepted_at, strict=True), start=1):
            if name and judged >= FEWEST_DRAFTS:
                yield AcceptanceRow(
                    draft=name,
                    model=shape.name,
                    parameters=shape.parameters / 1e9,
                    context=context,
                    acceptance=(accepted + 0.5) / (judged + 1),
                    source="measured",
                    where=f"{judged} drafts at position {position} after {text}, {device_name(engine)}",
                    ratio=float(drafts.share_of(context, self.ratio)),
                    gamma=self.plan.speculation.gamma,
                    position=position,
                    quantizer=quantizer_of(engine.device.type, calibrated),
                    dtype=str(engine.weights.embedding.dtype).removeprefix("torch."),
                    tokens=judged,
                    date=datetime.date.today().isoformat(),
                    text=text,
                )
