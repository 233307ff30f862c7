"""Mixtures of experts against transformers, in float32 and in the plan space."""

import pytest
import torch
from tiny_families import MOE_SIZES

from ridgeplan import runtime
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.runtime.model.experts import ListedExperts, RoutedMLP, StackedExperts, joined
from ridgeplan.runtime.model.linear import Dense, Int4
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization import calibration
from ridgeplan.runtime.quantization.gptq import quantize_weight

NEW = 8


@pytest.fixture(scope="module")
def reference(tiny_model, prompts):
    """A model's folder, a prompt, its greedy continuation, and the logits before each of its tokens and after it."""
    [prompt] = prompts(70)

    def make(family):
        model, tokens = tiny_model(family), list(prompt)
        for _ in range(NEW + 1):
            with torch.inference_mode():
                logits = model.reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 :]
            tokens.append(int(logits[-1].argmax()))
        return model.folder, prompt, tokens[len(prompt) : -1], logits

    return make


@pytest.mark.parametrize("family", MOE_SIZES)
def test_logits_and_greedy_tokens_equal_transformers(family, reference, make_plan):
    folder, prompt, tokens, logits = reference(family)
    engine = runtime.load(make_plan(), folder)
    assert isinstance(engine.weights.layers[-1].mlp, RoutedMLP)
    assert (engine.teacher_forced_logits([prompt], [tokens])[0] - logits).abs().max() < 1e-4
    assert engine.generate([prompt], NEW).tokens == [tokens]


@pytest.mark.parametrize(
    "changes",
    [
        {"kv": "bf16+int4", "gamma": 3, "draft_bits": 4},
        {"gamma": 2, "draft_bits": 4, "selection": "streamingllm"},
        {"gamma": 2, "draft_bits": 4, "evict": "snapkv", "budget": 128},
    ],
    ids=["quantspec", "streamingllm", "snapkv"],
)
def test_drafts_of_4_bit_experts_change_nothing(changes, reference, make_plan):
    folder, prompt, tokens, _ = reference("qwen3_moe")
    engine = runtime.load(make_plan(**changes), folder)
    assert engine.generate([prompt], NEW).tokens == [tokens]
    routed, drafts = engine.weights.layers[0].mlp, engine.draft_weights.layers[0].mlp
    assert drafts.router is routed.router  # drafts choose as the target does
    assert isinstance(drafts.gate_up, ListedExperts)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_weights_take_what_is_predicted(bits, reference, make_plan):
    folder, prompt, _, _ = reference("mixtral")
    plan = make_plan("int8", target_bits=bits)
    engine = runtime.load(plan, folder)
    device = Device(memory_bytes=10**12, element_bytes=4, num_sms=1, asynchronous=0)
    assert engine.weights.bytes == predicted_memory(plan, engine.config.shape, device).weights
    assert len(engine.generate([prompt], NEW).tokens[0]) == NEW
    again = runtime.load(plan, folder)  # quantized weights were saved, and are read back
    pairs = zip(engine.weights.tensors(), again.weights.tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_upper_planes_of_experts_draft_in_the_same_memory(reference, make_plan):
    folder, prompt, _, _ = reference("qwen3_moe")
    plain = runtime.load(make_plan(target_bits=8), folder)
    engine = runtime.load(make_plan(gamma=3, target_bits=8, draft_bits=4), folder)
    mlp, drafts = engine.weights.layers[0].mlp, engine.draft_weights.layers[0].mlp
    assert drafts.down[3].weight.packed.data_ptr() == mlp.down[3].weight.upper.packed.data_ptr()
    assert len(engine.generate([prompt], NEW).tokens[0]) == len(plain.generate([prompt], NEW).tokens[0])


def test_an_expert_that_few_tokens_reach_is_rounded_to_nearest():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(calibration.MIN_TOKENS, 64, generator=torch.Generator().manual_seed(1)) + 3
    target = WeightFormat(4, 32)

    def fitted(tokens):
        recorder = calibration._recorder(Dense(weight), full=True)
        recorder.record(rows[:tokens])
        assert recorder.tokens == tokens
        return calibration._quantized(recorder, target)(torch.eye(64))

    nearest = calibration.quantized_linear(Dense(weight), target)(torch.eye(64))
    assert torch.equal(fitted(calibration.MIN_TOKENS - 1), nearest)
    assert not torch.equal(fitted(calibration.MIN_TOKENS), nearest)


def test_stacks_of_codes_read_as_their_experts_do():
    """The layout of GPUs, whose stacks the kernels take: experts that were quantized one by one, in one weight."""
    dense = StackedExperts.of(torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)))
    parts = [quantize_weight(dense[expert].weight, 32) for expert in range(3)]
    listed = [Int4(Int4Weight.pack(*each)) for each in parts]
    stack = joined(iter(listed))
    assert isinstance(stack, StackedExperts) and stack.weight.outputs == 3 * 32
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for expert, layer in enumerate(listed):
        assert torch.equal(stack[expert](x), layer(x))
