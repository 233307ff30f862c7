"""Shapes from config.json and GGUF files: every family, and every way a file can be wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeplan.planner import recommend
from ridgeplan.roofline.catalog.model_shape import BadModelFile, ModelShape, UnknownModel, WeightBits
from ridgeplan.roofline.catalog.models import load_shape

SMALL_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
WIDE_MOE = {"num_experts_per_tok": 2}  # experts are as wide as the MLP
MOE = {**WIDE_MOE, "moe_intermediate_size": 48}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def small_shape(**changes: Any) -> ModelShape:
    names = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context")
    fields = dict(zip(names, (2, 64, 4, 2, 16, 96, 128, 512), strict=True))
    return ModelShape(**{"name": "small", "architecture": "llama", **fields, **changes})


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**SMALL_CONFIG, **changes}))
    return path


def write_gguf(
    path: Path, architecture: str = "qwen3", tied: bool = True, metadata: dict[str, int] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
        **(metadata or {}),
    }
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 5e5)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(128)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 128)
    writer.add_tensor("token_embd.weight", np.zeros((128, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float32))
    writer.add_tensor("blk.0.attn_q_norm.weight", np.zeros(16, np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((128, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- config.json


@pytest.mark.parametrize("reference", ["folder", "file"])
def test_config_from_a_folder_or_a_file(tmp_path: Path, reference: str) -> None:
    path = write_config(tmp_path)
    shape = load_shape(str(tmp_path if reference == "folder" else path))
    assert shape == small_shape(name=tmp_path.name, source=str(path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"attention_bias": True}, {"attention_bias": True}),
        ({"model_type": "mistral", "sliding_window": 64}, {"window_tokens": 64, "window_layers": 2}),
        ({"model_type": "mistral", "sliding_window": None}, {"window_tokens": None}),
        ({"model_type": "qwen2", "sliding_window": 64}, {"attention_bias": True, "window_tokens": None}),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            {"attention_bias": True, "window_tokens": 64, "window_layers": 1},
        ),
        ({"model_type": "qwen3", "tie_word_embeddings": True}, {"qk_norm": True, "tied_embeddings": True}),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0], **MOE},
            {
                "qk_norm": True,
                "experts": 8,
                "experts_per_token": 2,
                "expert_intermediate": 48,
                "dense_layers": 1,
            },
        ),
        (  # every other of 3 layers, from the first one on
            {"model_type": "gpt_oss", "num_hidden_layers": 3, "sliding_window": 64, "num_local_experts": 8, **WIDE_MOE},
            {
                "layers": 3,
                "attention_bias": True,
                "experts": 8,
                "experts_per_token": 2,
                "expert_intermediate": 96,
                "window_tokens": 64,
                "window_layers": 2,
                "head_dim": 64,
                "rope_theta": 150000.0,
            },
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, **WIDE_MOE},
            {"experts": 8, "experts_per_token": 2, "expert_intermediate": 96, "rope_theta": 1e6},
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_local_experts": 8,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
                "quantization_config": {"quant_method": "mxfp4"},
                **WIDE_MOE,
            },
            {
                "attention_bias": True,
                "experts": 8,
                "experts_per_token": 2,
                "expert_intermediate": 96,
                "window_tokens": 64,
                "window_layers": 1,
                "weight_bits": WeightBits(experts=4.25, format="mxfp4"),
                "head_dim": 64,
                "rope_theta": 150000.0,
            },
        ),
        (
            {
                "model_type": "deepseek_v3",
                "num_key_value_heads": 4,
                "n_routed_experts": 8,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
                **MOE,
                **MLA,
            },
            {
                "kv_heads": 4,
                "head_dim": 24,
                "latent_rank": 16,
                "rope_head_dim": 8,
                "nope_head_dim": 16,
                "v_head_dim": 16,
                "experts": 8,
                "experts_per_token": 2,
                "expert_intermediate": 48,
                "shared_experts_intermediate": 96,
                "dense_layers": 1,
            },
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 128,
                },
            },
            {"rope_theta": 5e5, "rope_original_context": 128, "max_context": 1024},
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 5e5,
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 512,
                }
            },
            {"rope_theta": 5e5, "rope_original_context": 512, "max_context": 2048},
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rope_theta": 1e6}),
    ],
    ids=str,
)
def test_config_families(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = load_shape(str(write_config(tmp_path, **changes)))
    family = changes.get("model_type", "llama")
    flat = replace(shape, groups=(), traits=())
    assert flat == small_shape(name=tmp_path.name, source=shape.source, architecture=family, **expected)
    assert sum(group.count for group in shape.layer_groups) == shape.layers
    sizes = [(shape.parameters, shape.active_parameters) for shape in (replace(shape, traits=()), flat)]
    assert sizes[0] == sizes[1]  # groups say in which order what the fields count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "odd", "conv_bias_size": 3}, "'odd' is not known, and conv_bias_size has no known meaning"),
        ({"model_type": "odd", "cross_attention_layers": [1]}, "'odd' is not known, and cross_attention_layers has no"),
        (
            {"model_type": "odd", "num_loops": 2, "mla_rank": 8, "attention_kind": "x"},
            "num_loops, mla_rank, attention_kind have no known meaning",
        ),
        (
            {"model_type": "odd", "hidden_act": "relu2"},
            "hidden_act 'relu2' does not say whether the MLP is gated",
        ),
        ({"model_type": "odd", "hidden_activation": "gelu"}, "hidden_activation 'gelu' does not say whether"),
        (
            {"model_type": "odd", "H_cycles": 2, "num_layers_per_stack": 2},
            "H_cycles, num_layers_per_stack have no known",
        ),
        (
            {"model_type": "odd", "kv_channels": 32, **WIDE_MOE, "num_local_experts": 4},
            "kv_channels has no known meaning",
        ),
        (
            {"model_type": "odd", "sliding_window": 64, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern must be a whole number",
        ),
        ({"model_type": "odd", "multi_query": True}, "multi_query has no known meaning"),
        ({"model_type": "odd", "cla_share_factor": 2}, "cla_share_factor has no known meaning"),
        (
            {"model_type": "odd", "block_configs": [{"attention": {"no_op": True}}]},
            "block_configs has no known meaning",
        ),
        ({"model_type": "odd", "attention_chunk_size": 64}, "attention_chunk_size has no known meaning"),
        (
            {"model_type": "odd", "attention_other_setting": {"heads": 8}},
            "attention_other_setting has no known meaning",
        ),
        ({"model_type": "odd", "use_gated_mlp": False}, "use_gated_mlp is false; allowed: gated MLPs"),
        ({"model_type": "odd", "is_encoder_decoder": True}, "is_encoder_decoder is true; allowed: models without"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true; allowed: models without an encoder"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "*-*-", "num_hidden_layers": 8},
            "hybrid_override_pattern has 4 letters; allowed: num_hidden_layers, 8",
        ),
        ({"model_type": "odd", "layer_types": ["full_attention", "conv"]}, "layer_types has 'conv'; allowed: full_"),
        ({**MOE, "num_experts": 4, "mlp_only_layers": [["a"]]}, r"mlp_only_layers has \['a'\]; allowed: 0 to 1"),
        ({**MOE, "num_experts": 4, "mlp_layer_types": ["moe_x", "dense"]}, "mlp_layer_types has 'moe_x'; allowed: den"),
        ({**MOE, "num_experts": 4, "moe_layer_freq": ["a", 1]}, "moe_layer_freq has 'a'; allowed: 0, 1"),
        ({**MOE, "num_experts": 4, "moe_layer_freq": []}, r"moe_layer_freq must be a whole number .* not \[\]"),
        ({"linear_attn_config": {"full_attn_layers": [[4]]}}, r"full_attn_layers has \[4\]; allowed: 1 to 2"),
        ({"rope_parameters": {"full_attention": "x"}}, "full_attention must be an object, not 'x'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; allowed: 2, one for each layer"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; allowed: the name of a family"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": float("nan")}, "hidden_size must be a whole number"),
        ({"num_attention_heads": 0}, "q_heads is 0; allowed: a whole number from 1"),
        ({"num_attention_heads": 10**8}, "q_heads is 100000000; allowed: a whole number from 1 to 10000"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be"),
        ({"vocab_size": "many"}, "vocab_size must be"),
        ({"rope_scaling": 7}, "rope_scaling must be an object"),
        ({"rope_scaling": {"factor": float("inf"), "original_max_position_embeddings": 9}}, "factor must be"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; allowed: a number"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed: a number from 0.001"),
        ({"tie_word_embeddings": "no"}, "tied_embeddings is 'no'; allowed: true or false"),
    ],
)
def test_bad_configs_are_one_line_naming_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_config(tmp_path, **changes)
    with pytest.raises(BadModelFile, match=message) as caught:
        load_shape(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b"\0" * 64]
)
def test_damaged_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=r"config\.json"):
        load_shape(str(path))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(json.dumps(SMALL_CONFIG)) - 1))
def test_truncated_json(tmp_path: Path, length: int) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps(SMALL_CONFIG).encode()[:length])
    with pytest.raises(BadModelFile, match=r"config\.json"):
        load_shape(str(path))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    for name in ("absent.json", "absent.gguf"):
        with pytest.raises(BadModelFile, match="No such file"):
            load_shape(str(tmp_path / name))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(BadModelFile, match=r"neither a .gguf file, a config.json nor a folder"):
        load_shape(str(tmp_path / "weights.bin"))
    with pytest.raises(UnknownModel):  # a folder without a config.json
        load_shape(str(tmp_path))


def test_a_folder_that_is_no_model_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert load_shape("qwen3-8b").name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("branch", ["main", "none", "gone", "long"])
def test_local_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = tmp_path / "hub" / "models--someone--tiny"
    for commit, layers in (("aaa", 2), ("bbb", 3)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        write_config(folder / "snapshots" / commit, num_hidden_layers=layers)
    if branch != "none":
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text({"main": "bbb\n", "gone": "ccc\n", "long": "x" * 5000}[branch])
    shape = load_shape("someone/tiny")
    assert (shape.name, shape.layers) == ("someone/tiny", 3 if branch == "main" else 2)
    with pytest.raises(UnknownModel):
        load_shape("someone/other")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert load_shape("someone/tiny") == shape


GEMMA = {  # as google/gemma-3-27b-it has it: what equals the class's defaults is left out
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_the_language_model_of_a_model_of_images(tmp_path: Path) -> None:
    """Gemma-3-27B's published file gives the catalog's shape."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA))
    shape, known = load_shape(str(path)), load_shape("google/gemma-3-27b-it")
    flat = replace(shape, name=known.name, source=known.source, groups=(), traits=known.traits, note="")
    assert shape.note == f"only the language model of {tmp_path.name} is counted, without its vision_config"
    assert flat == replace(known, groups=())
    assert [group.count for group in shape.groups] == [52, 10] and shape.group_of(5).indices[0] == 5


