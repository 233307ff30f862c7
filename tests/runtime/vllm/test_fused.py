"""Drafts in this package's fused kernels, against the modules of a Llama as vLLM runs them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm_batches import FORWARD_CONTEXT, PAGE, Sequence, batch_of, config_of, set_forward_context, use_fake_vllm

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.calibration import plane_parts
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.attention import CodesAttention, CodesBackend, CodesMetadataBuilder
from ridgeplan.runtime.vllm.fused import is_fused
from ridgeplan.runtime.vllm.proposer import DraftProposer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB, LAYERS, WIDTH, GAMMA = 4, 2, 64, 128, 192, 60, 2, 6, 3


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_vllm(monkeypatch)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Linear:
    """vLLM's layers return the product and a bias that is left to add."""

    def __init__(self, outputs: int, inputs: int, bias: bool = False) -> None:
        self.weight = random(outputs, inputs) * inputs**-0.5
        self.bias = random(outputs) if bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight, self.bias), None


class Coded(Linear):
    """As `CodedLinear` leaves a layer, of which drafts read the upper plane."""

    def __init__(self, outputs: int, inputs: int, bias: bool = False) -> None:
        super().__init__(outputs, inputs, bias)
        upper = Int4Weight.pack(*next(iter(plane_parts(self.weight, WeightFormat(8, 64, True)))))
        self.ridgeplan_upper, self.ridgeplan_sizes = upper.packed, (upper.group, upper.outputs)
        self.upper = upper

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return linear_quantized(x, self.upper, self.bias), None


class Norm:
    def __init__(self) -> None:
        self.weight, self.variance_epsilon = 1 + 0.1 * random(HIDDEN), 1e-5

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = functional.rms_norm(total, (HIDDEN,), self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)


class Rotary:
    is_neox_style, rotary_dim, head_size = True, HEAD_DIM, HEAD_DIM

    def __init__(self) -> None:
        angles = torch.arange(2048)[:, None] * 10000 ** -(torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)

    def __call__(self, positions: Tensor, *heads: Tensor) -> list[Tensor]:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, -1)
        turned = []
        for x in heads:
            a, b = x.unflatten(-1, (-1, HEAD_DIM)).chunk(2, -1)
            turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1))
        return turned


class Attention:
    def __init__(self, name: str, rotary: Rotary, config: Any) -> None:
        self.name, self.rotary_emb = name, rotary
        self.qkv_proj, self.o_proj = Linear(8 * HEAD_DIM, HIDDEN, bias=True), Linear(HIDDEN, HEADS * HEAD_DIM)
        shape = CodesBackend.get_kv_cache_shape(30, PAGE, KV_HEADS, HEAD_DIM)
        impl = CodesAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS)
        self.attn = SimpleNamespace(impl=impl, kv_cache=torch.zeros(shape, dtype=torch.int8))
        config.compilation_config.static_forward_context[name] = SimpleNamespace(impl=impl)

    def __call__(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], -1)
        q, k = self.rotary_emb(positions, q, k)
        parts = [part.reshape(len(x), -1, HEAD_DIM) for part in (q, k, v)]
        metadata = FORWARD_CONTEXT["attn_metadata"][self.name]
        out = torch.empty(len(x), HEADS * HEAD_DIM)
        return self.o_proj(self.attn.impl.forward(None, *parts, self.attn.kv_cache, metadata, out))[0]


class MLPModule:
    def __init__(self, gate_up: Linear) -> None:
        self.gate_up_proj, self.down_proj, self.calls = gate_up, Linear(HIDDEN, MLP), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down_proj(swiglu(self.gate_up_proj(x)[0]))[0]


