"""The real SmolLM2-135M-Instruct in float32 on the CPU: logits, identity and acceptance on real text."""

from functools import cache

import gguf
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ridgeplan import runtime
from ridgeplan.runtime.model.gguf import PlainReader

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def real(smollm2, make_plan, long_text):
    """An engine whose weights all tests share, and the text's tokens."""
    engine = runtime.load(make_plan(), str(smollm2), device="cpu", dtype=torch.float32)
    tokens = engine.tokenizer(long_text[30_000:80_000])["input_ids"]
    return engine, tokens


@pytest.fixture(scope="module")
def generate(real, smollm2, make_plan):
    def run(kv, gamma, prompts, new_tokens, group=128, draft_bits=16, **sampling):
        context = max(map(len, prompts))
        sizes = {"context": context, "new_tokens": new_tokens, "batch": len(prompts), "group": group}
        plan = make_plan(kv, gamma, **sizes, draft_bits=draft_bits, weight_group=64)
        engine = runtime.load(plan, str(smollm2), device="cpu", dtype=torch.float32, weights=real[0].weights)
        return engine.generate(prompts, new_tokens, runtime.SamplingParams(**sampling))

    return run


def test_logits_are_those_of_transformers(real, smollm2, monkeypatch):
    engine, tokens = real
    # Transformers reads the file's header twice, and makes the table of names again for each module.
    for name, function in (("GGUFReader", PlainReader), ("get_tensor_name_map", gguf.get_tensor_name_map)):
        monkeypatch.setattr(gguf, name, cache(function))
    config = transformers.AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    with torch.device("meta"):  # without random weights
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=reference)["tensors"]
    assert reference.load_state_dict(read, strict=False, assign=True).missing_keys in ([], ["lm_head.weight"])
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens[:132]])).logits[0, 123:]
    assert (engine.teacher_forced_logits([tokens[:124]], [tokens[124:132]])[0] - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kv", "target", "gamma", "draft_bits", "lengths", "new_tokens", "flushes", "acceptance"),
    [
        # Groups of 32 tokens. 600 tokens become 679: flushes at 608, 640 and 672.
        pytest.param("int4x2", "int4x2", 4, 16, [600], 80, 3, 0.9, marks=pytest.mark.slow),
        # 120, 91 and 84 become 135, 106 and 99: a flush of each row, at 128, 96 and 96.
        ("int4x2", "int8", 7, 16, [120, 91, 84], 16, 3, 0.9),
        pytest.param("bf16+int4", "bf16", 3, 4, [120, 91, 74], 24, 3, 0.5, marks=pytest.mark.slow),
    ],
    ids=["one row", "ragged rows", "a shadow and 4-bit weights"],
)
def test_speculation_changes_nothing(
    kv, target, gamma, draft_bits, lengths, new_tokens, flushes, acceptance, generate, real
):
    prompts = [real[1][start : start + length] for start, length in zip((0, 3000, 6000), lengths, strict=False)]
    plain = generate(target, 0, prompts, new_tokens, group=32)
    drafted = generate(kv, gamma, prompts, new_tokens, group=32, draft_bits=draft_bits)
    assert drafted.tokens == plain.tokens
    assert [len(tokens) for tokens in plain.tokens] == [new_tokens] * len(prompts)
    assert drafted.statistics.flushes == flushes
    assert drafted.statistics.acceptance > acceptance
    assert len(set(plain.tokens[0])) > 10


@pytest.mark.slow
def test_int4_kv_drafts_are_accepted_at_4k(generate, real):
    statistics = generate("int4x2", 4, [real[1][:4096]], 160, temperature=1.0).statistics
    assert statistics.num_draft_tokens_verified >= 120
    assert statistics.acceptance >= 0.93
