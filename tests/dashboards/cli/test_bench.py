"""`ridgeplan bench kernels`: what it prints and writes for a given report, and what it refuses."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from ridgeplan.dashboards.cli.bench_decode import SUITE_WORKLOADS, plan_text, row_texts
from ridgeplan.planner import Workload
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.progress import OnProgress
from ridgeplan.validate import kernel_bench, planner_speed
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.kernel_bench import KernelReport, KernelRow, MachinePeaks
from ridgeplan.validate.kernel_calls.sizes import KERNELS
from ridgeplan.validate.planner_speed import PlannerSpeed
from ridgeplan.validate.random_model import llama_like_shape

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Result]
ROWS = (
    KernelRow(
        "attention", "32/8 x 128", 4e-5, {"SDPA cuDNN": 1.2e-4, "FlashInfer": 1.3e-4}, "SDPA cuDNN", 3e-5, 1e-3, 5e-5
    ),
    KernelRow("draw", "32 x 128256", 3e-5, {}, None, 1e-5, 0.0, 2.5e-5, {"vLLM": "ImportError: no vllm"}),
)
COLUMNS = {"kernel", "shape", "ours_us", "peer", "peer_us", "peers_us", "ratio", "roof", "error", "target_us", "met"}


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The kernels that a run was asked for; the run itself finds `ROWS`."""
    calls: list[tuple[str, ...]] = []

    def bench_kernels(kernels: Iterable[str], on_progress: Callable[[str, int, int], None]) -> KernelReport:
        calls.append(tuple(kernels))
        on_progress("attention", 0, 1)
        return KernelReport("a GPU", {"torch": "2"}, "2026-11-21", MachinePeaks(4e12, 7e14), ROWS)

    monkeypatch.setattr(kernel_bench, "bench_kernels", bench_kernels)
    return calls


def test_the_table_shows_ours_and_the_peer(invoke: Invoke, benched: list[tuple[str, ...]]) -> None:
    result = invoke("bench", "kernels")
    assert result.exit_code == 0
    assert benched == [KERNELS]
    lines = result.stdout.splitlines()
    assert lines[0] == "a GPU, 4 TB/s, 700 TFLOP/s, 2026-11-21"
    cells = re.split(r"\s{2,}", next(line for line in lines if "attention" in line).strip())
    assert cells == ["attention 32/8 x 128", "40", "120", "3.00x", "75%", "1.0e-03", "50", "met", "SDPA cuDNN"]
    cells = re.split(r"\s{2,}", next(line for line in lines if "draw" in line).strip())
    assert cells == ["draw 32 x 128256", "30", "33%", "0.0e+00", "25", "missed", "none"]
    assert lines[-2:] == ["vLLM was not timed: ImportError: no vllm", "1 of 2 meet the targets for an H200"]


