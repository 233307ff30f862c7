"""Drafts by the target itself, from the upper planes of its weights and cache: QuantSpec as a proposer of vLLM.

A round's passes and choices run as one CUDA graph. Drafts are the most likely tokens: vLLM 0.24 takes no probabilities
of a proposer class, and accepts a draft with the target's probability of it. So output is distributed as without drafts
at any temperature, with a lower acceptance than sampled drafts would have (docs/vllm.md).

Source: QuantSpec (Tiwari et al. 2025, arXiv 2502.10424), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.cuda import GROUP
from ridgeplan.kernels.kv_cache.layout import PageTable
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.attention import CodesAttention, CodesMetadata, LatestRows, StepRows


def draft_counts(tokens: Sequence[int], gamma: int) -> list[int]:
    """Drafts of sequences of so many tokens, the last of which the target has not processed.

    None right after a page was filled, as its successor has no buffer yet, and none that would fill a page: what
    becomes codes is never rejected.
    """
    inside = [(count - 1) % GROUP for count in tokens]
    return [max(0, min(gamma, GROUP - 2 - place)) if place else 0 for place in inside]


class DraftProposer:
    """vLLM's `--speculative-config` with method `custom_class` and this class as its model.

    Raises ValueError for parallelism over layers or data, and for lengths that vLLM might end amid a page.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel, longest = vllm_config.parallel_config, vllm_config.model_config.max_model_len
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
            raise ValueError("ridgeplan's drafts run with tensor parallelism; allowed: one pipeline stage, one replica")
        if longest % GROUP:
            raise ValueError(f"--max-model-len is {longest}; allowed with ridgeplan's drafts: multiples of {GROUP}")
        self.config, speculative = vllm_config, vllm_config.speculative_config
        self.gamma: int = speculative.num_speculative_tokens
        # Within gamma tokens of this length, of any sequence, vLLM would verify zeros in all of them instead of asking,
        # and they might fill a page. It is the target's own until now.
        speculative.draft_model_config = copy(speculative.draft_model_config)
        speculative.draft_model_config.max_model_len = longest + self.gamma + 1
        self.target: Any = None
        self.layers: dict[str, CodesAttention] = {}
        self.rounds: dict[int, DraftRound] = {}

    def load_model(self, target: Any) -> None:
        """Called by vLLM with the loaded model. Raises ValueError where its attention is not the plugin's."""
        self.target = target
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
    ) -> list[list[int]]:
        """Drafts of each row of the latest pass; none of rows that sampled nothing."""
        rows = len(sampled_token_ids)
        lengths = num_tokens_no_spec[:rows]
        counts = draft_counts(lengths.tolist(), self.gamma)
        counts = [count if sampled else 0 for count, sampled in zip(counts, sampled_token_ids, strict=True)]
        latest = next((impl.latest for impl in self.layers.values() if impl.latest is not None), None)
        if latest is None or not any(counts):
            return [[] for _ in counts]
        last = token_ids_cpu[np.arange(rows), lengths - 1].tolist()
        positions = [length - 1 if count else -1 for length, count in zip(lengths.tolist(), counts, strict=True)]
        if rows not in self.rounds:
            self.rounds[rows] = DraftRound(self, rows, latest)
        drafts = self.rounds[rows].run(last, positions, latest).T.tolist()
        return [row[:count] for row, count in zip(drafts, counts, strict=True)]

    def pass_context(self, metadata: CodesMetadata, rows: int) -> AbstractContextManager[None]:
        """Inside it a forward pass of the target reads upper planes."""
        of_layers = dict.fromkeys(self.layers, metadata)
        context: AbstractContextManager[None] = api.set_forward_context(
            of_layers, self.config, num_tokens=rows, slot_mapping={}
        )
        return context


class DraftRound:
    """A round of drafts for so many rows: on a GPU one CUDA graph, which reads and writes the tensors here."""

    def __init__(self, proposer: DraftProposer, rows: int, latest: LatestRows) -> None:
        self.proposer, self.rows = proposer, rows
        device = latest.pages.device
        self.inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)  # last tokens, positions, buffers
        self.pages = torch.zeros_like(latest.pages[:rows])
        self.drafts = torch.zeros(proposer.gamma, rows, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, last: Sequence[int], positions: Sequence[int], latest: LatestRows) -> Tensor:
        """Drafts [gamma, rows] on the host, after the tokens `last` at `positions`, -1 for rows without drafts."""
        pinned = self.inputs.is_cuda
        host = torch.tensor([last, positions], dtype=torch.int64, pin_memory=pinned)
        self.inputs[:2].copy_(host, non_blocking=True)
        self.inputs[2].copy_(latest.buffers[: self.rows])
        self.pages.copy_(latest.pages[: self.rows])
        if not pinned:
            self._compute()
        elif self.graph is None:
            self._compute()  # compiles kernels, and gives this round's drafts
            self._capture()
        else:
            self.graph.replay()
        return self.drafts.cpu()

    def _capture(self) -> None:
        drafts = self.drafts.clone()
        self.graph = torch.cuda.CUDAGraph()
        with api.graph_capture(self.inputs.device) as capturing, torch.cuda.graph(self.graph, stream=capturing.stream):
            self._compute()
        self.drafts.copy_(drafts)

    @torch.inference_mode()
    def _compute(self) -> None:
        """The passes of a round. A draft sees the full pages before its own as INT4, and the tokens of its own."""
        tokens, positions, buffers = self.inputs
        drafts_any, page = positions >= 0, positions.clamp_min(0) // GROUP
        buffers, groups = buffers.int(), page.int()
        begins, no_page = torch.zeros_like(groups), torch.full_like(groups, -1)
        for number in range(self.proposer.gamma):
            place = (positions.clamp_min(0) - page * GROUP + number).int()
            inside = drafts_any & (place < GROUP)
            ends = torch.where(inside, place + 1, 0)
            slots = torch.where(inside, buffers * GROUP + place, -1)
            steps = StepRows(PageTable(self.pages, buffers), begins, ends, torch.where(inside, groups, 0))
            metadata = CodesMetadata(self.pages, buffers, slots, no_page, steps, draft=True)
            with self.proposer.pass_context(metadata, self.rows):
                hidden = self.proposer.target(input_ids=tokens.int(), positions=positions.clamp_min(0) + number)
                tokens = self.proposer.target.compute_logits(hidden).argmax(-1)
            self.drafts[number].copy_(tokens)
