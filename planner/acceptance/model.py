"""Predicted acceptance of a plan's drafts, with its band and its source.

All figures are conditional acceptance. The regression is fitted to the rows on first use; only its starting point is
stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance.drafters import proposal_acceptance
from ridgeplan.planner.acceptance.effects import Subject, place_of
from ridgeplan.planner.acceptance.regression import EffectsPosterior, Observation, fit, saved_bands, start_of
from ridgeplan.planner.acceptance.rows import (
    SPARSE_SELECTIONS,
    AcceptanceRow,
    core_name,
    differences,
    draft_names,
    merged,
    plan_differences,
    row_name,
    shipped_rows,
    variant_name,
)
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import SOURCES, Profile
from ridgeplan.roofline.plan.plan import Plan

NEAR = 2.0  # factor of context and ratio within which a model's own row speaks for a plan
# What a plan's drafts run with: dtype, and the quantizer of their 4-bit weights (runtime/quantization/calibration.py).
EXECUTION = {"gpu": ("bfloat16", "gptq"), "cpu": ("float32", "diagonal")}


@dataclass(frozen=True)
class Acceptance:
    """A conditional acceptance with its band, which holds 90%, and its source."""

    low: float
    best: float
    high: float
    source: str
    where: str

    def at(self, depth: int) -> tuple[float, float, float]:
        """Its low end, best and high end, of however many drafts."""
        return self.low, self.best, self.high


CERTAIN = Acceptance(1.0, 1.0, 1.0, "measured", "the draft reads what the target reads")


@dataclass(frozen=True)
class AcceptanceModel:
    """Acceptance of the drafts of one model at one context. text: the text that is decoded; "" if unknown."""

    rows: tuple[AcceptanceRow, ...]
    fitted: EffectsPosterior
    name: str
    parameters: float  # billions
    context: int
    limit: int  # tokens that the model's positions reach unless they are stretched
    dtype: str
    quantizer: str
    text: str
    spans: Mapping[str, tuple[float, float]]

    @classmethod
    def for_model(
        cls, shape: ModelShape, context: int, user_rows: Iterable[Mapping[str, Any]] = (), kind: str = "gpu"
    ) -> AcceptanceModel:
        """From the shipped rows and `user_rows`, those of a profile. kind: of the machine, "gpu" or "cpu".

        Predictions are for the text of the model's own rows in the profile, if they are of one text, else for any.
        """
        profile_rows = tuple(map(AcceptanceRow.read, user_rows))
        texts = {row.text for row in profile_rows if variant_name(row.model) == variant_name(shape.name)}
        rows, fitted = _fitted(profile_rows)
        text = texts.pop() if len(texts) == 1 else ""
        spans = spans_of(rows, shape.name)
        known = (shape.name, shape.parameters / 1e9, context, shape.max_context)
        return cls(rows, fitted, *known, *EXECUTION[kind], text, spans)

    @classmethod
    def of_profile(cls, shape: ModelShape, context: int, profile: Profile) -> AcceptanceModel:
        """For plans on the profile's machine, with the rows that the profile holds."""
        return cls.for_model(shape, context, profile.acceptance, profile.hardware.kind)

    def of(self, plan: Plan, gamma: int | None = None) -> Acceptance:
        """Conditional acceptance by the target of a plan's drafts, the mean over a round, with its band.

        gamma: drafts per round, by default the plan's.
        """
        speculation = plan.speculation
        if speculation.active and not speculation.self_drafts:
            return acceptance_of_proposals(plan, speculation.gamma if gamma is None else gamma)
        subject = self._subject(plan, speculation.gamma if gamma is None else gamma, speculation.ratio)
        if not subject.differences:
            return CERTAIN
        best, width = float(self.fitted.disagreement(subject.parts)), band_width(subject, self.fitted)
        low, high = (1 - min(1.0, best * math.exp(end)) for end in (width, -width))
        provenances = [self._known_provenance(*draft) for draft in self._supporting_drafts(plan)]
        source = max((source for source, _ in provenances), key=SOURCES.index)
        if source == "published" and (len(provenances) > 1 or plan.weights.target_bits != 16):
            source = "extrapolated"  # nobody published these drafts of this target
        return Acceptance(low, 1 - best, high, source, "; ".join(dict.fromkeys(where for _, where in provenances)))

    def best(self, plan: Plan, gamma: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """The best estimate of `of(plan)` for each of gamma [n] and ratio [n] instead of the plan's own."""
        if plan.speculation.active and not plan.speculation.self_drafts:
            return np.array([acceptance_of_proposals(plan, max(int(each), 1)).best for each in gamma])
        if not plan_differences(plan):
            return np.ones(len(gamma))
        disagreement = self.fitted.disagreement(self._subject(plan, gamma, ratio).parts)
        return np.broadcast_to(1 - disagreement, (len(gamma),))

    def measured(self, plan: Plan) -> float | None:
        """The acceptance of the model's own nearest measured row of a plan's drafts; None if none is near the plan."""
        if not plan_differences(plan):
            return 1.0
        draft, ratio = row_name(plan), float(self._share_read(plan, plan.speculation.ratio))
        rows = [
            row
            for row in self.rows
            if row.draft == draft and row.source == "measured" and self._is_own(row) and self._near(row, ratio)
        ]
        return min(rows, key=lambda row: self._distance(row, ratio)).acceptance if rows else None

    def competing(self, plan: Plan, gamma: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """The acceptance at which plans compete: `best`, but the low end of the band without any row of their drafts.

        So no plan wins by what nobody has measured.
        """
        best = self.best(plan, gamma, ratio)
        if all(self._rows_with(draft) for draft in draft_names(plan)):
            return best
        widths = {share: band_width(self._subject(plan, 1, share), self.fitted) for share in set(ratio.tolist())}
        factors = np.exp([widths[share] for share in ratio.tolist()])
        return np.asarray(1 - np.minimum(1.0, (1 - best) * factors))

    def competing_of_all(
        self, plans: Sequence[Plan], grids: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> list[np.ndarray]:
        """`competing` of each plan over its grid of gamma and ratio; plans of equal differences share the work."""
        results: dict[Hashable, np.ndarray] = {}
        keys = []
        for plan, (gamma, ratio) in zip(plans, grids, strict=True):
            tiers = plan.speculation.self_drafts, plan.speculation.drafter.kind
            keys.append((plan_differences(plan), *tiers, gamma.tobytes(), self._share_read(plan, ratio).tobytes()))
            if keys[-1] not in results:
                results[keys[-1]] = self.competing(plan, gamma, ratio)
        return [results[key] for key in keys]

    def _supporting_drafts(self, plan: Plan) -> list[tuple[str, float]]:
        """The drafts, each with its ratio, whose rows support a plan's prediction.

        This is the plan's draft itself if the model has a row of it, else its single differences.
        """
        draft, ratio = row_name(plan), float(self._share_read(plan, plan.speculation.ratio))
        if any(row.draft == draft and self._is_own(row) and self._near(row, ratio) for row in self.rows):
            return [(draft, ratio)]
        return [(name, ratio if name in SPARSE_SELECTIONS else 1.0) for name in draft_names(plan)]

    def _subject(self, plan: Plan, gamma: Any, ratio: Any) -> Subject:
        return Subject(
            plan_differences(plan), self.name, self.parameters, self.context, self.quantizer, self.dtype, self.text,
            position=(np.maximum(gamma, 1) + 1) / 2, ratio=self._share_read(plan, ratio),
            yarn=max(1.0, self.context / self.limit), spans=self.spans,
        )  # fmt: skip

    def _share_read(self, plan: Plan, ratio: Any) -> Any:
        """The share of the cached tokens that drafts read, with the plan's floor applied; rows record this share."""
        return plan.speculation.selection.share_of(self.context, ratio)

    @cached_property
    def _known_provenance(self) -> Callable[[str, float], tuple[str, str]]:
        """`_provenance`, which plans of all gammas share."""
        return cache(self._provenance)

    def _provenance(self, draft: str, ratio: float) -> tuple[str, str]:
        """The source of a draft's prediction, and a description of the rows behind it."""
        rows = self._rows_with(draft)
        if not rows:
            return "prior", f"no rows of {draft}: predicted from other selections"
        nearest = self._nearest(rows, draft, ratio)
        if nearest.draft == draft and self._is_own(nearest) and self._near(nearest, ratio):
            return nearest.source, str(nearest)
        names = {"parameters": "a model of this size", "context": "such a context", "ratio": "such a share"}
        values = {"parameters": self.parameters, "context": self.context, "ratio": ratio}
        known = {name: [getattr(row, name) for row in rows] for name in names}
        beyond = [text for name, text in names.items() if not _within(values[name], known[name])]
        models = len({variant_name(row.model) for row in rows})
        where = f"fitted to {len(rows)} rows of {draft} from {models} models, the nearest {nearest}"
        if beyond:
            return "extrapolated", f"no row has {' or '.join(beyond)}; {where}"
        return "transferred", where

    def _rows_with(self, draft: str) -> list[AcceptanceRow]:
        """Rows whose drafts have at least the differences of this one."""
        required = set(differences(draft))
        having = {name for name in {row.draft for row in self.rows} if required.issubset(differences(name))}
        return [row for row in self.rows if row.draft in having]

    def _is_own(self, row: AcceptanceRow) -> bool:
        return variant_name(row.model) == variant_name(self.name)

    def _near(self, row: AcceptanceRow, ratio: float) -> bool:
        return max(_factor(row.context, self.context), _factor(row.ratio, ratio)) <= NEAR

    def _nearest(self, rows: Sequence[AcceptanceRow], draft: str, ratio: float) -> AcceptanceRow:
        """The nearest row: of this draft and model, on its text, then by size, context and ratio."""
        same_draft = [row for row in rows if row.draft == draft] or rows
        same_model = [row for row in same_draft if self._is_own(row)] or same_draft
        return min(same_model, key=lambda row: self._distance(row, ratio))

    def _distance(self, row: AcceptanceRow, ratio: float) -> tuple[Any, ...]:
        factors = (
            _factor(row.parameters, self.parameters), _factor(row.context, self.context), _factor(row.ratio, ratio),
        )  # fmt: skip
        other_text = bool(self.text) and row.text != self.text
        return other_text, math.prod(factors), SOURCES.index(row.source)


def acceptance_of_proposals(plan: Plan, depth: int) -> Acceptance:
    """Acceptance of `depth` proposals of a plan's drafter, by whichever tier verifies them."""
    known = proposal_acceptance(plan.speculation.drafter.kind, plan.workload)
    return Acceptance(*known.at(depth), known.source, known.where)


def spans_of(rows: Iterable[AcceptanceRow], model: str) -> dict[str, tuple[float, float]]:
    """The first and last place that the rows of a model, of any tuning, reach, by difference."""
    places: dict[str, list[float]] = {}
    for row in rows:
        if core_name(row.model) == core_name(model):
            for difference in differences(row.draft):
                places.setdefault(difference, []).append(place_of(row.context))
    return {difference: (min(reached), max(reached)) for difference, reached in places.items()}


def observation(row: AcceptanceRow) -> Observation:
    """A row as the regression sees it."""
    published = row.source == "published"
    return Observation(subject(row).parts, 1 - row.acceptance, "published" if published else "measured")


def subject(row: AcceptanceRow) -> Subject:
    """The subject of a row."""
    return Subject(
        differences(row.draft), row.model, row.parameters, row.context, row.quantizer, row.dtype, row.text or row.where,
        row.mean_position, row.ratio, row.yarn,
    )  # fmt: skip


def band_family(differences: Iterable[str]) -> str:
    """Bands are calibrated for drafts that read fewer tokens, and for those of fewer bits alone."""
    return "tokens" if any(difference in SPARSE_SELECTIONS for difference in differences) else "bits"


def band_width(about: Subject, fitted: EffectsPosterior) -> float:
    """Log of the factor between the best estimate of a measured disagreement and either end of its band."""
    return saved_bands()[band_family(about.differences)] * fitted.deviation(about.parts, "measured")


@cache
def shipped_fit() -> EffectsPosterior:
    """The regression over the shipped rows, started from the stored result of an earlier fit."""
    rows = shipped_rows()
    return fit([observation(row) for row in rows], start=start_of(rows))


@lru_cache(maxsize=8)
def _fitted(profile_rows: tuple[AcceptanceRow, ...]) -> tuple[tuple[AcceptanceRow, ...], EffectsPosterior]:
    """All rows and their fit. The profile's rows change the effects but not the variances between models and texts."""
    rows = merged(shipped_rows(), profile_rows)
    if not profile_rows:
        return rows, shipped_fit()
    return rows, fit([observation(row) for row in rows], shipped_fit().variances)


def _factor(value: float, other: float) -> float:
    return max(value / other, other / value)


def _within(value: float, known: Sequence[float]) -> bool:
    """Whether a value lies within the range of the known ones, widened by a factor `NEAR`."""
    return min(known) / NEAR <= value <= max(known) * NEAR
