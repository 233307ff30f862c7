"""Plans compared under uncertainty: their times with the rates and acceptances that the bands allow.

Errors are shared. A kernel class that is slower than its calibration says is slower in every plan that uses it, and a
text on which drafts agree less often is the text of all plans, so plans that differ little are told apart by little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from ridgeplan.planner.acceptance import Acceptance
from ridgeplan.planner.prediction import Prediction
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import KERNEL_CLASSES
from ridgeplan.roofline.speculation import tokens_per_round

SAMPLES = 2048
SEED = 0
BAND_DEVIATIONS = 1.645  # standard deviations from the best acceptance to the ends of its band, which holds 90%
# Kernel classes of a round's parts other than its passes.
ROUND_CLASSES = {"acceptance": "sampling", "selection": "gather", "flush": "quantize", "overhead": "gap"}


def sampled_tpot_ms(predictions: Sequence[Prediction], profile: Profile) -> np.ndarray:
    """Milliseconds per token, [plans, samples], with the same errors for all plans.

    Every class's time is scaled by a log-normal factor of the spread of its fit; the acceptance follows a normal
    distribution on either side of its best estimate, as wide as its band there.
    """
    rounds = _scaled([_round_s_by_class(one) for one in predictions], profile)
    tokens = np.stack([_sampled_tokens(one, _deviations()[-1]) for one in predictions])
    return 1e3 * rounds / tokens


def sampled_ttft_ms(predictions: Sequence[Prediction], profile: Profile) -> np.ndarray:
    """Milliseconds to the first token, [plans, samples], with the same errors as `sampled_tpot_ms`."""
    return 1e3 * _scaled([_by_class(one, "prefill", one.best.ttft_ms / 1e3) for one in predictions], profile)


@cache
def _deviations() -> np.ndarray:
    """Standard normal errors, [kernel classes + 1, samples]; the last row is the acceptance's."""
    return np.random.default_rng(SEED).standard_normal((len(KERNEL_CLASSES) + 1, SAMPLES))


def _scaled(seconds: Sequence[Mapping[str, float]], profile: Profile) -> np.ndarray:
    """The sum of each plan's seconds by class, every class scaled by its sampled error: [plans, samples]."""
    spreads = np.array([profile.rates(name).spread for name in KERNEL_CLASSES])
    factors = np.exp(np.log1p(spreads)[:, None] * _deviations()[:-1])
    return np.array([[one.get(name, 0.0) for name in KERNEL_CLASSES] for one in seconds]) @ factors


def _round_s_by_class(predicted: Prediction) -> dict[str, float]:
    """Seconds of a round by kernel class; a pass's host time counts in proportion to its operations."""
    spent = predicted.round_s
    drafting = _by_class(predicted, "draft", spent["draft"]) if predicted.gamma else {}
    others = {kind: spent[part] for part, kind in ROUND_CLASSES.items()}
    return _sum(_by_class(predicted, "target", spent["verification"]), drafting, others)


def _by_class(predicted: Prediction, part: str, seconds: float) -> dict[str, float]:
    """`seconds` of one part of the work, divided among kernel classes as its operations' times are."""
    found = _sum(*({op.kind: op.seconds} for op in predicted.breakdown if op.part == part))
    scale = seconds / sum(found.values())
    return {kind: own * scale for kind, own in found.items()}


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in kinds}


def _sampled_tokens(predicted: Prediction, deviations: np.ndarray) -> np.ndarray:
    """Tokens per round at sampled acceptances: [samples]."""
    sampled = tokens_per_round(_sampled_acceptance(predicted.acceptance, deviations), predicted.gamma)
    best = tokens_per_round(predicted.acceptance.best, predicted.gamma)
    return np.asarray(predicted.tokens_per_round * sampled / best)


def _sampled_acceptance(known: Acceptance, deviations: np.ndarray) -> np.ndarray:
    width = np.where(deviations > 0, known.high - known.best, known.best - known.low)
    return np.clip(known.best + width * deviations / BAND_DEVIATIONS, 0, 1)
