"""The kernel bench on a CPU: its cases at tiny sizes with the references, and the arithmetic of its rows."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.selection import two_bit_scores, two_bit_top_k
from ridgeplan.kernels.selection.draft_planes import TwoBitKeys
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate import kernel_bench
from ridgeplan.validate.kernel_bench import (
    FAMILIES,
    MAX_ERROR,
    MachinePeaks,
    bench_kernels,
    cases_of,
    measured,
    row_of,
    timed_peers,
)
from ridgeplan.validate.kernel_calls import attention as kernel_attention
from ridgeplan.validate.kernel_calls import case as kernel_peers
from ridgeplan.validate.kernel_calls import experts as kernel_experts
from ridgeplan.validate.kernel_calls import kv_cache as kernel_quantize
from ridgeplan.validate.kernel_calls import latent as kernel_latent
from ridgeplan.validate.kernel_calls import layer as kernel_fused
from ridgeplan.validate.kernel_calls import linear as kernel_linear
from ridgeplan.validate.kernel_calls import sampling as kernel_sampling
from ridgeplan.validate.kernel_calls import sparse as kernel_sparse
from ridgeplan.validate.kernel_calls import state as kernel_state
from ridgeplan.validate.kernel_calls import vllm_peers
from ridgeplan.validate.kernel_calls.case import BenchCase, RoofShare, SpeedUp, Target, Within, relative_error
from ridgeplan.validate.kernel_calls.sizes import KERNELS, LayerSize, LinearSize, SparseSize, bench_sizes
from ridgeplan.validate.kernel_calls.sparse import SparseDraft
from ridgeplan.validate.machine import software
from ridgeplan.validate.timing import Bench, KernelCall

# Without the weights that only choose another variant of a GPU's kernel: a CPU multiplies all in one way.
TINY = {
    name: tuple(size for size in sizes if not isinstance(size, LinearSize) or size.outputs * size.inputs < 1 << 21)
    for name, sizes in bench_sizes("tiny").items()
}
PEAKS = MachinePeaks(bytes_per_s=1e12, flops=1e15)
UNCHECKED = ("SDPA cuDNN", kernel_experts.TRITON, "vLLM")  # the second is the same call, the others do not run here


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.build(torch.device("cpu"), 1 << 20, 1, 0.002)


@pytest.fixture(scope="module")
def cold() -> Bench:
    """Asks for variants, of small caches: no product of `TINY` reads nearly as much as they hold."""
    return Bench.build(torch.device("cpu"), 8 << 20, 4 << 20, 0.002)


def case(target: Target, peers: tuple[str, ...] = (), over: tuple[str, ...] = (), error: float = 0.0) -> BenchCase:
    """A kernel whose roof is a microsecond."""
    cost = Cost(read_bytes=1e6)
    call = KernelCall("k", "s", cost, lambda i: None, error=lambda: error, peers=dict.fromkeys(peers, print))
    return BenchCase("k", call, target, over)


def test_every_kernel_has_a_family_and_sizes() -> None:
    assert sorted(FAMILIES) == sorted(KERNELS)
    assert all(sizes[name] for sizes in (bench_sizes("full"), TINY) for name in KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_cases_run_and_agree_with_their_references(bench: Bench, name: str) -> None:
    cases = list(cases_of(bench, TINY, [name]))
    assert {each.kernel for each in cases} == {name}
    calls = [each.call for each in cases]
    assert len({call.name for call in calls}) == len(calls) >= 2
    for call in calls:
        assert call.cost.bytes > 0 or call.name.endswith("not taken")
        assert call.error() < 1e-5, call.name
        call.run(call.variants - 1)
        for peer in checked_peers(call):
            peer(0)


def checked_peers(call: KernelCall) -> list[Callable[[int], object]]:
    """The peers that run on a CPU."""
    return [peer for name, peer in call.peers.items() if not name.startswith(UNCHECKED)]


LINEAR = {f"{kind}_{weights}" for kind in ("linear", "gated") for weights in ("int4", "int8", "dense")}
LINEAR |= {"linear_q4_k", "linear_q6_k"}
SPARSE = {"two_bit", "page_scores", "top_k", "sparse_attention", "progressive", "scores"}
ROTATED = (
    LINEAR
    | SPARSE
    | {"experts_int4", "experts_int8", "experts_dense", "experts_mxfp4"}  # other experts at every call
    | {"delta_step"}
    | {
        "latent_append",
        "latent_attention",
        "attention",
        "ragged",
        "verification",
        "quantize",
        "flush",
        "rejection_sample",
        "draw",
        "take_slots",
    }
)


@pytest.mark.parametrize("name", KERNELS)
def test_weights_caches_and_logits_rotate_and_a_few_rows_of_activations_do_not(cold: Bench, name: str) -> None:
    for call in (each.call for each in cases_of(cold, TINY, [name])):
        fills_caches = name in LINEAR and call.cost.read_bytes > cold.rotate_bytes
        assert (call.variants > 1) == (name in ROTATED and not fills_caches), call.name
        for run in (call.run, *checked_peers(call)):
            run(call.variants - 1)


def test_ragged_rows_read_what_rows_of_equal_lengths_do(bench: Bench) -> None:
    """6 rows of 2 to 14 groups of 128 tokens beside 6 of 8 groups, the buffers of codes apart."""
    size = TINY["ragged"][1]
    assert [length // 128 for length in size.lengths] == [6, 4, 2, 10, 12, 14]
    for ragged_case in kernel_attention.ragged_cases(bench, [size]):
        equal = ragged_case.call.peers[ragged_case.over[0]]
        assert ragged_case.call.cost == equal.call(torch.get_num_threads()).cost
        _, end, groups = ragged_case.call.run.visible
        if groups is None:
            assert end.tolist() == list(size.lengths)
        else:
            assert groups.tolist() == [6, 4, 2, 10, 12, 14]
            assert set(end.tolist()) == {kernel_attention.BUFFER_SLOTS}


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("name", ["norm", "rope", "swiglu"])
def test_activations_of_a_prompt_rotate(cold: Bench, name: str, rows: int) -> None:
    sizes = {name: [LayerSize(64, 64, 1, 1, 64, rows)]}
    for call in (each.call for each in cases_of(cold, sizes, [name])):
        assert (call.variants > 1) == (rows == 512)
        call.run(call.variants - 1)
        assert call.error() < 1e-5


@pytest.mark.parametrize("name", ["attention", "quantize"])
def test_variants_have_data_of_their_own(cold: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kernel_quantize, "quantize", lambda keys, *_: keys.clone())
    call = next(cases_of(cold, TINY, [name])).call
    results = [call.run(variant) for variant in range(call.variants)]
    assert not any(torch.equal(results[0], other) for other in results[1:])


def scaled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, 1% off unless the reference is asked for."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if kwargs.get("backend") == "reference":
            return result
        return tuple(1.01 * part for part in result) if isinstance(result, tuple) else 1.01 * result

    return wrong


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("attention", kernel_attention, "decode_attention"),
        ("ragged", kernel_attention, "decode_attention"),
        ("verification", kernel_attention, "decode_attention"),
        ("linear_int4", kernel_linear, "linear_quantized"),
        ("linear_int8", kernel_linear, "linear_quantized"),
        ("linear_dense", kernel_linear, "linear_dense"),
        ("gated_int4", kernel_linear, "linear_quantized"),
        ("gated_int8", kernel_linear, "linear_quantized"),
        ("gated_dense", kernel_linear, "linear_dense"),
        ("latent_attention", kernel_latent, "latent_attention"),
        ("latent_append", kernel_latent, "absorb_append"),
        ("experts_int4", kernel_experts, "routed_mlp"),
        ("experts_dense", kernel_experts, "routed_mlp"),
        ("experts_mxfp4", kernel_experts, "routed_mlp"),
        ("quantize", kernel_quantize, "dequantize"),
        ("norm", kernel_fused.layer, "add_rms_norm"),
        ("rope", kernel_fused.layer, "rope_append"),
        ("swiglu", kernel_fused.layer, "swiglu"),
        ("delta_step", kernel_state.kernels, "delta_step"),
        ("delta_chunks", kernel_state.kernels, "delta_chunks"),
        ("gated_norm", kernel_state.kernels, "gated_rms_norm"),
        ("sparse_attention", kernel_sparse, "sparse_decode_attention"),
        ("progressive", kernel_sparse, "progressive_attention"),
    ],
)
def test_a_wrong_kernel_shows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, module: Any, function: str
) -> None:
    monkeypatch.setattr(module, function, scaled(getattr(module, function)))
    for case in cases_of(bench, TINY, [name]):
        assert case.call.error() == pytest.approx(0.01, rel=0.01)


def test_a_choice_of_other_tokens_shows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_sparse.selection.two_bit_top_k

    def wrong(*args: Any, backend: str, **sizes: int) -> tuple[Tensor, Tensor]:
        """The neighbor of each token, unless the reference is asked for."""
        index, count = right(*args, backend=backend, **sizes)
        return (index if backend == "reference" else index ^ 1), count

    cases = list(cases_of(bench, TINY, ["two_bit"]))
    assert all(0 <= case.call.error() < 1e-3 for case in cases)
    monkeypatch.setattr(kernel_sparse.selection, "two_bit_top_k", wrong)
    assert all(case.call.error() > 0.1 for case in cases)


def test_progressive_attention_that_reads_other_tokens_shows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_less(*args: Any, max_k: int, backend: str, **sizes: Any) -> tuple[Tensor, Tensor]:
        """Drops the last token, unless the reference is asked for."""
        index, count = two_bit_top_k(*args, max_k=max_k, backend=backend, **sizes)
        return index, count if backend == "reference" else count - 1

    monkeypatch.setattr("ridgeplan.kernels.sparse_attention.two_bit_top_k", one_less)
    assert all(case.call.error() > 2 * MAX_ERROR for case in cases_of(bench, TINY, ["progressive"]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", TINY["progressive"], ids=lambda size: size.name)
def test_the_error_of_progressive_attention_does_not_depend_on_ties(
    bench: Bench, device: str, size: SparseSize, dtype: torch.dtype, seed: int
) -> None:
    """The kernels round scores to 1/8 of a power of two, and may choose a share of k from each group."""
    torch.manual_seed(seed)
    on_device = replace(bench, device=torch.device(device), pool=bench.pool.to(device, dtype))
    draft = SparseDraft.quantized(on_device, size).with_clear_choice()
    scores = two_bit_scores(draft.q, TwoBitKeys.of(*draft.cache(0)), draft.groups, backend="reference")
    best = scores.sort(-1, descending=True)
    powers_of_two = (best.values[..., draft.chosen - 1] - best.values[..., draft.chosen]) / math.log(2)
    assert powers_of_two.min() > 1.5
    groups = draft.codes.groups
    group_of_token = best.indices[..., : draft.chosen] // draft.codes.group
    assert torch.nn.functional.one_hot(group_of_token, groups).sum(-2).unique().tolist() == [draft.chosen // groups]
    assert relative_error(draft.progressive(0, "triton"), draft.progressive(0, "reference")) < MAX_ERROR


@pytest.mark.parametrize("name", ["draw", "rejection_sample"])
def test_wrong_tokens_show(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = getattr(kernel_sampling, name)

    def wrong(*args: Any, **backend: str) -> Any:
        """The last sequence's tokens are from the other half of the vocabulary, unless the reference is asked for."""
        result = right(*args, **backend)
        if not backend:
            tokens = result if name == "draw" else result.tokens
            tokens[-1] = (tokens[-1] + 500) % 1003
        return result

    torch.manual_seed(0)
    cases = list(cases_of(bench, TINY, [name]))
    monkeypatch.setattr(kernel_sampling, name, wrong)
    for case in cases:
        assert case.call.error() > 0.05


