"""Drafts by the target itself, from the upper planes of its weights and cache: QuantSpec as a proposer of vLLM.

A round's passes and choices run as one CUDA graph, of as many rows as vLLM's graphs verify. Drafts are the most likely
tokens: vLLM 0.24 takes no probabilities of a proposer class, and accepts a draft with the target's probability of it.
So output is distributed as without drafts at any temperature, with a lower acceptance than sampled drafts would have
(docs/vllm.md).

Source: QuantSpec (Tiwari et al. 2025, arXiv 2502.10424), section 4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.cuda import GROUP
from ridgeplan.kernels.kv_cache.layout import PageTable
from ridgeplan.kernels.sampling import greedy
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.attention import (
    CodesAttention,
    CodesMetadata,
    LatestRows,
    StepRows,
    buffer_slots,
    draft_count,
)
from ridgeplan.runtime.vllm.fused import fused_pass, is_fused


def round_sizes(capture_sizes: Sequence[int], gamma: int, sequences: int) -> list[int]:
    """Rows of the rounds that are captured: those of vLLM's graphs of 1 + gamma tokens per row, at most `sequences`."""
    return sorted({min(sequences, size // (1 + gamma)) for size in capture_sizes if size > gamma})


class DraftProposer:
    """vLLM's `--speculative-config` with method `custom_class` and this class as its model.

    Raises ValueError for parallelism over layers or data.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel, longest = vllm_config.parallel_config, vllm_config.model_config.max_model_len
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
            raise ValueError("ridgeplan's drafts run with tensor parallelism; allowed: one pipeline stage, one replica")
        self.config, speculative = vllm_config, vllm_config.speculative_config
        self.gamma, self.longest = draft_count(speculative), longest
        # Within gamma tokens of this length, of any sequence, vLLM would verify zeros in all of them instead of asking.
        # It is the target's own until now.
        speculative.draft_model_config = copy(speculative.draft_model_config)
        speculative.draft_model_config.max_model_len = longest + self.gamma + 1
        self.target: Any = None
        self.fused = False  # whether passes run in this package's kernels alone
        self.layers: dict[str, CodesAttention] = {}
        self.rounds: dict[int, DraftRound] = {}
        self.pool: Any = None  # the memory that the rounds' graphs share

    def load_model(self, target: Any) -> None:
        """Called by vLLM with the loaded model. Raises ValueError where its attention is not the plugin's."""
        self.target, self.fused = target, is_fused(target)
        context = self.config.compilation_config.static_forward_context
        implementations = {name: layer.impl for name, layer in context.items() if hasattr(layer, "impl")}
        others = {name for name, impl in implementations.items() if not isinstance(impl, CodesAttention)}
        if others or not implementations:
            raise ValueError(f"ridgeplan's drafts need its cache in all layers, not {sorted(others)[:1]}")
        self.layers = implementations

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> Tensor | list[list[int]]:
        """Drafts int64 [rows, gamma] of the latest pass, on the device: vLLM copies them while the scheduler takes the
        sampled tokens, and ignores those of rows that sampled nothing, as these have prompts to go on with."""
        rows = len(sampled_token_ids)
        lengths = num_tokens_no_spec[:rows]
        latest = next((impl.latest for impl in self.layers.values() if impl.latest is not None), None)
        if latest is None or not any(sampled_token_ids):
            return [[] for _ in sampled_token_ids]
        last = token_ids_cpu[np.arange(rows), lengths - 1].tolist()
        positions = [n - 1 if sampled else -1 for n, sampled in zip(lengths.tolist(), sampled_token_ids, strict=True)]
        return self._round(rows, latest).run(last, positions, latest)

    def _round(self, rows: int, latest: LatestRows) -> DraftRound:
        """The smallest captured round that holds so many rows; of more than any holds, one that is not captured."""
        capture_sizes = self.config.compilation_config.cudagraph_capture_sizes or []
        sizes = round_sizes(capture_sizes, self.gamma, self.config.scheduler_config.max_num_seqs)
        place = bisect_left(sizes, rows)
        captured = place < len(sizes)
        size = sizes[place] if captured else rows
        if size in self.rounds:
            return self.rounds[size]
        created = DraftRound(self, size, latest, captured)
        if captured or not latest.pages.is_cuda:
            self.rounds[size] = created
        return created

    def logits(self, tokens: Tensor, positions: Tensor, metadata: CodesMetadata) -> Tensor:
        """Logits [rows, vocab] of a draft's pass over tokens [rows] at positions [rows], in `pass_context`."""
        if self.fused:
            hidden = fused_pass(self.target, tokens, positions, metadata)
        else:
            hidden = self.target(input_ids=tokens, positions=positions)
        logits: Tensor = self.target.compute_logits(hidden)
        return logits

    def pass_context(self, metadata: CodesMetadata, rows: int) -> AbstractContextManager[None]:
        """Inside it a forward pass of the target reads upper planes."""
        of_layers = dict.fromkeys(self.layers, metadata)
        context: AbstractContextManager[None] = api.set_forward_context(
            of_layers, self.config, num_tokens=rows, slot_mapping={}
        )
        return context


class DraftRound:
    """A round of drafts for so many rows: on a GPU one CUDA graph, which reads and writes the tensors here."""

    def __init__(self, proposer: DraftProposer, rows: int, latest: LatestRows, captured: bool) -> None:
        self.proposer, self.rows, self.captured = proposer, rows, captured
        device = latest.pages.device
        # Last tokens, positions, pages that buffers begin with, and buffers.
        self.inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.host = torch.zeros(3, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.pages = torch.zeros(rows, latest.pages.shape[1], dtype=torch.int32, device=device)
        self.drafts = torch.zeros(rows, proposer.gamma, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, last: Sequence[int], positions: Sequence[int], latest: LatestRows) -> Tensor:
        """Drafts [rows, gamma] after the tokens `last` at `positions`, -1 for rows without any; the next round's
        overwrite them."""
        rows = len(last)
        self.host.numpy()[:, :rows] = last, positions, latest.bases[:rows]
        self.host[1, rows:] = -1
        self.inputs[:3].copy_(self.host, non_blocking=True)
        self.inputs[3, :rows].copy_(latest.buffers[:rows])
        self.pages[:rows].copy_(latest.pages[:rows])
        if self.graph is not None:
            self.graph.replay()
        else:
            self._compute()  # compiles kernels, and gives this round's drafts
            if self.captured and self.inputs.is_cuda:
                self._capture()
        return self.drafts[:rows]

    def _capture(self) -> None:
        drafts, proposer = self.drafts.clone(), self.proposer
        proposer.pool = proposer.pool or torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()
        with (
            api.graph_capture(self.inputs.device) as capturing,
            torch.cuda.graph(self.graph, pool=proposer.pool, stream=capturing.stream),
        ):
            self._compute()
        self.drafts.copy_(drafts)

    @torch.inference_mode()
    def _compute(self) -> None:
        """The passes of a round. A draft sees full pages before its buffer as INT4, and the tokens in its buffer."""
        tokens, positions, bases, buffers = self.inputs
        drafted, groups, buffers = positions >= 0, bases.int(), buffers.int()
        begins, no_page = torch.zeros_like(groups), torch.full_like(groups, -1)
        capacity = buffer_slots(self.proposer.gamma)
        groups = torch.where(drafted, groups, 0)
        for number in range(self.proposer.gamma):
            place = (positions - bases * GROUP + number).int()
            ends = torch.where(drafted, place + 1, 0)
            slots = torch.where(drafted, buffers * capacity + place, -1)
            steps = StepRows(PageTable(self.pages, buffers), begins, ends, groups)
            metadata = CodesMetadata(self.pages, buffers, slots, no_page, steps, draft=True)
            with self.proposer.pass_context(metadata, self.rows):
                # The last drafts of a sequence at the greatest length are not verified.
                places = (positions + number).clamp(0, self.proposer.longest - 1)
                tokens = greedy(self.proposer.logits(tokens.int(), places, metadata)).best
            self.drafts[:, number].copy_(tokens)
