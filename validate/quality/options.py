"""Options of a quality run: model, plans, contexts, text and tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ridgeplan.planner.quality import HEAD, SOLVED, TEXT_MEASURES
from ridgeplan.planner.resolution import yarn_factor
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import MAX_BATCH, MAX_TOKENS, Plan, PlanError, Workload, require, require_within
from ridgeplan.roofline.plan.policies.evictions import eviction_preset, layer_budgets
from ridgeplan.roofline.plan.policy import EVICTIONS, PromptSelection
from ridgeplan.roofline.plan.presets import PRESETS, autoregressive, preset, preset_name
from ridgeplan.roofline.plan.support import allows_chunks, missing_head, only_estimated
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.retrieval.head import load_head, shipped_file
from ridgeplan.validate.quality.long_output import MIN_LONG_OUTPUT, QUESTION_TOKENS
from ridgeplan.validate.quality.ruler_samples import Task

PlanMaker = Callable[[Workload], Plan]
TIMED_TOKENS = 32  # generated to measure the time per token
MAX_TOKENS_MEASURED = 1 << 16
MAX_SAMPLES = 10_000


@dataclass(frozen=True)
class QualityOptions:
    """The options of a quality run. Raises PlanError for counts out of range.

    plans: make each plan for a workload. contexts: tokens of whole sequences, with what is measured or generated.
    passages: of the text, each measured on `tokens` tokens at its end. samples: prompts of each task. batch: the most
    prompts or passages that run together. only_solved: leave out the tasks that plain decoding does not solve, once it
    has been measured. retrieval_head: the file of the head for plans that choose by one. long_output: tokens of the
    model's own output after each passage's prompt, over which long outputs are measured; 0 for none.
    """

    model: str
    shape: ModelShape
    plans: tuple[PlanMaker, ...]
    contexts: tuple[int, ...]
    text: str
    text_name: str
    passages: int = 4
    tokens: int = 128
    tasks: tuple[Task, ...] = ()
    samples: int = 5
    batch: int = 1
    seed: int = 0
    only_solved: bool = False
    yarn: bool = False
    retrieval_head: str | None = None
    long_output: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        limits = {"tokens": MAX_TOKENS_MEASURED, "passages": MAX_SAMPLES, "samples": MAX_SAMPLES, "batch": MAX_BATCH}
        for name, largest in limits.items():
            require_within(name, getattr(self, name), 1, largest)
        require(
            self.long_output == 0 or MIN_LONG_OUTPUT <= self.long_output <= MAX_TOKENS_MEASURED,
            f"long_output is {self.long_output}; allowed: 0, or {MIN_LONG_OUTPUT} to {MAX_TOKENS_MEASURED}",
        )
        require_within("seed", self.seed, 0, (1 << 31) - 1)

    @property
    def headroom(self) -> int:
        """Tokens after a prompt: of a passage, of the longest answer, or of a long output with its questions."""
        long_output = self.long_output and self.long_output + QUESTION_TOKENS
        return max(self.tokens + 1, TIMED_TOKENS, long_output, *(task.new_tokens for task in self.tasks))

    @property
    def rows(self) -> int:
        """Prompts or passages that run together: as many as a batch has, or as there are."""
        return min(self.batch, max(self.passages, self.samples * len(self.tasks)))

    def leaves_out(self, plan: Plan, measure: str, plain: Mapping[str, float]) -> bool:
        """Whether a measure is a task that plain decoding, with the figures `plain`, does not solve.

        An oracle that evicts must know what comes next, so it is measured on texts only.
        """
        if plan.eviction.policy == "oracle" and measure not in TEXT_MEASURES:
            return True
        is_task = any(measure == task.name for task in self.tasks)
        return self.only_solved and is_task and plain.get(measure, 1.0) < SOLVED

    def workload(self, context: int) -> Workload:
        """Sequences of `context` tokens. Raises PlanError for one that is too short, or too long without YaRN."""
        factor = yarn_factor(self.shape, context)
        require(
            context > self.headroom,
            f"context is {context}; allowed: more than {self.headroom}, which are measured or generated",
        )
        require(
            factor == 1 or self.yarn,
            f"context {context} is beyond the model's limit of {self.shape.max_context}; allowed: less, or more "
            "with --yarn",
        )
        prompt = context - self.headroom
        return Workload(self.shape.name, "this machine", prompt, self.headroom, yarn_factor=factor)

    def plans_at(self, context: int) -> tuple[Plan, ...]:
        """Plain decoding, with which the others are compared, then the plans that the runtime executes, each once."""
        workload = self.workload(context)
        plans = (_chunked_if_longer(make(workload)) for make in self.plans)
        return tuple(dict.fromkeys([autoregressive(workload), *(plan for plan in plans if not self._missing(plan))]))

    def families_at(self, context: int) -> list[tuple[Plan, ...]]:
        """The plans in families that share a prefill: plain decoding alone, then the others.

        Plans of a family agree in weights, drafts, placement, and in the settings of their eviction. They differ in
        what they keep of a prompt and in how they choose what they read. Oracles have families of their own, as they
        append different tokens. So does each plan that evicts in chunks, as later chunks read what it has kept.
        """
        plain, *others = self.plans_at(context)
        families: dict[object, tuple[Plan, ...]] = {}
        for plan in others:
            families[_family(plan)] = (*families.get(_family(plan), ()), plan)
        return [(plain,), *families.values()]

    def head_of(self, plan: Plan) -> str | None:
        """The file of the retrieval head that a plan needs; None if it needs none."""
        return self.retrieval_head if missing_head(plan) else None

    def head_named(self, plan: Plan) -> dict[str, str]:
        """The entry of rows for a plan's retrieval head: the name of its file and a digest; empty without a head."""
        return {HEAD: self._head_name} if missing_head(plan) else {}

    @cached_property
    def _head_file(self) -> Path | None:
        """The file of `retrieval_head`, else the one that ships for a model of these sizes; None without one."""
        return shipped_file(self.shape) if self.retrieval_head is None else Path(self.retrieval_head)

    @cached_property
    def _head_name(self) -> str:
        path = self._head_file
        assert path is not None, "plans without a head are left out"
        return f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"

    def require_head(self) -> None:
        """Raises ModelError for a head that a plan needs and that cannot be read, or is of a model of other sizes."""
        plans = [make(self.workload(self.contexts[0])) for make in self.plans]
        if self.retrieval_head is not None and any(map(missing_head, plans)):
            load_head(self.retrieval_head).require_shape(self.shape)

    def refused(self) -> Iterator[str]:
        """A line for each plan that cannot be executed here. Raises UnsupportedPlan if that holds for all."""
        plans = [make(self.workload(self.contexts[0])) for make in self.plans]
        lines = [f"{label(plan)}: {missing}" for plan in plans if (missing := self._missing(plan))]
        if plans and len(lines) == len(plans):
            raise UnsupportedPlan("; ".join(lines))
        yield from lines

    def _missing(self, plan: Plan) -> str | None:
        """Why the plan cannot be executed here; None if it can."""
        return only_estimated(plan, has_head=self._head_file is not None)


