"""A whole calibration on tiny sizes, and saving its profile."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan import validate
from ridgeplan.planner.prediction import predict
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, load_profile, user_profile_path
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import INTEGER_CLASSES, KERNEL_CLASSES, WIDE_SCANS, attention_kind, experts_kind
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate import timing
from ridgeplan.validate.calibration import calibrate as calibrate_module
from ridgeplan.validate.calibration.calls import class_calls, expert_calls, quantized_calls
from ridgeplan.validate.calibration.fit import RoundSample
from ridgeplan.validate.calibration.sizes import Suite, suite_for
from ridgeplan.validate.kernel_calls.attention import DecodeSize, Heads, random_decode
from ridgeplan.validate.kernel_calls.sizes import ExpertSize
from ridgeplan.validate.random_model import llama_like_shape
from ridgeplan.validate.timing import Bench, KernelCall

TINY = Suite(
    pool_bytes=8 << 20, trial_s=0.002, matmul_size=128,
    linear_shapes=((64, 64), (256, 128), (64, 256)), linear_rows=(1, 5), quantized_rows=(1,),
    head_shapes=((512, 64),), head_rows=(1,),
    heads=(Heads(3, 1, 32), Heads(2, 1, 128)), batches=(1, 2), tokens=(64, 512), queries=(1, 5),
    prefill_shapes=((64, 64),), prefill_rows=(64, 128), prefill_tokens=(64,),
    quantize_tokens=(128,), gather_rows=(16, 64),
    elementwise=(llama_like_shape(1, 64, 128, 3, 1, 32),), elementwise_rows=(1, 5),
    dispatch_shape=llama_like_shape(1, 64, 128, 3, 1, 32), dispatch_layers=(1, 2),
    gap_shapes=(llama_like_shape(2, 64, 128, 3, 1, 32),),
)  # fmt: skip
FASTER = 40.0  # than measured are the rounds by which the fixture's classes are judged


@pytest.fixture(scope="module")
def calibrated() -> tuple[Profile, list[tuple[str, int, int]]]:
    messages: list[tuple[str, int, int]] = []
    measure = calibrate_module.measured_rounds

    def fast_rounds(*arguments: Any) -> list[RoundSample]:
        times = ("draft_s", "target_s", "prefill_s")
        return [replace(each, **{name: getattr(each, name) / FASTER for name in times}) for each in measure(*arguments)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate_module, "measured_rounds", fast_rounds)
        # Readings of such tiny sizes need not agree.
        profile = validate.calibrate(
            True, "cpu", lambda *step: messages.append(step), TINY, validate.NoiseCheck(allowed=True)
        )
    return profile, messages


@pytest.fixture(scope="module")
def profile(calibrated: tuple[Profile, list[tuple[str, int, int]]]) -> Profile:
    return calibrated[0]


def test_every_class_is_measured(profile: Profile) -> None:
    experts = {experts_kind(bits) for bits in (16, 8, 4)}  # a GPU's alone
    large = {attention_kind(bits, 256) for bits in (0, 4, 8)}  # heads that the quick suite lacks
    # No model of the suite has as many query heads as wide scans.
    not_executed = {*experts, *large, "state", "attention_mla", *WIDE_SCANS, "sparse_attention_wide"}
    assert set(KERNEL_CLASSES) - set(profile.classes) == {*not_executed, "gap"}  # a CPU's rounds have no such gaps
    assert profile.source == "calibrated"
    assert not profile.asynchronous
    assert profile.hardware.kind == "cpu"
    assert set(profile.software) == {"torch", "ridgeplan"}


def test_classes_that_whole_rounds_refute_are_measured_again(
    calibrated: tuple[Profile, list[tuple[str, int, int]]],
) -> None:
    kinds = {kind for kind, *_ in calibrated[1]}
    assert {"linear, again", "prefill_linear, again", "linear, pass 2, again"} <= kinds
    assert not {"two_bit_scan, again", "gather, again"} & kinds  # no round runs them


def test_rates_are_finite(profile: Profile) -> None:
    for rates in profile.classes.values():
        assert all(math.isfinite(value) for value in (rates.bandwidth_utilization, rates.launch_s, rates.spread))


def test_progress_is_told_in_order(calibrated: tuple[Profile, list[tuple[str, int, int]]]) -> None:
    message = calibrated[1]
    assert [done for _, done, _ in message] == sorted(done for _, done, _ in message)
    assert all(done < total for _, done, total in message)
    kernels, rounds = ([what for what, *_ in message if (what == "whole rounds") is whole] for whole in (False, True))
    assert len(set(kernels)) == len(kernels) >= 12
    assert len(rounds) == 8  # of one shape


def test_a_profile_predicts(profile: Profile) -> None:
    plan = preset("quantspec", Workload("SmolLM2-135M", profile.hardware.name, 1024, 64))
    predicted = predict(plan, load_shape("SmolLM2-135M"), profile)
    assert 0 < predicted.best.tpot_ms < 1e5
    assert predicted.draft_step_ms > 0


def test_saving_round_trips(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "machine.json"
    assert validate.save_profile(profile, path) == path
    assert load_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


def test_saving_without_a_path_is_where_auto_looks(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert validate.save_profile(profile) == user_profile_path()
    assert load_profile(user_profile_path()).device == profile.device


def test_a_failed_save_keeps_the_old_profile(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    validate.save_profile(profile, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        validate.save_profile(replace(profile, device="another"), path)
    assert load_profile(path) == profile
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]


def test_classes_are_measured_again_into_a_profile(profile: Profile) -> None:
    """Only those; whole rounds and the machine stay as they are."""
    messages: list[str] = []
    noise = validate.NoiseCheck(allowed=True)
    recalibrated = validate.recalibrate(
        profile, ["rope", "top_k"], True, lambda what, *_: messages.append(what), TINY, noise
    )
    assert messages[:4] == ["rope", "top_k", "rope, pass 2", "top_k, pass 2"]
    assert set(noise.spreads) == {"rope", "top_k"}
    kept = {kind: rates for kind, rates in profile.classes.items() if kind not in ("rope", "top_k")}
    assert {kind: recalibrated.classes[kind] for kind in kept} == kept
    assert list(recalibrated.classes) == list(profile.classes)
    assert (recalibrated.hardware, recalibrated.portable) == (profile.hardware, profile.portable)


def test_the_times_of_launches_are_measured_again_alone(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatched(bench: object, base: Profile, shape: object, layers: Sequence[int]) -> Profile:
        assert tuple(layers) == TINY.dispatch_layers and shape == TINY.dispatch_shape
        return replace(base, pass_dispatch_s=1.0, layer_dispatch_s=2.0, prefill_layer_dispatch_s=3.0)

    monkeypatch.setattr(calibrate_module, "with_dispatch", dispatched)
    measured = validate.recalibrate(profile, ["dispatch"], True, suite=TINY)
    assert (measured.classes, measured.hardware) == (profile.classes, profile.hardware)
    merged = calibrate_module.merge_recalibrated(profile, profile, measured)
    assert (merged.pass_dispatch_s, merged.layer_dispatch_s, merged.prefill_layer_dispatch_s) == (1.0, 2.0, 3.0)


def test_an_unknown_class_and_another_machines_profile_are_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match=r"^class 'ropes' is none of: linear, head, .*portable, link, dispatch$"):
        validate.recalibrate(profile, ["ropes"], True, suite=TINY)
    other = replace(profile, device="NVIDIA H200")
    with pytest.raises(ValueError, match=r"^the profile is of NVIDIA H200, this machine is "):
        validate.recalibrate(other, ["rope"], True, suite=TINY)


def test_an_unknown_device_names_the_allowed() -> None:
    with pytest.raises(ValueError, match=r"device is 'tpu'; allowed here: cpu"):
        validate.calibrate(True, "tpu", suite=TINY)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.build(torch.device("cpu"), TINY.pool_bytes, 1 << 20, 0.01)


def test_calls_compute_finite_numbers(bench: Bench) -> None:
    for kind, calls in class_calls(bench, TINY, 2).items():
        for call in calls:
            assert call.kind == kind
            assert call.cost.bytes > 0, call.name
            result = call.run(call.variants - 1)
            if isinstance(result, torch.Tensor):
                assert result.isfinite().all(), (kind, call.name)


def test_products_of_integers_are_a_class_of_their_own_where_they_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4-bit weights: 128 inputs in one row, but not of 64 inputs, whose groups are smaller, nor of 5 rows."""
    suite = replace(TINY, quantized_rows=(1, 5))
    assert not INTEGER_CLASSES.keys() & class_calls(bench, suite, 2).keys()
    monkeypatch.setattr("ridgeplan.validate.calibration.calls.is_on_hopper", lambda tensor: True)
    classes = class_calls(bench, suite, 2)
    for kind in INTEGER_CLASSES:
        integers, others = list(classes[kind]), list(classes[kind.removesuffix("_integer")])
        assert {call.kind for call in integers} == {kind}
        assert {(call.rows, call.depth) for call in integers} == {(1, 128), (1, 256)}
        assert {(call.rows, call.depth) for call in others} == {(1, 64), (5, 64), (5, 128), (5, 256)}


