"""SpeContext: Eq 6 to 8 and Algorithm 1, in the paper's form and corrected."""

import pytest
import sympy

from ridgeplan.validate.papers.specontext_memory import SpeContextMemory, layers_to_offload

GB = 1e9


def llama_8b(**changes):
    """Llama-3.1-8B with 32 requests and a budget of 2048 tokens; the retrieval head is about 60 MB (section 7.4)."""
    plain = {
        "model_bytes": 16.06 * GB,
        "retrieval_model_bytes": 0.06 * GB,
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "requests": 32,
        "budget_tokens": 2048,
    }
    return SpeContextMemory(**{**plain, **changes})


def test_equation_7_at_no_offload_is_equation_6():
    model = llama_8b(retrieval_layers=1, repeat_buffers=4)
    tokens = 3000
    by_hand = 1.3 * 16.12 * GB + 4 * 32 * (32 + 1 + 4) * tokens * 8 * 128
    assert model.all_bytes(tokens) == model.part_bytes(tokens, 0) == pytest.approx(by_hand)


def test_equations_stay_symbolic():
    S, L_cpu, B = sympy.symbols("S L_cpu B", positive=True)
    model = llama_8b(budget_tokens=B, retrieval_layers=1, repeat_buffers=4)
    slope = sympy.diff(model.part_bytes(S, L_cpu), L_cpu)
    assert sympy.simplify(slope - 4 * 32 * 8 * 128 * (B - S)) == 0  # a layer that leaves frees S - B tokens


@pytest.mark.parametrize("cpu_layers", [0, 1, 15, 31])
def test_thresholds_are_the_longest_lengths_that_equation_7_allows(cpu_layers):
    model, memory_bytes = llama_8b(), 80 * GB
    threshold = model.thresholds(memory_bytes)[cpu_layers]
    assert model.part_bytes(threshold, cpu_layers) <= memory_bytes < model.part_bytes(threshold + 1, cpu_layers)


def test_the_papers_algorithm_over_commits_by_6_gb():
    """SpeContext-1: line 3 lacks the factor 4 of Eq 7, which at 31 offloaded layers is 3 x 31 B R H D = 6.2 GB."""
    paper, corrected = llama_8b(paper_form=True), llama_8b()
    threshold = paper.thresholds(80 * GB)[31]
    assert corrected.part_bytes(threshold, 31) - 80 * GB == pytest.approx(6.24 * GB, rel=0.02)
    assert paper.thresholds(80 * GB)[0] == corrected.thresholds(80 * GB)[0]


def test_thresholds_never_fall_even_when_offloading_cannot_help():
    """SpeContext-3: with S_0 below the budget the formula falls along the list, or below zero."""
    crowded = llama_8b(requests=512).thresholds(80 * GB)
    assert list(crowded) == sorted(crowded)
    assert llama_8b(model_bytes=100 * GB).thresholds(80 * GB) == (0,) * 33


def test_algorithm_2_offloads_one_layer_more_than_the_text_says():
    """SpeContext-2: between S_2 and S_3 three layers are on the CPU."""
    thresholds = llama_8b().thresholds(80 * GB)
    assert layers_to_offload(thresholds, thresholds[0] - 1) == 0
    assert layers_to_offload(thresholds, thresholds[0]) == 1
    assert layers_to_offload(thresholds, thresholds[2]) == 3
    assert layers_to_offload(thresholds, 10**9) == 32


def test_reserved_tokens_bring_every_threshold_forward():
    plain, reserved = llama_8b().thresholds(80 * GB), llama_8b().thresholds(80 * GB, reserved_tokens=5)
    assert [early - late for early, late in zip(plain, reserved, strict=True)] == [5] * 33


@pytest.mark.parametrize(
    "gpu, weights, form, by_hand",
    [
        # What 1.3 (M_O + M_D) leaves, 59.044 GB of 80, over (32 + extra - i) layers of 4 x 4 x 8 x 128 bytes a token.
        (80, 16.06, "paper", {0: 97_398, 1: 100_090, 16: 171_217, 32: 717_475}),
        (80, 16.06, "corrected", {0: 110_884, 1: 114_340, 16: 216_423, 32: 7_076_447}),
        # In bf16 the model exceeds 8 GB; with weights of 4.65 GB 1.877 GB are left.
        (8, 16.06, "paper", dict.fromkeys((0, 1, 16, 32), 0)),
        (8, 16.06, "corrected", dict.fromkeys((0, 1, 16, 32), 0)),
        (8, 4.65, "paper", {0: 3_096, 1: 3_168, 16: 5_065, 32: 19_635}),
        (8, 4.65, "corrected", {0: 3_525, 1: 3_571, 16: 4_957, 32: 98_053}),
    ],
)
def test_thresholds_of_llama_8b_by_hand(gpu, weights, form, by_hand):
    """4 requests, 2048 tokens. The paper adds 1 + 4 layers and takes i B R H D off, we add 0.5 and take 4 i B R H D."""
    layers = {"retrieval_layers": 1, "repeat_buffers": 4, "paper_form": True} if form == "paper" else {}
    thresholds = llama_8b(requests=4, model_bytes=weights * GB, **layers).thresholds(gpu * GB)
    assert {layer: thresholds[layer] for layer in by_hand} == by_hand
