"""Acceptance of drafters by kind of text and context: published and measured rows, and a user's own figure.

A drafter's acceptance depends on the text more than on the model: a suffix repeats in code and hardly in prose. So rows
are of one kind of text, and a drafter without a row of the workload's kind is not searched. Between the contexts of a
measurement acceptance is linear in their logarithm, and measurements are pooled by their passes and comparisons.
Proposals of a head that reads the whole context decay with it; where no row says how, they do as EAGLE-3's were
published to. Far beyond the contexts of other drafters' rows nothing is known: the band reaches down to no gain, and a
block drafter's pass has no more tokens than the one that was published for long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby, product
from pathlib import Path

import numpy as np

from ridgeplan.planner.acceptance.drafter_rows import (
    EAGLE3,
    UNCOUNTED_ROUNDS,
    DrafterRow,
    acceptance_of,
    drafter_rows,
    load_drafter_rows,
)
from ridgeplan.planner.acceptance.rows import variant_name
from ridgeplan.planner.acceptance.speculation_profile import CONFIG, head_rows, head_settings
from ridgeplan.planner.acceptance.speculation_profile import NAME as PROFILE
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.execution import MAX_ACCEPTANCE_LENGTH, MAX_GAMMA
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Workload

LONG_BLOCK = "DFlash2"  # of the block drafters, the one with published rows up to 184k tokens
GIVEN_DEPTH = MAX_ACCEPTANCE_LENGTH - 1  # proposals of the passes whose tokens a user states
NEAR_CONTEXT = 4.0  # factor of context within which measurements are pooled
GENERATION_POINTS = 8  # contexts of a generation at which acceptance is taken
PRIOR_PROPOSALS = 2.0  # weight of the position before, for positions that few proposals reached
PASSAGES = 4  # of a text, whose rounds a shipped row sums up
SHIFTS = np.linspace(-2, 2, 41)  # of log odds, between which the mean over texts is kept
BAND_DEVIATIONS = 1.645  # standard deviations from the best acceptance to the ends of its band, which holds 90%


@dataclass(frozen=True)
class ProposalAcceptance:
    """A drafter's hits, and by position the chance that so many of a pass's proposals are accepted: [MAX_GAMMA].

    spread: the fewest and the most tokens that passes gain by measurements of the same text, over the gain here.
    compared: proposals that were compared, 0 if not known. depth: proposals of the passes that were measured.
    """

    hit: float
    reached: tuple[float, ...]
    spread: tuple[float, float]
    compared: float
    source: str
    where: str
    depth: int

    @property
    def known(self) -> bool:
        """Whether there is a row of the workload's kind of text, or the user's own figure."""
        return self.source != "prior"

    def at(self, depth: int) -> tuple[float, float, float]:
        """The low end, the best and the high end of the conditional acceptance of passes with `depth` proposals.

        It differs by position; this is the one that, equal at all of them, gives the same tokens. The band covers the
        spread of measurements and the binomial error of their counts (Wilson 1927).
        """
        gain = sum(self.reached[:depth])
        least, most = self.spread
        low, best, high = (acceptance_of(1 + gain * factor, 1.0, depth) for factor in (least, 1, most))
        if not self.compared:
            return low, best, high
        z2 = BAND_DEVIATIONS**2 / self.compared
        middle, width = best + z2 / 2, math.sqrt(z2 * (best * (1 - best) + z2 / 4))
        return min(low, (middle - width) / (1 + z2)), best, max(high, (middle + width) / (1 + z2))

    @property
    def best(self) -> float:
        """The acceptance of passes with as many proposals as were measured."""
        return self.at(self.depth)[1]


def proposal_acceptance(kind: DrafterKind, workload: Workload) -> ProposalAcceptance:
    """What is known of a drafter on a workload, over its generation: the user's figure or rows, else all rows.

    The model's own rows come first, and of these those that were counted in its rounds. Without any row it is a prior:
    the worst row of any text.
    """
    folder = workload.drafter_head
    files = map(Path, (workload.drafter_rows, *(f"{folder}/{name}" for name in (PROFILE, CONFIG) if folder)))
    return _known(kind, workload, tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files))


@lru_cache(maxsize=4096)
def _known(kind: DrafterKind, workload: Workload, written: tuple[int, ...]) -> ProposalAcceptance:
    if rows := _rows_about(kind, workload):
        return _pooled(rows, workload)
    worst = min((row for row in drafter_rows() if row.kind is kind), key=lambda row: row.pass_tokens)
    what = f"{workload.text} texts" if workload.text else "a text of unknown kind (--text)"
    where = f"no rows of {kind} on {what}: {worst}"
    return replace(_pooled([worst], workload), spread=(0.0, 1.0), source="prior", where=where, depth=1)


def _pooled(rows: Sequence[DrafterRow], workload: Workload) -> ProposalAcceptance:
    """The counts of all measurements near the workload's context, summed at contexts of its generation."""
    of_model = [row for row in rows if variant_name(row.model) == variant_name(workload.model)]
    rows = [row for row in of_model if row.rounds] or of_model or rows
    rows = sorted([row for row in rows if row.context] or rows, key=lambda row: (_measurement(row), row.context))
    series = [tuple(group) for _, group in groupby(rows, _measurement)]
    factors = [_outside(each, workload.context) for each in series]
    series = [each for each, far in zip(series, factors, strict=True) if far <= max(NEAR_CONTEXT, min(factors))]
    rows, depth = [row for each in series for row in each], max(row.depth for each in series for row in each)
    contexts = workload.context + (np.arange(GENERATION_POINTS) + 0.5) / GENERATION_POINTS * workload.new_tokens
    counts = np.stack([_counts_at(each, contexts) for each in series])
    hit, reached = _chances(counts.sum(0), depth)
    gains = [share * sum(chances[:depth]) for share, chances in (_chances(each, depth) for each in counts)]
    gain, counted = max(hit * sum(reached[:depth]), 1e-9), all(row.rounds for row in rows)
    nearest = min(rows, key=lambda row: (_outside([row], workload.context), -(row.rounds or UNCOUNTED_ROUNDS)))
    models, last = {row.model for row in rows}, max(row.context for row in rows)
    where = f"{len(rows)} rows of {len(models)} models, the nearest {nearest}" if len(series) > 1 else str(nearest)
    beyond = nearest.name != EAGLE3 and 0 < NEAR_CONTEXT * last < workload.context
    if nearest.name == EAGLE3 and 0 < last < workload.final_context - 1:
        where += f", which decays with the context as published: {ContextDecay.of(EAGLE3)}"
    elif beyond:
        capped = f", at most as published: {ContextDecay.of(LONG_BLOCK)}" if nearest.kind is DrafterKind.BLOCK else ""
        where += f", far beyond its context{capped}"
    return ProposalAcceptance(
        hit, tuple(reached), (0.0 if beyond else min(gains) / gain, max(gains) / gain),
        float(counts[:, :, 1 : MAX_GAMMA + 1].sum((0, 2)).mean()) if counted else 0.0,
        "extrapolated" if beyond else nearest.source if of_model else "transferred", where, depth,
    )  # fmt: skip


