"""Model shapes: parameter totals as published, names and suggestions, validation."""

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.model_shape import BadModelFile, ModelShape, UnknownModel
from ridgeplan.roofline.catalog.models import list_models, load_shape
from ridgeplan.roofline.catalog.validation import InvalidField

# Element counts of the published checkpoints (safetensors index on the Hub). Exact where our count leaves
# nothing out; DeepSeek-V3 is counted without its MTP module.
TOTALS = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "gemma-3-1b-it": 999_885_952,
    "phi-4": 14_659_507_200,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "SmolLM2-135M": 134_515_008,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# With their vision tower, SigLIP of 416,866,032 parameters, and its projection: 1152 x hidden and a norm of 1152.
TOTALS_WITH_VISION = {
    "gemma-3-4b-it": 4_300_079_472,
    "gemma-3-12b-it": 12_187_325_040,
    "gemma-3-27b-it": 27_432_406_640,
}
SIGLIP, SIGLIP_WIDTH = 416_866_032, 1152
ROUNDED_TOTALS = {"DeepSeek-V3": 671e9}

# Elements of the models that transformers makes of the same configurations on the meta device: all, and those without
# the routed experts that a token does not use. Ours leave out gates of shared experts, an indexer's norm and the like.
TRANSFORMERS_TOTALS = {
    "Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 3_874_929_408),
    "Qwen3.5-9B": (8_953_803_264, 8_953_803_264),
    "Qwen3.5-27B": (26_895_998_464, 26_895_998_464),
    "Qwen3.5-35B-A3B": (34_660_610_688, 3_454_988_928),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_937_344, 3_580_073_408),
    "Kimi-Linear-48B-A3B-Instruct": (49_122_675_072, 3_484_453_248),
    "granite-4.0-h-small": (32_207_337_984, 8_803_121_664),
    "gemma-4-31B-it": (30_697_345_280, 30_697_345_280),
    "gemma-4-26B-A4B-it": (25_233_141_760, 3_822_530_560),
    "gemma-4-E2B-it": (4_628_569_344, 4_628_569_344),
    "gemma-4-E4B-it": (7_463_013_376, 7_463_013_376),
    "GLM-4.5-Air": (106_852_245_504, 13_424_123_904),
    "GLM-4.5": (352_797_814_784, 33_632_251_904),
    "GLM-4.7-Flash": (29_943_390_976, 3_896_763_136),
    "GLM-5": (743_911_199_232, 41_784_709_632),
    "MiniMax-M2": (228_689_748_992, 11_030_537_216),
    "DeepSeek-V3.2": (671_877_929_216, 38_403_807_488),
    "Kimi-K2-Instruct": (1_026_408_209_408, 32_861_477_888),
    "Qwen3.5-397B-A17B": (396_346_350_336, 17_349_040_896),
    "Olmo-Hybrid-7B": (7_430_870_688, 7_430_870_688),
    "Solar-Open-100B": (102_651_793_408, 12_054_827_008),
    "Ministral-3-8B-Base-2512": (8_489_553_920, 8_489_553_920),
    "Phi-4-mini-instruct": (3_836_021_760, 3_836_021_760),
    "SmolLM3-3B": (3_075_098_624, 3_075_098_624),
    "internlm3-8b-instruct": (8_804_241_408, 8_804_241_408),
    "ERNIE-4.5-0.3B-PT": (360_748_032, 360_748_032),
    "c4ai-command-r7b-12-2024": (8_028_033_024, 8_028_033_024),
    "granite-3.1-2b-base": (2_533_531_648, 2_533_531_648),
    "granite-4.0-micro": (3_402_836_480, 3_402_836_480),
    "OLMo-2-0425-1B": (1_484_916_736, 1_484_916_736),
    "OLMo-2-1124-13B": (13_716_198_400, 13_716_198_400),
    "Olmo-3-1025-7B": (7_298_011_136, 7_298_011_136),
    "Olmo-3-1125-32B": (32_233_522_176, 32_233_522_176),
}
# In billions, rounded as in names and on model cards: in all, and by token, with the input table or without it; None
# where that is rounded by more than what is compared.
ROUNDED_SIZES: dict[str, tuple[float, float | None]] = {
    "Qwen3-Next-80B-A3B-Instruct": (80, 3.9),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2),
    "gemma-4-26B-A4B-it": (25.2, 3.8),
    "DeepSeek-V3.2": (671, 37),
    "Kimi-K2-Instruct": (1000, 32),
    "Qwen3.5-397B-A17B": (397, 17),
    "GLM-5": (744, 40),
    "Qwen3.5-9B": (9, 9),
    "Qwen3.5-27B": (27, 27),
    "Qwen3.5-35B-A3B": (35, 3),
    "granite-4.0-h-small": (32, 9),
    "Kimi-Linear-48B-A3B-Instruct": (48, None),
    "GLM-4.5-Air": (106, None),
    "GLM-4.5": (355, 32),
    "GLM-4.7-Flash": (30, None),
    "MiniMax-M2": (230, None),
    "Solar-Open-100B": (100, None),
    "Phi-4-mini-instruct": (3.8, None),
    "SmolLM3-3B": (3.08, None),
}


