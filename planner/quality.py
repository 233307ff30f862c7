"""Quality as a constraint: measured rows, and how far the target of a plan deviates from the model.

A row is one figure of one target at one context. The target is the part of a plan that can change its output.
Speculation never does, so plans that differ only in speculation share their rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeplan.planner.acceptance.rows import DTYPES, saved_or_empty, variant_name
from ridgeplan.planner.engines.formats import ENGINES, FIDELITY_SOURCE, formats_loss
from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import fields_of_schema, json_or, naming_file, read_document
from ridgeplan.roofline.catalog.profile import user_quality_path
from ridgeplan.roofline.catalog.validation import Checked, brief, build
from ridgeplan.roofline.plan.plan import MAX_TOKENS, Plan, PlanError
from ridgeplan.roofline.plan.policy import EVICTION_BUDGET, EVICTIONS, FULL_RULER

QUALITY_SCHEMA = 1
REMEASURE = "make it again with `ridgeplan quality`"
FIDELITY, PERPLEXITY, TTFT, TPOT, KV_BYTES = "fidelity", "perplexity", "ttft_ms", "tpot_ms", "kv_bytes"
TEXT_MEASURES = (FIDELITY, PERPLEXITY)
COST_MEASURES = (TTFT, TPOT, KV_BYTES)
AGREEMENT = "greedy_agreement"  # share of the model's own output at which the greedy token is full attention's
EARLY_RECALL, LATE_RECALL = "early_output_recall", "late_output_recall"
OUTPUT_MEASURES = (AGREEMENT, EARLY_RECALL, LATE_RECALL)
SOLVED = 0.5  # a task counts where the plain model reaches this score
HEAD = "attention.head"  # in a row's target: the retrieval head used for the measurement; plans do not name one
NEAR = 2.0  # factor of context within which a row speaks for a plan


@dataclass(frozen=True)
class QualityRow(Checked):
    """One measured figure. Raises PlanError for values out of range.

    target: the values of a plan's axes that differ from plain decoding's and can change its output, by name, and HEAD.
    measure: fidelity (1 - TV), perplexity, a cost, a measure of long outputs, or a task's name, whose value is a score
    from 0 to 1. plain: the same figure of plain decoding. context: tokens of a sequence, the measured ones included.
    samples: passages or prompts that the figure is the mean of; tokens: of each passage, or of each output.
    """

    error = PlanError
    model: str = check.name_text()
    plan: str = check.text()
    target: Mapping[str, Any] = check.values_by_name()
    context: int = check.whole(1, MAX_TOKENS)
    measure: str = check.text()
    value: float = check.number(0, 1e18)
    plain: float = check.number(0, 1e18)
    samples: int = check.whole(1, MAX_TOKENS)
    tokens: int = check.whole(0, MAX_TOKENS)
    seed: int = check.whole(0, 1 << 31)
    dtype: str = check.one_of(DTYPES)
    where: str = check.text()
    date: str = check.text()
    text: str = check.text()  # last, as it hides the function of that name

    def _owner(self) -> str:
        return "quality row: "

    def _contradiction(self) -> str | None:
        """Fidelity and scores of tasks are shares."""
        measured = max(self.value, self.plain)
        if self.measure in (PERPLEXITY, *COST_MEASURES) or measured <= 1:
            return None
        return f"{self.measure} is {measured:g}; allowed: a number from 0 to 1"

    @property
    def cell(self) -> tuple[Any, ...]:
        """A key that repeated measurements of the same figure share."""
        target = tuple(sorted(self.target.items()))
        how = (self.samples, self.tokens, self.seed, self.dtype, self.where, self.text)
        return (self.model, self.plan, target, self.context, self.measure, *how)


def target_values(plan: Plan) -> dict[str, Any]:
    """The plan's values that can change its output and differ from plain decoding's, as in `QualityRow.target`."""
    differing = {
        "weights.target_bits": plan.weights.target_bits if plan.weights.target_bits != 16 else None,
        "weights.group": plan.weights.group if plan.weights.target_bits != 16 else None,
        "weights.hierarchical": 1 if plan.weights.hierarchical else None,
        "kv.target_bits": plan.kv.target_bits if plan.kv.target_bits != 16 else None,
        "kv.group": plan.kv.group if plan.kv.target_bits != 16 else None,
        **(_flat("eviction", _eviction(plan)) if plan.eviction.active else {}),
        **(_attention(plan) if plan.attention.active else {}),
    }
    if plan.workload.yarn_factor != 1:
        differing["yarn_factor"] = plan.workload.yarn_factor
    return {name: value for name, value in differing.items() if value is not None}


def _eviction(plan: Plan) -> dict[str, Any]:
    """The policy, its budget in tokens, its settings, and its chunk if it has an effect at this context."""
    context = plan.workload.context
    budget, chunk = plan.eviction.tokens(context), plan.eviction.chunk_at(context)
    return {**asdict(plan.eviction), "budget": budget, "share": None, "chunk": chunk or None}


def _attention(plan: Plan) -> dict[str, Any]:
    """The selection's name and hyperparameters, with the budget in place of ratio and floor."""
    selection = {name: value for name, value in asdict(plan.attention.selection).items() if name != "name"}
    values = {**selection, "ratio": None, "floor": None, "budget": plan.attention.budget}
    return {"attention.selection": plan.attention.selection.name, **_flat("attention", values)}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested fields as `axis.field`; enums as their texts, truth values as numbers."""
    if isinstance(value, dict):
        return {key: item for field, part in value.items() for key, item in _flat(f"{name}.{field}", part).items()}
    return {name: str(value) if isinstance(value, str) else int(value) if isinstance(value, bool) else value}


def rows_json(rows: Iterable[QualityRow]) -> str:
    """JSON text that `read_rows` reads."""
    document = {"schema": QUALITY_SCHEMA, "rows": [asdict(row) for row in rows]}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_rows(content: str | bytes) -> tuple[QualityRow, ...]:
    """Rows from untrusted JSON text. Raises PlanError, one line."""
    document = json_or(PlanError, content)
    rows = fields_of_schema(document, QUALITY_SCHEMA, REMEASURE, PlanError).get("rows")
    if not isinstance(rows, list):
        raise PlanError(f"rows is {brief(rows)}; allowed: a list of quality rows; {REMEASURE}")
    return tuple(build(QualityRow, row, "quality row: ") for row in rows)


def load_rows(path: str | Path) -> tuple[QualityRow, ...]:
    """The rows of a file of `ridgeplan quality`. Raises PlanError naming the file."""
    with naming_file("quality rows", Path(path), PlanError):
        return read_rows(read_document(Path(path)))


def saved_rows() -> tuple[QualityRow, ...]:
    """The rows that `ridgeplan quality` saved for this user, if any; a warning names a damaged file."""
    return saved_or_empty(user_quality_path, load_rows, "no measured quality is shown")


def measured_quality(plan: Plan, rows: Sequence[QualityRow]) -> str | None:
    """The figures measured for the plan's target and model at the nearest context; None if there are none."""
    measured = _nearest_rows(plan, rows)
    if not measured:
        return None
    nearest = measured[0]
    head = f", with the retrieval head {row_head}" if (row_head := nearest.target.get(HEAD)) else ""
    return f"{'; '.join(_figure_texts(measured))}; at {nearest.context} tokens of {nearest.text}{head} [measured]"