@pytest.mark.parametrize("portable", [False, True])
def test_calls_of_experts_are_of_the_class_of_their_bits(bench: Bench, portable: bool) -> None:
    """Portable calls are sorted by their own class, those of a suite by the suite's."""
    for bits in (4, 8):
        (call,) = expert_calls(bench, bits, [ExpertSize(4, 2, 128, 64)], [3], portable)
        assert (call.kind, call.rows) == (f"grouped_linear_int{bits}", 3)
        assert call.error() < 0.01


def test_a_reading_is_priced_by_what_it_reads(bench: Bench) -> None:
    size = DecodeSize.of_cache(Heads(3, 1, 32), 2, 512, 5, 8)
    assert (size.groups, size.full_tokens) == (2, 197)
    expected = ops.attention(2, 5, 3, 1, 32, ops.KVRead(256, 197, 8, 4, 128, 1))
    assert random_decode(bench, size, 1).cost == expected


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_calibrated_attention_agrees_with_its_reference(bench: Bench, bits: int) -> None:
    assert random_decode(bench, DecodeSize.of_cache(Heads(3, 1, 32), 2, 512, 1, bits), 1).error() < 1e-5


def test_variants_of_a_call_are_different_memory(bench: Bench) -> None:
    stores = bench.randoms(64, 64)
    assert len(stores) == (1 << 20) // (64 * 64 * 4)
    assert len({store.data_ptr() for store in stores}) == len(stores)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_caches_that_a_call_rotates_over_amount_to_what_is_asked(bench: Bench, bits: int) -> None:
    call = random_decode(bench, DecodeSize.of_cache(Heads(3, 1, 32), 2, 2048, 1, bits), 1)
    assert (call.variants - 1) * call.cost.read_bytes < bench.rotate_bytes <= call.variants * call.cost.read_bytes
    results = [call.run(variant) for variant in range(call.variants)]
    assert all(isinstance(result, torch.Tensor) and result.isfinite().all() for result in results)


def test_packed_weights_rotate(bench: Bench) -> None:
    (call,) = quantized_calls(bench, 4, [(128, 128)], [1])
    assert call.variants > 100


def test_the_clock_takes_the_undisturbed_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: of four calls one takes 5 ms, as another program runs beside it, the others 1 ms."""
    now = [0.0]

    def call(index: int) -> None:
        now[0] += 1e-3 if index else 5e-3

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    disturbed = KernelCall("test", "one call of four is slow", Cost(), call, variants=4)
    assert bench.seconds(disturbed) == pytest.approx(1e-3)
    assert bench.seconds(KernelCall("test", "all are", Cost(), lambda _: call(0))) == pytest.approx(5e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_suites_are_part_of_the_full_ones(device: str) -> None:
    quick, full = suite_for(device, True), suite_for(device, False)
    assert all(set(items) <= set(full.decode_sizes()[kind]) for kind, items in quick.decode_sizes().items())
    assert set(quick.linear_shapes) <= set(full.linear_shapes)
    assert quick.trial_s < full.trial_s
