"""ClusterKV: keys are clustered by k-means, and each query reads the nearest clusters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.plan.policies import selections
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.per_query import PromptSelector
from ridgeplan.runtime.policies.registry import SELECTORS

ITERATIONS = 10  # of k-means
COMPARED_TOKENS = 4096  # with all centroids at once


@SELECTORS.register("clusterkv")
class ClusterKVSelector(PromptSelector):
    """Tokens rank by their cluster's score, so that whole clusters are read, the last one in part (section 3.3).

    centroids: [layers, batch, kv_heads, clusters, head_dim], means of a prompt's keys. labels: int32 [layers, batch,
    kv_heads, tokens], the cluster of each. clusters: int32 [batch], in use. What is generated and not kept whole joins
    the nearest cluster when it grows old; the paper makes new ones.
    """

    selection: selections.ClusterKV

    def __init__(self, selection: selections.ClusterKV, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        cache = self.cache
        keys, group, device = cache.stores[0].keys, cache.config.group, cache.lengths.device
        sets = cache.layers, *keys.shape[1:3]
        groups = -(-self.candidates // group) + 1  # one more, which is not old yet
        max_clusters = -(-self.candidates // selection.cluster)
        self.centroids = torch.zeros(*sets, max_clusters, keys.shape[4], dtype=keys.dtype, device=device)
        self.labels = torch.zeros(*sets, groups * group, dtype=torch.int32, device=device)
        self.clusters = torch.zeros_like(cache.lengths)

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        known = keys[:, : self.labels.shape[3]]
        count = max(1, min(known.shape[1] // self.selection.cluster, self.centroids.shape[3]))
        centroids, labels = k_means(known, count)
        self.centroids[layer, row, :, :count] = centroids.to(keys.dtype)
        self.labels[layer, row, :, : known.shape[1]] = labels
        self.clusters[row] = count

    def index_generated(self) -> None:
        first = self.old_tokens()
        keys = self.cache.oldest_group(first)
        likeness = _likeness(keys, self.centroids)
        unused = torch.arange(self.centroids.shape[3], device=keys.device) >= self.clusters[:, None]
        labels = likeness.masked_fill_(unused[None, :, None, None], -torch.inf).argmax(-1).int()
        at = first[:, None].long() + torch.arange(keys.shape[3], device=keys.device)
        self.labels.scatter_(3, at[None, :, None].expand(labels.shape), labels)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        rows = self.cache.rows
        centroids = self.centroids[layer, :rows]
        heads = query[:, 0].unflatten(1, (centroids.shape[1], -1))
        scores = (heads @ centroids.mT).amax(2).float()
        return scores.gather(2, self.labels[layer, :rows].long())


def k_means(keys: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Centroids float32 [kv_heads, clusters, head_dim] and labels int32 [kv_heads, tokens] of keys.

    keys: [kv_heads, tokens, head_dim], compared by cosine similarity (section 3.2). It starts from keys at equal
    distances, so that the result is always the same.
    """
    tokens = keys.shape[1]
    centroids = keys[:, torch.arange(clusters, device=keys.device) * tokens // clusters].float()
    labels = _nearest(keys, centroids)
    for _ in range(ITERATIONS):
        sums, counts = _members(keys, labels, clusters)
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
        labels = _nearest(keys, centroids)
    return centroids, labels.int()


def _members(keys: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Sums of each cluster's keys [kv_heads, clusters, head_dim], and their number [kv_heads, clusters, 1], float32.

    By products, as scattered additions on a GPU would differ from run to run.
    """
    sums, counts = torch.zeros((), device=keys.device), torch.zeros((), device=keys.device)
    for part, assigned in zip(keys.split(COMPARED_TOKENS, 1), labels.split(COMPARED_TOKENS, 1), strict=True):
        belongs = (assigned[:, None] == torch.arange(clusters, device=keys.device)[:, None]).float()
        sums, counts = sums + belongs @ part.float(), counts + belongs.sum(2, keepdim=True)
    return sums, counts


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    """The most similar centroid of each key, int64 [kv_heads, tokens]; some tokens at a time."""
    parts = keys.split(COMPARED_TOKENS, dim=1)
    return torch.cat([_likeness(part, centroids.to(keys.dtype)).argmax(-1) for part in parts], dim=1)


def _likeness(keys: Tensor, centroids: Tensor) -> Tensor:
    """Cosine similarity, up to the keys' lengths, of keys [..., tokens, d] to centroids [..., clusters, d]."""
    return keys @ functional.normalize(centroids, dim=-1).mT
