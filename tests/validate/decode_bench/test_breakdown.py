"""A round by kernel: the model's parts add up, and launches find their parts and classes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from ridgeplan.planner.prediction import OpTime, predict
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.rounds import EagerRounds
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.decode_bench import breakdown as module
from ridgeplan.validate.decode_bench import breakdown as trace
from ridgeplan.validate.decode_bench.breakdown import (
    CLASSES,
    STAMP,
    TRACED_ROUNDS,
    Launch,
    NoBreakdown,
    breakdown,
    breakdowns,
    busy_us,
    class_of,
    class_of_op,
    classified,
    predicted_us,
    rounds_of,
)
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.decode_bench.report import DecodeCase, DecodeOptions, bench_decode
from ridgeplan.validate.measure import Measured
from ridgeplan.validate.random_model import llama_like_shape

KERNELS = Path(__file__).parents[3] / "kernels"
OUTSIDE_ROUNDS = {  # or between their parts
    "_record_timestamp_kernel", "_dequantize_kernel", "_round_kernel", "_convolution_kernel", "_within_chunks_kernel",
    "_across_chunks_kernel", "_mxfp4_copy_kernel",
}  # fmt: skip
LLAMA = load_shape("meta-llama/Llama-3.1-8B")


def measured(gamma: int = 0) -> Measured:
    """A generation whose draft steps take 20 us, verifications 50 us and flushes 3 us a round."""
    times = {"prefill_s": 1.0, "draft_s": 2e-5, "verify_s": 5e-5, "flush_s": 3e-5, "decode_s": 1.0, "idle_s": 0.0}
    counts = {"rounds": 10, "sequence_rounds": 10, "generated": 20, "decoded": 20, "flushes": 0}
    figures = Statistics(
        gamma=gamma, prompt_tokens=(4096,), verified_at=(), accepted_at=(), capture_s=0.0, peak_memory_bytes=None,
        **counts, **times,
    )  # fmt: skip
    return Measured(4096, 256, 1, figures)


def plan_of(name: str, gamma: int = 4) -> Plan:
    plan = preset(name, Workload(LLAMA.name, "h200", 1024, 64))
    if plan.speculation.active:
        return replace(plan, speculation=replace(plan.speculation, gamma=gamma))
    return plan


@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-weights", "magicdec-snapkv"])
@pytest.mark.parametrize("host_s", [0.0, 0.1])
def test_the_models_parts_add_up_to_the_predicted_round(h200_profile: Profile, name: str, host_s: float) -> None:
    plan = plan_of(name)
    profile = replace(h200_profile, pass_dispatch_s=host_s, draft_gap_s=2e-5, target_gap_s=4e-5, round_s=6e-5)
    run = replace(plan, workload=measured().workload(plan.workload))
    predicted, parts = predict(run, LLAMA, profile), predicted_us(plan, measured(), LLAMA, profile)
    assert sum(parts.values()) == pytest.approx(1e3 * predicted.round_ms, rel=1e-9)
    drafts = sum(value for (part, _), value in parts.items() if part == "draft")
    assert drafts == pytest.approx(1e6 * predicted.round_s["draft"], rel=1e-9)
    assert {kind for _, kind in parts} <= set(CLASSES)
    assert (parts["verify", "other"] > 1e4) == bool(host_s)


@pytest.mark.parametrize("name", ["autoregressive", "quantspec"])
def test_each_operation_of_the_model_is_in_one_class(h200_profile: Profile, name: str) -> None:
    plan = plan_of(name)
    parts = predicted_us(plan, measured(), LLAMA, h200_profile)
    run = replace(plan, workload=measured().workload(plan.workload))
    microseconds = {(op.part, op.op): 1e6 * op.seconds for op in predict(run, LLAMA, h200_profile).breakdown}
    linears = ("qkv projection", "output projection", "mlp gate + up", "mlp down")
    assert parts["verify", "linear"] == pytest.approx(sum(microseconds["target", op] for op in linears))
    assert parts["verify", "head"] == pytest.approx(microseconds["target", "lm head"])
    assert parts["verify", "attention"] == pytest.approx(microseconds["target", "attention"])
    assert parts["verify", "norm"] == pytest.approx(
        microseconds["target", "first norm"] + microseconds["target", "residual + norm"]
    )
    rope = microseconds["target", "rope + append"] + microseconds["target", "rotary tables"]
    assert parts["verify", "rope + append"] == pytest.approx(rope)
    assert parts["verify", "between kernels"] == pytest.approx(microseconds["target", "between kernels"]) == 32 * 2
    # Where the device is what a round waits for, nothing is left beside the operations.
    assert parts["verify", "other"] == pytest.approx(microseconds["target", "embedding"], rel=1e-6)
    if name == "quantspec":
        assert parts["draft", "linear"] == pytest.approx(4 * sum(microseconds["draft", op] for op in linears))
        assert parts["draft", "other"] == pytest.approx(4 * microseconds["draft", "embedding"], rel=1e-6)
        assert parts["draft", "between kernels"] == pytest.approx(4 * microseconds["draft", "between kernels"])
        assert parts["flush", "flush and shift"] > 0


def test_what_a_round_takes_beyond_its_passes_is_at_its_end(h200_profile: Profile) -> None:
    parts = predicted_us(plan_of("quantspec"), measured(), LLAMA, replace(h200_profile, round_s=6e-5))
    assert parts["flush", "between kernels"] == pytest.approx(60)


@pytest.mark.parametrize(
    ("op", "kind", "expected"),
    [
        ("routed experts", "grouped_linear", "linear"),
        ("router", "linear", "linear"),
        ("attention", "attention_mla", "attention"),
        ("between kernels", "gap", "between kernels"),
    ],
)
def test_operations_of_experts_and_latent_attention_have_classes(op: str, kind: str, expected: str) -> None:
    assert class_of_op(OpTime("target", op, kind, 1, 1e-6, 1.0, 1.0)) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::Args)", "linear"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, 128, 16, 4>(float)", "linear"),
        ("linear", "linear"),
        ("attend", "attention"),
        ("merge", "attention"),
        ("filter", "sampling"),
        ("quantize", "flush and shift"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void at::native::merge_sort(int)", "other"),
        (STAMP, "other"),
    ],
)
def test_a_kernels_class_is_told_by_its_name(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_every_kernel_of_a_round_has_a_class() -> None:
    triton = {path.read_text(encoding="utf-8") for path in KERNELS.rglob("*triton.py")}
    # Launch bounds and the preprocessor's lines stand between `void` and the name.
    cuda = {
        re.sub(r"__\w+__\([^)]*\)|^#.*$", "", path.read_text("utf-8"), flags=re.M) for path in KERNELS.rglob("*.cu")
    }
    names = {name for text in triton for name in re.findall(r"^def (_\w+_kernel)\(", text, re.M)}
    names |= {name for text in cuda for name in re.findall(r"__global__\s+void\s+(\w+)\s*\(", text)}
    assert {"attend", "merge", "linear", "quantize", "filter", "_swiglu_kernel", "_shift_kernel"} <= names
    assert {name for name in names if class_of(name) == "other"} <= OUTSIDE_ROUNDS


def chain(*names: str, begin: float = 0.0) -> list[Launch]:
    """Launches of 10 us, one each 8 us: each begins while the one before it ends."""
    return [Launch(name, begin + 8 * index, begin + 8 * index + 10) for index, name in enumerate(names)]


A_ROUND = (
    STAMP, "_add_rms_norm_kernel", "linear", "_add_rms_norm_kernel", "linear", "copy", "filter", "_pick_kernel",
    STAMP, "gather", "_add_rms_norm_kernel", "nvjet_qkv", "_rope_append_kernel", "attend", "merge", "nvjet_out",
    "_add_rms_norm_kernel", "nvjet_up", "_swiglu_kernel", "nvjet_down", "splitKreduce", "_add_rms_norm_kernel",
    "nvjet_head", "splitKreduce", "filter",
    STAMP, "quantize", "_shift_kernel",
    STAMP,
)  # fmt: skip


def test_launches_belong_to_whole_rounds_and_their_parts() -> None:
    launches = chain("nvjet_prefill", *A_ROUND, "Memcpy DtoH", *A_ROUND, "Memcpy DtoH", STAMP, "linear")
    rounds = rounds_of(launches)
    assert len(rounds) == 2
    assert [launch.name for _, launch in rounds[0]] == list(A_ROUND[:-1])
    assert [part for part, _ in rounds[1]] == ["draft"] * 8 + ["verify"] * 17 + ["flush"] * 3
    assert rounds_of(launches[:5]) == []


def test_the_head_is_the_product_that_sampling_follows() -> None:
    launches = classified(rounds_of(chain(*A_ROUND))[0])
    heads = [(part, launch.name) for (part, kind), launch in launches if kind == "head"]
    assert heads == [("draft", "linear"), ("verify", "nvjet_head"), ("verify", "splitKreduce")]
    assert sum(kind == "linear" for (_, kind), _ in launches) == 1 + 5


def test_a_breakdown_holds_measured_and_predicted_by_class(h200_profile: Profile) -> None:
    plan = plan_of("quantspec")
    launches = chain(*A_ROUND, "Memcpy DtoH", *A_ROUND)
    result = breakdown(plan, LLAMA, h200_profile, measured(4), launches)
    rows = {(row.part, row.operation): row for row in result.rows}
    assert (result.rounds, result.round_us) == (2, pytest.approx(4 * 20 + 50 + 3))
    assert (rows["draft", "linear int4"].launches, rows["draft", "linear int4"].measured_us) == (1, 10)
    assert rows["verify", "linear dense"].kernels == {
        "nvjet_qkv": 10, "nvjet_out": 10, "nvjet_up": 10, "nvjet_down": 10, "splitKreduce": 10
    }  # fmt: skip
    assert rows["verify", "other"].kernels == {STAMP: 10, "gather": 10}
    assert rows["draft", "attention"].launches == 0 < rows["draft", "attention"].predicted_us
    count = len(A_ROUND) - 1
    assert result.kernels_us == pytest.approx(10 * count)
    assert result.traced_round_us == result.busy_us == pytest.approx(8 * count + 2)
    assert result.overlap_us == pytest.approx(2 * (count - 1))
    saved = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert saved["predicted_us"] == pytest.approx(sum(row["predicted_us"] for row in saved["rows"]))
    assert {"rounds", "kernels_us", "busy_us", "overlap_us", "round_us", "traced_round_us"} < set(saved)


def test_a_generation_without_rounds_still_has_its_prediction(h200_profile: Profile) -> None:
    result = breakdown(plan_of("autoregressive"), LLAMA, h200_profile, measured(), [])
    assert (result.rounds, result.kernels_us, result.busy_us) == (0, 0, 0)
    assert result.predicted_us > 1000
    assert all(row.part == "verify" for row in result.rows)


@pytest.mark.slow
@pytest.mark.model
def test_every_case_of_a_report_is_traced_and_drafts_are_made_once(
    smollm2: Path, h200_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies in the target's format stand for 4-bit drafts, which take most of a minute to fit.
    monkeypatch.setattr("ridgeplan.runtime.engine.quantized_draft", lambda _decoder, weights, *_: replace(weights))
    model = InflatedModel.load(str(smollm2), llama_like_shape(30, 640, 1600, 9, 3, 64, vocab=49_200), "cpu")
    cases = [DecodeCase("quantspec", 64, 2, 2), DecodeCase("autoregressive", 64, 2), DecodeCase("quantspec", 64, 1, 1)]
    report = bench_decode(model, cases, DecodeOptions(h200_profile, 4, temperature=0.5))
    with pytest.raises(NoBreakdown, match="needs a CUDA device"):
        breakdowns(model, report.rows, DecodeOptions(h200_profile, 4))
    calls: list[Any] = []
    weights: list[int] = []

    def tracing(engine: Any, prompts: list[list[int]], sampling: SamplingParams) -> tuple[Launch, ...]:
        calls.append((engine.plan.speculation.gamma, [len(prompt) for prompt in prompts], sampling.temperature))
        weights.append(id(engine.draft_weights))
        return tuple(chain(*A_ROUND))

    monkeypatch.setattr(module, "require_cuda", lambda device: None)
    monkeypatch.setattr(module, "attach", lambda: None)
    monkeypatch.setattr(module, "traced", tracing)
    results = breakdowns(model, report.rows, DecodeOptions(h200_profile, 4, temperature=0.5))
    assert calls == [(0, [64, 64], 0.5), (2, [64, 64], 0.5), (1, [64], 0.5)]  # those with 4-bit drafts last
    assert weights[0] != weights[1] == weights[2]
    assert results[1].predicted_us < results[2].predicted_us < results[0].predicted_us
    assert all(result.kernels_us == 10 * (len(A_ROUND) - 1) for result in results)
    assert all(result.round_us > 100 for result in results)


@pytest.mark.gpu
@pytest.mark.model
def test_a_traced_round_on_cuda_is_whole(smollm2: Path, h200_profile: Profile) -> None:
    model = InflatedModel.load(str(smollm2), llama_like_shape(30, 640, 1600, 9, 3, 64, vocab=49_200), "cuda")
    report = bench_decode(model, [DecodeCase("quantspec", 512, 1, 2)], DecodeOptions(h200_profile, 32, temperature=1.0))
    (result,) = breakdowns(model, report.rows, DecodeOptions(h200_profile, 32, temperature=1.0))
    launches = {(row.part, row.operation): row.launches for row in result.rows}
    kernels = {(row.part, row.operation): row.kernels for row in result.rows}
    assert result.rounds >= TRACED_ROUNDS
    # Each layer launches attention, and a second kernel where that leaves the merge of its splits to one.
    assert launches["verify", "attention"] == 30 * len(kernels["verify", "attention"])
    assert launches["draft", "attention"] == 2 * 30 * len(kernels["draft", "attention"])
    assert launches["draft", "norm"] == 2 * launches["verify", "norm"] == 2 * 61
    assert launches["verify", "head"] >= 1
    assert launches["draft", "head"] == 2
    assert 0 < result.busy_us <= result.traced_round_us
    assert result.round_us == pytest.approx(result.traced_round_us, rel=0.5)


# Launches as the profiler lists them: only the device's, of decoding alone, and the time in which any of them runs.


def test_time_in_which_several_kernels_run_counts_once() -> None:
    spans = [(0, 10), (8, 12), (9, 11), (20, 21)]
    assert busy_us(Launch("any", *span) for span in spans) == 13
    assert busy_us([]) == 0


class FakeProfiler:
    """Finds one kernel and one call of the host; `log` holds what was asked of it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def events(self) -> list[Any]:
        device, host = DeviceType.CUDA, DeviceType.CPU
        kinds = (("second", device, 5.0), ("cudaGraphLaunch", host, 0.0), ("first", device, 1.0))
        return [
            SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=start + 2))
            for name, kind, start in kinds
        ]


@pytest.mark.model
def test_the_profiler_runs_from_the_end_of_prefill_to_that_of_decoding(
    model: InflatedModel, h200_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(trace.profiler, "profile", lambda activities: FakeProfiler(log))
    engine = model.engine(DecodeCase("quantspec-kv", 64, 1, 2).plan(model.shape, h200_profile, 6))
    launch = EagerRounds.launch
    monkeypatch.setattr(EagerRounds, "launch", lambda rounds, gamma: (log.append("round"), launch(rounds, gamma)))
    launches = trace.traced(engine, [list(range(100, 164))], 0.0)
    warm, decoding = log[: log.index("start") - 1], log[log.index("start") - 1 :]
    assert set(warm) == {"round"}
    assert decoding[:2] == ["synchronize", "start"]
    assert decoding[-2:] == ["synchronize", "stop"]
    assert 2 <= len(decoding[2:-2]) <= 5
    assert set(decoding[2:-2]) == {"round"}
    assert launches == (Launch("first", 1.0, 3.0), Launch("second", 5.0, 7.0))