def test_a_flush_that_writes_no_codes_shows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeplan.runtime.kv.storage.quantize", lambda *_, **__: None)
    errors = {case.call.name.partition(", ")[2]: case.call.error() for case in cases_of(bench, TINY, ["flush"])}
    assert errors == {"taken": pytest.approx(1.0, rel=1e-5), "not taken": 0.0}


@pytest.mark.parametrize(
    ("target", "limit_us"),
    [(SpeedUp(2.5), 4.0), (SpeedUp(1 / 1.2), 12.0), (RoofShare(0.5), 2.0), (Within(3e-6), 3.0)],
    ids=str,
)
def test_a_target_is_a_longest_time(target: Target, limit_us: float) -> None:
    times = {"slow": 2e-5, "fast": 1e-5}
    row = row_of(case(target, tuple(times)), 1e-6 * limit_us, times, PEAKS)
    assert row.target_s == pytest.approx(1e-6 * limit_us)
    assert row.met
    assert not row_of(case(target, tuple(times)), 1.01e-6 * limit_us, times, PEAKS).met


def test_the_peer_that_counts_is_the_fastest_of_those_named() -> None:
    times = {"slow": 2e-5, "slower": 3e-5, "fast": 1e-5}
    fastest = row_of(case(SpeedUp(2), tuple(times)), 4e-6, times, PEAKS)
    named = row_of(case(SpeedUp(2), tuple(times), over=("slower", "slow", "absent")), 4e-6, times, PEAKS)
    assert (fastest.peer, fastest.ratio) == ("fast", pytest.approx(2.5))
    assert (named.peer, named.ratio) == ("slow", pytest.approx(5.0))
    assert row_of(case(Within(1.0)), 4e-6, {}, PEAKS).ratio is None


