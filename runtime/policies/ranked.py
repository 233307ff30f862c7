"""Policies that rank tokens by attention of the prompt (SnapKV) or of a verification (SpecExtend, SpecAttn)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.attention.scores import Rows, ScoreRequest, What
from ridgeplan.kernels.selection import top_k
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.roofline.plan.policy import SparseSelection
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import SparseSelector, TokenIndex
from ridgeplan.runtime.policies.registry import SELECTORS

KERNEL_ROWS: dict[str, Rows] = {"last": "last", "ends": "ends", "all": "all", "accepted": "each"}
UNSCORED = float(1 << 22)  # above any score; float32 still tells 2^22 positions apart


class RankedSelector(SparseSelector):
    """Scores float32 [layers, batch, kv_heads, candidates], which a subclass fills in.

    A subclass may hold several for each token, [layers, batch, kv_heads, N, candidates], and combine them when drafts
    begin. Tokens without a score were recent when the others were scored. They come first, the latest before others.
    page: tokens that are ranked together, by their mean score. shared: one set for all heads of a layer, by the sum.
    """

    page = 1
    shared = True
    selected_before_pass = True

    def __init__(self, selection: SparseSelection, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        cache = self.cache
        sizes = (cache.layers, cache.config.batch, cache.kv_heads, *self._scores_of_token(), self.candidates)
        self.scores = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)
        self._chosen: tuple[Tensor, Tensor] | None = None

    def _scores_of_token(self) -> tuple[int, ...]:
        """The number of scores that each token has, if it is not one."""
        return ()

    def _combined_scores(self) -> Tensor:
        """A score for each token, [layers, batch, kv_heads, candidates]. The caller does not write to it."""
        return self.scores

    def start(self) -> None:
        places = torch.arange(self.candidates, dtype=torch.float32, device=self.scores.device)
        self.scores.copy_((places + UNSCORED).expand_as(self.scores))

    def old_tokens_at(self, lengths: Tensor) -> Tensor:
        return super().old_tokens_at(lengths) // self.page * self.page

    def before_drafts(self) -> None:
        scores = self._combined_scores()
        scores = scores.sum(2, keepdim=True) if self.shared else scores.clone()
        if self.page > 1:
            scores = functional.avg_pool1d(scores.flatten(0, 2), self.page).unflatten(0, scores.shape[:3])
        self._chosen = self.top_pages(scores, self.page)

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        assert self._chosen is not None, "drafts have begun"
        index, count = (chosen[layer, : self.cache.rows] for chosen in self._chosen)
        return TokenIndex(index, count, self.page)


def prompt_scores(queries: Tensor, keys: Tensor, positions: Tensor, what: str) -> Tensor:
    """Scores of a prompt's cached tokens by its last queries -> float32 [kv_heads, tokens].

    queries, keys, positions: as `TokenSelector.after_prefill` has them. what: "logits" or "probabilities", summed over
    queries and over the query heads of a KV head, which take turns to bound the workspace.
    """
    kv_heads, tokens, head_dim = keys.shape
    heads = (queries.float() * head_dim**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    asking = torch.arange(-len(queries), 0, device=keys.device)
    later = (positions[:, None] > asking[:, None]).expand(kv_heads, -1, -1)
    out = torch.empty(kv_heads, tokens, dtype=torch.float32, device=keys.device)
    for head, (q, k, unseen) in enumerate(zip(heads, keys, later, strict=True)):
        weights = q @ k.float().mT
        if what == "probabilities":  # an eviction may leave a query nothing to see
            weights = weights.masked_fill(unseen, -torch.inf).softmax(-1).masked_fill(unseen, 0)
        out[head] = weights.sum((0, 1))
    return out


def prompt_lse(query: Tensor, keys: Tensor) -> Tensor:
    """Log-sum-exps of a prompt's last query [q_heads, head_dim] over its cached tokens -> float32 [q_heads]."""
    heads = (query.float() * keys.shape[2] ** -0.5).unflatten(0, (len(keys), -1))
    return torch.cat([(q @ k.float().mT).logsumexp(-1) for q, k in zip(heads, keys, strict=True)])


MAX_JOINED = 4096  # generated tokens that join the sets