def _nearest_rows(plan: Plan, rows: Sequence[QualityRow]) -> list[QualityRow]:
    """The rows of the plan's target and model at the nearest context; of several retrieval heads, of the last one."""
    matching = [row for row in rows if _is_of(row, plan)]
    if not matching or not target_values(plan):
        return []
    nearest = max(matching, key=lambda row: (-_factor(row.context, plan), row.date))
    return [row for row in matching if _source(row) == _source(nearest)]


def _source(row: QualityRow) -> tuple[Any, ...]:
    return row.context, row.text, row.target.get(HEAD)


def _is_of(row: QualityRow, plan: Plan) -> bool:
    target = {name: value for name, value in row.target.items() if name != HEAD}
    same = target == target_values(plan) and variant_name(row.model) == variant_name(plan.workload.model)
    return same and row.measure not in COST_MEASURES and _factor(row.context, plan) <= NEAR


def _factor(context: int, plan: Plan) -> float:
    plan_context = plan.workload.final_context
    return max(context / plan_context, plan_context / context)


def _figure_texts(rows: Sequence[QualityRow]) -> Iterator[str]:
    for row in rows:
        if row.measure == FIDELITY:
            yield f"fidelity {row.value:.3f} (1 - TV)"
        if row.measure == PERPLEXITY:
            yield f"perplexity {row.value:.2f} of {row.plain:.2f}"
        if row.measure == AGREEMENT:
            yield f"greedy agreement {row.value:.3f} over {row.tokens} generated tokens"
    average = ruler_average(rows)
    if average is not None:
        value, plain, count = average
        yield f"RULER {100 * value:.1f} of {100 * plain:.1f} over {count} tasks"


