"""Routed experts: the choice of experts, blocks of pairs by expert, and products in every weight format."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.experts import (
    SWIGLU,
    Activation,
    expert_blocks,
    expert_of,
    expert_sizes,
    max_blocks,
    route,
    routed_mlp,
    routed_mlp_cost,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.layers import Routing

pytestmark = pytest.mark.usefixtures("poisoned_empty")
ROWS, EXPERTS, PER_TOKEN, HIDDEN, MIDDLE = 5, 6, 2, 64, 32
BACKENDS = ["reference", "triton"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [False, True], ids=["as scored", "normalized"])
def test_routing_by_definition(backend: str, sigmoid: bool, normalized: bool, device: str) -> None:
    """A bias counts in the choice, not in the weights."""
    logits, bias = drawn(ROWS, EXPERTS), drawn(EXPERTS, seed=1)
    routing = Routing(per_token=PER_TOKEN, sigmoid=sigmoid, normalized=normalized, scale=2.5)
    chosen, weights = route(logits.to(device), routing, bias.to(device), backend=backend)
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    for row in range(ROWS):
        expected = sorted(range(EXPERTS), key=lambda expert: -float(scores[row, expert] + bias[expert]))[:PER_TOKEN]
        assert chosen[row].tolist() == expected
        kept = scores[row, expected]
        kept = 2.5 * (kept / kept.sum() if normalized else kept)
        torch.testing.assert_close(weights[row].cpu(), kept)


def test_only_the_best_groups_are_chosen_from() -> None:
    """Group 1 has the best expert, group 0 the best pair of them."""
    logits = torch.tensor([[2.0, 1.9, -3.0, 3.0, -3.0, -3.0]])
    pairs = Routing(per_token=2, sigmoid=True, groups=2, kept_groups=1)
    assert route(logits, pairs)[0].tolist() == [[0, 1]]
    assert route(logits, Routing(per_token=2, groups=2, kept_groups=1, group_members=1))[0][0, 0] == 3
    with pytest.raises(ValueError, match="6 experts; allowed: at least 2, a multiple of 4"):
        route(logits, Routing(per_token=2, groups=4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", [1, 7, 90])
def test_blocks_hold_each_pair_once_with_its_expert(backend: str, pairs: int, device: str) -> None:
    """Half of all pairs have one expert, so that it needs several blocks; some experts have none."""
    ids = torch.randint(0, EXPERTS - 1, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    ids[: pairs // 2] = 3
    experts, places = expert_blocks(ids.to(device), EXPERTS, 16, backend=backend)
    assert len(experts) == max_blocks(pairs, EXPERTS, 16)
    taken = [place for row in places.tolist() for place in row if place < pairs]
    assert sorted(taken) == list(range(pairs))
    for expert, row in zip(experts.tolist(), places.tolist(), strict=True):
        assert {int(ids[place]) for place in row if place < pairs} <= {expert}
    assert int((experts >= 0).sum()) == sum(-(-int(count) // 16) for count in ids.flatten().bincount())


@dataclass(frozen=True)
class Case:
    gate_up: object
    down: object
    exact: tuple[Tensor, Tensor]


def weights_of(kind: str, device: str) -> Case:
    """Both weights in a format, and as float32 [experts, outputs, inputs]."""
    sizes = (EXPERTS, 2 * MIDDLE, HIDDEN), (EXPERTS, HIDDEN, MIDDLE)
    if kind in ("float32", "bfloat16"):
        dense = [(0.2 * drawn(*size, seed=i)).to(device, getattr(torch, kind)) for i, size in enumerate(sizes)]
        return Case(*dense, tuple(each.float() for each in dense))
    if kind == "mxfp4":
        stacks = [
            mxfp4(experts * outputs, inputs, seed, device) for seed, (experts, outputs, inputs) in enumerate(sizes)
        ]
        return Case(*stacks, tuple(stack.dequantize().unflatten(0, (EXPERTS, -1)) for stack in stacks))
    packed, levels = [], 16 if kind == "int4" else 256
    for seed, (experts, outputs, inputs) in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(levels, (experts * outputs, inputs), generator=generator)
        scale, zero = 0.6 / levels * drawn(2, experts * outputs, inputs // 32, seed=seed)
        pack = Int4Weight.pack if levels == 16 else Int8Weight.pack
        packed.append(pack(codes.to(device), scale.to(device), zero.to(device)))
    exact = tuple(weight.dequantize().unflatten(0, (EXPERTS, -1)) for weight in packed)
    return Case(*packed, exact)


def mxfp4(outputs: int, inputs: int, seed: int, device: str) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(codes.to(device), scales.to(device))


def test_mxfp4_by_definition() -> None:
    """The format's 16 numbers, times a power of two of each 32 inputs."""
    weight = Mxfp4Weight(torch.arange(16, dtype=torch.uint8).repeat(2, 2) * 17, torch.tensor([[127, 128], [126, 0]]))
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    twice = torch.tensor(numbers).repeat_interleave(2)
    expected = [torch.cat([twice, 2 * twice]), torch.cat([twice / 2, 2.0**-127 * twice])]
    assert torch.equal(weight.dequantize(), torch.stack(expected))