class LlamaForCausalLM:
    """The modules of vLLM's class, and its forward pass."""

    def __init__(self, config: Any, gate_up: Callable[[], Linear]) -> None:
        api.get_current_vllm_config = lambda: config
        rotary, self.calls = Rotary(), 0
        layers = [
            SimpleNamespace(
                input_layernorm=Norm(), self_attn=Attention(f"layer{i}", rotary, config),
                post_attention_layernorm=Norm(), mlp=MLPModule(gate_up()),
            )
            for i in range(LAYERS)
        ]  # fmt: skip
        embedding = nn.Embedding(VOCAB, HIDDEN, _weight=random(VOCAB, HIDDEN))
        self.model = SimpleNamespace(embed_input_ids=embedding, layers=layers, norm=Norm())
        self.head = random(HIDDEN, VOCAB)

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.calls += 1
        hidden, residual = self.model.embed_input_ids(input_ids.long()), None
        for layer in self.model.layers:
            if residual is None:
                normed, residual = layer.input_layernorm(hidden), hidden
            else:
                normed, residual = layer.input_layernorm(hidden, residual)
            hidden = layer.self_attn(positions, normed)
            normed, residual = layer.post_attention_layernorm(hidden, residual)
            hidden = layer.mlp(normed)
        normed: Tensor = self.model.norm(hidden, residual)[0]
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


@torch.inference_mode()
def drafted(gate_up: Callable[[], Linear], fused: bool) -> tuple[list[list[int]], LlamaForCausalLM, list[Tensor]]:
    """Drafts after three prompts, one of which ends a page; the target, and what its open pages then hold."""
    speculative = SimpleNamespace(method="custom_class", model="ridgeplan.x", num_speculative_tokens=GAMMA)
    speculative.draft_model_config = SimpleNamespace(max_model_len=2048)
    config = config_of(3, 2048, speculative)
    config.parallel_config = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    target, proposer = LlamaForCausalLM(config, gate_up), DraftProposer(config)
    proposer.load_model(target)
    assert proposer.fused
    proposer.fused = fused
    texts = np.random.default_rng(0).integers(0, VOCAB, (3, 600))
    rows = [Sequence("a", 0, [3, 4, 5]), Sequence("b", 0, [7, 8]), Sequence("c", 0, [9])]
    builder = CodesMetadataBuilder(None, ["layer0"], config, torch.device("cpu"))
    for counts in ([300, 126, 40], [1, 1, 1]):
        metadata = builder.build(0, batch_of(list(zip(rows, counts, strict=True)), WIDTH))
        spans = [(i, np.arange(r.context, r.context + n)) for i, (r, n) in enumerate(zip(rows, counts, strict=True))]
        tokens = torch.from_numpy(np.concatenate([texts[i, span] for i, span in spans]))
        places = torch.from_numpy(np.concatenate([span for _, span in spans]))
        with set_forward_context({f"layer{i}": metadata for i in range(LAYERS)}, config, len(tokens), {}):
            target(tokens, places)
        for row, count in zip(rows, counts, strict=True):
            row.context += count
    target.calls = 0
    for layer in target.model.layers:
        layer.mlp.calls = 0
    drafts = proposer.propose([[1], [1], []], np.array([302, 128, 42]), texts, slot_mappings=None)
    impls = [layer.self_attn.attn.impl for layer in target.model.layers]
    return drafts.tolist(), target, [store[:-1] for impl in impls for store in (impl.keys, impl.values)]


@pytest.mark.parametrize("kind", ["coded", "coded, biased", "dense"])
def test_fused_passes_draft_what_modules_do(kind: str) -> None:
    """b's drafts pass the end of its page; c has none, and its open page stays as it is."""

    def gate_up() -> Linear:
        return (Linear if kind == "dense" else Coded)(2 * MLP, HIDDEN, bias="biased" in kind)

    expected, modules, held = drafted(gate_up, fused=False)
    drafts, target, stores = drafted(gate_up, fused=True)
    assert (modules.calls, target.calls) == (GAMMA, 0)
    assert [layer.mlp.calls for layer in target.model.layers] == LAYERS * [0 if kind == "coded" else GAMMA]
    assert drafts[:2] == expected[:2]
    for store, other in zip(stores, held, strict=True):
        torch.testing.assert_close(store, other, rtol=1e-4, atol=1e-4)


def test_other_models_run_as_they_are() -> None:
    target = LlamaForCausalLM(config_of(3), lambda: Linear(2 * MLP, HIDDEN))
    assert is_fused(target)
    target.model.layers[0].self_attn.rotary_emb = SimpleNamespace(is_neox_style=True, rotary_dim=32, head_size=HEAD_DIM)
    assert not is_fused(target)
    assert not is_fused(SimpleNamespace(model=target.model))