@pytest.mark.parametrize("error", [2 * MAX_ERROR, math.nan])
def test_a_fast_kernel_that_is_wrong_meets_nothing(error: float) -> None:
    row = row_of(case(Within(1.0), error=error), 1e-6, {}, PEAKS)
    assert not row.met
    assert json.loads(json.dumps(row.to_dict(), allow_nan=False))["met"] is False


def test_the_roof_is_bandwidth_or_arithmetic() -> None:
    assert PEAKS.seconds(Cost(1e9, 3e6, 1e6)) == pytest.approx(4e-6)
    assert PEAKS.seconds(Cost(1e10, 3e6, 1e6)) == pytest.approx(1e-5)
    assert row_of(case(RoofShare(0.5)), 4e-6, {}, PEAKS).roof_share == pytest.approx(0.25)


def test_rows_hold_what_json_shows(bench: Bench) -> None:
    rows = [row.to_dict() for row in measured(bench, PEAKS, cases_of(bench, TINY, ["swiglu", "quantize"]))]
    assert [row["kernel"] for row in rows] == ["quantize", "quantize", "swiglu", "swiglu"]
    for row in rows:
        assert row["ours_us"] > 0
        assert row["target_us"] > 0
        assert (row["peer"] is None) == (row["peer_us"] is None) == (row["ratio"] is None) == (not row["peers_us"])
        if row["peer"]:
            assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"], rel=0.01)