def by_definition(x, chosen, weights, exact, biases=(None, None), activation=SWIGLU):
    """Row by row and expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].double(), strict=True):
            gate_up = exact[0][expert].double() @ x[row].double()
            if biases[0] is not None:
                gate_up = gate_up + biases[0][expert].double()
            gate, up = gate_up.chunk(2)
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            down = exact[1][expert].double() @ (gate * (activation.alpha * gate).sigmoid() * (up + activation.offset))
            if biases[1] is not None:
                down = down + biases[1][expert].double()
            out[row] += weight * down
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4", "int8", "mxfp4"])
def test_products_of_the_experts_hit(backend: str, kind: str, device: str) -> None:
    case = weights_of(kind, device)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    x, addend = (drawn(ROWS, HIDDEN, seed=seed).to(device, dtype) for seed in (3, 4))
    chosen, weights = route(drawn(ROWS, EXPERTS).to(device), Routing(per_token=PER_TOKEN))
    out = routed_mlp(x, chosen, weights, case.gate_up, case.down, EXPERTS, addend=addend, backend=backend)
    expected = by_definition(x, chosen, weights, case.exact) + addend.double()
    # In bfloat16 three results are rounded, which the interpreter does towards zero.
    assert float((out.double() - expected).norm() / expected.norm()) < (3 * 2**-8 if kind == "bfloat16" else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_many_rows_of_one_expert_with_biases_and_a_clamped_activation(backend: str, kind: str, device: str) -> None:
    """gpt-oss's activation; 70 rows need several blocks, one of which is partly filled. Inputs of codes are split."""
    case, activation = weights_of(kind, device), Activation(1.702, 0.5, 1.0)
    biases = [drawn(EXPERTS, width, seed=7).to(device) for width in (2 * MIDDLE, HIDDEN)]
    x = drawn(70, HIDDEN, seed=3).to(device)
    chosen, weights = torch.full((70, 1), 4, device=device), torch.ones(70, 1, device=device)
    out = routed_mlp(
        x, chosen, weights, case.gate_up, case.down, EXPERTS, gate_up_bias=biases[0], down_bias=biases[1],
        activation=activation, backend=backend,
    )  # fmt: skip
    expected = by_definition(x, chosen, weights, case.exact, biases, activation)
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-6


def test_an_expert_of_a_stack_is_a_view() -> None:
    stack = weights_of("int8", "cpu").gate_up
    expert = expert_of(stack, 2, EXPERTS)
    torch.testing.assert_close(expert.dequantize(), stack.dequantize().unflatten(0, (EXPERTS, -1))[2])
    assert expert.lower.packed.data_ptr() == stack.lower.packed[8:].data_ptr()
    with pytest.raises(ValueError, match="384 outputs does not hold 5 experts"):
        expert_sizes(stack, 5)


def test_weights_that_do_not_fit_are_refused() -> None:
    case, chosen = weights_of("float32", "cpu"), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit rows of 63"):
        routed_mlp(drawn(1, 63), chosen, torch.ones(1, 1), case.gate_up, case.down, EXPERTS)


def test_cost_is_that_of_the_experts_expected() -> None:
    x = torch.empty(4, HIDDEN, dtype=torch.bfloat16)
    cost, params = routed_mlp_cost(x, PER_TOKEN, EXPERTS, 3 * HIDDEN * MIDDLE, 0.5), 3 * HIDDEN * MIDDLE
    assert cost.flops == 2 * 4 * PER_TOKEN * params
    hit = EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** 4)
    assert ops.activated_experts(EXPERTS, PER_TOKEN, 4) == pytest.approx(hit)
    assert cost.read_bytes == pytest.approx(hit * params * 0.5 + x.nbytes)
