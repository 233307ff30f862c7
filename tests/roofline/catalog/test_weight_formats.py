"""Checkpoints cost what they hold: bits per weight of every published format, and refusals of what is not known."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_headers import llama_8b_header

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline.catalog.config_json import shape_from_config
from ridgeplan.roofline.catalog.gguf import gguf_bits, shape_of_header
from ridgeplan.roofline.catalog.model_shape import PARTS, WeightBits, mean_bits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import draft_weight_memory, weight_memory
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import target_terms

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
# By hand: q and o are 64 x 64, k and v 64 x 32; gate, up and down 64 x 96.
ATTENTION, MLP, TABLE, VECTORS = 2 * 12_288, 2 * 18_432, 8_192, 5 * 64


def bits_of(quantization=None, **changes):
    config = {**CONFIG, **changes}
    if quantization is not None:
        config["quantization_config"] = quantization
    return shape_from_config(config, "m", "a test").weight_bits


def compressed(ignore=("lm_head",), **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": list(ignore)}


@pytest.mark.parametrize(
    "quantization, layers, head",
    [
        # 4 bits; an fp16 scale and a 4-bit zero per 128 weights
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}, 8, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, 4 + 20 / 64, 16),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, 4 + 16 / 128, 16),
        # an fp32 maximum per 64; twice quantized: 8 bits of it and an fp32 per 256 of them (QLoRA: 0.127 bits)
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, 16),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 8 / 64 + 32 / (64 * 256), 16),
        ({"load_in_8bit": True}, 8, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16_384, 16),
        ({"quant_method": "fp8"}, 8, 16),
        ({"quant_method": "fbgemm_fp8"}, 8, 16),
        (compressed(strategy="group", group_size=128), 4 + 16 / 128, 16),
        (compressed(strategy="group", group_size=32, symmetric=False), 4 + 20 / 32, 16),
        (compressed(strategy="tensor_group", group_size=16), 4.5, 16),  # NVFP4
        (compressed(num_bits=8, strategy="channel"), 8, 16),
        (compressed(num_bits=8, strategy="block", block_structure=[128, 128]), 8 + 16 / 16_384, 16),
        (compressed(ignore=(), num_bits=8, strategy="tensor"), 8, 8),
    ],
    ids=str,
)
def test_bits_per_weight_include_scales_and_zeros(quantization, layers, head):
    bits = bits_of(quantization)
    assert (bits.attention, bits.mlp, bits.embedding, bits.head) == pytest.approx((layers, layers, 16, head))
    method = quantization.get("quant_method", "bitsandbytes")
    assert bits.format == ("nvfp4" if "tensor_group" in str(quantization) else method)


@pytest.mark.parametrize(
    "quantization, name",
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "gptq"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in another layout"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, "gptq"),
        ({"quant_method": "awq", "bits": 8}, "awq of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, "awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in another layout"),
        (compressed(num_bits=6, strategy="channel"), "compressed-tensors of 6 bits"),
        (compressed(type="float", strategy="group", group_size=32), "compressed-tensors in another layout"),
        (compressed(type="float", num_bits=8, strategy="channel"), "compressed-tensors"),
        (compressed(strategy="channel") | {"format": "marlin-24"}, "compressed-tensors in another layout"),
        (compressed(strategy="channel") | {"format": "pack-quantized"}, "compressed-tensors"),
    ],
    ids=str,
)
def test_layouts_that_the_runtime_does_not_decode_have_names_of_their_own(quantization, name):
    """Those of 3, 5 and 6 bits cross words, and packed floats are no integers (runtime/model/packed_weights.py)."""
    bits = bits_of(quantization)
    assert bits.format == name
    assert bits.converted == (name == quantization["quant_method"])


@pytest.mark.parametrize("dtype, bits", [("float32", 32), ("bfloat16", 16), ("float16", 16), (None, 16)])
def test_a_checkpoint_of_one_type(dtype, bits):
    result = bits_of(torch_dtype=dtype)
    assert {getattr(result, part) for part in PARTS} == {bits}
    assert result.format == ("float32" if bits == 32 else "bf16") and not result.stored.layers
    assert bits_of(torch_dtype="bfloat16", dtype=dtype) == result  # transformers 5's name comes first


def test_experts_in_mxfp4_beside_attention_in_bf16():
    config = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    bits = bits_of({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, **config)
    assert bits == WeightBits(experts=4.25, format="mxfp4")


def test_gpt_oss_has_experts_of_4_bits_and_everything_else_in_bf16():
    """13.75 GB: 24 layers of 32 experts of 3 x 2880 x 2880; q and o of 2880 x 4096, k and v of 2880 x 512."""
    shape = load_shape("openai/gpt-oss-20b")
    experts, attention = 24 * 32 * 3 * 2880 * 2880, 24 * 2 * 2880 * (4096 + 512)
    tables, routers = 2 * 201_088 * 2880, 24 * 32 * 2880
    vectors = 24 * (2 * 2880 + 4096 + 2 * 512 + 2880 + 64) + 2880  # 64 attention sinks
    vectors += 24 * 32 * (3 * 2880 + 1)  # biases of experts and of the router
    held = experts * 4.25 / 8 + 2 * (attention + tables + routers + vectors)
    assert weight_memory(shape, shape.weight_bits.widest_bytes(2), 2) == held == pytest.approx(13.75e9, rel=1e-3)


@pytest.mark.parametrize(
    "ignored, attention, mlp",
    [
        (["model.layers.0.self_attn"], (4.5 + 16) / 2, 4.5),
        (["model.layers.1.self_attn.q_proj"], (4.5 * (24_576 - 4_096) + 16 * 4_096) / 24_576, 4.5),
        (["self_attn"], 16, 4.5),
        (["model.layers.*.mlp"], 4.5, 16),
        (["re:.*self_attn.*"], 16, 4.5),
        (["re:^model\\.layers\\..*mlp.down_proj$"], 4.5, (4.5 * 2 + 16) / 3),
        (["gate"], 4.5, 4.5),  # routers, not gate_proj
        (["visual"], 4.5, 4.5),
    ],
    ids=str,
)
def test_modules_that_are_not_quantized_keep_their_bits(ignored, attention, mlp):
    bits = bits_of(compressed(ignore=[*ignored, "lm_head"], strategy="group", group_size=32))
    assert (bits.attention, bits.mlp) == pytest.approx((attention, mlp))


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported: gptq, awq"),
        ({}, "quant_method None is not supported"),
        ("awq", "quantization_config must be an object, not 'awq'"),
        ({"quant_method": ["awq"]}, "quant_method"),
        ({"quant_method": "gptq"}, "bits must be a whole number from 2 to 8, not None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be a whole number"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "dynamic .* is not supported"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes needs load_in_4bit or load_in_8bit"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a block of weights must be two sizes"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "must be a list of up to 10000 names"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object with a group"),
        (compressed(strategy="random"), "strategy 'random' is not supported"),
        (compressed(ignore=["re:(a|b)"], strategy="tensor"), r"it ignores modules by 're:\(a.b\)'"),
        (compressed(ignore=["*"] * 17, strategy="tensor"), "it ignores 17 patterns of modules; allowed: up to 16"),
        ({**compressed(strategy="tensor"), "sparsity_config": {"format": "marlin-24"}}, "sparsity_config"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(quantization, message):
    with pytest.raises(ValueError, match=message):
        bits_of(quantization)


def test_groups_of_different_bits_are_refused():
    two = compressed(strategy="tensor")
    two["config_groups"]["group_1"] = compressed(num_bits=8, strategy="tensor")["config_groups"]["group_0"]
    with pytest.raises(ValueError, match="config_groups hold weights of 2 sizes; supported: one"):
        bits_of(two)
    two["config_groups"]["group_1"]["targets"] = ["re:.*mlp"]
    with pytest.raises(ValueError, match=r"supported: weights of targets \['Linear'\]"):
        bits_of(two)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", 16])
def test_types_that_are_not_known_are_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype .* is not supported; supported: float16, bfloat16, float32"):
        bits_of(torch_dtype=dtype)


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_gguf_types_are_those_of_the_gguf_package(kind):
    if kind.name not in ("F32", "F16") and kind not in gguf.quants._type_traits:  # which it does not decode either
        with pytest.raises(ValueError, match=f"tensor 'a' is of type {kind.name}, which is not read; read: F32, F16, "):
            gguf_bits(int(kind), "a")
        return
    weights, block_bytes = GGML_QUANT_SIZES[kind]
    assert gguf_bits(int(kind)) == 8 * block_bytes / weights


@pytest.mark.parametrize(
    ("name", "kind", "shown"), [("blk.3.ffn_up.weight", 31, "Q4_0_4_4"), ("output_norm.weight", 77, 77)]
)
def test_a_type_that_is_not_read_is_named_with_its_tensor(name, kind, shown):
    header = llama_8b_header()
    types = {**header.types, name: kind}
    with pytest.raises(
        ValueError, match=rf"^tensor '{name}' is of type {shown}, which is not read; read: F32, .*NVFP4$"
    ):
        shape_of_header(replace(header, types=types), Path("other.gguf"))


def test_a_gguf_file_costs_what_its_tensors_take(tmp_path):
    """One layer of Q4_0, Q8_0 and F16 tensors: all bytes of the data section but the vectors'."""
    path, kinds = tmp_path / "mixed.gguf", gguf.GGMLQuantizationType
    types = {"attn_q": kinds.Q8_0, "ffn_down": kinds.F16}
    sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
             "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "embedding_length": 64, "feed_forward_length": 96, "context_length": 512,
                       "attention.head_count": 4, "attention.head_count_kv": 2}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    tensors = {f"blk.0.{name}.weight": (size, types.get(name, kinds.Q4_0)) for name, size in sizes.items()}
    tensors["token_embd.weight"] = (128, 64), kinds.Q4_0
    held = 0
    for name, (size, kind) in tensors.items():
        data = gguf.quants.quantize(np.ones(size, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        held += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = load_shape(str(path))
    assert shape.weight_bits.head == shape.weight_bits.embedding == 4.5  # tied
    vectors = 3 * 64 * 2
    assert weight_memory(shape, shape.weight_bits.widest_bytes(2), 2) == pytest.approx(held + vectors)


@pytest.mark.model
def test_the_embedded_models_file_is_its_weights_and_its_vocabulary(smollm2):
    shape = load_shape(str(smollm2))
    held = weight_memory(shape, shape.weight_bits.widest_bytes(2), 2)
    assert 0.97 < held / smollm2.stat().st_size < 1


def small_shape(**bits):
    shape = shape_from_config({**CONFIG}, "m", "a test")
    return replace(shape, weight_bits=WeightBits(**bits))


def test_parts_are_stored_in_the_plans_bits_or_in_fewer_of_their_own():
    shape = small_shape(attention=4.5, head=8, embedding=32)
    others = VECTORS * 2 + TABLE * (4 + 1)
    assert weight_memory(shape, 2, 2) == ATTENTION * 4.5 / 8 + MLP * 2 + others
    assert weight_memory(shape, 0.5, 2) == (ATTENTION + MLP) * 0.5 + others
    assert draft_weight_memory(shape, 0.5) == (ATTENTION + MLP + TABLE) * 0.5
    assert draft_weight_memory(shape, 2) == ATTENTION * 4.5 / 8 + MLP * 2 + TABLE


def test_steps_read_what_is_stored():
    shape = small_shape(attention=4.5, mlp=8)
    terms = PassTerms(batch=1, queries=1, quantized_tokens=0, full_tokens=1, bits=0, group=128, splits=1,
                      weight_bytes=2, head_bytes=2, element_bytes=2)  # fmt: skip
    plain = {op.name: op.total.read_bytes for op in decode_pass(small_shape(), terms)}
    bytes_by_op = {op.name: op.total.read_bytes for op in decode_pass(shape, terms)}
    saved = {name: plain[name] - bytes_by_op[name] for name in plain if plain[name] != bytes_by_op[name]}
    projections = {"qkv projection": 2 * 8_192, "output projection": 2 * 4_096}
    mlps = {"mlp gate + up": 2 * 12_288, "mlp down": 2 * 6_144}
    expected = {name: count * (2 - 4.5 / 8) for name, count in projections.items()}
    assert saved == expected | {name: count * 1.0 for name, count in mlps.items()}


def test_experts_are_read_in_their_own_bits():
    config = {**CONFIG, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 64}
    shape = shape_from_config({**config, "quantization_config": {"quant_method": "mxfp4"}}, "m", "a test")
    terms = PassTerms(batch=1, queries=1, quantized_tokens=0, full_tokens=1, bits=0, group=128, splits=1,
                      weight_bytes=2, head_bytes=2, element_bytes=2)  # fmt: skip
    (routed,) = (op for op in decode_pass(shape, terms) if op.name == "routed experts")
    assert routed.cost.read_bytes == 4 * 18_432 * 4.25 / 8 + 64 * 2


def test_the_head_is_read_in_its_own_bits(h200_profile):
    machine, workload = Machine.of(h200_profile), Workload("m", "h200", 4096)
    for bits, expected in ((16, 2), (8.5, 8.5 / 8), (32, 4)):
        shape = small_shape(head=bits)
        strategy = strategy_of(preset("autoregressive", workload), shape, machine, 1.0)
        assert target_terms(shape, machine, strategy, 4096).head_bytes == expected


def test_full_precision_is_the_machines_own():
    bits = WeightBits(attention=4.5, embedding=32)
    assert [bits.full_bytes(part, 4) for part in ("attention", "mlp", "embedding")] == [4.5 / 8, 4, 4]
    assert (bits.widest_bytes(4), bits.widest_bytes(2), WeightBits(mlp=32).widest_bytes(2)) == (4, 2, 4)


def test_loading_converts_some_formats():
    assert WeightBits(mlp=4.5, format="gguf").as_loaded == WeightBits(format="gguf")
    kept = WeightBits(mlp=4.5, format="bitsandbytes")
    assert kept.as_loaded is kept


def test_means_are_weighted_by_elements():
    bits = mean_bits([("mlp", 100, 4), ("mlp", 300, 8), ("head", 1, 2)], "gguf")
    assert (bits.mlp, bits.head, bits.attention) == (7, 2, 16)
