"""Drafts by the target itself, against a step by step computation with the same model."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm_batches import FORWARD_CONTEXT, PAGE, Sequence, batch_of, config_of, set_forward_context, use_fake_vllm

from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.attention import CodesAttention, CodesBackend, CodesMetadataBuilder
from ridgeplan.runtime.vllm.proposer import DraftProposer, round_sizes

HEADS, KV_HEADS, HEAD_DIM, VOCAB, WIDTH, GAMMA = 4, 2, 64, 50, 6, 3


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_vllm(monkeypatch)


class Target:
    """A model of one layer in vLLM: tokens and positions to logits through the plugin's attention."""

    def __init__(self, config: Any) -> None:
        api.get_current_vllm_config = lambda: config
        generator = torch.Generator().manual_seed(3)
        self.tables = [torch.randn(VOCAB, n * HEAD_DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS)]
        self.head = torch.randn(HEADS * HEAD_DIM, VOCAB, generator=generator)
        self.impl = CodesAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS)
        config.compilation_config.static_forward_context["layer"] = SimpleNamespace(impl=self.impl)
        self.memory = torch.zeros(CodesBackend.get_kv_cache_shape(30, PAGE, KV_HEADS, HEAD_DIM), dtype=torch.int8)

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        turned = 1 + 0.3 * torch.sin(positions)[:, None]  # so that a wrong position shows
        q, k, v = (table[input_ids.long()] * turned for table in self.tables)
        parts = [x.view(len(x), -1, HEAD_DIM) for x in (q, k, v)]
        return self.impl.forward(
            None, *parts, self.memory, FORWARD_CONTEXT["attn_metadata"]["layer"], torch.empty_like(q)
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


def configured(**others: Any) -> SimpleNamespace:
    speculative = SimpleNamespace(method="custom_class", model="ridgeplan.x", num_speculative_tokens=GAMMA)
    speculative.draft_model_config = SimpleNamespace(max_model_len=2048)
    config = config_of(3, 2048, speculative)
    config.parallel_config = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    vars(config).update(others)
    return config


def test_drafts_are_what_the_target_finds_likely_in_upper_planes() -> None:
    config = configured()
    target, proposer = Target(config), DraftProposer(config)
    proposer.load_model(target)
    builder = CodesMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    texts = np.random.default_rng(0).integers(0, VOCAB, (3, 600))
    a, b, c = Sequence("a", 0, [3, 4, 5]), Sequence("b", 0, [7]), Sequence("c", 0, [9])

    def compute(rows: list[tuple[Sequence, int]], draft: bool = False) -> Tensor:
        metadata = builder.build(0, batch_of(rows, WIDTH))
        if draft:
            metadata = type(metadata)(**{**vars(metadata), "draft": True})
        tokens = np.concatenate([texts[ord(s.name) - 97, s.context : s.context + n] for s, n in rows])
        places = np.concatenate([np.arange(s.context, s.context + n) for s, n in rows])
        with set_forward_context({"layer": metadata}, config, len(tokens), {}):
            logits = target.compute_logits(target(torch.from_numpy(tokens), torch.from_numpy(places)))
        for sequence, count in rows:
            sequence.context += count
        return logits

    compute([(a, 300), (b, 120), (c, 40)])
    compute([(b, 6)])  # of which all but the last are accepted
    b.context = 125
    compute([(a, 1), (b, 1), (c, 1)])
    lengths = np.array([302, 127, 42])  # each with a token that was sampled
    assert proposer.propose([[], [], []], lengths, texts, slot_mappings=None) == [[], [], []]
    proposed = proposer.propose([[1], [1], []], lengths, texts, slot_mappings=None)
    assert isinstance(proposed, Tensor) and proposed.is_contiguous() and proposed.dtype == torch.int64
    drafts = proposed.tolist()  # b's pass the end of its page; c sampled none, and vLLM leaves its drafts
    assert [len(row) for row in drafts] == [3, 3, 3]
    assert list(proposer.rounds) == [3]
    for number, row in enumerate([a, b]):
        texts[number, row.context + 1 : row.context + 4] = drafts[number]
        likely = compute([(row, 4)], draft=True)[:3].argmax(1)  # as one step, which keeps the buffer
        assert likely.tolist() == drafts[number]


def test_vllm_asks_for_drafts_up_to_the_end() -> None:
    """It would verify zeros instead, of all sequences."""
    config = configured()
    target_config = config.speculative_config.draft_model_config
    DraftProposer(config)
    assert config.speculative_config.draft_model_config.max_model_len == 2048 + GAMMA + 1
    assert target_config.max_model_len == 2048


def test_rounds_have_the_sizes_of_graphs() -> None:
    assert round_sizes([1, 2, 4, 8, 16, 24, 32, 40], 3, 6) == [1, 2, 4, 6]
    assert round_sizes([5, 10, 20, 25], 4, 16) == [1, 2, 4, 5]
    assert round_sizes([], 3, 6) == []


def test_what_drafts_do_not_run_with() -> None:
    stages = SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=1)
    with pytest.raises(ValueError, match="allowed: one pipeline stage, one replica"):
        DraftProposer(configured(parallel_config=stages))
    config = configured()
    config.compilation_config.static_forward_context["other"] = SimpleNamespace(impl=object())
    with pytest.raises(ValueError, match=r"need its cache in all layers, not \['other'\]"):
        DraftProposer(config).load_model(None)
