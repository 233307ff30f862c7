"""Quality of several plans of a model: the measures of an engine, and the run over plans and contexts.

The engines of one call share weights and differ in how much they keep, so that each prompt is processed once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import mean
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeplan.planner.quality import (
    COST_MEASURES,
    FIDELITY,
    HEAD,
    KV_BYTES,
    OUTPUT_MEASURES,
    PERPLEXITY,
    TEXT_MEASURES,
    TPOT,
    TTFT,
    QualityRow,
    target_values,
)
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime import SamplingParams, load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.policies.evictions import OracleScorer
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate.machine import device_name, free_bytes, today
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.quality.fidelity import ForcedPassage, next_logits, overlap, perplexity, surprise
from ridgeplan.validate.quality.long_output import LongOutput, long_outputs
from ridgeplan.validate.quality.options import TIMED_TOKENS, QualityOptions, cache_bytes, label
from ridgeplan.validate.quality.ruler import Prompt, PromptMaker
from ridgeplan.validate.quality.ruler_samples import Material, Task

Values = dict[str, float]  # by measure
Step = Callable[[str, int], None]  # called with what a group does now, and its inputs so far, each counted once a plan
TaskPrompt = tuple[Task, Prompt]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The measures that one pass over the inputs yields, and the number of samples.

    tokens: of each sample, as rows state it. rows: sequences that its engines hold. inputs: passages and prompts of all
    its measures. run: returns each engine's values, of the given measures at least.
    """

    name: str
    measures: tuple[str, ...]
    samples: int
    tokens: int
    rows: int
    inputs: int
    run: Callable[[Sequence[Engine], Collection[str], Step], list[Values]]


