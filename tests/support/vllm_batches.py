"""What vLLM hands to the plugin: batches of scheduled sequences, FlashAttention and its merge, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.runtime.vllm import api

PAGE = 128


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None, *, softmax_scale: float, causal: bool,
    block_table: Tensor | None = None, return_softmax_lse: bool, fa_version: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by sequence; a causal query sees keys up to its distance from the sequence's end."""
    assert return_softmax_lse and fa_version == 3
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    starts = cu_seqlens_q.tolist()
    for i, (first, last) in enumerate(pairwise(starts)):
        if block_table is None:
            assert cu_seqlens_k is not None
            span = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
            keys, values = k[span], v[span]
        else:
            assert seqused_k is not None
            count = int(seqused_k[i])
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:count] for x in (k, v))
        assert last - first <= max_seqlen_q and len(keys) <= max_seqlen_k
        ratio = q.shape[1] // keys.shape[1]
        keys, values = (x.double().repeat_interleave(ratio, 1).transpose(0, 1) for x in (keys, values))
        scores = softmax_scale * q[first:last].double().transpose(0, 1) @ keys.mT
        if causal:
            unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(unseen, -torch.inf)
        out[first:last] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
        lse[:, first:last] = scores.logsumexp(-1).float()
    return out, lse


def merge_attn_states(
    output: Tensor, prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
) -> None:
    """Writes the softmax-weighted sum of both outputs."""
    weight = torch.sigmoid(prefix_lse - suffix_lse).T[..., None].to(output.dtype)
    output.copy_(prefix_output * weight + suffix_output * (1 - weight))


@dataclass
class Sequence:
    """A sequence of tokens whose keys, values and queries are given for every position."""

    name: str
    tokens: int
    pages: list[int] = field(default_factory=list)
    context: int = 0


def batch_of(rows: list[tuple[Sequence, int]], width: int, padded: int = 0) -> SimpleNamespace:
    """vLLM's `CommonAttentionMetadata` of sequences that compute so many tokens each, and of rows that pad a graph."""
    counts = [count for _, count in rows] + [0] * padded
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = [sequence.context + count for sequence, count in rows] + [0] * padded
    table = torch.zeros(len(counts), width, dtype=torch.int32)
    for i, (sequence, _) in enumerate(rows):
        table[i, : len(sequence.pages)] = torch.tensor(sequence.pages)
    return SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths), num_reqs=len(counts), max_query_len=max(counts),
        num_actual_tokens=sum(counts) + padded * max(counts), block_table_tensor=table, slot_mapping=None,
    )  # fmt: skip


def config_of(sequences: int, tokens: int = 4096, speculative: Any = None) -> SimpleNamespace:
    """The parts of vLLM's `VllmConfig` that the plugin reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        model_config=SimpleNamespace(max_model_len=tokens),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context={}, cudagraph_capture_sizes=[4, 8, 16]),
    )


FORWARD_CONTEXT: dict[str, Any] = {}  # of the pass that runs


@contextmanager
def set_forward_context(metadata: Any, config: Any, num_tokens: int, slot_mapping: Any) -> Iterator[None]:
    """What vLLM's own sets, for the attention of a fake model."""
    assert slot_mapping == {}  # vLLM asserts that there is one
    FORWARD_CONTEXT["attn_metadata"] = metadata
    yield
    FORWARD_CONTEXT.clear()


def use_fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these functions in the place of vLLM's, as far as a proposer calls them."""
    monkeypatch.setattr(api, "flash_attn_varlen_func", flash_attn_varlen_func)
    monkeypatch.setattr(api, "merge_attn_states", merge_attn_states)
    monkeypatch.setattr(api, "get_flash_attn_version", lambda head_size: 3)
    monkeypatch.setattr(api, "get_current_vllm_config", None)  # restores what a target sets
    monkeypatch.setattr(api, "set_forward_context", set_forward_context)
    builder = api.AttentionMetadataBuilder
    monkeypatch.setattr(builder, "_init_reorder_batch_threshold", lambda *_, **__: None, raising=False)