def test_json_is_one_object_and_the_file_holds_the_same(
    invoke: Invoke, benched: list[tuple[str, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "kernels.json"
    result = invoke("bench", "kernels", "--only", "draw", "--only", "attention", "--json", "--output", path)
    report = json.loads(result.stdout)
    assert benched == [("draw", "attention")]
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.json"]
    assert (report["device"], report["copy_bytes_per_s"], report["matmul_flops"]) == ("a GPU", 4e12, 7e14)
    assert [set(row) - COLUMNS for row in report["rows"]] == [set(), {"notes"}]
    first, second = report["rows"]
    assert (first["ours_us"], first["peer_us"], first["ratio"], first["met"]) == (40.0, 120.0, 3.0, True)
    assert (second["peer"], second["ratio"], second["target_us"], second["met"]) == (None, None, 25.0, False)


def test_once_lists_the_errors(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "run_kernels_once", lambda kernels: [(name, "tiny", 1e-3) for name in kernels])
    result = invoke("bench", "kernels", "--once", "--only", "norm")
    assert result.exit_code == 0
    assert "norm" in result.stdout
    assert "1.0e-03" in result.stdout
    result = invoke("bench", "kernels", "--once", "--only", "norm", "--json")
    assert json.loads(result.stdout) == {"rows": [{"kernel": "norm", "shape": "tiny", "error": 1e-3}]}


def test_an_error_that_is_not_finite_is_shown_and_saved(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_bench, "run_kernels_once", lambda kernels: [("norm", "tiny", math.nan)])
    path = tmp_path / "once.json"
    result = invoke("bench", "kernels", "--once", "--output", path)
    assert result.exit_code == 0
    assert "not finite" in result.stdout
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row == {"kernel": "norm", "shape": "tiny", "error": None}


def test_an_unknown_kernel_names_the_allowed(refuses: Callable[..., str]) -> None:
    line = refuses("bench", "kernels", "--only", "softmax")
    assert "'softmax'" in line
    assert all(f"'{name}'" in line for name in KERNELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("arguments", [(), ("--once",), ("--json",)], ids=str)
def test_without_a_gpu_one_line_says_so(refuses: Callable[..., str], arguments: tuple[str, ...]) -> None:
    assert "needs a CUDA device" in refuses("bench", "kernels", *arguments)


def test_an_output_that_cannot_be_written_is_refused_first(
    refuses: Callable[..., str], benched: list[tuple[str, ...]], tmp_path: Path
) -> None:
    refuses("bench", "kernels", "--output", tmp_path / "nowhere" / "kernels.json")
    assert not benched


def test_planner_speed_is_told_in_units_and_saved(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    benched: list[int] = []

    def measure_planner(runs: int, on_progress: OnProgress) -> PlannerSpeed:
        benched.append(runs)
        on_progress("a new process", 0, 3)
        return PlannerSpeed(
            help_s=0.1, cold_s=0.4, first_s=0.05, warm_s=0.02, map_s=0.6, grid_s=2.5, searched_plans=5000,
            swept_plans_per_s=1.5e7,
        )  # fmt: skip

    monkeypatch.setattr(planner_speed, "measure_planner", measure_planner)
    path = tmp_path / "speed.json"
    result = invoke("bench", "planner", "--runs", "2", "--output", str(path))
    assert result.exit_code == 0
    assert benched == [2]
    assert "400 ms" in result.stdout and "20.0 ms for 5,000 plans" in result.stdout
    assert "0.25 million plans per second" in result.stdout and "15.0 million plans per second" in result.stdout
    assert json.loads(path.read_text(encoding="utf-8"))["searched_plans_per_s"] == 250_000


# `bench decode` and `bench suite`: a small model's function at another shape's size, as tables and JSON.

CASES = (("autoregressive", 0), ("quantspec-kv", 2))


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """A model that was placed inside a shape keeps its large weights, which take seconds to make."""
    from ridgeplan.validate.decode_bench.inflated_model import InflatedModel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InflatedModel, "load", cache(InflatedModel.load))
        yield


@pytest.fixture
def small_shape(loaded_once: None, monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """A shape little larger than SmolLM2's, under a name of the catalog."""
    shape = llama_like_shape(30, 640, 1600, 9, 3, 64, vocab=49_200)
    monkeypatch.setattr("ridgeplan.dashboards.cli.bench_decode.load_shape", lambda name: shape)
    return shape


@pytest.mark.model
def test_decode_runs_plain_decoding_and_the_preset(
    invoke: Any, profile_path: Path, small_shape: ModelShape, smollm2: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--model-shape", "toy", "--ctx", 64, "--preset", "quantspec-kv", "--gamma", 2]
    arguments += ["--new-tokens", 6, "--profile", profile_path, "--output", saved]
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert json.loads(saved.read_text()) == json.loads(result.stdout)
    assert [(row["preset"], row["gamma"]) for row in rows] == list(CASES)
    assert rows[1]["measured"]["generated"] == 6


@pytest.mark.model
def test_a_breakdown_shows_each_class_beside_its_prediction(
    invoke: Any, profile_path: Path, small_shape: ModelShape, smollm2: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from ridgeplan.validate.decode_bench import breakdown

    names = (breakdown.STAMP, breakdown.STAMP, "linear", "void at::native::fill<4, at::native::FillFunctor<int>>(int)")
    names = (*names, "filter", breakdown.STAMP, breakdown.STAMP)
    launches = tuple(breakdown.Launch(name, 4.0 * index, 4.0 * index + 5) for index, name in enumerate(names))
    monkeypatch.setattr(breakdown, "require_cuda", lambda device: None)
    monkeypatch.setattr(breakdown, "attach", lambda: None)
    monkeypatch.setattr(breakdown, "traced", lambda *_: launches)
    saved = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--model-shape", "toy", "--ctx", 64, "--preset", "quantspec-kv", "--gamma", 2]
    arguments += ["--new-tokens", 4, "--profile", profile_path, "--output", saved, "--breakdown"]
    shown = invoke(*arguments).stdout
    titles = [f"{name}, context 64, batch 1, gamma {gamma}: one round" for name, gamma in CASES]
    assert all(title in shown for title in titles)
    (other,) = [line for line in shown.partition(titles[1])[2].splitlines() if "verify other" in line]
    cells = re.split(r"\s{2,}", other.strip())
    assert cells[1:3] == ["2", "10"]
    assert cells[4] == "_record_timestamp_kernel 5, fill of FillFunctor 5"
    assert "kernels take 30 us, 5 us of them beside others; a round takes" in shown
    rows = json.loads(saved.read_text())["rows"]
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines() if "64x1" in line]
    assert [line[-1] for line in lines] == ["autoregressive", "quantspec-kv, gamma 2"]
    predicted = {figure["name"]: figure["predicted"] for figure in rows[1]["comparison"]}
    message = f"({predicted['tokens per round']:.2f})"
    assert [any(cell.endswith(message) for cell in line) for line in lines] == [False, True]
    assert [row["breakdown"]["rounds"] for row in rows] == [1, 1]
    heads = [part for part in rows[1]["breakdown"]["rows"] if part["operation"] == "head" and part["launches"]]
    assert [(part["part"], part["measured_us"]) for part in heads] == [("verify", 5)]


@pytest.mark.parametrize(
    "case",
    [
        "quantspec", "quantspec:4096", "quantspec:4096x1:0", "quantspec:4096x1:99", "autoregressive:4096x1", "int8:x1",
        "int8:4096x1:3", "quantspec@0.25:4096x1", "dapq@1.5:4096x1", "dapq@0:4096x1", "dapq@0.25:4096x1:2",
        "quantspec/512:4096x1", "dapq/0:4096x1", "dapq/99999999:4096x1", "dapq/:x",
        "quantspec:4096x1:0-", "quantspec:4096x1:0-99", "int8:4096x1:0-3",
    ],
)  # fmt: skip
def test_a_strange_case_is_refused(refuses: Any, profile_path: Path, case: str) -> None:
    arguments = ("bench", "suite", "--model-shape", "SmolLM2-135M", "--profile", profile_path, "--case", case)
    assert "is not a" in refuses(*arguments)


def test_cases_replace_the_grid(invoke: Any, profile_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("ridgeplan.dashboards.cli.bench_decode.report", lambda cases, **rest: seen.extend(cases))
    arguments = ("bench", "suite", "--model-shape", "any", "--case", "quantspec:32768x8:3", "--case", "int8:4096x1")
    arguments += ("--case", "dapq-quantspec@0.25:32768x8:2", "--case", "quantspec:32768x8:0-6")
    arguments += ("--case", "snapkv/512:32768x8", "--case", "dapq@0.5/4096:32768x8")
    assert invoke(*arguments).exit_code == 0
    expected = [("autoregressive", 4096, 1, None, False, 0, 0), ("int8", 4096, 1, None, False, 0, 0)]
    expected += [("autoregressive", 32768, 8, None, False, 0, 0), ("quantspec", 32768, 8, 3, False, 0, 0)]
    expected += [("dapq-quantspec", 32768, 8, 2, False, 0.25, 0), ("quantspec", 32768, 8, 6, True, 0, 0)]
    expected += [("snapkv", 32768, 8, None, False, 0, 512), ("dapq", 32768, 8, None, False, 0.5, 4096)]
    assert [astuple(case)[:-1] for case in seen] == expected


def test_a_plan_file_is_a_case_with_its_own_figures(
    invoke: Any, profile_path: Path, tmp_path: Path, h200_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = preset("dapq-quantspec", Workload("meta-llama/Llama-3.1-8B", "h200", 4096, batch=2))
    plan = replace(plan, speculation=replace(plan.speculation, gamma=5))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    seen: list[Any] = []
    monkeypatch.setattr("ridgeplan.dashboards.cli.bench_decode.report", lambda cases, **rest: seen.extend(cases))
    assert invoke("bench", "suite", "--model-shape", "any", "--plan", file).exit_code == 0
    assert seen == [DecodeCase("autoregressive", 4096, 2), DecodeCase("dapq-quantspec", 4096, 2, saved_plan=plan)]
    shape = load_shape("Llama-3.1-8B")
    run = seen[1].plan(shape, h200_profile, 64)
    assert run == replace(plan, workload=run.workload)
    assert (run.workload.new_tokens, run.workload.hardware) == (64, h200_profile.hardware.name)


def test_a_case_may_keep_a_share_of_the_prompt(h200_profile: Any) -> None:
    shape = load_shape("Llama-3.1-8B")
    plan = DecodeCase("dapq-quantspec", 32768, 8, 2, share=0.25).plan(shape, h200_profile, 64)
    assert (plan.eviction.budget, plan.eviction.share, plan.eviction.tokens(32768)) == (0, 0.25, 8192)
    assert DecodeCase("dapq", 32768, 8).plan(shape, h200_profile, 64).eviction.budget == 1024
    row = {"preset": "dapq-quantspec", "share": 0.25, "gamma": 2}
    assert plan_text(row) == "dapq-quantspec 25%, gamma 2"
    assert plan_text(row | {"adaptive": True}) == "dapq-quantspec 25%, gamma adaptive up to 2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_breakdown_without_a_gpu_is_refused_before_anything_is_loaded(refuses: Any, profile_path: Path) -> None:
    arguments = ("bench", "decode", "--model-shape", "SmolLM2-135M", "--ctx", 64, "--profile", profile_path)
    assert "needs a CUDA device" in refuses(*arguments, "--breakdown")


@pytest.mark.model
def test_the_text_that_comes_with_python_holds_the_default_suite(smollm2: Path) -> None:
    from ridgeplan.runtime.model.checkpoint import load_tokenizer
    from ridgeplan.runtime.model.source import model_source
    from ridgeplan.validate.prompts import sample_text

    tokens = len(load_tokenizer(model_source(str(smollm2))).encode(sample_text()))
    sizes = [map(int, workload.split("x")) for workload in SUITE_WORKLOADS]
    assert max(context + batch - 1 for context, batch in sizes) <= tokens


@pytest.mark.model
def test_a_shape_too_small_for_the_model_is_one_line(
    refuses: Any, profile_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    shape = llama_like_shape(30, 512, 1600, 9, 3, 64, vocab=49_200)
    monkeypatch.setattr("ridgeplan.dashboards.cli.bench_decode.load_shape", lambda name: shape)
    arguments = ("bench", "decode", "--model-shape", "toy", "--ctx", 64, "--profile", profile_path)
    assert "needs 577 hidden channels and a constant" in refuses(*arguments)


def test_a_case_shows_each_figure_beside_its_prediction() -> None:
    names = {"tpot": 4.0, "tpot at the measured acceptance": 5.0, "tokens per round": 3.0, "acceptance": 0.8}
    predicted = names | {"prefill": 250.0, "peak memory": 7e9}
    faster = {"name": "speed-up over plain decoding", "predicted": 2.0, "measured": 1.5}
    measured = {"tpot_ms": 6.0, "tokens_per_round": 2.5, "acceptance": 0.75, "ttft_ms": 500.0, "generated": 500}
    row = {
        "preset": "quantspec", "context": 64, "batch": 2, "gamma": 3, "over_vllm": 1.2,
        "measured": measured | {"peak_memory_bytes": 8e9},
        "comparison": [{"name": name, "predicted": value} | {"measured": None} for name, value in predicted.items()],
    }  # fmt: skip
    row["comparison"].append(faster)
    cells = ("64x2", "6.00 (5.00)", "1.50x", "1.20x", "2.50 (3.00)", "0.750 (0.800)", "0.50 (0.25)")
    # Two sequences of 250 tokens: 0.5 + 1.5 seconds, predicted 0.25 + 1.25.
    assert row_texts(row) == (*cells, "250 (333)", "8.0 (7.0)", "quantspec, gamma 3")
    plain = row | {"preset": "autoregressive", "gamma": 0, "over_vllm": None}
    assert row_texts(plain)[1:6] == ("6.00 (4.00)", "1.50x", "", "", "")


def test_only_presets_that_can_be_executed_are_allowed(refuses: Any) -> None:
    line = refuses("bench", "decode", "--model-shape", "llama-3.1-8b", "--ctx", 64, "--preset", "specontext")
    assert "'quantspec-exact'" in line
    assert "'shadowkv'" in line
    assert "'specontext-resident'" not in line  # it needs a retrieval head, which no model here has


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("suite", "--model-shape", "toy", "--workload", "4096"),
            "'4096' is not a workload; allowed: context up to 16777216 and batch up to 4096",
        ),
        (("suite", "--model-shape", "toy", "--workload", "9" * 5000 + "x1"), "is not a workload"),
        (("suite", "--model-shape", "toy", "--workload", "64x4097"), "'64x4097' is not a workload"),
        (("suite", "--model-shape", "toy", "--case", "quantspec:64x1:" + "9" * 5000), "is not a case"),
        (("decode", "--model-shape", "llama-3.1-8b", "--ctx", "64", "--profile", ""), "cannot read profile ''"),
        (("decode", "--model-shape", "toy", "--ctx", "99999999"), "'99999999' is out of range; allowed: 1 to 16777216"),
        (("decode", "--model-shape", "nonsense-9b", "--ctx", "64"), "nonsense-9b"),
        (("decode", "--ctx", "64"), "--model-shape"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(invoke: Any, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