class Inputs:
    """Passages and prompts of one context, made once for all plans, and the plain model's logits on the passages."""

    def __init__(self, options: QualityOptions, context: int, maker: PromptMaker, plain: Callable[[], Engine]) -> None:
        """plain: an engine of plain decoding, which is not closed here."""
        self._options, self._context, self._maker, self._plain = options, context, maker, plain
        self._prompts: dict[str, list[Prompt]] = {}

    @cached_property
    def passages(self) -> list[ForcedPassage]:
        """Passages spread over the text. Raises PromptError for a text that is too short."""
        options = self._options
        length = self._context - options.headroom + options.tokens + 1
        batch = prompt_batch(self._maker.tokenizer, length, options.passages, options.text)
        return [ForcedPassage.split(ids, options.tokens) for ids in batch]

    @cached_property
    def plain_logits(self) -> list[Tensor]:
        """float32 [tokens, vocab] of each passage."""
        engine = self._plain()
        return [logits for part in parts(self.passages, self._options.rows) for logits in next_logits(engine, part)]

    def prompts(self, task: Task) -> list[Prompt]:
        """A task's prompts. Raises TaskError for a context that is too short."""
        options = self._options
        if task.name not in self._prompts:
            tokens = self._context - options.headroom
            self._prompts[task.name] = self._maker.prompts(task, tokens, options.samples, options.seed)
        return self._prompts[task.name]

    @cached_property
    def groups(self) -> list[Group]:
        """All groups of measures. Tasks share a group as long as a batch holds their prompts."""
        options = self._options
        passages, tokens, rows = options.passages, options.tokens, options.rows
        groups = [
            Group("text", TEXT_MEASURES, passages, tokens, rows, passages, self._on_text),
            Group("times", COST_MEASURES, 1, tokens, 1, 1, self._times),
            *self._task_groups(),
        ]
        long_output = options.long_output
        if long_output:
            run = self._on_outputs
            groups.append(Group("long outputs", OUTPUT_MEASURES, passages, long_output, rows, passages, run))
        return groups

    def _task_groups(self) -> Iterator[Group]:
        options = self._options
        for together in parts(options.tasks, max(1, options.batch // options.samples)):
            names = tuple(task.name for task in together)
            prompts = options.samples * len(names)
            answering = self._answering(together)
            yield Group(" ".join(names), names, options.samples, options.tokens, options.rows, prompts, answering)

    def _on_text(self, engines: Sequence[Engine], _: Collection[str], step: Step) -> list[Values]:
        by_engine: list[list[tuple[float, float]]] = [[] for _ in engines]
        step("text", 0)
        pairs = list(zip(self.passages, self.plain_logits, strict=True))
        for start, part in numbered_parts(pairs, self._options.rows):
            step(f"text, passage {start + 1} of {len(pairs)}", start * len(engines))
            passages = [passage for passage, _ in part]
            tell_oracles(engines, passages)
            share_prefill(engines, [passage.prompt for passage in passages], self._options.tokens + 1)
            for engine, figures in zip(engines, by_engine, strict=True):
                logits = zip(part, next_logits(engine, passages), strict=True)
                figures += [
                    (overlap(plain, logits_of_plan), surprise(logits_of_plan, passage))
                    for (passage, plain), logits_of_plan in logits
                ]
        return [text_values(figures) for figures in by_engine]

    @cached_property
    def outputs(self) -> list[LongOutput]:
        """The plain model's own output after each passage's prompt, with questions about it."""
        options, engine = self._options, self._plain()
        outputs = []
        for part in parts(self.passages, options.rows):
            outputs += long_outputs(engine, [passage.prompt for passage in part], options.long_output, options.seed)
        return outputs

    def _on_outputs(self, engines: Sequence[Engine], _: Collection[str], step: Step) -> list[Values]:
        by_engine: list[list[Values]] = [[] for _ in engines]
        step("long outputs", 0)
        for start, part in numbered_parts(self.outputs, self._options.rows):
            step(f"long outputs, passage {start + 1} of {len(self.outputs)}", start * len(engines))
            prompts = [output.prompt for output in part]
            share_prefill(engines, prompts, len(part[0].forced) + 1)
            for engine, values in zip(engines, by_engine, strict=True):
                chosen = engine.teacher_forced_choices(prompts, [output.forced for output in part]).tolist()
                values += [output.scores(row) for output, row in zip(part, chosen, strict=True)]
        return [{name: mean(each[name] for each in values) for name in OUTPUT_MEASURES} for values in by_engine]

    def _times(self, engines: Sequence[Engine], _: Collection[str], step: Step) -> list[Values]:
        step("times", 0)
        prompt = self.passages[0].prompt
        if engines[0].device.type == "cuda":
            warm(engines, prompt)
        return [times(engine, prompt) for engine in engines]

    def _answering(self, tasks: Sequence[Task]) -> Callable[[Sequence[Engine], Collection[str], Step], list[Values]]:
        def run(engines: Sequence[Engine], names: Collection[str], step: Step) -> list[Values]:
            chosen_tasks = [task for task in tasks if task.name in names]
            step(f"prompts of {' '.join(task.name for task in chosen_tasks)}", 0)
            prompts = [(task, prompt) for task in chosen_tasks for prompt in self.prompts(task)]
            scores = []
            for start, part in numbered_parts(prompts, self._options.rows):
                (task, prompt), done = part[0], start * len(engines)
                what = f"{task.name}, prompt {start % self._options.samples + 1} of {self._options.samples}"
                on_answer = partial(_report_answer, step, f"{what}, {len(prompt.ids)} tokens", done, len(part))
                on_answer(0, 0)
                scores.append(answer_scores(engines, part, self._maker.tokenizer, on_answer))
            return [
                mean_scores(prompts, [score for part in scores for score in part[at]]) for at in range(len(engines))
            ]

        return run


def tell_oracles(engines: Sequence[Engine], passages: Sequence[ForcedPassage]) -> None:
    """Tells engines whose eviction is an oracle the continuation of each prompt."""
    for engine in engines:
        if isinstance(engine.scorer, OracleScorer):
            for passage in passages:
                engine.scorer.tell(passage.prompt, passage.continuation)


def text_values(figures: Sequence[tuple[float, float]]) -> Values:
    """Fidelity and perplexity from the overlap and the surprise of each passage."""
    overlaps, surprises = zip(*figures, strict=True)
    return {FIDELITY: sum(overlaps) / len(overlaps), PERPLEXITY: perplexity(surprises)}


def warm(engines: Sequence[Engine], prompt: Sequence[int]) -> None:
    """Generates as `times` does, so that kernels are compiled and graphs captured; the prompt is processed once."""
    share_prefill(engines, [prompt], TIMED_TOKENS)
    for engine in engines:
        engine.generate(prompt, TIMED_TOKENS)


def times(engine: Engine, prompt: Sequence[int]) -> Values:
    """TTFT and TPOT of a generation, and the bytes of the cache."""
    engine.generate(prompt, TIMED_TOKENS)
    assert engine.cache is not None, "the engine is open"
    return {TTFT: engine.statistics.ttft_ms, TPOT: engine.statistics.tpot_ms, KV_BYTES: float(engine.cache.bytes)}


def share_prefill(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Processes prompts once for engines that then go on from them."""
    first, *others = engines
    if others:
        first.prefill_with(others, prompts, new_tokens)


def _report_answer(step: Step, what: str, done: int, prompts: int, plan: int, tokens: int) -> None:
    """A step of the answers of plan number `plan`, which have `tokens` tokens so far; 0 while the prompts are read."""
    step(f"{what}, answer token {tokens}" if tokens else what, done + plan * prompts)


def answer_scores(
    engines: Sequence[Engine],
    pairs: Sequence[TaskPrompt],
    tokenizer: Any,
    on_answer: Callable[[int, int], None] = lambda plan, tokens: None,
) -> list[list[float]]:
    """For each engine the score, from 0 to 1, of its greedy answer to each prompt; all answers in one batch.

    on_answer: is called with an engine's number and the tokens of its answers so far.
    """
    prompts, new_tokens = [prompt.ids for _, prompt in pairs], max(task.new_tokens for task, _ in pairs)
    stop = tokenizer.eos_token_id
    sampling = SamplingParams(stop_token_ids=() if stop is None else (stop,))
    share_prefill(engines, prompts, new_tokens)
    answers = [
        engine.generate(prompts, new_tokens, sampling, on_progress=partial(on_answer, at)).tokens
        for at, engine in enumerate(engines)
    ]
    return [
        [_score(task, prompt, tokens, tokenizer) for (task, prompt), tokens in zip(pairs, engine_answers, strict=True)]
        for engine_answers in answers
    ]


def _score(task: Task, prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> float:
    """The score of an answer, cut to the task's tokens: other tasks of the batch may allow longer answers."""
    return task.score(tokenizer.decode(tokens[: task.new_tokens], skip_special_tokens=True), prompt.answers)


def mean_scores(pairs: Sequence[TaskPrompt], scores: Sequence[float]) -> Values:
    """The mean score of each task."""
    by_task: dict[str, list[float]] = {}
    for (task, _), score in zip(pairs, scores, strict=True):
        by_task.setdefault(task.name, []).append(score)
    return {name: sum(task_scores) / len(task_scores) for name, task_scores in by_task.items()}


def parts(items: Sequence[T], max_items: int) -> Iterator[Sequence[T]]:
    """The items in order, up to `max_items` at a time."""
    return (items[start : start + max_items] for start in range(0, len(items), max_items))


def numbered_parts(items: Sequence[T], max_items: int) -> Iterator[tuple[int, Sequence[T]]]:
    """`parts`, each with the number of items before it."""
    return ((start * max_items, part) for start, part in enumerate(parts(items, max_items)))


CACHES_SHARE = 0.7  # of the free memory; the rest is for weights and workspaces


def measure_quality(
    options: QualityOptions, material: Material, known: Sequence[QualityRow] = (), on_progress: OnProgress = silent
) -> Iterator[list[QualityRow]]:
    """New rows of each group of measures as soon as they are measured; what `known` has is not measured again.

    Raises what `ridgeplan.runtime.load` raises, PromptError for a text that is too short, and TaskError.
    """
    run = _Run(options, material, known, on_progress)
    for context in options.contexts:
        yield from run.at(context)


def default_batch() -> int:
    """The default batch of prompts. A CPU gains nothing from several."""
    return 8 if torch.cuda.is_available() else 1


class _Run:
    """State of a run: known rows, open engines with their shared weights, and progress."""

    def __init__(
        self, options: QualityOptions, material: Material, known: Sequence[QualityRow], on_progress: OnProgress
    ) -> None:
        self._options, self._on_progress, self._done = options, on_progress, 0
        self._maker = PromptMaker(load_tokenizer(model_source(options.model, on_progress)), material)
        if options.tasks:
            _ = self._maker.frame  # a chat template that cannot be used is refused before anything is measured
        self._rows = {row.cell: row for row in known}
        self._weights: dict[tuple[int, int | None, bool, bool], DecoderWeights] = {}
        self._engines: dict[tuple[Plan, int], Engine] = {}
        on_cuda = options.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if on_cuda else "cpu")
        self._dtype = torch.bfloat16 if on_cuda else torch.float32  # what `load` chooses

    def at(self, context: int) -> Iterator[list[QualityRow]]:
        """The rows of one context: plain decoding's first, as the others hold its figures."""
        families = self._options.families_at(context)
        (plain,) = families[0]
        inputs = Inputs(self._options, context, self._maker, lambda: self._engine(plain, self._options.rows))
        figures: Values = {}
        for family in self._that_fit(families):
            for group in inputs.groups:
                step = partial(self._report, f"{context} tokens, {plan_names(family)}", inputs)
                step(group.name, 0)
                yield from self._of_group(family, context, group, figures, step)
                self._done += len(family) * group.inputs
                if family == (plain,):
                    figures.update(self._known(plain, context, group))
            self._close()

    def _that_fit(self, families: Sequence[tuple[Plan, ...]]) -> Iterator[tuple[Plan, ...]]:
        """The families, in as many parts as their engines need to be in memory at once."""
        options = self._options
        for family in families:
            largest = max(cache_bytes(plan, options.shape, options.rows, self._dtype.itemsize) for plan in family)
            together = max(1, int(CACHES_SHARE * free_bytes(self._device) / largest))
            yield from (tuple(part) for part in parts(family, together))

    def _of_group(
        self, family: Sequence[Plan], context: int, group: Group, plain: Values, step: Step
    ) -> Iterator[list[QualityRow]]:
        """New rows of a family of plans. plain: the figures of plain decoding."""
        missing = {plan: self._missing(plan, context, group, plain) for plan in family}
        todo = [plan for plan in family if missing[plan]]
        if not todo:
            return
        names = {name for names in missing.values() for name in names}
        values_by_plan = group.run([self._engine(plan, group.rows) for plan in todo], names, step)
        rows = [
            self._row(plan, context, group, name, values[name], plain)
            for plan, values in zip(todo, values_by_plan, strict=True)
            for name in missing[plan]
        ]
        self._rows.update((row.cell, row) for row in rows)
        yield rows

    def _missing(self, plan: Plan, context: int, group: Group, plain: Values) -> list[str]:
        """The group's measures that have no row yet and are not left out."""
        known, left_out = self._known(plan, context, group), self._options.leaves_out
        return [name for name in group.measures if name not in known and not left_out(plan, name, plain)]

    def _known(self, plan: Plan, context: int, group: Group) -> Values:
        """The group's figures that have a row."""
        cells = {name: self._row(plan, context, group, name, 0.0, {}).cell for name in group.measures}
        return {name: self._rows[cell].value for name, cell in cells.items() if cell in self._rows}

    def _row(
        self, plan: Plan, context: int, group: Group, name: str, value: float, plain: dict[str, float]
    ) -> QualityRow:
        options = self._options
        return QualityRow(
            model=options.shape.name,
            plan=label(plan),
            target={**target_values(plan), **options.head_named(plan)},
            context=context,
            measure=name,
            value=value,
            plain=plain.get(name, value),  # plain decoding is compared with itself
            samples=group.samples,
            tokens=group.tokens,
            seed=options.seed,
            dtype=str(self._dtype).removeprefix("torch."),
            where=device_name(self._device),
            date=today(),
            text=options.text_name,
        )

    def _engine(self, plan: Plan, rows: int) -> Engine:
        """An open engine of a plan for `rows` sequences. Engines of one weight format share weights."""
        if (plan, rows) not in self._engines:
            kind, options = plan.weights.target_format, self._options
            shared = {"weights": self._weights.get(kind), "retrieval_head": options.head_of(plan)}
            for_rows = replace(plan, workload=replace(plan.workload, batch=rows))
            engine = load(for_rows, options.model, device=options.device, **shared)  # type: ignore[arg-type]
            self._weights[kind], self._engines[plan, rows] = engine.weights, engine
        return self._engines[plan, rows]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _report(self, plans: str, inputs: Inputs, what: str, done: int) -> None:
        options = self._options
        plan_inputs = sum(group.inputs for group in inputs.groups)
        total = sum(len(options.plans_at(context)) for context in options.contexts) * plan_inputs
        self._on_progress(f"{plans}: {what}", self._done + done, total)


def plan_names(plans: Sequence[Plan]) -> str:
    """The first plan's name, and how many others there are."""
    return label(plans[0]) + (f" and {len(plans) - 1} more" if len(plans) > 1 else "")


def is_requested(options: QualityOptions, row: QualityRow) -> bool:
    """Whether a row is of the run's model, text, plans and contexts, and of its numbers of samples."""
    tokens = options.long_output if row.measure in OUTPUT_MEASURES else options.tokens
    same = (row.model, row.text, row.tokens, row.seed) == (
        options.shape.name, options.text_name, tokens, options.seed,
    )  # fmt: skip
    if not same or row.context not in options.contexts:
        return False
    counted = row.samples in (1, options.passages, options.samples)
    plans = options.plans_at(row.context)
    return counted and (row.plan, row.target.get(HEAD)) in {
        (label(plan), options.head_named(plan).get(HEAD)) for plan in plans
    }
