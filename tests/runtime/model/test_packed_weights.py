"""Quantized checkpoints, written here as their methods define them, against the weights that they stand for."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeplan import planner, runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.support import missing_architecture
from ridgeplan.runtime import memory
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.model import packed_weights
from ridgeplan.runtime.model.linear import Mxfp4
from ridgeplan.runtime.model.packed_weights import StoredTensors

GROUP = 32
Written = tuple[dict[str, Tensor], Tensor]  # the tensors of a module, and the weight that they stand for


def words(fields: Tensor, bits: int) -> Tensor:
    """int32 [rows, n * bits / 32] of unsigned fields [rows, n], lowest first, summed up in int64."""
    per_word = 32 // bits
    shifted = fields.long().unflatten(1, (-1, per_word)) << bits * torch.arange(per_word)
    total = shifted.sum(2)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def codes_of(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], zeros of at least 1 and fp16 scales [outputs, groups]."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(2) / ((1 << bits - 1) - 1) + 1e-4).half().float()
    zeros = torch.randint((1 << bits - 1) - 1, (1 << bits - 1) + 1, scale.shape)
    return ((grouped / scale[..., None]).round() + zeros[..., None]).clamp(0, (1 << bits) - 1).flatten(1), zeros, scale


def meaning(codes: Tensor, zeros: Tensor, scale: Tensor) -> Tensor:
    return ((codes.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scale[..., None]).flatten(1)


def gptq(bits: int, stored_zero: int = 1) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        codes, zeros, scale = codes_of(weight, bits)
        parts = {
            "qweight": words(codes, bits).t(),
            "qzeros": words(zeros.t() - stored_zero, bits),
            "scales": scale.t().half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
        }
        return parts, meaning(codes, zeros, scale)

    return write


def reordered(weight: Tensor) -> Written:
    """GPTQ with activation order: neighbours belong to different groups."""
    order = torch.arange(weight.shape[1]).view(GROUP, -1).t().flatten()  # its n-th input of a group, by group
    parts, expected = gptq(4)(weight[:, order])
    back = order.argsort()
    qweight = parts["qweight"].t().contiguous()
    codes = (qweight[:, :, None] >> 4 * torch.arange(8) & 15).flatten(1)[:, back]
    parts |= {"qweight": words(codes, 4).t(), "g_idx": parts["g_idx"][back]}
    return parts, expected[:, back]


def awq(weight: Tensor) -> Written:
    """The fields of a word hold columns 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    codes, zeros, scale = codes_of(weight, 4)
    interleaved = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(columns: Tensor) -> Tensor:
        return words(columns.unflatten(1, (-1, 8))[:, :, interleaved].flatten(1), 4)

    parts = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scale.t().half()}
    return parts, meaning(codes, zeros, scale)


def compressed(bits: int, symmetric: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        codes, zeros, scale = codes_of(weight, bits)
        zeros = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scale.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.t(), bits).t()
        return parts, meaning(codes, zeros, scale.bfloat16().float())

    return write


