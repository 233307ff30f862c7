"""Hierarchical regression of log disagreement, 1 - acceptance, and what is saved of it: its start and its bands.

A draft differs from its target in one or more ways: bits of weights, bits of KV, tokens read, arithmetic. Alone, each
would disagree by exp(eta), where eta is linear in effects (effects.py). Small independent changes of the logits add
like standard deviations, and so do the disagreements that they cause: D = sqrt(sum of exp(2 eta)). Where the parts and
the whole were measured this holds within 0.015, while acceptances that multiply miss by up to 0.03.

Every effect has a normal prior. Those of single models, texts and contexts are drawn from common distributions, whose
variances are estimated with them (empirical Bayes by expectation maximization, Dempster et al. 1977): this makes the
band of a model without rows as wide as models differ. Residuals are Student-t, so that outliers weigh little.

The package ships the effects of a fit to its rows (start.json). A fit that starts there takes one step instead of
eighteen. After the rows have changed it starts from the priors, until `python scripts/acceptance_start.py` has written
the file anew. The same script calibrates the bands by cross-validation (scripts/cross_validation.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from ridgeplan.planner.acceptance.effects import COMMON, GROUPS, Effect, Part, group_of
from ridgeplan.planner.acceptance.rows import AcceptanceRow
from ridgeplan.roofline.plan.policy import SELECTIONS

STEPS = 60
DAMPING = 0.6  # of a Gauss-Newton step; whole ones can swing between two parts that share a disagreement
CONVERGED = 1e-2  # change of an effect, in log disagreement
T_DEGREES = 4.0  # of the residuals' Student-t distribution (Lange et al. 1989)
PRIOR_COUNT = 3.0  # how many effects the starting value of a variance counts as
RESIDUALS = {"measured": 0.1, "published": 0.1}  # starting standard deviations
MIN_DISAGREEMENT = 1e-4
HELD = 1e-12  # variance of a slope that is held at 0


@dataclass(frozen=True)
class Observation:
    """The disagreement that a draft's parts had together. residual: the group of its noise."""

    parts: tuple[Part, ...]
    disagreement: float
    residual: str


@dataclass(frozen=True, eq=False)
class EffectsPosterior:
    """Posterior of the effects: mean [effects], covariance [effects, effects]; and the variances of their groups."""

    index: Mapping[Effect, int]
    mean: np.ndarray
    covariance: np.ndarray
    variances: Mapping[str, float]

    def disagreement(self, parts: Sequence[Part]) -> np.ndarray:
        """The median of what the parts disagree together, for arrays of values at once; at most 1."""
        squares = sum(np.exp(2 * self._eta(part)) for part in parts)
        return np.asarray(np.minimum(1.0, np.sqrt(squares)))

    def deviation(self, parts: Sequence[Part], residual: str | None = None) -> float:
        """Standard deviation of the log disagreement; with `residual`, of an observation with that noise."""
        eta = np.array([self._eta(part) for part in parts])
        gradient = _gradient(parts, np.exp(2 * (eta - eta.max())))
        known = [(self.index[effect], value) for effect, value in gradient.items() if effect in self.index]
        values, places = np.array([value for _, value in known]), [place for place, _ in known]
        variance = values @ self.covariance[np.ix_(places, places)] @ values
        unseen = [(effect, value) for effect, value in gradient.items() if effect not in self.index]
        variance += sum(value**2 * prior(effect, self.variances)[1] for effect, value in unseen)
        return float(np.sqrt(variance + (self.variances[residual] if residual else 0.0)))

    def _eta(self, part: Part) -> np.ndarray:
        return np.asarray(sum(value * self._mean(effect) for effect, value in part.items()))

    def _mean(self, effect: Effect) -> float:
        mean = self._means.get(effect)
        return prior(effect, self.variances)[0] if mean is None else mean

    @cached_property
    def _means(self) -> dict[Effect, float]:
        return dict(zip(self.index, self.mean.tolist(), strict=True))


def prior(effect: Effect, variances: Mapping[str, float]) -> tuple[float, float]:
    """Mean and variance of an effect before any row."""
    common = COMMON.get(effect[0])
    if common is not None:
        return common.mean, common.deviation**2
    mean = SELECTIONS[effect[1]].log_disagreement_prior if effect[0] == "policy" else 0.0
    return mean, variances[group_of(effect)]


@dataclass(frozen=True)
class Start:
    """Where a fit begins, so that it has fewer steps to go: effects and variances of an earlier one."""

    effects: Mapping[Effect, float] = field(default_factory=dict)
    variances: Mapping[str, float] = field(
        default_factory=lambda: {name: start**2 for name, start in (GROUPS | RESIDUALS).items()}
    )


def fit(
    observations: Sequence[Observation], variances: Mapping[str, float] | None = None, start: Start | None = None
) -> EffectsPosterior:
    """The posterior given observations. variances: those of an earlier fit; by default they are estimated as well.

    A slope that contradicts its certain sign is held at 0. start: of an earlier fit to the same observations.
    """
    return _Problem(observations).solve(variances, start or Start())