def test_gemmas_layers_by_type_and_by_pattern(tmp_path: Path) -> None:
    text = {**GEMMA["text_config"], "num_hidden_layers": 3}
    cases = ({"sliding_window_pattern": 2}, 2), ({"layer_types": ["sliding_attention", *["full_attention"] * 2]}, 1)
    for changes, windows in cases:
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "text_config": {**text, **changes}}))
        assert load_shape(str(tmp_path)).window_layers == windows


def test_an_unknown_family_is_read_by_its_keys_with_a_note_in_every_answer(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="odd", hidden_act="silu", router_aux_loss_coef=0.1, attn_pdrop=0.1)
    odd_keys = {"depth_multiplier": 2.0, "lambda_std_dev": 0.1, "vision_config": {"depth": 2}, "audio_config": {}}
    shape = load_shape(str(tmp_path))
    assert shape.parameters == small_shape().parameters
    assert shape.note == f"{tmp_path.name} was read by its fields; not checked against this architecture ('odd')"
    for backend in ("any", "vllm"):
        assert recommend(shape, "h200", 256, new_tokens=64, backend=backend).notes[0] == shape.note
    noted = load_shape(str(write_config(tmp_path, model_type="odd", hidden_act="silu", **odd_keys))).note
    beside = f"only the language model of {tmp_path.name} is counted, without its vision_config"
    assert noted == f"{shape.note}; not read: depth_multiplier, lambda_std_dev; {beside}"