def plain_int8(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def block_fp8(weight: Tensor) -> Written:
    """Blocks of 48 x 32: the last rows of blocks are not whole."""
    rows, columns = -(-weight.shape[0] // 48), -(-weight.shape[1] // 32)
    scale = torch.rand(rows, columns) + 0.5
    wide = scale.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(32, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def compressed_fp8_blocks(weight: Tensor) -> Written:
    parts, expected = block_fp8(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, expected


def whole_fp8(weight: Tensor) -> Written:
    codes = (weight / 0.01).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.tensor(0.01)}, codes.float() * 0.01


def config_group(
    bits: int, kind: str = "int", symmetric: bool = True, strategy: str = "group", **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": GROUP,
        **more,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"]}  # fmt: skip


METHODS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "gptq": (gptq(4), {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq-8": (gptq(8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq-v2": (gptq(4, 0), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}),
    "gptq-act-order": (reordered, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "w4a16": (compressed(4, True), config_group(4)),
    "w4a16-asymmetric": (compressed(4, False), config_group(4, symmetric=False)),
    "w8a16": (compressed(8, True), config_group(8)),
    "int8": (plain_int8, config_group(8, strategy="channel")),
    "compressed-fp8-blocks": (
        compressed_fp8_blocks,
        config_group(8, "float", strategy="block", block_structure=[48, 32]),
    ),
    "fp8-blocks": (block_fp8, {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8": (whole_fp8, {"quant_method": "fp8"}),
}


def rewritten(folder: str, to: Path, method: str) -> tuple[Path, dict[str, Tensor]]:
    """A copy of a checkpoint in a quantized format, and the weights that it stands for."""
    write, settings = METHODS[method]
    shutil.copytree(folder, to)
    torch.manual_seed(0)
    stored: dict[str, Tensor] = {}
    expected = load_file(to / "model.safetensors")
    for name, tensor in list(expected.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, expected[name] = write(tensor)
        stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return to, expected


@pytest.fixture
def packed(tiny_model: Any, tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    return lambda method: rewritten(tiny_model(intermediate_size=128).folder, tmp_path / method, method)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_what_the_checkpoint_stands_for(method: str, packed: Any, make_plan: Any) -> None:
    folder, expected = packed(method)
    weights = runtime.load(make_plan(), str(folder), device="cpu").weights
    for index, layer in enumerate(weights.layers):
        start = f"model.layers.{index}."
        for projection, names in (
            (layer.mixer.qkv, [f"self_attn.{name}_proj" for name in "qkv"]),
            (layer.mixer.output, ["self_attn.o_proj"]),
            (layer.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.mlp.down, ["mlp.down_proj"]),
        ):
            stacked = torch.cat([expected[f"{start}{name}.weight"] for name in names])
            torch.testing.assert_close(projection.weight, stacked, rtol=1e-6, atol=1e-7)


def test_experts_are_packed_one_by_one(tiny_model: Any, tmp_path: Path, make_plan: Any) -> None:
    """Routers and norms are not packed; a model of these weights has the same logits as one of their meaning."""
    folder, expected = rewritten(tiny_model("qwen3_moe").folder, tmp_path / "moe", "fp8-blocks")
    mlp = runtime.load(make_plan(), str(folder), device="cpu").weights.layers[1].mlp
    names = [f"model.layers.1.mlp.experts.4.{part}_proj.weight" for part in ("gate", "up", "down")]
    gate, up, down = (expected[name] for name in names)
    torch.testing.assert_close(mlp.gate_up[4].weight, torch.cat([gate, up]), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mlp.down[4].weight, down, rtol=1e-6, atol=1e-7)
    assert torch.equal(mlp.router, expected["model.layers.1.mlp.gate.weight"])


def test_a_language_model_inside_another_is_decoded(tiny_model: Any, tmp_path: Path, make_plan: Any) -> None:
    """As Ministral 3 is published: in fp8, beside a vision tower."""
    folder, expected = rewritten(tiny_model("mistral").folder, tmp_path / "inner", "fp8-blocks")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "mistral3", "quantization_config": inner.pop("quantization_config"), "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    weights = runtime.load(make_plan(), str(folder), device="cpu").weights
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(weights.layers[1].mlp.down.weight, expected[name], rtol=1e-6, atol=1e-7)
    assert torch.equal(weights.head.weight, expected["lm_head.weight"])


def test_mxfp4_experts_are_read_as_stored(tiny_model: Any, tmp_path: Path, make_plan: Any, prompts: Any) -> None:
    """As gpt-oss is published: both projections of all experts in blocks of 32, everything else in full precision."""
    model = tiny_model("gpt_oss")
    folder = shutil.copytree(model.folder, tmp_path / "mxfp4")
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    reference = copy.deepcopy(model.reference)
    state = reference.state_dict()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    [prompt] = prompts(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    engines = {
        bits: runtime.load(make_plan(target_bits=bits, draft_bits=min(bits, 16)), str(folder), device="cpu")
        for bits in (16, 8)
    }
    actual = engines[16].teacher_forced_logits([prompt], [[]])[0, -1]
    assert (actual - expected).abs().max() < 1e-4
    stacks = [engine.weights.layers[0].mlp.gate_up for engine in engines.values()]
    assert all(isinstance(stack.layer, Mxfp4) for stack in stacks)  # a plan's 8 bits are for what is not in 4
    shape = engines[16].decoder.config.shape
    assert stacks[0].layer.bytes * 8 == stacks[0].weight.outputs * shape.hidden * shape.weight_bits.experts
    assert (engines[8].teacher_forced_logits([prompt], [[]])[0, -1] - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_weights_become_the_plans(method: str, bits: int, packed: Any, make_plan: Any, prompts: Any) -> None:
    folder, _ = packed(method)
    engine = runtime.load(make_plan(target_bits=bits), str(folder), device="cpu")
    assert engine.weights.format.bits == bits
    assert len(engine.generate(prompts(20), 8).tokens[0]) == 8


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in another layout"),
        (config_group(4, "float", strategy="tensor_group"), "nvfp4"),
    ],
    ids=["gptq-3", "awq-gemv", "nvfp4"],
)
def test_other_layouts_are_refused_by_their_configuration(
    settings: Any, name: str, packed: Any, make_plan: Any, monkeypatch: Any
) -> None:
    folder, _ = packed("gptq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    monkeypatch.setattr("ridgeplan.runtime.loading.load_state_dict", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=f"weight format is '{name}'; supported: .* gptq of 2/4/8 bits, awq of 4"):
        runtime.load(make_plan(), str(folder), device="cpu")


def test_recommend_prices_the_weights_that_would_run(packed: Any, h200_profile: Any) -> None:
    folder, _ = packed("gptq")
    shape = load_shape(str(folder / "config.json"))
    assert missing_architecture(shape) is None
    recommendation = planner.recommend(shape, "h200", 64, new_tokens=8, profile=h200_profile, quality="exact")
    assert recommendation.predicted.memory_bytes["weights"] == 2 * shape.parameters


def test_no_more_than_a_layer_is_decoded_where_the_plan_has_codes(
    packed: Any, make_plan: Any, monkeypatch: Any
) -> None:
    """Where 4-bit weights fit but their full precision would not, plans in full precision are refused unread."""
    folder, _ = packed("gptq")
    parameters = load_shape(str(folder / "config.json")).parameters
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * parameters - 1)
    monkeypatch.setattr("ridgeplan.runtime.loading.require_memory", lambda *_: (0, 0))
    opened: list[object] = []
    monkeypatch.setattr("ridgeplan.runtime.loading.load_state_dict", lambda *given: opened.append(given))
    with pytest.raises(WorkloadError, match=r"^the weights in .* GB are free; allowed: a smaller model$"):
        runtime.load(make_plan(), str(folder), device="cpu")
    assert not opened


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda parts: parts.pop("model.layers.0.mlp.down_proj.scales"), "cannot decode model.layers.0.mlp.down_proj"),
        (lambda parts: parts.pop("model.norm.weight"), "lacks the weight model.norm.weight"),
        (
            lambda parts: parts.update({"model.embed_tokens.weight": torch.zeros(3, 4)}),
            r"model.embed_tokens.weight is \[3, 4\]; its config.json needs",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_in_one_line(spoil: Any, message: str, packed: Any, make_plan: Any) -> None:
    folder, _ = packed("awq")
    parts = load_file(folder / "model.safetensors")
    spoil(parts)
    save_file(parts, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        runtime.load(make_plan(), str(folder), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_have_the_dtype_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(StoredTensors, "_tensor", lambda self, name: torch.ones(4, dtype=torch.float16))
    monkeypatch.setattr(packed_weights, "expected_sizes", lambda *_: {})
    held = object.__new__(StoredTensors)
    object.__setattr__(held, "dtype", dtype)
    object.__setattr__(held, "shape", None)
    assert held.get("model.norm.weight").dtype is dtype