def _family(plan: Plan) -> object:
    """A key that plans share if one prefill can serve them."""
    if plan.eviction.chunk:
        return plan
    oracle = plan.eviction.policy == "oracle"  # appends other tokens
    return plan.weights, plan.speculation, plan.placement, oracle, tuple(sorted(plan.eviction.settings.items()))


def _chunked_if_longer(plan: Plan) -> Plan:
    """The plan, without chunks if one chunk holds the whole prompt, as the result is the same."""
    return replace(plan, eviction=replace(plan.eviction, chunk=plan.eviction.chunk_at(plan.workload.context)))


def cache_bytes(plan: Plan, shape: ModelShape, rows: int, element_bytes: int) -> float:
    """Upper bound of an engine's cache for `rows` sequences: full precision, and as much again for a selection."""
    kept = layer_budgets(plan, shape.layers) or (MAX_TOKENS,) * shape.layers
    workload = plan.workload
    tokens = sum(min(workload.final_context, layer_tokens + workload.new_tokens) for layer_tokens in kept)
    return (1 + plan.attention.active) * rows * tokens * shape.kv_elements_per_token_per_layer * element_bytes


def label(plan: Plan) -> str:
    """A plan's name, with its budget, what its preset has otherwise, the chunks of its prompts and gamma."""
    context = plan.workload.context
    budgets, chunk = (plan.eviction.tokens(context), plan.attention.budget), plan.eviction.chunk_at(context)
    at_once = replace(plan, eviction=replace(plan.eviction, chunk=0))
    name = preset_name(at_once)
    words = [name, *(str(budget) for budget in budgets if budget)]
    if name in PRESETS or name in EVICTIONS:
        words += _unusual_settings(plan, _plan(name, plan.workload))
    if isinstance(plan.attention.selection, PromptSelection) and not plan.attention.keeps_generated:
        words.append("with generated tokens selected")
    if chunk:
        words.append(f"in chunks of {chunk}")
    if plan.speculation.active:
        words.append(f"gamma {plan.speculation.gamma}")
    return " ".join(words)