def _measurement(row: DrafterRow) -> tuple[str, str, str, int]:
    return row.name, row.model, row.where, row.depth


def _outside(series: Sequence[DrafterRow], context: int) -> float:
    """The factor by which a context is outside of a measurement's contexts; 1 within, or where they are not known."""
    first, last = series[0].context, series[-1].context
    return max(first / context, context / last, 1.0) if last else 1.0


def _counts_at(series: Sequence[DrafterRow], contexts: np.ndarray) -> np.ndarray:
    """A measurement's counts at contexts; beyond its last those of an EAGLE-3 head decay as published.

    Those of a block drafter fall from NEAR_CONTEXT times its last context on, and have no more tokens than LONG_BLOCK's
    passes from the square of that factor on.
    """
    logs, last = np.log([max(row.context, 1) for row in series]), series[-1]
    weights = np.stack([np.interp(np.log(contexts), logs, of_row) for of_row in np.eye(len(series))], axis=1)
    counts = weights @ np.stack([row.counts for row in series])
    if last.name == EAGLE3 and last.context:
        decay = ContextDecay.of(EAGLE3)
        kept = np.array([decay.tokens_at(context, 2.0, last.context) - 1 for context in contexts])
    elif last.kind is DrafterKind.BLOCK and 0 < NEAR_CONTEXT * last.context < contexts[0]:
        gains = np.array([ContextDecay.of(LONG_BLOCK).tokens(context) - 1 for context in contexts])
        far = np.interp(np.log(contexts / last.context) / math.log(NEAR_CONTEXT), (1, 2), (0, 1))
        kept = 1 - far * (1 - np.minimum(1, gains / (last.pass_tokens - 1)))
    else:
        return np.asarray(counts)
    counts[:, 2:] *= kept[:, None]  # all that follows passes and hits
    return np.asarray(counts)


