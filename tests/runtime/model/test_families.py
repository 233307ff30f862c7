"""Every family that the runtime executes computes what transformers computes, in float32 on a CPU."""

import pytest
import torch
import transformers
from tiny_families import HYBRIDS, LATENT_SIZES, MOE_SIZES

from ridgeplan import runtime
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.planner.recommend import recommend
from ridgeplan.roofline.catalog.families import executable_architectures
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.model_shape import sizes_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Placement
from ridgeplan.roofline.plan.support import as_loaded, missing_architecture, missing_execution
from ridgeplan.runtime.errors import ModelError, UnsupportedPlan
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.prefill import prefill

TOLERANCE = 1e-4  # of logits of about 1
PROMPT, TOKENS = 44, 50
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
    "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "sliding_window": 12,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"] * 2
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
FAMILIES = {
    "gemma3_text": {"layer_types": TYPES, "rope_parameters": ROPES, "query_pre_attn_scalar": 24},
    "gemma2": {"layer_types": TYPES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    "mistral": {},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0,
        }
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "cohere2": {"layer_types": TYPES, "logit_scale": 0.25},
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 0.5, "attention_multiplier": 0.1,
        "attention_bias": True,
    },
    "olmo2": {},
    "olmo3": {"layer_types": TYPES, "rope_parameters": ROPES},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "seed_oss": {"attention_out_bias": True},
    "ernie4_5": {"use_bias": False},
    "gemma4_text": {
        "layer_types": TYPES, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "final_logit_softcapping": 3.0,
    },
    "gemma4_unified_text": {"layer_types": TYPES, "rope_parameters": ROPES, "final_logit_softcapping": 3.0},
    "internlm3": {
        "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e4},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Factory of tiny random models of a family: their folders, and transformers' own implementation."""

    def make(family, **changes):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES[family] | changes)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            if "norm" in name:  # ones, as transformers has them, would hide norms that are mixed up
                torch.nn.init.uniform_(parameter, -0.5, 0.5)
                parameter.data += 0 if family in ("gemma2", "gemma3_text") else 1
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
        folder = str(tmp_path_factory.mktemp(family))
        model.save_pretrained(folder)
        return folder, model

    return make


PADDED = {"phi3": 96, "gemma3_text": 80, "olmo2": 112}  # heads of so many channels are held as 128


@pytest.mark.parametrize(("family", "head_dim"), [*((family, 16) for family in FAMILIES), *PADDED.items()])
@torch.inference_mode()
def test_logits_equal_transformers(family, head_dim, model_of, make_plan, prompts):
    """Of a prompt, then of a pass over two tokens, as verifications are, and of single ones."""
    folder, reference = model_of(family, head_dim=head_dim)
    engine, ids = runtime.load(make_plan(), folder, device="cpu"), torch.tensor(prompts(TOKENS)[0])
    expected = reference(ids[None]).logits[0, PROMPT - 1 :]
    cache = engine.cache
    cache.reset(1)
    steps = [prefill(engine.decoder, engine.weights, cache, 0, ids[:PROMPT], chunk_tokens=20)[None]]
    start = PROMPT
    while start < TOKENS:
        part = ids[None, start : start + (2 if start == PROMPT else 1)]
        metadata = AttentionMetadataBuilder(cache).target_metadata(part.shape[1])
        steps.append(engine.decoder.step(engine.weights, cache, part, metadata)[0])
        cache.advance(torch.tensor([part.shape[1]], dtype=torch.int32))
        start += part.shape[1]
    assert expected.std() > 0.1
    assert (torch.cat(steps) - expected).abs().max() < TOLERANCE


def test_padded_heads_run_in_every_format_and_are_priced_as_they_are_held(model_of, make_plan, prompts):
    folder, _ = model_of("phi3", head_dim=96, sliding_window=None)
    stored, ids = load_shape(folder), prompts(100)
    assert missing_architecture(stored, load_hardware("h200")) is None
    plain, drafting = (make_plan("int4x2", gamma, context=100, new_tokens=20) for gamma in (0, 3))
    engine = runtime.load(drafting, folder, device="cpu")
    assert engine.generate(ids, 20).tokens == runtime.load(plain, folder, device="cpu").generate(ids, 20).tokens
    held = engine.decoder.config.shape
    assert (stored.head_dim, held.head_dim, engine.cache.keys.shape[-1]) == (96, 128, 128)
    priced = recommend(stored, "h200", 100).shape
    assert priced == as_loaded(stored) and sizes_of(priced) == sizes_of(held)


VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14, "num_channels": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("outer", "family"), [("gemma3", "gemma3_text"), ("gemma4", "gemma4_text"), ("mistral3", "mistral")]
)
def test_the_language_model_of_a_model_of_images_is_read(outer, family, tmp_path, make_plan, prompts):
    """Its tensors have the names of where it stands in the other; those beside it are left."""
    torch.manual_seed(0)
    text = SIZES | FAMILIES[family] | {"model_type": family, "initializer_range": 0.2}
    vision = VISION | ({"model_type": "pixtral"} if outer == "mistral3" else {})
    tied = family != "mistral"
    config = transformers.AutoConfig.for_model(
        outer, text_config=text, vision_config=vision, image_token_id=0, image_token_index=0, tie_word_embeddings=tied
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    ids = [[1 + token % 127 for token in prompts(20)[0]]]
    expected = model.generate(torch.tensor(ids), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 20:]
    plan = make_plan(context=20, new_tokens=8)
    assert runtime.load(plan, str(tmp_path), device="cpu").generate(ids, 8).tokens == [expected.tolist()]


def test_no_family_is_executed_untested():
    tested_elsewhere = {"llama", "qwen2", "qwen3", *HYBRIDS, *MOE_SIZES, *LATENT_SIZES}
    assert set(FAMILIES) | tested_elsewhere >= set(executable_architectures())


WINDOW, CONTEXT, NEW = 40, 100, 50
DEVICE = Device(memory_bytes=10**12, element_bytes=4, num_sms=1, asynchronous=0)


@pytest.fixture(scope="module", params=["gemma3_text", "gemma4_text"])
def windowed(model_of, request):
    """A tiny Gemma of two windows to a layer that sees all, and its greedy continuation by transformers."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    folder, model = model_of(request.param, sliding_window=WINDOW, layer_types=kinds, num_hidden_layers=3)
    prompt = torch.randint(1, 128, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    tokens = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return folder, prompt.tolist(), tokens[0, CONTEXT:].tolist()


LOSSLESS = {
    "plain": {},
    "shadow": {"kv": "bf16+int4", "gamma": 3},
    "progressive": {"kv": "bf16+int4", "gamma": 3, "selection": "progressive", "ratio": 0.4},
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_layers_hold_their_window_alone_and_greedy_tokens_are_transformers(name, windowed, make_plan):
    folder, prompt, expected = windowed
    plan = make_plan(context=CONTEXT, new_tokens=NEW, **LOSSLESS[name])
    engine = runtime.load(plan, folder, device="cpu")
    assert engine.generate([prompt], NEW).tokens == [expected]
    everything, windows = engine.cache.stores
    gamma = plan.speculation.gamma
    assert (len(everything.keys), everything.keys.shape[3]) == (1, CONTEXT + NEW + gamma + 1)
    assert (len(windows.keys), windows.keys.shape[3]) == (2, WINDOW + 32 + gamma + 1)


def test_codes_and_evictions_leave_windows_alone(windowed, make_plan):
    folder, prompt, _ = windowed
    int8, drafting = (
        runtime.load(make_plan("int4x2" if gamma else "int8", gamma, context=CONTEXT, new_tokens=NEW), folder)
        for gamma in (0, 3)
    )
    assert drafting.generate([prompt], NEW).tokens == int8.generate([prompt], NEW).tokens
    evicting = runtime.load(make_plan(evict="snapkv", budget=64, context=CONTEXT, new_tokens=NEW), folder)
    evicting.generate([prompt], 1)
    assert [int(evicting.cache.stored(layer)[0]) for layer in range(3)] == [WINDOW, WINDOW, 64]


@pytest.mark.parametrize(("kv", "gamma"), [("bf16", 0), ("int8", 0), ("int4x2", 3)])
def test_the_cache_takes_what_is_predicted(kv, gamma, windowed, make_plan):
    folder, _, _ = windowed
    plan = make_plan(kv, gamma, context=CONTEXT, new_tokens=NEW)
    engine = runtime.load(plan, folder, device="cpu")
    predicted = predicted_memory(plan, engine.config.shape, DEVICE)
    group_bytes = 2 * 32 * 2 * 16 * 4  # keys and values of 32 tokens
    assert 0 <= predicted.kv + predicted.buffers - engine.cache.bytes <= group_bytes


def test_what_gemma_4_has_beside_its_dense_layers_is_refused(model_of, make_plan):
    """Per-layer embeddings, caches that layers share, and codes where no window hides a token."""
    shape = load_shape("google/gemma-4-E2B-it")
    assert missing_architecture(shape) == (
        "the runtime does not execute layers with a cache that layers share, per-layer embeddings yet"
    )
    shape = load_shape("google/gemma-4-31B-it")
    assert missing_architecture(shape, load_hardware("h200")) is None
    chosen = make_plan("int4x2", 3, selection="streamingllm", context=4096)
    assert missing_execution(chosen, shape) == ["selections of tokens in heads of 512 channels"]
    assert missing_execution(make_plan("int4x2", 3, context=4096), shape) == []
    folder, _ = model_of("gemma4_text", sliding_window=WINDOW)
    with pytest.raises(
        UnsupportedPlan, match="anything but plain KV in heads of several sizes within a sliding window"
    ):
        runtime.load(make_plan("int8", context=20, new_tokens=10), folder, device="cpu")
    engine = runtime.load(make_plan(context=20, new_tokens=10), folder, device="cpu")
    assert len(engine.generate([1] * 20, 10).tokens[0]) == 10
    folder, _ = model_of("gemma4_text", hidden_size_per_layer_input=8)
    with pytest.raises(ModelError, match="does not execute layers with per-layer embeddings") as error:
        runtime.load(make_plan(), folder, device="cpu")
    assert "\n" not in str(error.value)


def test_offloaded_layers_beside_windows_are_refused(windowed, make_plan):
    folder, _, _ = windowed
    plan = make_plan(context=CONTEXT, new_tokens=NEW, placement=Placement(offload=True, budget=32))
    message = "offloaded KV beside layers that hold a sliding window"
    assert message in missing_execution(plan, decoder_config(load_config(folder), folder).shape)
    with pytest.raises(UnsupportedPlan, match=message):
        runtime.load(plan, folder, device="cpu")
