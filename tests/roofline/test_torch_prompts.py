"""What prompts compute in plain torch is priced by the operations that torch dispatches, counted here on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeplan.kernels.state import DeltaVectors, delta_chunks
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.render.text import prompt_notes
from ridgeplan.roofline.catalog.layers import DELTA_RULE, Attention, State
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.execution import HELD_ATTENTION_SHARE
from ridgeplan.roofline.passes import SINKS_IN_FLASH, STATES_IN_KERNELS
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.torch_prompts import PROMPT_STATES_SHARE, softmax_in_torch, states_in_torch
from ridgeplan.runtime.model.prefill_layer import Softmax, attend_in_place


class Counter(TorchDispatchMode):
    """Operations that launch something, and the bytes of their operands and outputs; no views, no empty tensors."""

    def __init__(self):
        super().__init__()
        self.launches = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not views and func._schema.name not in ("aten::_unsafe_view", "aten::empty_like"):
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.launches += 1
            self.moved += sum(each.numel() * each.element_size() for each in tensors)
        return out


@pytest.mark.parametrize("tokens", [128, 512])
def test_states_move_what_torch_moves(tokens):
    state = State(rule=DELTA_RULE, key_heads=2, value_heads=8, key_dim=32, value_dim=64)
    inputs = state.channels + 2 * state.value_heads
    projected, earlier = torch.randn(tokens, inputs).bfloat16(), torch.zeros(3, inputs).bfloat16()
    vectors = DeltaVectors(torch.randn(state.channels, 4).bfloat16(), torch.randn(8), torch.randn(8), 2, 32)
    with Counter() as counted:
        delta_chunks(projected, earlier, torch.zeros(8, 32, 64), vectors)
    op = states_in_torch(state, 1, tokens)
    assert op.launches == pytest.approx(counted.launches, abs=1)
    assert op.total.bytes == pytest.approx(counted.moved, rel=0.02)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("trait", ["attention sinks", "attention soft cap"])
def test_other_softmaxes_move_what_torch_moves(trait, window):
    """Several blocks of queries: of 32 heads with 2,048 keys, or windows of 64."""
    tokens, heads, kv_heads = 2048, 32, 4
    shape = replace(load_shape("gpt-oss-20b"), traits=(trait,))
    softmax = Softmax(sinks=torch.zeros(heads)) if "sinks" in trait else Softmax(soft_cap=2.0)
    queries, keys, values = (torch.randn(size).bfloat16() for size in (
        (tokens, heads, 16), (kv_heads, tokens, 16), (kv_heads, tokens, 16)))  # fmt: skip
    with Counter() as counted:
        attend_in_place(queries, keys, values, window, tokens, softmax)
    attention = Attention(q_heads=heads, kv_heads=kv_heads, head_dim=16, window_tokens=window)
    op = softmax_in_torch(shape, attention, 1, tokens, 0, 2)
    assert op.launches == pytest.approx(counted.launches, rel=0.01)
    assert op.total.bytes == pytest.approx(counted.moved, rel=0.025)


@pytest.mark.parametrize(
    ("name", "asynchronous", "part"), [("Qwen/Qwen3.5-9B", False, "states"), ("gpt-oss-20b", False, "sinks")]
)
def test_first_tokens_of_such_models_are_guesses(h200_profile, name, asynchronous, part):
    machine = replace(h200_profile, asynchronous=asynchronous)
    predicted = predict(preset("autoregressive", Workload(name, "h200", 32768)), load_shape(name), machine)
    (note,) = prompt_notes(predicted, 1)
    assert "guess" in note and part in note
    assert predicted.high.ttft_ms > 2 * predicted.best.ttft_ms


def test_states_on_a_gpu_are_priced_by_the_bytes_of_the_chunked_form(h200_profile):
    """Of 24 layers with 32 heads of 128 x 128: a state read and written every 64 tokens, inputs and outputs."""
    predicted = predict(
        preset("autoregressive", Workload("Qwen/Qwen3.5-9B", "h200", 32768)),
        load_shape("Qwen/Qwen3.5-9B"),
        h200_profile,
    )
    assert not any("states" in note for note in prompt_notes(predicted, 1))
    (op,) = (op for op in predicted.breakdown if op.op == STATES_IN_KERNELS)
    moved = 24 * 32768 * (2 * 4 * 32 * 128 * 128 / 64 + 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32))
    assert op.seconds == pytest.approx(moved / (4.8e12 * 0.85 * PROMPT_STATES_SHARE), rel=0.01)


def test_states_of_an_unknown_family_are_priced_as_those_of_a_known_one(h200_profile):
    known = load_shape("Qwen/Qwen3.5-9B")
    plan = preset("autoregressive", Workload(known.name, "h200", 32768))
    shapes = known, replace(known, architecture="unheard_of")
    first, second = (predict(plan, shape, h200_profile) for shape in shapes)
    assert first.best.ttft_ms == second.best.ttft_ms
    assert list(prompt_notes(first, 1)) == list(prompt_notes(second, 1))


def test_sinks_on_a_gpu_are_priced_at_flash_attentions_rate(h200_profile):
    """The full layers of a long prompt are bound by arithmetic, which cuDNN does faster."""
    shape, seconds = load_shape("gpt-oss-20b"), []
    for traits, name in ((shape.traits, SINKS_IN_FLASH), ((), "prefill attention")):
        plan = preset("autoregressive", Workload("gpt-oss-20b", "h200", 32768))
        predicted = predict(plan, replace(shape, traits=traits), h200_profile)
        assert not any("sinks" in note for note in prompt_notes(predicted, 1))
        seconds.append(max(op.seconds for op in predicted.breakdown if op.op == name))
    assert HELD_ATTENTION_SHARE * seconds[0] == pytest.approx(seconds[1], rel=0.01)