@pytest.mark.parametrize("name", TRANSFORMERS_TOTALS)
def test_parameters_of_recent_models_are_those_of_transformers(name: str) -> None:
    shape, (total, by_token) = load_shape(name), TRANSFORMERS_TOTALS[name]
    assert shape.parameters == pytest.approx(total, rel=2e-5)
    assert shape.parameters - shape.idle_expert_params == pytest.approx(by_token, rel=2e-4)


@pytest.mark.parametrize("name", ROUNDED_SIZES)
def test_parameters_of_recent_models_are_near_those_in_their_names(name: str) -> None:
    shape, (total, by_token) = load_shape(name), ROUNDED_SIZES[name]
    by_token_here = shape.active_parameters, shape.active_parameters + shape.embedding_params
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert by_token is None or min(abs(here / 1e9 / by_token - 1) for here in by_token_here) < 0.03


def small_shape(**changes: Any) -> ModelShape:
    names = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context")
    fields = dict(zip(names, (2, 64, 4, 2, 16, 96, 128, 512), strict=True))
    return ModelShape(**{"name": "small", "architecture": "llama", **fields, **changes})


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert load_shape(name).parameters == TOTALS[name]


@pytest.mark.parametrize("name", TOTALS_WITH_VISION)
def test_parameters_of_a_language_model_beside_a_vision_tower(name: str) -> None:
    shape = load_shape(name)
    projection = SIGLIP_WIDTH * shape.hidden + SIGLIP_WIDTH
    assert shape.parameters == TOTALS_WITH_VISION[name] - SIGLIP - projection


@pytest.mark.parametrize("name", ROUNDED_TOTALS)
def test_parameters_are_near_the_published_ones(name: str) -> None:
    assert load_shape(name).parameters == pytest.approx(ROUNDED_TOTALS[name], rel=0.005)


def test_parameters_of_a_latent_mixture_of_experts_counted_by_hand() -> None:
    """Two layers as DeepSeek-V3's, the first one dense."""
    shape = small_shape(
        architecture="deepseek_v3",
        kv_heads=4,
        head_dim=16 + 8,
        latent_rank=16,
        q_lora_rank=8,
        nope_head_dim=16,
        rope_head_dim=8,
        v_head_dim=12,
        experts=8,
        experts_per_token=2,
        expert_intermediate=48,
        shared_experts_intermediate=40,
        dense_layers=1,
    )
    queries = 64 * 8 + 8 * (4 * 24)
    latents = 64 * (16 + 8) + 16 * (4 * (16 + 12))
    attention = queries + latents + (4 * 12) * 64
    norms = 64 + 64 + 8 + 16  # of the layer's input, the MLP's input, the low-rank queries and the latents
    dense, expert, shared, router = 3 * 64 * 96, 3 * 64 * 48, 3 * 64 * 40, 64 * 8
    total = 2 * (attention + norms) + dense + 8 * expert + shared + router + 64 + 2 * (128 * 64)
    assert shape.parameters == total
    assert shape.active_parameters == total - 6 * expert - 128 * 64
    assert (shape.score_dim, shape.value_dim, shape.kv_elements_per_token_per_layer) == (16 + 8, 16, 16 + 8)
    assert shape.cached_heads == (16 + 8) / (2 * 24)


def test_parameters_of_biases_and_head_norms_counted_by_hand() -> None:
    plain = small_shape().parameters
    # Biases of 4 query, 2 key and 2 value heads of 16; norms of one query and one key head; in 2 layers.
    assert small_shape(attention_bias=True).parameters - plain == 2 * (4 + 2 + 2) * 16
    assert small_shape(qk_norm=True).parameters - plain == 2 * (16 + 16)