def test_shared_peers_are_timed_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[KernelCall] = []
    monkeypatch.setattr(Bench, "median_s", lambda _, call: float(timed.append(call) or 1e-6))
    rows = list(measured(bench, PEAKS, cases_of(bench, TINY, ["attention"])))
    sizes, formats = len(TINY["attention"]), 3
    assert len(rows) == sizes * formats
    full, codes = rows[:2]  # peers are timed once for full precision, and once for all codes, with those over FP8
    assert len(timed) == sizes * (formats + len(full.peers_s) + len(codes.peers_s))
    assert all(call.cost.bytes for call in timed)


def test_progress_names_the_chosen_kernels(bench: Bench) -> None:
    messages: list[tuple[str, int, int]] = []
    list(cases_of(bench, TINY, ["swiglu", "norm"], lambda *step: messages.append(step)))
    assert messages == [("norm", 0, 2), ("swiglu", 1, 2)]


def test_a_peer_that_does_not_run_gives_a_note_beside_our_time(bench: Bench) -> None:
    def broken(variant: int) -> None:
        raise AssertionError("no such device\nand more")

    call = KernelCall("k", "s", Cost(1e6), lambda i: None, error=lambda: 0.0, peers={"broken": broken, "fine": range})
    (row,) = measured(bench, PEAKS, [BenchCase("k", call, Within(1.0), over=("broken",))])
    assert (list(row.peers_s), row.peer, row.met) == (["fine"], "fine", True)
    assert row.to_dict()["notes"] == {"broken": "AssertionError: no such device"}