def test_a_key_of_an_unknown_family_that_is_0_or_false_is_noted_and_needs_no_layer(tmp_path: Path) -> None:
    keys = {"norm_after": False, "num_loops": 0, "gate_logit_cap": None, "skips": []}
    note = load_shape(str(write_config(tmp_path, model_type="odd", hidden_act="silu", **keys))).note
    assert note.endswith("('odd'); not read: norm_after, num_loops")


@pytest.mark.parametrize("key", ["num_kv_heads", "n_kv_heads"])
def test_other_names_of_kv_heads(tmp_path: Path, key: str) -> None:
    shape = load_shape(str(write_config(tmp_path, model_type="odd", num_key_value_heads=None, **{key: 1})))
    assert (shape.kv_heads, shape.parameters) == (1, small_shape(kv_heads=1).parameters)


def test_a_count_of_no_experts_does_not_hide_another(tmp_path: Path) -> None:
    keys = {"model_type": "odd", **MOE, "num_local_experts": 0, "n_routed_experts": 4}
    assert load_shape(str(write_config(tmp_path, **keys))).experts == 4


def test_a_switch_that_is_off_makes_its_factor_moot(tmp_path: Path) -> None:
    shape = load_shape(str(write_config(tmp_path, model_type="odd", use_cla=False, cla_share_factor=2)))
    assert shape.parameters == small_shape().parameters


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, 2),  # as Mistral 7B v0.1 has it
        ({"use_sliding_window": False}, 0),
        ({"use_sliding_window": False, "max_window_layers": 1}, 0),
        ({"use_sliding_window": True, "max_window_layers": 1}, 1),
        ({"max_window_layers": 28, "use_sliding_window": False, "sliding_window": None}, 0),
        ({"sliding_window_pattern": 2}, 1),
        ({"sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention", "full_attention"]}, 1),
        ({"use_sliding_window": False, "max_window_layers": 28, "layer_types": ["full_attention"] * 2}, 0),
    ],
)
def test_windows_of_an_unknown_family(tmp_path: Path, keys: dict[str, Any], windows: int) -> None:
    """Keys that `layer_types` makes moot do not matter."""
    shape = load_shape(str(write_config(tmp_path, **{"model_type": "odd", "sliding_window": 64, **keys})))
    assert (shape.window_layers, shape.window_tokens) == (windows, 64 if windows else None)