@SELECTORS.register("snapkv")
class SnapKVSelector(SparseSelector):
    """Selects a set for each KV head in prefill; generated tokens join it once they are no longer recent.

    index: int32 [layers, batch, kv_heads, K], a prompt's set, followed by the tokens after the prompt's old ones.
    chosen, first: int32 [batch], number of tokens in the prompt's set, and the first token that was not old in prefill.
    """

    selection: selections.SnapKV

    def __init__(self, selection: selections.SnapKV, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        cache = self.cache
        self.window = selection.window
        width = min(self.candidates, self.max_budget + MAX_JOINED)
        sizes = (cache.layers, cache.config.batch, cache.kv_heads, width)
        self.index = torch.zeros(sizes, dtype=torch.int32, device=cache.lengths.device)
        self.chosen, self.first = (torch.zeros_like(cache.lengths) for _ in "ab")
        self._count = self.chosen

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        scores = prompt_scores(queries, keys, positions, "probabilities")
        pooled = functional.max_pool1d(scores, self.selection.pooling, 1, self.selection.pooling // 2)
        pooled[:, : self.selection.sinks] = torch.inf
        lengths = torch.full_like(self.cache.lengths[:1], keys.shape[1])
        old, budget = self.old_tokens_at(lengths), self.budget_at(lengths)
        sets = len(pooled)
        index, _ = top_k(pooled, old.expand(sets).contiguous(), budget.expand(sets).contiguous(), self.max_budget)
        width = self.index.shape[3]
        later = torch.arange(width, dtype=torch.int32, device=keys.device) - budget + old
        self.index[layer, row] = later
        self.index[layer, row, :, : index.shape[1]] = torch.where(
            torch.arange(index.shape[1], device=keys.device) < budget, index, later[: index.shape[1]]
        )
        self.chosen[row], self.first[row] = budget[0], old[0]

    def before_round(self) -> None:
        joined = (self.old_tokens() - self.first).clamp_min(0)
        self._count = (self.chosen + joined).clamp_max(self.index.shape[3])

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        rows = self.cache.rows
        index = self.index[layer, :rows]
        count = self._count[:rows, None].expand(index.shape[:2]).contiguous()
        return TokenIndex(index, count)


class VerificationSelector(RankedSelector):
    """Selects by the scores of the last verification; the first round uses those of the prompt's last token.

    rows: the verification queries that score; "each" where only the verification's result tells which of them count:
    the tokens then have a score of each query. what: the kind of score. lse: float32 [layers, batch, q_heads],
    log-sum-exps of the last query before the next verification, which normalize its probabilities. scored: int32
    [batch], tokens before the last verification's, among which its scores select. accepted: int64 [batch], drafts that
    the last verification accepted, which is also the number of its last query whose token was accepted.
    """

    window = 1
    what: What = "probabilities"

    def __init__(
        self, selection: selections.SpecExtend | selections.SpecAttn, builder: AttentionMetadataBuilder
    ) -> None:
        self.rows = KERNEL_ROWS[selection.rows]
        super().__init__(selection, builder)
        cache = self.cache
        sizes = (cache.layers, cache.config.batch, cache.q_heads)
        self.lse = torch.zeros(sizes, dtype=torch.float32, device=self.scores.device)
        self.scored = torch.zeros_like(cache.lengths)
        self.accepted = torch.zeros(cache.config.batch, dtype=torch.int64, device=self.scores.device)

    def _scores_of_token(self) -> tuple[int, ...]:
        return (self.cache.config.gamma + 1,) if self.rows == "each" else ()

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What verifications change."""
        return self.scores, self.lse, self.scored, self.accepted

    def share_state(self, other: VerificationSelector) -> None:
        """Selects by the state of another selector over the same cache, whose verifications update it."""
        self.scores, self.lse, self.scored, self.accepted = other.state

    def start(self) -> None:
        super().start()
        self.accepted.zero_()

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        scores = prompt_scores(queries, keys, positions, self.what)
        kept = min(self.candidates, scores.shape[1])
        by_query = self.scores[layer, row] if self.rows == "each" else self.scores[layer, row, :, None]
        by_query[..., :kept] = scores[:, None, :kept]
        self.accepted[row] = 0
        self.lse[layer, row] = prompt_lse(queries[-1], keys)
        self.scored[row] = scores.shape[1]

    def old_tokens(self) -> Tensor:
        """As the base class, but those that came since the last verification: all of them are read, as recent ones.

        That verification left scores for its own tokens, too, which no later query has ranked.
        """
        old = super().old_tokens()
        return old if self.whole_groups else torch.minimum(old, self.scored // self.page * self.page)

    def budget(self) -> Tensor:
        """As the base class; what came since the last verification is read beside it."""
        return torch.minimum(super().budget(), self.old_tokens())

    def target_metadata(self, queries: int) -> AttentionMetadata:
        self.scored.copy_(self.builder.lengths)
        return super().target_metadata(queries).changed(scores=self.request)

    def request(self, layer: int) -> ScoreRequest:
        """Where verification writes a layer's scores."""
        rows = slice(self.cache.rows)
        return ScoreRequest(self.scores[layer, rows], self.rows, self.what, self.lse[layer, rows])

    def after_verification(self, accepted: Tensor) -> None:
        self.accepted[: len(accepted)] = accepted


@SELECTORS.register("specextend")
class SpecExtendSelector(VerificationSelector):
    """Selects by the query of the last accepted token, an index on the device, or by the last one, rejected or not."""

    def __init__(self, selection: selections.SpecExtend, builder: AttentionMetadataBuilder) -> None:
        self.page = selection.page
        super().__init__(selection, builder)

    def _combined_scores(self) -> Tensor:
        if self.rows != "each":
            return self.scores
        layers, batch, kv_heads, _, tokens = self.scores.shape
        index = self.accepted[:, None, None, None].expand(layers, batch, kv_heads, 1, tokens)
        return self.scores.gather(3, index)[:, :, :, 0]


@SELECTORS.register("specattn")
class SpecAttnSelector(VerificationSelector):
    """Selects by the first and the last verification query (Eq 3), by all (Eq 2), or by those of accepted tokens.

    One set per layer, or one per KV head.
    """

    selection: selections.SpecAttn

    def __init__(self, selection: selections.SpecAttn, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        self.what = "logits" if selection.score == "logits" else "probabilities"
        self.shared = not selection.per_kv_head

    def _combined_scores(self) -> Tensor:
        if self.rows != "each":
            return self.scores
        queries = torch.arange(self.scores.shape[3], device=self.scores.device)
        counts = queries <= self.accepted[:, None]
        return torch.einsum("lbhqn,bq->lbhn", self.scores, counts.float())


@SELECTORS.register("specattn-weights")
class SpecAttnWeightsSelector(SpecAttnSelector):
    """The same; the plan's defaults differ."""