def _chances(counts: np.ndarray, depth: int) -> tuple[float, np.ndarray]:
    """Hits, and chances by position, of passes with `depth` proposals.

    counts: at contexts with equally many tokens of a generation, so that each has as many passes as these take.
    """
    passes, compared, accepted = np.split(counts, [1, MAX_GAMMA + 1], axis=1)
    hits = compared[:, 0] / passes[:, 0]
    chance, before = np.ones(len(counts)), accepted.sum(1) / np.maximum(compared.sum(1), 1e-9)
    reached = []
    for place in range(MAX_GAMMA):
        before = (accepted[:, place] + PRIOR_PROPOSALS * before) / (compared[:, place] + PRIOR_PROPOSALS)
        chance = chance * before
        reached.append(chance)
    per_token = 1 / (1 + hits * sum(reached[:depth]))
    hit = float(np.average(hits, weights=per_token))
    return hit, np.average(reached, axis=1, weights=per_token * np.maximum(hits, 1e-9))


@lru_cache(maxsize=1024)
def texts_of(known: ProposalAcceptance, depth: int, sequences: int) -> np.ndarray:
    """Hits, acceptance and weights of the texts that a known acceptance is the mean of: [3, texts].

    Log odds are normal around the mean (Gauss-Hermite quadrature), and passes that verify `depth` proposals yield the
    known tokens over all texts. The last entry is the mean, without weight. sequences: that share their rounds, so that
    their mean counts. A model without rows of its own differs from those with rows; without rows of the kind of text,
    all texts are as the prior says.
    """
    between_texts, between_models = text_covariances()
    covariance = between_texts / sequences + between_models * (known.source == "transferred")
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    weight = np.outer(weights, weights).ravel() / weights.sum() ** 2
    mean = np.clip((known.hit, known.at(depth)[1]), 1e-3, 1 - 1e-3)  # whose odds are finite
    deviations = np.array([*product(nodes, repeat=2)]) @ np.linalg.cholesky(covariance).T * known.known
    odds = np.log(mean / (1 - mean)) + deviations

    def rates(shift: float) -> np.ndarray:
        """At log odds of acceptance that are larger by a shift, then those of the mean: [2, texts]."""
        return np.column_stack((1 / (1 + np.exp(-np.add(odds, (0, shift)).T)), mean))

    passes = [1 / np.asarray(pass_tokens(each[0], each[1], depth)) for each in map(rates, SHIFTS)]  # of a token
    shift = np.interp(0, [each[-1] - weight @ each[:-1] for each in passes], SHIFTS)
    return np.vstack((rates(float(shift)), [*weight, 0.0]))


@cache
def text_covariances() -> tuple[np.ndarray, np.ndarray]:
    """Of the log odds of a lookup's hits and acceptance, [2, 2]: between texts of a kind, and between models.

    Shipped rows of real rounds, of one kind of text and model, differ by context and passages. What a line over log
    context leaves, less the binomial error of their counts, is between texts; the rows' means differ between models.
    """
    rows = [row for row in drafter_rows() if row.kind is DrafterKind.SUFFIX and row.rounds]
    rows.sort(key=lambda row: (row.text, row.model, row.context))
    squares, freedom, means = np.zeros((2, 2)), 0, dict[str, list[np.ndarray]]()
    for (text, _), group in groupby(rows, lambda row: (row.text, row.model)):
        series = [*group]
        rates = np.array([(row.hit, row.acceptance) for row in series])
        counted = np.array([(row.rounds, row.counts[1 : MAX_GAMMA + 1].sum()) for row in series])
        odds, line = np.log(rates / (1 - rates)), np.vander(np.log([row.context for row in series]), 2)
        rest = odds - line @ np.linalg.lstsq(line, odds, rcond=None)[0]
        squares += rest.T @ rest - (len(series) - 2) * np.diag((1 / (counted * rates * (1 - rates))).mean(axis=0))
        freedom += len(series) - 2
        means.setdefault(text, []).append(odds.mean(axis=0))
    return PASSAGES * squares / freedom, np.mean([np.cov(each, rowvar=False) for each in means.values()], axis=0)


