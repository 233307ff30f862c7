"""Weights of a plan as vLLM loads them: rounded on each GPU, or cut out of a saved fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.runtime.model.linear import GatedMLP, Int8
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, LayerWeights
from ridgeplan.runtime.quantization.calibration import plane_parts
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm import weights as plugin
from ridgeplan.runtime.vllm.weights import CodedHead, CodedLinear, PlanWeights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 32
QKV = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]


class Loading:
    """vLLM's method of layers that are not quantized: it gives the layer an empty weight, which loading fills."""

    def __init__(self, *_: Any) -> None:
        pass

    def create_weights(self, layer: nn.Module, inputs: int, sizes: list[int], *_: Any, **__: Any) -> None:
        layer.register_parameter("weight", nn.Parameter(torch.empty(sum(sizes), inputs), requires_grad=False))

    def tie_weights(self, layer: Any, embedding: Any) -> Any:
        layer.weight = embedding.weight
        return layer


class LinearBase(nn.Module):
    pass


class ParallelLMHead(nn.Module):
    pass


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "UnquantizedLinearMethod", Loading)
    monkeypatch.setattr(api, "UnquantizedEmbeddingMethod", Loading)
    monkeypatch.setattr(api, "LinearBase", LinearBase)
    monkeypatch.setattr(api, "ParallelLMHead", ParallelLMHead)
    on_rank(monkeypatch, 0, 1)


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setattr(api, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(api, "get_tensor_model_parallel_world_size", lambda: ranks)


def config(bits: int = 8, **others: Any) -> PlanWeights:
    return PlanWeights.from_config({"quant_method": "ridgeplan", "bits": bits, "group": 64, **others})


def loaded(method: CodedLinear | CodedHead, weight: Tensor, sizes: list[int], inputs: int, **facts: Any) -> LinearBase:
    """A layer with this rank's `weight`, as vLLM leaves it."""
    layer = LinearBase()
    vars(layer).update(facts)
    method.create_weights(layer, weight.shape[1], sizes, inputs, sum(sizes), torch.float32, weight_loader=None)
    layer.weight.data.copy_(weight)
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "weight")
    return layer


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("bits", "hierarchical"), [(4, False), (8, True), (8, False)])
def test_a_weight_is_rounded_as_the_runtime_does(bits: int, hierarchical: bool) -> None:
    weight, x, bias = random(48, HIDDEN), random(5, HIDDEN), random(48)
    method = config(bits, hierarchical=hierarchical).get_quant_method(LinearBase(), "model.layers.0.mlp.down_proj")
    assert isinstance(method, CodedLinear)
    layer = loaded(method, weight, [48], HIDDEN)
    rounded = sum(Int4Weight.pack(*parts).dequantize() for parts in plane_parts(weight, method.config.format))
    torch.testing.assert_close(method.apply(layer, x, bias), x @ rounded.mT + bias, rtol=1e-4, atol=1e-4)
    assert float((rounded - weight).norm() / weight.norm()) < (0.15 if bits == 4 else 0.02)


def test_compilers_take_the_product_as_it_is() -> None:
    method = config().get_quant_method(LinearBase(), "x")
    assert isinstance(method, CodedLinear)
    layer, x = loaded(method, random(32, HIDDEN), [32], HIDDEN), random(3, HIDDEN)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = method.apply(layer, mode.from_tensor(x))
    assert isinstance(traced, FakeTensor)
    assert (traced.shape, traced.dtype) == ((3, 32), x.dtype) == (method.apply(layer, x).shape, x.dtype)
    assert "Tensor[] planes" in str(torch.ops.ridgeplan.linear.default._schema)


def test_drafts_read_the_upper_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(32, HIDDEN), random(3, HIDDEN)
    method = config().get_quant_method(LinearBase(), "x")
    assert isinstance(method, CodedLinear)
    layer = loaded(method, weight, [32], HIDDEN)
    monkeypatch.setattr(api, "is_forward_context_available", lambda: True)
    for draft in (False, True):
        context = SimpleNamespace(attn_metadata={"layer": SimpleNamespace(draft=draft)})
        monkeypatch.setattr(api, "get_forward_context", lambda context=context: context)
        error = float((method.apply(layer, x) - x @ weight.mT).norm() / (x @ weight.mT).norm())
        assert (error > 0.05) == draft


