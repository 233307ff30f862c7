"""Prompts' routed experts: torch's grouped products of pairs sorted by expert, with dense copies of codes."""

import pytest
import torch
from torch.nn import functional

from ridgeplan.kernels.experts import SWIGLU, Activation, grouped, route, routed_mlp, routed_mlp_reference
from ridgeplan.kernels.experts.grouped import routed_mlp_grouped, takes_grouped
from ridgeplan.kernels.experts.triton import dequantize_rows
from ridgeplan.roofline.catalog.layers import Routing
from tests.kernels.experts.test_routed import EXPERTS, HIDDEN, MIDDLE, drawn, mxfp4, weights_of

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has grouped products from 2.10 on"),
]
EXPERT_BYTES = 2 * 2 * MIDDLE * HIDDEN  # of a dense copy of gate and up


@pytest.mark.parametrize(
    ("kind", "copied"),  # experts copied at once
    [("bfloat16", 6), ("int4", 4), ("int8", 6), ("int8", 2), ("int8", 0), ("mxfp4", 6), ("mxfp4", 2)],
)
def test_grouped_products_of_many_rows(kind: str, copied: int, device: str) -> None:
    """Experts 0 and 3 are never hit. At least one is copied at once, and without a row none."""
    case, rows = weights_of(kind, device), 40
    logits = drawn(rows, EXPERTS)
    logits[:, [0, 3]] = -9.0
    chosen, weights = route(logits.to(device), Routing(per_token=2))
    assert set(chosen.unique().tolist()) == {1, 2, 4, 5}
    x, addend = (drawn(rows, HIDDEN, seed=seed).to(device, torch.bfloat16) for seed in (3, 4))
    biases = tuple(drawn(EXPERTS, width, seed=7).to(device) for width in (2 * MIDDLE, HIDDEN))
    for given, activation in ((biases, Activation(1.702, 0.5, 1.0)), ((None, None), SWIGLU)):
        routed = chosen, weights, case.gate_up, case.down, EXPERTS
        expected = routed_mlp_reference(x.float(), *routed, *given, activation, addend)
        stacks, size = (case.gate_up, case.down), copied * EXPERT_BYTES
        out = routed_mlp_grouped(x, chosen, weights, stacks, given, EXPERTS, activation, addend, size)
        assert out.dtype == torch.bfloat16
        # Weights and four results are rounded, which the interpreter does towards zero.
        assert float((out - expected).norm() / expected.norm()) < 4 * 2**-8


def test_a_copy_begins_at_any_row_of_16(device: str) -> None:
    """MXFP4 is exact in bfloat16; 80 rows and 96 inputs fill no whole number of programs."""
    weight = mxfp4(160, 96, 0, device)
    out = torch.empty(80, 96, dtype=torch.bfloat16, device=device)
    dequantize_rows(weight, 48, out)
    assert torch.equal(out, weight.dequantize(torch.bfloat16)[48:128])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_passes_of_many_rows_can_be_captured_after_a_warm_up(kind: str) -> None:
    """A graph cannot hold the wait for the hits, nor a kernel's compilation; prompts' calls take grouped products."""
    case, rows = weights_of(kind, "cuda"), 64 * EXPERTS
    x = drawn(rows, HIDDEN).to("cuda", torch.bfloat16)
    chosen, weights = route(drawn(rows, EXPERTS).cuda(), Routing(per_token=2))
    routed = x, chosen, weights, case.gate_up, case.down, EXPERTS
    eager = routed_mlp(*routed, prompt=True)
    torch.testing.assert_close(eager, routed_mlp_grouped(*routed[:3], routed[3:5], (None, None), EXPERTS, SWIGLU, None))
    routed_mlp(*routed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = routed_mlp(*routed)
    graph.replay()
    assert float((captured - eager).norm() / eager.norm()) < 3 * 2**-8


@pytest.mark.parametrize(("kind", "rows"), [("bfloat16", 32), ("int8", 32), ("mxfp4", 64)])
def test_few_rows_of_each_expert_and_a_cpu_take_no_grouped_products(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.empty(1, HIDDEN, dtype=torch.bfloat16), weights_of(kind, "cpu").gate_up
    assert not takes_grouped(x, weight, 1 << 20, EXPERTS)
    monkeypatch.setattr(grouped, "supports_grouped", lambda x: True)
    taken = [takes_grouped(x, weight, pairs * EXPERTS, EXPERTS) for pairs in (rows - 1, rows)]
    assert taken == [False, True]