@pytest.mark.parametrize(
    ("name", "published", "counts_input_table"),
    [
        ("gpt-oss-20b", 3.61e9, False),
        ("gpt-oss-120b", 5.13e9, False),
        ("DeepSeek-V3", 37e9, False),
        ("Qwen3-30B-A3B", 3.35e9, True),  # published as 3.3B; 30.5B in all and 29.9B without embeddings
        ("Qwen3-235B-A22B", 22.19e9, True),
        ("Mixtral-8x7B-v0.1", 12.88e9, True),  # published as 12.9B
        ("Mixtral-8x22B-v0.1", 39.15e9, True),
        ("DeepSeek-V2-Lite", 2.66e9, True),  # published as 2.4B without embeddings
    ],
)
def test_active_parameters_are_near_the_published_ones(name: str, published: float, counts_input_table: bool) -> None:
    shape = load_shape(name)
    active = shape.active_parameters + (shape.embedding_params if counts_input_table else 0)
    assert active == pytest.approx(published, rel=0.011)


def test_a_tied_table_is_stored_once_and_active() -> None:
    tied, untied = small_shape(tied_embeddings=True), small_shape()
    assert untied.parameters - tied.parameters == 128 * 64
    assert tied.active_parameters == tied.parameters == untied.active_parameters


@pytest.mark.parametrize("shape", list_models(), ids=lambda shape: shape.name)
def test_every_entry_is_sourced_and_found_by_all_its_names(shape: ModelShape) -> None:
    defaults = "https://github.com/huggingface/transformers (defaults of "
    assert shape.source.startswith(("https://huggingface.co/", defaults))
    assert load_shape(shape.name) == shape == load_shape(shape.name.upper())
    assert load_shape(shape.name.partition("/")[2].lower()) == shape
    assert ModelShape(**asdict(shape)) == shape
    assert shape.traits == families()[shape.architecture].traits


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama-3-70b-instruct", "meta-llama/Meta-Llama-3-70B"),
        ("Llama-2-7B-32K-Instruct", "togethercomputer/LLaMA-2-7B-32K"),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert load_shape(alias).name == name


def test_windows_and_latents_of_the_catalog() -> None:
    gpt, mistral, deepseek = (
        load_shape("gpt-oss-120b"),
        load_shape("Mistral-7B-v0.1"),
        load_shape("DeepSeek-V3"),
    )
    assert (gpt.window_tokens, gpt.window_layers, gpt.layers) == (128, 18, 36)
    assert (mistral.window_tokens, mistral.window_layers) == (4096, 32)
    assert (deepseek.kv_elements_per_token_per_layer, deepseek.score_dim, deepseek.value_dim) == (
        576,
        576,
        512,
    )
    assert (deepseek.moe_layers, deepseek.q_width) == (58, 128 * 192)
    assert load_shape("Llama-3.1-8B").kv_elements_per_token_per_layer == 2 * 8 * 128