def ruler_average(rows: Iterable[QualityRow]) -> tuple[float, float, int] | None:
    """Mean score, plain decoding's mean, and the count of tasks that plain decoding solves; None without such tasks."""
    known = (*TEXT_MEASURES, *COST_MEASURES, *OUTPUT_MEASURES)
    tasks = [row for row in rows if row.measure not in known and row.plain >= SOLVED]
    if not tasks:
        return None
    return sum(row.value for row in tasks) / len(tasks), sum(row.plain for row in tasks) / len(tasks), len(tasks)


class Quality(StrEnum):
    """How much the target may deviate from the model, from strictest to loosest."""

    EXACT = "exact"
    NEAR_LOSSLESS = "near-lossless"
    FOUR_BIT = "4-bit"
    LOSSY = "lossy"

    def allows(self, other: Quality) -> bool:
        """Whether this constraint admits a plan of quality `other`."""
        order = list(Quality)
        return order.index(other) <= order.index(self)

    def admits(self, plan: Plan, backend: str = "") -> bool:
        """Whether this constraint admits the plan, on whatever backend."""
        return self.allows(quality_of(plan))

    @property
    def loosest(self) -> Quality:
        """The loosest step that this constraint admits."""
        return self


# Fidelity, 1 - total variation of the next token's distribution against full precision, by kind of 8-bit weights.
WEIGHT_FIDELITY = {
    "plain": "fidelity 0.992 on Qwen2.5-Coder-0.5B and 0.988 on SmolLM2-135M",
    "hierarchical": "fidelity 0.987 on Qwen2.5-Coder-0.5B and 0.983 on SmolLM2-135M",
}
FITTED = "fitted to a text, in float32 (docs/kernels/gptq.md)"


def losses(plan: Plan, backend: str = "") -> list[str]:
    """The plan's deviations from the model, each with its published loss if there is one; empty for an exact plan.

    Speculation is never a loss: the output keeps the target's distribution. On an engine, formats are those that it
    executes the plan's with.
    """
    engine = ENGINES.get(backend)
    lost = _format_losses(plan) if engine is None else [*filter(None, [formats_loss(*engine.formats(plan))])]
    if plan.eviction.active:
        lost.append(_eviction_loss(plan))
    if plan.attention.active:
        selection, whole = plan.attention.selection, " of the prompt" if plan.attention.keeps_generated else ""
        beside = f" and {selection.unbudgeted_tokens} beside them" if selection.unbudgeted_tokens else ""
        lost.append(f"{selection.name} reads {plan.attention.budget} tokens{whole}{beside} a step")
    return lost