def test_without_vllm_its_kernels_give_notes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    chosen = (
        "delta_step",
        "delta_chunks",
        "gated_norm",
        "latent_attention",
        "experts_dense",
        "experts_int4",
        "experts_mxfp4",
    )
    for case in {case.kernel: case for case in cases_of(bench, TINY, chosen)}.values():
        (name,) = (name for name in case.call.peers if name.startswith("vLLM"))
        _, notes = timed_peers(bench, replace(case.call, peers={name: case.call.peers[name]}))
        assert "vllm" in notes[name]


def test_torchs_own_int4_product_packs_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("_convert_weight_to_int4pack is only for newer devices")

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", missing)
    pairs = torch.zeros(16, 1)
    product = kernel_peers.tinygemm(torch.zeros(16, 32, dtype=torch.int32), pairs, pairs)
    with pytest.raises(RuntimeError, match="only for newer devices"):
        product(torch.zeros(1, 32), 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_vllms_products_get_codes_in_gptqs_order(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight or four codes along the inputs in a word, the first in its lowest bits, and scales by group."""
    half = 1 << bits - 1
    ops = SimpleNamespace(
        gptq_marlin_repack=lambda words, order, inputs, outputs, width, eight: words if width == bits else None,
        machete_prepack_B=lambda words, **_: words,
        machete_mm=lambda a, b_q, b_group_scales, b_group_size, **_: product(a, b_q, b_group_scales, b_group_size),
    )
    utils = SimpleNamespace(
        marlin_permute_scales=lambda scales, *_: scales,
        marlin_make_workspace_new=lambda device: None,
        marlin_act_int8_process_scales=lambda scales: (scales / 2, 2),
        apply_gptq_marlin_linear=lambda x, words, scales, *fixed, input_dtype, input_global_scale=1: (
            input_global_scale * product(x, words, scales, 32)
        ),
    )

    def product(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
        unpacked = torch.stack([words >> shift & (2 * half - 1) for shift in range(0, 32, bits)], 1).flatten(0, 1)
        return x @ ((unpacked - half) * scales.float().repeat_interleave(group, 0))

    parts = {"_custom_ops": ops, "scalar_type": SimpleNamespace(scalar_types=SimpleNamespace(uint4b8=4, uint8b128=8))}
    parts["model_executor.layers.quantization.utils.marlin_utils"] = utils
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", part)
    monkeypatch.setattr(vllm_peers, "import_module", lambda name: sys.modules[name])
    codes, x = torch.arange(16 * 64).view(16, 64) * 7 % (2 * half), torch.randn(3, 64)
    scale = torch.rand(16, 2).bfloat16()
    expected = x @ ((codes - half) * scale.float().repeat_interleave(32, 1)).t()
    products = vllm_peers.vllm_products(codes, scale, bits, 2)
    assert list(products) == ["vLLM Marlin", "vLLM Machete", *["vLLM Marlin, INT8 x"] * (bits == 4)]
    assert all(torch.allclose(run(x, 1), expected, rtol=1e-4, atol=1e-3) for run in products.values())


def test_versions_are_of_what_is_installed() -> None:
    assert software(["torch", "no-such-package-is-installed"]) == {"torch": metadata.version("torch")}


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, reference) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), reference))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(kernel_bench.NoCudaDevice, match="needs a CUDA device"):
        bench_kernels()


@pytest.mark.gpu
def test_every_kernel_runs_once_on_the_gpu() -> None:
    for kernel, shape, error in kernel_bench.run_kernels_once():
        assert error < MAX_ERROR, (kernel, shape)
