"""What the regression knows acceptance to depend on: the effects of a draft's differences, and their priors.

A difference (4-bit weights, fewer tokens, ...) has a part: its effects, each times a value. Effects of one name form a
group. Some are common to all rows, such as the slope over log context. The others belong to one model, text, run or
context, and are drawn from a distribution whose variance is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance.rows import SPARSE_SELECTIONS, core_name, variant_name
from ridgeplan.roofline.plan.policy import SELECTIONS

Effect = tuple[str, ...]
Part = Mapping[Effect, Any]  # numbers, or arrays of one shape
REFERENCE_PARAMETERS = 1.0  # billions
REFERENCE_CONTEXT = 8192  # tokens
REFERENCE_RATIO = 0.25
PLACE_FACTOR = 4.0
ROUNDING = "bfloat16"


@dataclass(frozen=True)
class Prior:
    """A normal prior. sign: that of a slope whose direction is certain, 0 for others."""

    mean: float
    deviation: float
    sign: int = 0


# Of effects common to all rows. Larger models and shorter contexts cannot be expected to agree less often, nor can
# drafts that read more tokens or stand earlier in their round; a slope that the rows pull the other way is held at 0.
COMMON = {
    "level": Prior(math.log(0.05), 1.5),
    "eight bits": Prior(-math.log(16), 0.5),  # of KV instead of four: steps are a sixteenth
    "quantizer": Prior(0.0, 0.4),
    # A factor of 2 in parameters: wider sums average more errors. Wide, as few rows compare models that differ in size
    # alone. Which tokens matter does not depend on size, as far as rows tell.
    "size": Prior(-0.12, 0.13, -1),
    # A factor of 2 in tokens within the model's limit. None for selections that each draft's query makes anew: at a
    # ratio, a longer context has more of what it needs.
    "context": Prior(0.1, 0.15, 1),
    "stretch": Prior(0.1, 0.15, 1),  # a factor of 2 in positions by YaRN, beyond the limit
    "position": Prior(0.0, 0.15, 1),  # a factor of 2 in positions
    "ratio": Prior(1.0, 0.3, 1),  # the power of ln(1/ratio)
    "tuning": Prior(0.0, 0.15),  # Instruct or Coder against the base model; no rows compare them
}
# Of effects drawn from a distribution: the starting value of its standard deviation, which the rows then change.
# Models and texts differ more in which tokens matter than in how they bear rounding.
GROUPS = {
    "policy": 0.6, "model": 0.2, "text": 0.3, "run": 0.15, "place": 0.15,
    "model, tokens": 0.6, "text, tokens": 0.4, "run, tokens": 0.4, "place, tokens": 0.15,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What a figure of acceptance is about. position and ratio may be arrays; text "" is one without rows.

    yarn: the factor by which positions are stretched beyond the model's limit.
    spans: for a prediction, the first and last place (`place_of`) that the model's own rows reach, by difference.
    """

    differences: tuple[str, ...]
    model: str
    parameters: float  # billions
    context: int
    quantizer: str
    dtype: str
    text: str = ""
    position: Any = 1.0
    ratio: Any = 1.0
    yarn: float = 1.0
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        """One part per difference, and one for arithmetic in bfloat16, which differs from kernel to kernel."""
        rounding = (ROUNDING,) if self.dtype == ROUNDING else ()
        return tuple(self._part(difference) for difference in (*self.differences, *rounding))

    def _part(self, difference: str) -> Part:
        family = family_of(difference)
        core, octave = core_name(self.model), math.log2(self.context / REFERENCE_CONTEXT)
        variant = variant_name(self.model)
        return {
            ("level", family): 1.0,
            **({} if family == "tokens" else {("size", family): math.log2(self.parameters / REFERENCE_PARAMETERS)}),
            ("model", core, family): 1.0,
            ("tuning", variant, family): 1.0,
            ("text", self.text, family): 1.0,
            ("run", variant, self.text, difference): 1.0,
            **({} if family == ROUNDING else self._slopes(difference, family, core, octave)),
        }

    def _slopes(self, difference: str, family: str, core: str, octave: float) -> Part:
        policy = SELECTIONS.get(difference)
        part: dict[Effect, Any] = {
            ("context", family): 0.0 if policy is not None and policy.per_query else octave,
            ("stretch", family): math.log2(self.yarn),
            ("position", _ageing(difference)): np.log2(self.position),
            **self._places(difference, core),
        }
        if difference == "kv8":
            part[("eight bits",)] = 1.0
        if difference == "w4":
            part[("quantizer", self.quantizer)] = 1.0
        if difference in SPARSE_SELECTIONS:
            part[("policy", difference)] = 1.0
            part[("ratio", difference)] = log_ratio_factor(self.ratio)
        return {effect: value for effect, value in part.items() if _matters(value)}

    def _places(self, difference: str, core: str) -> Part:
        """A model's own deviation at this context, interpolated between places; beyond its rows it stays, less surely.

        So acceptance rises with context only where the model's own rows of this difference do: not because rows end,
        nor because another selection's rows do.
        """
        place = place_of(self.context)
        low, high = self.spans.get(difference, (place, place))
        inside = min(max(place, low), high)
        below = math.floor(inside)
        return {
            ("place", core, difference, str(below)): 1 - (inside - below),
            ("place", core, difference, str(below + 1)): inside - below,
            ("place", core, difference, "beyond"): abs(place - inside),
        }


def place_of(context: float) -> float:
    """Where a context lies among the places of a model's own deviations, a factor of `PLACE_FACTOR` apart."""
    return math.log(context / REFERENCE_CONTEXT, PLACE_FACTOR)


@cache
def group_of(effect: Effect) -> str:
    """The group of an effect that belongs to one model, text, run, place or policy."""
    of_tokens = "tokens" in effect or any(policy in effect for policy in SPARSE_SELECTIONS)
    return f"{effect[0]}, tokens" if of_tokens and effect[0] != "policy" else effect[0]


def family_of(difference: str) -> str:
    """Differences of one family share the slopes and the effects of models and texts."""
    if difference in SPARSE_SELECTIONS:
        return "tokens"
    return "kv" if difference in ("kv4", "kv8") else difference


def log_ratio_factor(ratio: Any) -> Any:
    """Log of ln(1/ratio) over that at a quarter of the tokens; where all are read, nearly minus infinity."""
    return np.log(np.maximum(np.log(1 / np.asarray(ratio)), 1e-9) / math.log(1 / REFERENCE_RATIO))


def _matters(value: Any) -> bool:
    """Whether a number, or any of an array, is not 0; numpy's own functions take long for numbers."""
    return bool(value.any()) if isinstance(value, np.ndarray) else bool(value)


def _ageing(difference: str) -> str:
    """Sets chosen once a round, by the last verification's scores, age with the positions of its drafts."""
    policy = SELECTIONS.get(difference)
    if policy is None:
        return family_of(difference)
    return "once a round" if policy.from_verification else "each step"