def as_published(name: str, workload: Workload) -> ProposalAcceptance:
    """What the longest published measurement of a drafter says of a workload, whatever its text: a prior."""
    decay = ContextDecay.of(name)
    return replace(_pooled(decay.rows, workload), spread=(0.0, 1.0), source="prior", where=str(decay))


def at_context(workload: Workload, context: int, drafter: Drafter) -> Workload:
    """The workload's next token at another context. A user's figure is of its own; a head that reads all decays."""
    here = replace(workload, context=context, new_tokens=1)
    of_head = drafter.kind is workload.drafter is DrafterKind.HEAD and not drafter.window
    if not (workload.acceptance_length and of_head):
        return here
    length = ContextDecay.of(EAGLE3).tokens_at(context, workload.acceptance_length, workload.context)
    return replace(here, acceptance_length=min(length, float(MAX_ACCEPTANCE_LENGTH)))


def _rows_about(kind: DrafterKind, workload: Workload) -> Sequence[DrafterRow]:
    """The user's figure, else rows of the workload's kind of text: of the head that it names, else the user's near its
    context, else all.

    Where the kind of text is not known, all of the head's rows, and none of a drafter that any text may have.
    """
    folder, length = workload.drafter_head, workload.acceptance_length
    name = head_settings(folder).row_name() if folder and kind is DrafterKind.HEAD else EAGLE3
    if length and workload.drafter is kind:
        where = f"given: {length:g} tokens a pass"
        return (DrafterRow(kind, name if kind is DrafterKind.HEAD else str(kind), workload.model, GIVEN_DEPTH,
                           "measured", where, workload.context, tokens=length),)  # fmt: skip
    if folder and kind in (DrafterKind.HEAD, DrafterKind.BLOCK):
        of_head = [row for row in head_rows(folder) if row.kind is kind and row.text in ("", workload.text or row.text)]
        return [row for row in of_head if row.name == name] or of_head  # with the window that plans have
    if not workload.text:
        return ()
    users = load_drafter_rows(workload.drafter_rows) if workload.drafter_rows else ()
    of_user, shipped = (
        [row for row in rows if (row.kind, row.text) == (kind, workload.text)] for rows in (users, drafter_rows())
    )
    if kind is DrafterKind.HEAD:  # MTP layers and windows are of models and heads that are named
        shipped = [row for row in shipped if row.name == EAGLE3]
    return [row for row in of_user if _outside([row], workload.context) <= NEAR_CONTEXT] or [*of_user, *shipped]


@dataclass(frozen=True)
class ContextDecay:
    """Tokens of a pass of a drafter by context, between the contexts of its rows linear in the logarithm."""

    rows: tuple[DrafterRow, ...]

    @classmethod
    def of(cls, name: str) -> ContextDecay:
        """Of the measurement of a drafter that has most contexts, first one of no kind of text alone."""
        rows = sorted((row for row in drafter_rows() if row.name == name and row.context), key=_measurement)
        series = [tuple(group) for _, group in groupby(rows, lambda row: (_measurement(row), row.text))]
        longest = max(series, key=lambda each: (len(each), not each[0].text))
        return cls(tuple(sorted(longest, key=lambda row: row.context)))

    def tokens(self, context: float) -> float:
        """Tokens of a pass; beyond the rows' contexts those of the nearest."""
        logs = [math.log(row.context) for row in self.rows]
        return float(np.interp(math.log(context), logs, [row.pass_tokens for row in self.rows]))

    def tokens_at(self, context: float, tokens: float, measured_at: float) -> float:
        """Tokens of a pass of a drafter that had `tokens` at another context: as many at shorter ones, else fewer."""
        return 1 + (tokens - 1) * min(1.0, (self.tokens(context) - 1) / (self.tokens(measured_at) - 1))

    def __str__(self) -> str:
        """The first and the last row."""
        first, last = self.rows[0], self.rows[-1]
        ends = f"{first.tokens:g} tokens a pass at {first.context} and {last.tokens:g} at {last.context}"
        return f"{ends}, {first.where}"
