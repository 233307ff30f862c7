"""The quality of several plans of a model at several contexts, each figure beside plain decoding's."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ridgeplan.planner.measured_quality import HEAD, QualityRow, target_values
from ridgeplan.planner.plan import Plan
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.host_memory import available_bytes
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.validate.machine import cpu_model
from ridgeplan.validate.progress import Progress, silent
from ridgeplan.validate.quality.measure import Group, Inputs, Values, parts
from ridgeplan.validate.quality.question import Question, cache_bytes, label
from ridgeplan.validate.ruler.task import Material
from ridgeplan.validate.ruler.tasks import PromptMaker

CACHES_SHARE = 0.7  # of the free memory; the rest is for weights and workspaces


def measure_quality(
    question: Question, material: Material, known: Sequence[QualityRow] = (), on_progress: Progress = silent
) -> Iterator[list[QualityRow]]:
    """New rows of each group of measures as soon as they are measured; what `known` has is not measured again.

    Raises what `ridgeplan.runtime.load` raises, PromptError for a text that is too short, and TaskError.
    """
    run = _Run(question, material, known, on_progress)
    for context in question.contexts:
        yield from run.at(context)


def default_batch() -> int:
    """Prompts that run together unless told: a CPU gains nothing from several."""
    return 8 if torch.cuda.is_available() else 1


class _Run:
    """The state of a run: the rows that are there, open engines and the weights that they share, and progress."""

    def __init__(
        self, question: Question, material: Material, known: Sequence[QualityRow], on_progress: Progress
    ) -> None:
        self._question, self._on_progress, self._done = question, on_progress, 0
        self._maker = PromptMaker(load_tokenizer(model_source(question.model)), material)
        self._rows = {row.cell: row for row in known}
        self._weights: dict[tuple[int, int | None, bool], DecoderWeights] = {}
        self._engines: dict[tuple[Plan, int], Engine] = {}
        self._on_cuda = question.device != "cpu" and torch.cuda.is_available()
        self._where = torch.cuda.get_device_name() if self._on_cuda else cpu_model()
        self._dtype = "bfloat16" if self._on_cuda else "float32"  # what `load` chooses

    def at(self, context: int) -> Iterator[list[QualityRow]]:
        """The rows of one context: plain decoding's first, as the others hold its figures."""
        families = self._question.families_at(context)
        (plain,) = families[0]
        inputs = Inputs(self._question, context, self._maker, lambda: self._engine(plain, self._question.rows))
        figures: Values = {}
        for family in self._that_fit(families):
            for group in inputs.groups:
                self._report(f"{context} tokens, {named(family)}: {group.name}", len(family), inputs)
                yield from self._of_group(family, context, group, figures)
                if family == (plain,):
                    figures.update(self._known(plain, context, group))
            self._close()

    def _that_fit(self, families: Sequence[tuple[Plan, ...]]) -> Iterator[tuple[Plan, ...]]:
        """The families, in as many parts as their engines need to be in memory at once."""
        question, element_bytes = self._question, 2 if self._on_cuda else 4
        for family in families:
            largest = max(cache_bytes(plan, question.shape, question.rows, element_bytes) for plan in family)
            together = max(1, int(CACHES_SHARE * _free_bytes(self._on_cuda) / largest))
            yield from (tuple(part) for part in parts(family, together))

    def _of_group(
        self, family: Sequence[Plan], context: int, group: Group, plain: Values
    ) -> Iterator[list[QualityRow]]:
        """New rows of a family of plans. plain: the figures of plain decoding."""
        missing = {plan: self._missing(plan, context, group, plain) for plan in family}
        todo = [plan for plan in family if missing[plan]]
        if not todo:
            return
        wanted = {name for names in missing.values() for name in names}
        found = group.run([self._engine(plan, group.rows) for plan in todo], wanted)
        rows = [
            self._row(plan, context, group, name, values[name], plain)
            for plan, values in zip(todo, found, strict=True)
            for name in missing[plan]
        ]
        self._rows.update((row.cell, row) for row in rows)
        yield rows

    def _missing(self, plan: Plan, context: int, group: Group, plain: Values) -> list[str]:
        """The group's measures that there is no row of, and that are not left out."""
        known, left_out = self._known(plan, context, group), self._question.leaves_out
        return [name for name in group.measures if name not in known and not left_out(plan, name, plain)]

    def _known(self, plan: Plan, context: int, group: Group) -> Values:
        """A group's figures that there is a row of."""
        cells = {name: self._row(plan, context, group, name, 0.0, {}).cell for name in group.measures}
        return {name: self._rows[cell].value for name, cell in cells.items() if cell in self._rows}

    def _row(
        self, plan: Plan, context: int, group: Group, name: str, value: float, plain: dict[str, float]
    ) -> QualityRow:
        question = self._question
        return QualityRow(
            model=question.shape.name,
            plan=label(plan),
            target={**target_values(plan), **question.head_named(plan)},
            context=context,
            measure=name,
            value=value,
            plain=plain.get(name, value),  # its own has none before it
            samples=group.samples,
            tokens=question.tokens,
            seed=question.seed,
            dtype=self._dtype,
            where=self._where,
            date=datetime.date.today().isoformat(),
            text=question.text_name,
        )

    def _engine(self, plan: Plan, rows: int) -> Engine:
        """An open engine of a plan for so many sequences, which shares the weights of others of the same format."""
        if (plan, rows) not in self._engines:
            kind, question = plan.weights.target_format, self._question
            shared = {"weights": self._weights.get(kind), "retrieval_head": question.head_of(plan)}
            for_rows = replace(plan, workload=replace(plan.workload, batch=rows))
            engine = load(for_rows, question.model, device=question.device, **shared)  # type: ignore[arg-type]
            self._weights[kind], self._engines[plan, rows] = engine.weights, engine
        return self._engines[plan, rows]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _report(self, what: str, plans: int, inputs: Inputs) -> None:
        question = self._question
        total = sum(len(question.plans_at(one)) for one in question.contexts) * len(inputs.groups)
        self._on_progress(what, self._done, total)
        self._done += plans


def _free_bytes(on_cuda: bool) -> int:
    """Memory that engines may take; without a limit on a host that does not tell."""
    if on_cuda:
        torch.cuda.empty_cache()  # of engines that are closed
        return torch.cuda.mem_get_info()[0]
    return available_bytes() or sys.maxsize


def named(plans: Sequence[Plan]) -> str:
    """The first plan's name, and how many others there are."""
    return label(plans[0]) + (f" and {len(plans) - 1} more" if len(plans) > 1 else "")


def asked(question: Question, row: QualityRow) -> bool:
    """Whether a row is of the question's model, text, plans and contexts, and of its numbers of samples."""
    same = (row.model, row.text, row.tokens, row.seed) == (
        question.shape.name, question.text_name, question.tokens, question.seed,
    )  # fmt: skip
    if not same or row.context not in question.contexts:
        return False
    counted = row.samples in (1, question.passages, question.samples)
    plans = question.plans_at(row.context)
    return counted and (row.plan, row.target.get(HEAD)) in {
        (label(one), question.head_named(one).get(HEAD)) for one in plans
    }
