"""Files with mistakes in them raise the package's own error of one line, or are read and round-trip."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import FUZZ, assert_one_line, binary_files, json_files, mutated, raw_tokens, toml_files

from ridgeplan import planner
from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.acceptance.rows import differences
from ridgeplan.roofline.catalog.config_json import routing_of
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.hardware import BadHardwareFile, load_hardware
from ridgeplan.roofline.catalog.model_shape import BadModelFile, ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, profile_for, shipped_profiles
from ridgeplan.roofline.catalog.validation import InvalidField, build
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan, PlanError, Workload
from ridgeplan.roofline.plan.presets import preset

PLANS = [
    json.loads(preset(name, Workload("m", "h200", 4096)).to_json()) for name in ("specattn-int4", "specontext", "dapq")
]
SHAPE, LLAMA, H200 = load_shape("DeepSeek-V3"), load_shape("Llama-3.1-8B"), shipped_profiles()[0]
PROFILE = json.loads(H200.to_json())
ROW = {
    "draft": "specattn", "model": "m", "parameters": 1.5, "context": 4096, "acceptance": 0.9, "source": "measured",
    "where": "here", "ratio": 0.25,
}  # fmt: skip
HARDWARE = {
    "card": {
        "memory_bytes": 8_000_000_000, "bandwidth_bytes_per_s": 5e11, "compute_flops": 5e13, "int8_flops": 1e14,
        "l2_bytes": 4_000_000, "num_sms": 30, "host_link_bytes_per_s": 1.6e10, "element_bytes": 2, "kind": "gpu",
        "aliases": ["a", "b"], "note": "none", "compute_capability": "8.0", "sources": {"num_sms": "counted"},
    }
}  # fmt: skip
CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512,
    "kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "num_local_experts": 8, "num_experts": 8, "sliding_window": 64, "max_window_layers": 2,
    "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128}, "rope_theta": 10000.0,
    "quantization_config": {"quant_method": "fp8"}, "mlp_only_layers": [0], "attention_bias": True, "head_dim": 24,
}  # fmt: skip

BASE = {
    name: CONFIG[name]
    for name in (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size", "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    )
}  # fmt: skip
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
# Keys that describe layers one by one or hold others: of BASE's four layers, and each with what makes it count.
LAYERED: list[dict[str, Any]] = [
    {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128}},
    {"mlp_only_layers": [0]},
    {"moe_layer_freq": [0, 1, 1, 1]},
    {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16}},
    {"hybrid_override_pattern": "M*E-", **MAMBA},
    {"layers_block_type": ["mamba", "attention", "moe", "mlp"], **MAMBA},
    {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64, "head_dim": 16,
        "per_layer_config": {"1": {"num_key_value_heads": 1}, "3": {"num_key_value_heads": 1}},
        "attention_k_eq_v": True,
    },
]  # fmt: skip


@FUZZ
@given(st.sampled_from(PLANS).flatmap(json_files))
def test_plans(document: bytes) -> None:
    try:
        plan = Plan.from_json(document)
    except PlanError as error:
        assert_one_line(error)
        return
    assert Plan.from_json(plan.to_json()) == plan
    predicted = prediction_of(plan)
    assert predicted is None or all(math.isfinite(value) for value in (predicted.tpot_ms, predicted.peak_memory_bytes))


def prediction_of(plan: Plan) -> Any:
    """The prediction of a plan on an H200; None where it refuses to predict."""
    try:
        return planner.predict(plan, LLAMA, H200).best
    except PlanError as error:
        assert_one_line(error)
        return None


@FUZZ
@given(json_files(PROFILE))
def test_profiles(document: bytes) -> None:
    try:
        profile = Profile.from_json(document)
        Machine.of(profile)
    except ProfileError as error:
        assert_one_line(error)
        return
    assert Profile.from_json(profile.to_json()) == profile


@FUZZ
@given(document=toml_files(HARDWARE))
def test_hardware_files(tmp_path: Path, document: bytes) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(document)
    try:
        hardware = load_hardware(str(path))
    except BadHardwareFile as error:
        assert_one_line(error)
        return
    assert type(hardware)(**asdict(hardware)) == hardware
    try:
        machine = Machine.of(profile_for(hardware, shipped_profiles()))
    except ProfileError as error:  # no calibrated CPU
        assert hardware.kind == "cpu"
        assert_one_line(error)
        return
    assert all(np.isfinite(rates.bandwidth_utilization) for rates in machine.rates.values())
    try:
        assert math.isfinite(planner.recommend(LLAMA, str(path), 4096).predicted.best.tpot_ms)
    except planner.NothingFits as error:
        assert_one_line(error)


@FUZZ
@given(family=st.sampled_from(sorted(families())), document=json_files(CONFIG))
def test_model_configs(tmp_path: Path, family: str, document: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(document.replace(b'"deepseek_v3"', f'"{family}"'.encode()))
    check_model_file(path)


@settings(FUZZ, max_examples=3 * FUZZ.max_examples)  # of many kinds of keys
@given(family=st.sampled_from([*sorted(families()), "unknown"]), keys=st.sampled_from(LAYERED).flatmap(mutated))
def test_keys_of_layers(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(raw_tokens(json.dumps({**BASE, "model_type": family, **keys})), encoding="utf-8")
    check_model_file(path)


@pytest.mark.parametrize("keys", LAYERED, ids=lambda keys: next(iter(keys)))
def test_valid_keys_of_layers(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Fuzzing starts from files that are read."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "model_type": "llama", **keys}), encoding="utf-8")
    load_shape(str(path))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small GGUF file of about 3 kB, of which the last 1 kB is tensors."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for key in ("block_count", "attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"qwen3.{key}", 2)
    for key in ("embedding_length", "feed_forward_length", "context_length"):
        writer.add_uint32(f"qwen3.{key}", 8)
    writer.add_float32("qwen3.rope.freq_base", 5e5)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(64)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 64)
    for name, rows in (("token_embd.weight", 16), ("blk.0.attn_q.weight", 8)):
        writer.add_tensor(name, np.zeros((rows, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@FUZZ
@given(data=st.data())
def test_gguf_files(tmp_path: Path, gguf_file: bytes, data: st.DataObject) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data.draw(binary_files(gguf_file, len(gguf_file) - 768)))
    check_model_file(path)


@FUZZ
@given(keys=mutated({"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}))
def test_keys_of_routers(keys: dict[str, Any]) -> None:
    """What only the runtime reads of a config.json."""
    document = json.loads(
        raw_tokens(json.dumps({**BASE, "model_type": "deepseek_v3", **keys})).replace("9" * 5000, "9")
    )
    try:
        routing = routing_of(document)
    except ValueError as error:
        assert_one_line(error)
        return
    assert routing is not None and math.isfinite(routing.scale)


def check_model_file(path: Path) -> None:
    """The file is a bad one, or describes a model that can be counted."""
    try:
        shape = load_shape(str(path))
    except BadModelFile as error:
        assert_one_line(error)
        return
    assert ModelShape(**asdict(shape)) == shape
    assert 0 < shape.active_parameters <= 2 * shape.parameters <= 2 * 10**15


@FUZZ
@given(mutated(ROW))
def test_acceptance_rows(row: dict[str, Any]) -> None:
    row = json.loads(raw_tokens(json.dumps(row)).replace("9" * 5000, "9" * 300))
    try:
        read = AcceptanceRow.read(row)
    except PlanError as error:
        assert_one_line(error)
        return
    assert AcceptanceRow.read(asdict(read)) == read
    assert read.mean_position >= 1
    assert len(differences(read.draft)) >= 1


@FUZZ
@given(mutated(asdict(SHAPE)))
def test_shapes(fields: dict[str, Any]) -> None:
    try:
        shape = build(ModelShape, fields)
    except InvalidField as error:
        assert_one_line(error)
        return
    assert ModelShape(**asdict(shape)) == shape