def saved_fit() -> DecoderWeights:
    """One layer whose codes no rounding would choose, so that it is seen to be used."""
    format = config().format

    def fit(outputs: int, inputs: int) -> Int8:
        planes = [Int4Weight.pack(*parts) for parts in plane_parts(3 * random(outputs, inputs), format)]
        return Int8(Int8Weight(*planes), None, hierarchical=True)

    mlp = GatedMLP(fit(2 * 128, HIDDEN), fit(HIDDEN, 128))
    norm = RMSNorm(random(1), 1e-5)
    layer = LayerWeights(norm, AttentionWeights(fit(sum(QKV), HIDDEN), fit(HIDDEN, QKV[0])), norm, mlp)
    return DecoderWeights(random(1), (layer,), norm, fit(192, HIDDEN))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_a_saved_fit_are_the_fit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs share two KV heads: two hold the same."""
    saved = saved_fit()
    monkeypatch.setattr(PlanWeights, "saved", lambda self, dtype: saved)
    layer: Any = saved.layers[0]
    x, narrow, wide = random(3, HIDDEN), random(3, 128), random(3, QKV[0])
    kv = max(1, KV_HEADS // ranks) * HEAD_DIM
    shard_sizes = [QKV[0] // ranks, kv, kv]
    facts = {"total_num_heads": HEADS, "total_num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
    parts: list[tuple[Tensor, ...]] = []
    reduced = {"down": torch.zeros(3, HIDDEN), "output": torch.zeros(3, HIDDEN)}
    for rank in range(ranks):
        on_rank(monkeypatch, rank, ranks)

        def product(name: str, x: Tensor, sizes: list[int], inputs: int, **facts: Any) -> Tensor:
            prefix = f"model.layers.0.{name}" if name != "lm_head" else name
            kind = ParallelLMHead if name == "lm_head" else LinearBase
            method = config(group=32).get_quant_method(kind(), prefix)
            assert method is not None
            return method.apply(loaded(method, torch.zeros(sum(sizes), x.shape[1]), sizes, inputs, **facts), x)

        qkv = product("self_attn.qkv_proj", x, shard_sizes, HIDDEN, **facts)
        gate_up = product("mlp.gate_up_proj", x, 2 * [128 // ranks], HIDDEN)
        parts.append(
            (*qkv.split(shard_sizes, -1), *gate_up.chunk(2, -1), product("lm_head", x, [192 // ranks], HIDDEN))
        )
        if ranks <= 2:  # with four, 32 of 128 inputs are no whole group of 64
            for name, full, out in (("mlp.down_proj", narrow, "down"), ("self_attn.o_proj", wide, "output")):
                piece = full.chunk(ranks, -1)[rank]
                reduced[out] += product(name, piece, [HIDDEN], full.shape[1])
    shared = max(1, ranks // KV_HEADS)
    q, k, v, gate, up, head = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    if shared > 1:
        k, v = (torch.cat(y.split(HEAD_DIM, -1)[::shared], -1) for y in (k, v))
    torch.testing.assert_close(torch.cat([q, k, v], -1), layer.mixer.qkv(x))
    torch.testing.assert_close(torch.cat([gate, up], -1), layer.mlp.gate_up(x))
    torch.testing.assert_close(head, saved.head(x))
    if ranks <= 2:
        torch.testing.assert_close(reduced["down"], layer.mlp.down(narrow), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(reduced["output"], layer.mixer.output(wide), rtol=1e-4, atol=1e-4)


def test_a_fit_of_other_sizes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanWeights, "saved", lambda self, dtype: saved_fit())
    method = config().get_quant_method(LinearBase(), "model.layers.0.mlp.down_proj")
    assert isinstance(method, CodedLinear)
    weight, x = random(HIDDEN, 192), random(2, 192)
    error = method.apply(loaded(method, weight, [HIDDEN], 192), x) - x @ weight.mT
    assert float(error.norm() / (x @ weight.mT).norm()) < 0.02


def test_where_saved_fits_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same checkpoint and format that `runtime.load` saved on a GPU."""
    asked: list[Any] = []
    monkeypatch.setattr(plugin, "model_source", lambda model: f"folder of {model}")
    monkeypatch.setattr(plugin, "weights_path", lambda *identity: asked.append(identity))
    chosen, plain = config(), config(fitted=False)
    for quantization in (chosen, plain):
        quantization.maybe_update_config("some/model", hf_config=None)
    with pytest.warns(match="rounded to nearest: no fit of them is saved; `ridgeplan run PLAN"):
        assert chosen.saved(torch.bfloat16) is None
    assert plain.saved(torch.bfloat16) is None
    assert asked == [("folder of some/model", torch.bfloat16, torch.device("cuda"), chosen.format, None)]


def test_a_tied_head_keeps_the_embedding() -> None:
    method = config().get_quant_method(ParallelLMHead(), "lm_head")
    assert isinstance(method, CodedHead)
    head, embedding = ParallelLMHead(), nn.Embedding(64, HIDDEN)
    method.create_weights(head, HIDDEN, [64], HIDDEN, 64, torch.float32)
    method.tie_weights(head, embedding)
    method.process_weights_after_loading(head)
    assert head.weight is embedding.weight
    x = random(2, HIDDEN)
    torch.testing.assert_close(method.apply(head, x), x @ embedding.weight.mT, rtol=0.05, atol=0.5)


def test_what_becomes_codes() -> None:
    assert config(4).get_quant_method(ParallelLMHead(), "lm_head") is None
    assert config(8).get_quant_method(nn.Linear(2, 2), "other") is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bits": 5}, "bits 5, group 128"),
        ({"bits": 8, "group": 100}, "group 100"),
        ({"bits": 4, "hierarchical": True}, "hierarchical True, fitted True; allowed: .* true only with 8 bits"),
        ({"bits": 8, "fitted": "false"}, "fitted 'false'; allowed: .* true or false"),
        ({"bits": 8, "planes": 2}, r"quantization_config has \['planes'\]"),
    ],
)
def test_a_configuration_that_there_is_not_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PlanWeights.from_config({"quant_method": "ridgeplan", **wrong})


def test_shards_that_split_groups_are_refused() -> None:
    method = config().get_quant_method(LinearBase(), "model.layers.3.mlp.down_proj")
    assert isinstance(method, CodedLinear)
    with pytest.raises(ValueError, match="down_proj has 96 of 192 inputs per GPU; allowed: a multiple of its groups"):
        method.create_weights(LinearBase(), 96, [HIDDEN], 192, HIDDEN, torch.float32)