def _format_losses(plan: Plan) -> list[str]:
    lost = []
    if plan.kv.target_bits == 8:
        lost.append("INT8 KV: perplexity +0.16% on WikiText-2, +0.004% on C4 (QuantSpec, Table 2)")
    if plan.weights.target_bits == 8:
        kind = "hierarchical" if plan.weights.hierarchical else "plain"
        lost.append(f"INT8 weights ({kind}): {WEIGHT_FIDELITY[kind]}, {FITTED}")
    if plan.weights.target_bits == 4:
        lost.append("INT4 weights: perplexity 5.47 to 5.73 for Llama-2-7B, rounded to nearest (AWQ, Table 4)")
    return lost


def _eviction_loss(plan: Plan) -> str:
    context, eviction, ruler = plan.workload.context, plan.eviction, EVICTIONS[plan.eviction.policy].ruler
    kept, how = f"{eviction.policy} keeps {eviction.tokens(context)} of {context} prompt tokens", ""
    if chunk := eviction.chunk_at(context):
        kept, how = f"{kept}, chosen after every {chunk}", " chosen at once"
    if ruler is None:
        return kept
    return f"{kept}: RULER {ruler:g} of {FULL_RULER:g} with {EVICTION_BUDGET} tokens{how} (DapQ, Table 11)"


def stated_losses(plan: Plan, rows: Sequence[QualityRow], backend: str = "") -> list[str]:
    """The plan's losses with measured figures if there are rows, otherwise with published figures.

    Rows are of this package's formats, and so say nothing of engines.
    """
    published = losses(plan, backend)
    measured = None if backend in ENGINES else measured_quality(plan, rows)
    if measured is None:
        return [f"{loss} [not measured here]" for loss in published]
    return [f"{', '.join(loss.partition(':')[0] for loss in published)}: {measured}"]


def published_loss(plan: Plan) -> float:
    """The share of RULER's average that the plan's eviction loses with EVICTION_BUDGET tokens; 1 if none is published.

    Use it only to rank plans that are otherwise equal: it ignores the plan's own budget.
    """
    if not plan.eviction.active:
        return 0.0
    ruler = EVICTIONS[plan.eviction.policy].ruler
    return 1.0 if ruler is None else 1 - ruler / FULL_RULER


def quality_of(plan: Plan) -> Quality:
    """The strictest step that admits the plan: whether it drops tokens, and else how few bits its target has."""
    if plan.eviction.active or plan.attention.active:
        return Quality.LOSSY
    bits = min(plan.weights.target_bits, plan.kv.target_bits)
    return {16: Quality.EXACT, 8: Quality.NEAR_LOSSLESS, 4: Quality.FOUR_BIT}[bits]


# What a target in low precision keeps, as measured on Qwen2.5-Coder-0.5B at 32k tokens (docs/quality.md): fidelity, and
# the share of RULER's score, which of 8-bit weights was not measured: they keep at least what 4-bit ones do.
KEPT_BY_KV = {16: (1.0, 1.0), 8: (0.987, 1.0)}
KEPT_BY_WEIGHTS = {"16": (1.0, 1.0), "8": (0.980, 0.726), "hierarchical": (0.975, 0.726), "4": (0.827, 0.726)}
KEPT_SOURCE = "on Qwen2.5-Coder-0.5B (docs/quality.md)"
FLOOR = re.compile(r"(fidelity|ruler)\s*>=\s*(\d+(?:\.\d+)?|\.\d+)", re.IGNORECASE)
RULER = "RULER"
QUALITIES = f"{', '.join(Quality)}, or a floor such as 'fidelity>=0.95' or 'RULER>=80'"


