"""Configurations of transformers become decoders: shapes as the roofline reads them, windows, rotary frequencies."""

import dataclasses
import json
import math

import pytest
import torch
import transformers

from ridgeplan.roofline.catalog.families import executable_architectures, families
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.support import as_loaded
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import DecoderConfig
from ridgeplan.validate.random_model import llama_like_shape


@pytest.mark.parametrize("family", executable_architectures())
def test_the_shape_is_the_one_that_the_planner_reads(family, tiny_model):
    folder = tiny_model(family, num_hidden_layers=4, tie_word_embeddings=family == "qwen2").folder
    shape, expected = decoder_config(load_config(folder), folder).shape, as_loaded(load_shape(folder))
    named = {"name": shape.name, "source": shape.source, "architecture": families()[family].hub_type or family}
    assert shape == dataclasses.replace(expected, **named)
    kv_heads = 4 if shape.is_mla else 2
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.vocab) == (4, 4, kv_heads, 128)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 24}, (24, 24, 24)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, (None, 24, 24)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 1}, (None, None, None)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (24, None, 24),
        ),
    ],
)
def test_each_layer_has_its_window(family, changes, windows):
    hub = transformers.AutoConfig.for_model(family, num_hidden_layers=3, **changes)
    assert decoder_config(hub, "model").windows == windows


def test_kimi_k2_is_read_without_its_code(tmp_path):
    """YaRN of factor 32 with `mscale_all_dim` 1 scales scores by (1 + 0.1 ln 32)^2, and cosines by 1."""
    yarn = {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    }
    published = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": 50000.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "max_position_embeddings": 131072,
        "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_routed_experts": 384, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = decoder_config(load_config(str(tmp_path)), "model")
    assert config.score_scale == pytest.approx((1 + 0.1 * math.log(32)) ** 2)
    assert (config.rotary_scale, config.rotary_frequencies[-1]) == (1.0, pytest.approx(50000 ** (-62 / 64) / 32))
    assert (config.shape.experts, config.routing.scale, config.routing.sigmoid) == (384, 2.827, True)


def test_plain_rotary_frequencies_are_powers_of_theta():
    hub = transformers.LlamaConfig(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = decoder_config(hub, "model")
    assert config.rotary_frequencies == pytest.approx([5e5 ** (-2 * i / 8) for i in range(4)], rel=1e-6)
    assert config.rotary_scale == 1.0
    assert DecoderConfig.plain(config.shape).rotary_frequencies == config.rotary_frequencies


def test_a_decoder_without_a_checkpoint_attends_to_everything():
    config = DecoderConfig.plain(llama_like_shape(3, 64, 96, 4, 2, 32))
    assert config.windows == (None, None, None)
    assert len(config.rotary_frequencies) == 16


def test_yarn_stretches_the_limit_and_scales_cosines():
    hub = transformers.LlamaConfig(max_position_embeddings=1000)
    for factor, limit, scale in ((1.0, 1000, 1.0), (1.5, 1500, 1.0405465), (4.0, 4000, 1.1386294)):
        config = decoder_config(hub, "model", factor)
        assert config.shape.max_context == limit
        assert config.rotary_scale == pytest.approx(scale)  # 0.1 ln(factor) + 1 (YaRN, equation 22)
    assert hub.rope_parameters["rope_type"] == "default"  # the configuration itself stays as it was


def test_yarn_of_qwen3_stretches_what_it_was_trained_on():
    """32,768 tokens of its 40,960, as its model card has it; transformers computes the same frequencies from that."""
    hub = transformers.Qwen3Config(max_position_embeddings=40_960)
    named = transformers.Qwen3Config(
        max_position_embeddings=40_960,
        rope_parameters=hub.rope_parameters
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    )
    stretched = decoder_config(hub, "model", 4.0)
    assert stretched.rotary_frequencies == pytest.approx(decoder_config(named, "model").rotary_frequencies, rel=1e-6)
    assert stretched.rotary_frequencies != decoder_config(hub, "model").rotary_frequencies


def test_weights_that_the_runtime_does_not_load_are_refused():
    hub = transformers.LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ModelError, match="the model's weight format is 'bitsandbytes'; supported: bf16, float32, gguf"):
        decoder_config(hub, "model")


def test_what_the_decoder_does_not_compute_is_refused():
    def refused(message, family="llama", **changes):
        with pytest.raises(ModelError, match=message) as error:
            decoder_config(transformers.AutoConfig.for_model(family, **changes), "model")
        assert "\n" not in str(error.value)

    refused("hidden_act is 'gelu'; supported: silu", hidden_act="gelu")
    executed = ", ".join(executable_architectures())
    refused(f"model_type is 'gpt_neox'; supported: {executed}", family="gpt_neox", rotary_pct=1.0)
    refused("model_type is 'jamba'", family="jamba")
    hybrid = {"family": "qwen3_5_text", "num_hidden_layers": 4}
    refused("hidden_act with recurrent states is 'gelu_pytorch_tanh'", hidden_act="gelu_pytorch_tanh", **hybrid)
    refused("convolution's width is 5; supported: 1, 2, 3, 4", linear_conv_kernel_dim=5, **hybrid)
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    refused("rope_type is 'longrope'", rope_parameters={"rope_theta": 1e4, "factor": 2.0, **longrope})
    refused("cannot load the model model: .*vocab_size must be a whole number", vocab_size=10**10)


def test_yarn_on_an_already_scaled_model_is_refused():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    hub = transformers.LlamaConfig(rope_parameters=rope)
    with pytest.raises(ModelError, match=r"yarn_factor is 2\.0, but the model's own rope_type is 'linear'; allowed: 1"):
        decoder_config(hub, "model", 2.0)


def test_scaled_rotary_frequencies_are_transformers(tiny_model):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    model = tiny_model(rope_parameters=rope)
    config = decoder_config(load_config(model.folder), model.folder)
    embedding = model.reference.model.rotary_emb
    assert torch.tensor(config.rotary_frequencies).equal(embedding.inv_freq)
    assert config.rotary_scale == pytest.approx(embedding.attention_scaling)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": "x"},
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": -1.0},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": float("inf")},
        {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
    ],
)
def test_rotary_embeddings_that_cannot_be_computed_are_refused(rope):
    hub = transformers.LlamaConfig()
    hub.rope_parameters = {"rope_theta": 1e4, **rope}
    with pytest.raises(ModelError, match="the model's rope_parameters are") as error:
        decoder_config(hub, "model")
    assert "\n" not in str(error.value)