def test_windows_of_gemma_3() -> None:
    """Every sixth layer reads everything: 10 of 62, 8 of 48, 5 of 34, 4 of 26."""
    full = {name: load_shape(f"gemma-3-{name}-it") for name in ("27b", "12b", "4b", "1b")}
    assert [shape.layers - shape.window_layers for shape in full.values()] == [10, 8, 5, 4]
    assert {shape.window_tokens for shape in full.values()} == {512, 1024}


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("Llama-3.3-70B-Instruct", 320),  # 80 layers x 2 x 8 heads x 128 x 2 bytes
        ("Qwen2.5-32B", 256),
        ("Qwen3-14B", 160),
        ("Qwen3-235B-A22B", 188),  # 94 x 2 x 4 x 128 x 2
        ("Mixtral-8x7B-v0.1", 128),
        ("phi-4", 200),  # 40 x 2 x 10 x 128 x 2
        ("gemma-3-27b-it", 496),  # 62 x 2 x 16 x 128 x 2, before the window
        ("DeepSeek-V2-Lite", 30.375),  # 27 x (512 + 64) x 2
    ],
)
def test_cached_bytes_per_token_counted_by_hand(name: str, kib: float) -> None:
    shape = load_shape(name)
    assert shape.layers * shape.kv_elements_per_token_per_layer * 2 == kib * 1024


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("meta-llama/Llama-3.1-8", "meta-llama/Llama-3.1-8B"),
        ("lama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("Qwen/Qwen3-9B", "Qwen/Qwen3-8B"),
        ("smollm-135m", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_unknown_names_suggest_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        load_shape(wrong)
    assert f"{wrong!r}" in str(caught.value) and near in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_known_or_an_unknown_model(text: str) -> None:
    try:
        assert isinstance(load_shape(f"no such {text}"), ModelShape)
    except (UnknownModel, BadModelFile) as error:
        assert str(error)


@pytest.mark.parametrize("reference", ["", "a\0b", "x" * 5000, "../x/y", "a/b/c"])
def test_hostile_names_are_unknown(reference: str) -> None:
    with pytest.raises(UnknownModel):
        load_shape(reference)


def test_import_is_light() -> None:
    code = (
        "import sys, ridgeplan.roofline.catalog.models, ridgeplan.roofline.catalog.hardware;"
        "print([m for m in ('torch', 'transformers', 'gguf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- validation


@pytest.mark.parametrize(
    "field",
    [
        "layers",
        "hidden",
        "q_heads",
        "kv_heads",
        "head_dim",
        "intermediate",
        "vocab",
        "max_context",
        "window_tokens",
        "latent_rank",
    ],
)
@pytest.mark.parametrize(
    "value",
    [0, -1, 10**12, pytest.param(10**5000, id="huge"), 2.5, 32.0, float("nan"), float("inf"), "8", True],
)
def test_bad_numbers_name_their_field(field: str, value: object) -> None:
    with pytest.raises(InvalidField, match=rf"'small': {field} is .*; allowed: a whole number from 1 to \d+") as caught:
        small_shape(**{field: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "q_heads is 4; allowed: a multiple of kv_heads, 3"),
        ({"window_layers": 1}, "window_layers is 1; allowed: 0 to 0, as window_tokens is None"),
        ({"window_tokens": 64}, "window_layers is 0; allowed: 1 to 2, as window_tokens is 64"),
        ({"window_tokens": 64, "window_layers": 3}, "window_layers is 3; allowed: 1 to 2"),
        ({"experts": 8}, "experts_per_token is 0; allowed: 1 to 8"),
        ({"experts": 8, "experts_per_token": 9}, "experts_per_token is 9; allowed: 1 to 8"),
        ({"experts": 8, "experts_per_token": 2}, "expert_intermediate is 0; allowed: 1 or more"),
        (
            {"experts": 8, "experts_per_token": 2, "expert_intermediate": 4, "dense_layers": 2},
            "dense_layers is 2; allowed: fewer than the 2 layers",
        ),
        ({"experts_per_token": 2}, "experts_per_token is 2; allowed: 0, as experts is 0"),
        ({"latent_rank": 8}, "latent_rank needs rope_head_dim"),
        ({"q_lora_rank": 8}, "q_lora_rank needs latent_rank"),
        (
            {"latent_rank": 8, "rope_head_dim": 8, "nope_head_dim": 16, "v_head_dim": 16},
            "head_dim is 16; allowed: nope_head_dim . rope_head_dim, 24",
        ),
        ({"rope_theta": float("nan")}, "rope_theta is nan; allowed: a number from 0.001 to 1e.12"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed"),
        ({"weight_bits": {"mlp": 0.5}}, "weight_bits.mlp is 0.5; allowed: a number from 1 to 64"),
        ({"tied_embeddings": 1}, "tied_embeddings is 1; allowed: true or false"),
        ({"traits": ("odd",)}, "traits has 'odd'; allowed: attention sinks"),
        ({"name": ""}, "name is ''; allowed: a text of 1 to 255 characters"),
        # 10^4 layers of 3 x 10^6 x 10^7 parameters
        ({"layers": 10**4, "hidden": 10**6, "intermediate": 10**7}, r"make 3e.17 parameters; allowed: up to 1e.15"),
        # 2 x 8 x 16 of each of 16385 layers, where 2^22 / 256 = 16384 are allowed
        (
            {"layers": 8193, "q_heads": 16, "kv_heads": 16},
            r"cache 4.19e.06 numbers per token; allowed: up to 4.19e.06",
        ),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        small_shape(**changes)