def _unusual_settings(plan: Plan, usual: Plan) -> list[str]:
    """The settings of a plan's eviction and of its target's selection that differ from the usual ones, in brackets."""
    pairs = (plan.eviction.method, usual.eviction.method), (plan.attention.selection, usual.attention.selection)
    settings = [
        f"{name} {value}"
        for policy, usual_policy in pairs if policy is not None and type(policy) is type(usual_policy)
        for name, value in vars(policy).items() if vars(usual_policy)[name] != value and name != "keep_generated"
    ]  # fmt: skip
    return [f"({', '.join(settings)})"] if settings else []


def _plan(name: str, workload: Workload) -> Plan:
    """A preset's plan, or that of an eviction that has none: random or an oracle. Raises PlanError for other names."""
    if name in EVICTIONS and name not in PRESETS:
        return eviction_preset(name)(workload)
    return preset(name, workload)


def named_plan(name: str, budget: int | None = None, chunk: int = 0) -> PlanMaker:
    """A maker of a preset's plan, with another budget of its eviction or selection, and with chunks of its eviction.

    It raises PlanError when it is run.
    """

    def make(workload: Workload) -> Plan:
        plan = _plan(name, workload)
        if chunk:
            plan = replace(plan, eviction=replace(plan.eviction, chunk=chunk))
        return plan if budget is None else _with_budget(plan, name, budget)

    return make


def of_file(plan: Plan) -> PlanMaker:
    """A maker of a file's plan for other lengths."""
    return lambda workload: replace(plan, workload=workload)


def with_budgets(names: Sequence[str], budgets: Sequence[int], chunks: Sequence[int] = ()) -> Iterator[PlanMaker]:
    """Presets, those with a budget once for each of `budgets`, and those that evict for each of `chunks`.

    A policy that scores whole prompts only has no chunk.
    """
    for name in names:
        plan = _plan(name, Workload("any", "any", MAX_TOKENS // 2))
        has_budget = plan.eviction.active or plan.attention.budget
        chunks_of_plan = (allows_chunks(plan) and chunks) or (0,)
        yield from (
            named_plan(name, budget, chunk)
            for chunk in chunks_of_plan
            for budget in ((has_budget and budgets) or (None,))
        )


def _with_budget(plan: Plan, name: str, budget: int) -> Plan:
    kept = min(budget, plan.workload.context)
    if plan.eviction.active:
        return replace(plan, eviction=replace(plan.eviction, budget=kept, share=0.0))
    if plan.attention.budget:
        return replace(plan, attention=replace(plan.attention, budget=kept))
    raise PlanError(f"budget is {budget}; allowed: none, as {name} keeps and reads all tokens")