class _Problem:
    """Observations as arrays: design [rows, parts, effects], `used` [rows, parts], log disagreement [rows]."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        effects = dict.fromkeys(effect for observation in observations for part in observation.parts for effect in part)
        self.index = {effect: place for place, effect in enumerate(effects)}
        max_parts = max(len(observation.parts) for observation in observations)
        self.design = np.zeros((len(observations), max_parts, len(effects)))
        self.used = np.zeros((len(observations), max_parts), dtype=bool)
        for row, observation in enumerate(observations):
            self.used[row, : len(observation.parts)] = True
            for number, part in enumerate(observation.parts):
                for effect, value in part.items():
                    self.design[row, number, self.index[effect]] = value
        self.target = np.log([max(observation.disagreement, MIN_DISAGREEMENT) for observation in observations])
        self.residuals = np.array([observation.residual for observation in observations])
        self.groups = np.array([group_of(effect) for effect in effects])
        self.signs = np.array([COMMON[effect[0]].sign if effect[0] in COMMON else 0 for effect in effects])

    def solve(self, known: Mapping[str, float] | None, start: Start) -> EffectsPosterior:
        """Damped Gauss-Newton steps, with the variances and the rows' weights renewed after each.

        With J the derivatives, S the priors' variances and R the rows' noise, the effects' covariance is the inverse of
        J^T R^-1 J + S^-1 (Rasmussen and Williams 2006, section 2.1.1); there are fewer effects than rows.
        """
        variances = dict(known or start.variances)
        mean = self._prior(variances)[0]
        mean = np.array([start.effects.get(effect, mean[place]) for effect, place in self.index.items()])
        weights, held = np.ones(len(self.target)), np.zeros(len(mean), dtype=bool)
        if start.effects:
            weights = self._weights((self.target - self._linearized(mean)[0]) ** 2, variances)
            held = (self.signs != 0) & np.array([start.effects.get(effect) == 0 for effect in self.index])
        for _ in range(STEPS):
            before, spread = self._prior(variances)
            before, spread = np.where(held, 0.0, before), np.where(held, HELD, spread)
            fitted, jacobian = self._linearized(mean)
            precise = jacobian / (self._noise(variances) / weights)[:, None]
            covariance = np.linalg.inv(jacobian.T @ precise + np.diag(1 / spread))
            step = before + covariance @ (precise.T @ (self.target - fitted + jacobian @ (mean - before))) - mean
            mean = mean + DAMPING * step
            held |= mean * self.signs < 0
            mean = np.where(held, 0.0, mean)
            errors = (self.target - self._linearized(mean)[0]) ** 2
            if not known:
                uncertain = np.einsum("re,re->r", jacobian @ covariance, jacobian)
                squares = mean**2 + np.diag(covariance)
                variances = self._variances(squares, weights * errors + uncertain)
            weights = self._weights(errors, variances)
            if np.abs(step).max() < CONVERGED:
                break
        return EffectsPosterior(self.index, mean, covariance, variances)

    def _weights(self, errors: np.ndarray, variances: Mapping[str, float]) -> np.ndarray:
        """How much each row counts, given its squared error."""
        return np.asarray((T_DEGREES + 1) / (T_DEGREES + errors / self._noise(variances)))

    def _noise(self, variances: Mapping[str, float]) -> np.ndarray:
        """The variance of each row's residual."""
        return np.array([variances[name] for name in self.residuals])

    def _linearized(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log disagreement [rows] at these effects, and its derivatives [rows, effects]."""
        eta = np.where(self.used, self.design @ mean, -np.inf)
        shares = np.exp(2 * (eta - eta.max(axis=1, keepdims=True)))
        total = shares.sum(axis=1, keepdims=True)
        fitted = eta.max(axis=1) + np.log(total[:, 0]) / 2
        return fitted, np.einsum("rp,rpe->re", shares / total, self.design)

    def _prior(self, variances: Mapping[str, float]) -> np.ndarray:
        """Means and variances [2, effects] of the effects before any row."""
        return np.array([prior(effect, variances) for effect in self.index]).T

    def _variances(self, squares: np.ndarray, errors: np.ndarray) -> dict[str, float]:
        """Each group's expected square, its starting value counting as `PRIOR_COUNT` members."""
        groups = {name: (start, squares[self.groups == name]) for name, start in GROUPS.items()}
        groups |= {name: (start, errors[self.residuals == name]) for name, start in RESIDUALS.items()}
        return {
            name: float((PRIOR_COUNT * start**2 + members.sum()) / (PRIOR_COUNT + len(members)))
            for name, (start, members) in groups.items()
        }


def _gradient(parts: Sequence[Part], shares: np.ndarray) -> dict[Effect, float]:
    """Derivatives of the log disagreement; the parts have these shares of its square."""
    gradient: dict[Effect, float] = {}
    for part, share in zip(parts, shares / shares.sum(), strict=True):
        for effect, value in part.items():
            gradient[effect] = gradient.get(effect, 0.0) + float(share * value)
    return gradient


START = Path(__file__).with_name("start.json")


def start_of(rows: Sequence[AcceptanceRow]) -> Start:
    """The start that ships if it is of these rows, else none."""
    stored = json.loads(START.read_text(encoding="utf-8"))
    if stored["rows"] != digest(rows):
        return Start()
    return Start({tuple(effect): value for *effect, value in stored["effects"]}, stored["variances"])


def digest(rows: Sequence[AcceptanceRow]) -> str:
    """What changes when any row does."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()


@cache
def saved_bands() -> dict[str, float]:
    """How many deviations lie between a prediction and either end of its band, by `band_family`."""
    return dict(json.loads(START.read_text(encoding="utf-8"))["bands"])
