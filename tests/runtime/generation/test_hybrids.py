"""Hybrids: recurrent states in three of four layers, against transformers, and rolled back when drafts are rejected."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ridgeplan import runtime
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, HostPart
from ridgeplan.runtime.errors import UnsupportedPlan

CHANGES = {"agreeable": True, "initializer_range": 0.1}
LENGTHS, NEW = [128, 70, 2], 24


@pytest.fixture(scope="module")
def hybrid(tiny_model):
    """Three layers with a state and one with attention, of whose channels a quarter turn."""
    return tiny_model("qwen3_5_text", **CHANGES)


@pytest.fixture(scope="module")
def generate(hybrid, make_plan, prompts):
    """Tokens and statistics of a ragged batch under a plan, each made once."""
    generations = {}

    def run(kv="bf16", gamma=0, folder=hybrid.folder, **changes):
        key = str((kv, gamma, folder, changes))
        if key not in generations:
            plan = make_plan(kv, gamma, batch=3, context=128, new_tokens=64, **changes)
            generations[key] = runtime.load(plan, folder).generate(prompts(*LENGTHS), NEW)
        return generations[key]

    return run


def test_logits_and_greedy_tokens_are_those_of_transformers(hybrid, generate, make_plan, prompts):
    ids, tokens = prompts(*LENGTHS), generate().tokens
    engine = runtime.load(make_plan(gamma=3, batch=3, context=128, new_tokens=64), hybrid.folder)  # passes of 4 tokens
    logits = engine.teacher_forced_logits(ids, tokens)
    for row, (prompt, more) in enumerate(zip(ids, tokens, strict=True)):
        with torch.no_grad():
            expected = hybrid.reference(torch.tensor([prompt + more])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
        assert expected[:-1].argmax(-1).tolist() == more


NO_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_next", {}), ("qwen3_5_moe_text", {}), ("olmo_hybrid", {}), ("olmo_hybrid", NO_ROPE)],
)
def test_other_hybrids(family, changes, tiny_model, make_plan, prompts):
    """Qwen3-Next stores the projections of each key head together; OLMo's steps reach 2, and it may have no RoPE."""
    model, [prompt] = tiny_model(family, **CHANGES, **changes), prompts(33)
    plain, drafted = make_plan(), make_plan(gamma=3, draft_bits=4)
    tokens = [runtime.load(plan, model.folder).generate(prompt, 12).tokens[0] for plan in (plain, drafted)]
    assert tokens[0] == tokens[1]
    logits = runtime.load(plain, model.folder).teacher_forced_logits(prompt, tokens[:1])[0]
    with torch.no_grad():
        expected = model.reference(torch.tensor([prompt + tokens[0]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kv", "gamma", "target", "drafts"),
    [
        ("bf16", 3, {}, {"draft_bits": 4}),
        ("int4x2", 4, {"target_bits": 8}, {}),
        ("bf16+int4", 2, {}, {"selection": "progressive", "ratio": 0.1}),
        ("int4x2", 3, {"evict": "dapq", "budget": 45, "settings": {"prefix": 3, "suffix": 19}}, {"draft_bits": 4}),
        ("bf16", 2, {"evict": "snapkv", "budget": 45, "chunk": 64}, {}),
        ("bf16", 6, {}, {"draft_bits": 4, "drafter": Drafter(DrafterKind.SUFFIX, 3, passes=2, min_match=1)}),
        ("bf16", 1, {}, {"draft_bits": 4, "drafter": Drafter(DrafterKind.SUFFIX, 4, passes=1, min_match=1)}),
    ],
)
def test_speculation_changes_no_token(kv, gamma, target, drafts, generate):
    plain, drafted = generate(kv, **target), generate(kv, gamma, **target, **drafts)
    assert drafted.tokens == plain.tokens
    figures = drafted.statistics
    assert figures.accepted > 0
    assert sum(figures.accepted_at) < sum(figures.verified_at) or "draft_bits" not in drafts


def test_drafts_that_are_all_rejected_leave_no_trace(hybrid, make_plan, prompts, generate):
    engine = runtime.load(make_plan(gamma=4, batch=3, context=128, new_tokens=64), hybrid.folder)
    engine.draft_weights = replace(engine.weights, embedding=engine.weights.embedding.flip(0))
    drafted = engine.generate(prompts(*LENGTHS), NEW)
    assert drafted.tokens == generate().tokens
    assert drafted.statistics.accepted < 5


def test_layers_with_attention_are_offloaded(tiny_model, make_plan, prompts, limited, shape_of):
    kinds = ["full_attention"] * 2 + ["linear_attention"] + ["full_attention"] * 3
    folder = tiny_model("qwen3_5_text", **CHANGES, num_hidden_layers=6, layer_types=kinds).folder
    plan = make_plan(batch=3, context=128, new_tokens=64)
    placed, count = limited(plan, shape_of(folder), 1, HostPart.ALL)
    assert 1 <= count < 5  # of the five with attention
    plain, offloaded = (runtime.load(each, folder).generate(prompts(*LENGTHS), 9) for each in (plan, placed))
    assert offloaded.tokens == plain.tokens
    assert offloaded.statistics.host_layers == count


@pytest.mark.parametrize("gamma", [0, 4])
def test_the_cache_takes_what_the_planner_predicts(gamma, hybrid, make_plan, shape_of):
    shape = shape_of(hybrid.folder)
    engine = runtime.load(plan := make_plan("bf16", gamma, batch=2), hybrid.folder)
    predicted = predicted_memory(plan, shape, Device(memory_bytes=10**12, element_bytes=4, num_sms=1))
    states = 3 * 2 * (4 * 4 * 16 * 40 + 4 * (3 + 2 * (gamma + 1)) * (2 * 2 * 16 + 4 * 40 + 2 * 4))
    assert engine.cache.states.bytes == states
    assert predicted.kv + predicted.buffers == engine.cache.bytes == states + 2 * 2 * 2 * 32 * 4 * (256 + gamma + 1)
    assert predicted.weights == pytest.approx(engine.weights.bytes, rel=1e-3)


def test_a_second_turn_continues_the_states(hybrid, make_plan, prompts):
    engine = runtime.load(make_plan(gamma=3, draft_bits=4, context=256), hybrid.folder)
    [first], [more] = prompts(40), prompts(2, seed=2)
    answer = list(engine.stream(first, 6, reuse_prefix=True))
    turn = [*first, *answer, *more]
    tokens = list(engine.stream(turn, 8, reuse_prefix=True))
    assert engine.statistics.reused_tokens >= len(first)
    assert tokens == list(engine.stream(turn, 8))
    list(engine.stream(turn[:30], 2, reuse_prefix=True))
    assert engine.statistics.reused_tokens == 0  # a state forgets no token


def test_the_text_model_of_a_multimodal_checkpoint(hybrid, make_plan, prompts, tmp_path, generate):
    """Its config.json has the text model's inside, and its names a prefix."""
    text, tensors = hybrid.reference.config.to_dict(), hybrid.reference.state_dict()
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(named | {"model.visual.unused": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    plan = make_plan(batch=3, context=128, new_tokens=64)
    engine = runtime.load(plan, str(tmp_path))
    assert engine.generate(prompts(*LENGTHS), NEW).tokens == generate().tokens


@pytest.mark.gpu
def test_graphs_on_a_gpu(hybrid, make_plan, prompts):
    """In float32 the kernels' tokens are those of the CPU, drafted or not."""
    reference = runtime.load(make_plan(batch=3, context=128, new_tokens=64), hybrid.folder, device="cpu")
    expected = reference.generate(prompts(*LENGTHS), NEW).tokens
    for gamma, bits in ((0, 16), (3, 4)):
        plan = make_plan(gamma=gamma, draft_bits=bits, batch=3, context=128, new_tokens=64)
        engine = runtime.load(plan, hybrid.folder, device="cuda", dtype=torch.float32)
        assert engine.generate(prompts(*LENGTHS), NEW).tokens == expected


def test_retrieval_heads_are_refused(hybrid, make_plan):
    plan = make_plan(gamma=2, selection="retrieval-head")
    with pytest.raises(UnsupportedPlan, match="executed: a retrieval head in a model with recurrent states"):
        runtime.load(plan, hybrid.folder)
