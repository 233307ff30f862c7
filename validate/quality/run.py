"""The quality of several plans of a model at several contexts, each figure beside plain decoding's."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

import torch

from ridgeplan.planner.measured_quality import SOLVED, QualityRow, target_values
from ridgeplan.planner.plan import Plan
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.validate.machine import cpu_model
from ridgeplan.validate.progress import Progress, silent
from ridgeplan.validate.quality.measure import Group, Inputs, Values
from ridgeplan.validate.quality.question import Question, label
from ridgeplan.validate.ruler.task import Material
from ridgeplan.validate.ruler.tasks import PromptMaker


def measure_quality(
    question: Question, material: Material, known: Sequence[QualityRow] = (), on_progress: Progress = silent
) -> Iterator[list[QualityRow]]:
    """New rows of each group of measures as soon as they are measured; what `known` has is not measured again.

    Raises what `ridgeplan.runtime.load` raises, PromptError for a text that is too short, and TaskError.
    """
    run = _Run(question, material, known, on_progress)
    for context in question.contexts:
        yield from run.at(context)


class _Run:
    """The state of a run: the rows that are there, the weights that plans share, and progress."""

    def __init__(
        self, question: Question, material: Material, known: Sequence[QualityRow], on_progress: Progress
    ) -> None:
        self._question, self._on_progress, self._done = question, on_progress, 0
        self._maker = PromptMaker(load_tokenizer(model_source(question.model)), material)
        self._rows = {row.cell: row for row in known}
        self._weights: dict[tuple[int, int | None, bool], DecoderWeights] = {}
        on_cuda = question.device != "cpu" and torch.cuda.is_available()
        self._where = torch.cuda.get_device_name() if on_cuda else cpu_model()
        self._dtype = "bfloat16" if on_cuda else "float32"  # what `load` chooses

    def at(self, context: int) -> Iterator[list[QualityRow]]:
        """The rows of one context: plain decoding's first, as the others hold its figures."""
        plain, *others = self._question.plans_at(context)
        inputs = Inputs(self._question, context, self._maker, lambda: self._engine(plain))
        found: Values = {}
        for plan in (plain, *others):
            yield from self._of_plan(plan, context, inputs, found)

    def _of_plan(self, plan: Plan, context: int, inputs: Inputs, plain: Values) -> Iterator[list[QualityRow]]:
        """New rows of a plan. plain: the figures of plain decoding, which its own run fills."""
        engine: Engine | None = None
        for group in inputs.groups():
            self._report(f"{context} tokens, {label(plan)}: {group.name}")
            if self._question.only_solved and plain.get(group.name, 1.0) < SOLVED:
                continue
            values = self._known(plan, context, group)
            if values is None:
                engine = engine or self._engine(plan)
                values = group.run(engine)
                plain.update((name, value) for name, value in values.items() if name not in plain)
                rows = [self._row(plan, context, group, name, value, plain) for name, value in values.items()]
                self._rows.update((row.cell, row) for row in rows)
                yield rows
            plain.update((name, value) for name, value in values.items() if name not in plain)
        if engine is not None:
            engine.close()

    def _known(self, plan: Plan, context: int, group: Group) -> Values | None:
        """A group's figures, if there is a row of each."""
        cells = {name: self._row(plan, context, group, name, 0.0, {}).cell for name in group.measures}
        rows = {name: self._rows.get(cell) for name, cell in cells.items()}
        return {name: row.value for name, row in rows.items() if row} if all(rows.values()) else None

    def _row(
        self, plan: Plan, context: int, group: Group, name: str, value: float, plain: dict[str, float]
    ) -> QualityRow:
        question = self._question
        return QualityRow(
            model=question.shape.name,
            plan=label(plan),
            target=target_values(plan),
            context=context,
            measure=name,
            value=value,
            plain=plain.get(name, 0.0),
            samples=group.samples,
            tokens=question.tokens,
            seed=question.seed,
            dtype=self._dtype,
            where=self._where,
            date=datetime.date.today().isoformat(),
            text=question.text_name,
        )

    def _engine(self, plan: Plan) -> Engine:
        """An engine that shares the weights of earlier ones of the same format."""
        kind, question = plan.weights.target_format, self._question
        engine = load(plan, question.model, device=question.device, weights=self._weights.get(kind))
        self._weights[kind] = engine.weights
        return engine

    def _report(self, what: str) -> None:
        question = self._question
        total = sum(len(question.plans_at(one)) for one in question.contexts) * (2 + len(question.tasks))
        self._on_progress(what, self._done, total)
        self._done += 1


def asked(question: Question, row: QualityRow) -> bool:
    """Whether a row is of the question's model, text, plans and contexts, and of its numbers of samples."""
    same = (row.model, row.text, row.tokens, row.seed) == (
        question.shape.name, question.text_name, question.tokens, question.seed,
    )  # fmt: skip
    if not same or row.context not in question.contexts:
        return False
    counted = row.samples in (1, question.passages, question.samples)
    return counted and row.plan in {label(plan) for plan in question.plans_at(row.context)}