@dataclass(frozen=True)
class QualityFloor:
    """The least fidelity (0 to 1) or RULER score (0 to 100) that a plan may have.

    A plan counts with the figures that `ridgeplan quality` measured for it, else with those of docs/quality.md and
    DapQ's Table 11; on an engine, with those of the formats that it executes. One without a figure is not admitted.
    """

    measure: str
    minimum: float

    def __str__(self) -> str:
        return f"{self.measure}>={self.minimum:g}"

    @property
    def loosest(self) -> Quality:
        """The loosest step that this constraint admits."""
        return Quality.LOSSY

    @cached_property
    def _rows(self) -> tuple[QualityRow, ...]:
        return saved_rows()

    def admits(self, plan: Plan, backend: str = "") -> bool:
        """Whether the plan's figure is known and reaches the floor."""
        figure, _ = self.figure(plan, backend)
        return figure is not None and figure >= self.minimum

    def verdict(self, plan: Plan, backend: str = "") -> str:
        """The floor, and the figure that counts, with its source."""
        figure, source = self.figure(plan, backend)
        if figure is None:
            return f"{self}: no figure of the plan's formats or policies is known"
        digits = 3 if self.measure == FIDELITY else 2
        return f"{self}: {figure:.{digits}f} {source}"

    def figure(self, plan: Plan, backend: str = "") -> tuple[float | None, str]:
        """The plan's fidelity or RULER score, measured or published, None where neither is known; and its source."""
        engine, kind, is_fidelity = ENGINES.get(backend), quality_of(plan), self.measure == FIDELITY
        rows = [] if engine else _nearest_rows(plan, self._rows)
        average = ruler_average(rows)
        score = 100 * average[0] if average else None
        measured = next((row.value for row in rows if row.measure == FIDELITY), None) if is_fidelity else score
        if measured is not None:
            return measured, "(measured)"
        if kind is Quality.EXACT:
            return 1.0 if is_fidelity else FULL_RULER, "(exact)"
        if engine:
            return engine.fidelity(plan) if is_fidelity and kind is not Quality.LOSSY else None, FIDELITY_SOURCE
        if is_fidelity:
            return _kept_fidelity(plan), KEPT_SOURCE
        bound = " or more, as kept by 4-bit weights" if plan.weights.target_bits == 8 else ", as kept"
        evicted = " and by DapQ's Table 11" if plan.eviction.active else ""
        return _kept_ruler(plan), f"of {FULL_RULER:g}{bound} {KEPT_SOURCE}{evicted}"


def _kept(plan: Plan, measure: int) -> list[Any]:
    weights = "hierarchical" if plan.weights.hierarchical else str(plan.weights.target_bits)
    return [KEPT_BY_KV[plan.kv.target_bits][measure], KEPT_BY_WEIGHTS[weights][measure]]


def _kept_fidelity(plan: Plan) -> float | None:
    if plan.eviction.active or plan.attention.active:
        return None
    kept_by_kv, kept_by_weights = _kept(plan, 0)
    return kept_by_kv + kept_by_weights - 1  # total variations add up at most (triangle inequality)


def _kept_ruler(plan: Plan) -> float | None:
    shares = _kept(plan, 1)
    if plan.eviction.active:
        ruler = EVICTIONS[plan.eviction.policy].ruler
        enough = plan.eviction.tokens(plan.workload.context) >= EVICTION_BUDGET and not plan.eviction.chunk
        shares.append(ruler / FULL_RULER if ruler and enough else None)
    if plan.attention.active or None in shares:
        return None
    return FULL_RULER * math.prod(share for share in shares if share is not None)


def parse_quality(value: object) -> Quality | QualityFloor:
    """A step or a floor from its text. Raises PlanError for anything else."""
    if isinstance(value, (Quality, QualityFloor)):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text in list(Quality):
        return Quality(text)
    floor = FLOOR.fullmatch(text)
    measure = FIDELITY if floor and floor[1].casefold() == FIDELITY else RULER
    if floor is None or float(floor[2]) > (1 if measure == FIDELITY else 100):
        raise PlanError(f"quality is {brief(value)}; allowed: {QUALITIES}")
    return QualityFloor(measure, float(floor[2]))