@pytest.mark.parametrize("layers", [6, 12])
def test_gemma_4_as_transformers_saves_it(tmp_path: Path, layers: int) -> None:
    """Layers are named with as many digits as the last one has."""
    kinds = [*["sliding_attention"] * 5, "full_attention"] * (layers // 6)
    width = len(str(layers - 1))
    full = {f"{layer:0{width}}": {"head_dim": 64} for layer in range(5, layers, 6)}
    keys = {"model_type": "gemma4_text", "num_hidden_layers": layers, "layer_types": kinds, "head_dim": 16}
    shape = load_shape(str(write_config(tmp_path, **keys, per_layer_config=full)))
    assert [group.attention.head_dim for group in shape.layer_groups if group.attention] == [16, 64]
    same = load_shape(str(write_config(tmp_path, **keys, per_layer_config={})))  # as saved where all layers are alike
    assert [group.attention.head_dim for group in same.layer_groups if group.attention] == [16, 16]
    for head_dim in ({}, {"head_dim": 16}):  # only KV heads differ: the heads' size is not repeated
        fewer = {layer: {"num_key_value_heads": 1, **head_dim} for layer in full}
        for same_values in (False, True):
            path = write_config(tmp_path, **keys, attention_k_eq_v=same_values, per_layer_config=fewer)
            attentions = [group.attention for group in load_shape(str(path)).layer_groups if group.attention]
            sizes = [(each.head_dim, each.kv_heads, each.shares_values) for each in attentions]
            assert sizes == [(16, 2, False), (16, 1, same_values)]
    with pytest.raises(
        BadModelFile, match="per_layer_config must hold the same sizes for all layers of full attention"
    ):
        load_shape(str(write_config(tmp_path, **keys, per_layer_config={"0": {"head_dim": 64}})))


def test_phi_4_is_a_llama_with_its_matrices_joined(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="phi3")
    assert load_shape(str(tmp_path)).parameters == small_shape().parameters


# ---- GGUF


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_written_by_the_gguf_package(tmp_path: Path, tied: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    expected = small_shape(
        name="tiny",
        architecture="qwen3",
        qk_norm=True,
        rope_theta=5e5,
        tied_embeddings=tied,
        weight_bits=WeightBits(attention=32, embedding=32, head=32, format="gguf"),
        source=str(path),
    )
    assert load_shape(str(path)) == expected


def test_gguf_window_and_head_dim(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", "llama", metadata={"attention.sliding_window": 64, "attention.key_length": 8}
    )
    shape = load_shape(str(path))
    assert (shape.window_tokens, shape.window_layers, shape.head_dim) == (64, 2, 8)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma9", {}, "architecture 'gemma9' is not supported; supported: llama, qwen2"),
        ("llama", {"expert_count": 8}, "mixtures of experts"),
        ("llama", {"attention.head_count": 0}, "q_heads is 0; allowed"),
        ("llama", {"attention.head_count_kv": 3}, "q_heads is 4; allowed: a multiple of kv_heads, 3"),
        ("llama", {"block_count": 4_000_000_000}, "a whole number from 1 to 10000, not 4000000000"),
    ],
)
def test_bad_gguf_metadata(tmp_path: Path, architecture: str, metadata: dict[str, int], message: str) -> None:
    path = write_gguf(tmp_path / "bad.gguf", architecture, metadata=metadata)
    with pytest.raises(BadModelFile, match=message) as caught:
        load_shape(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 4096, b"GGUF" + b"\xff" * 200, b"GGUF\0\0\0\3" + b"\0" * 64])
def test_damaged_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=r"bad\.gguf"):
        load_shape(str(path))


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf").read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=st.floats(0, 0.99))
def test_truncated_gguf(tmp_path: Path, good_gguf: bytes, part: float) -> None:
    # The last tensor is 64 bytes at the very end; a cut within it leaves the header and every start intact.
    path = tmp_path / "cut.gguf"
    path.write_bytes(good_gguf[: int(part * (len(good_gguf) - 64))])
    with pytest.raises(BadModelFile, match=r"cut\.gguf"):
        load_shape(str(path))


@pytest.mark.model
def test_the_embedded_models_gguf_is_the_catalogs_shape(smollm2: Path) -> None:
    shape = load_shape(str(smollm2))
    catalog = load_shape("SmolLM2-135M-Instruct")
    assert replace(shape, name=catalog.name, source=catalog.source, weight_bits=WeightBits()) == catalog
