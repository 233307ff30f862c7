"""`bench decode` and `bench suite`: a small model's function at another shape's size, as tables and JSON."""

import json
import re
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan.dashboards.cli.bench_decode import SUITE_WORKLOADS, plan_text, row_texts
from ridgeplan.planner import Workload
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.random_model import llama_like_shape

CASES = (("autoregressive", 0), ("quantspec-kv", 2))


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> ModelShape:
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
    assert cells[4] == "_stamp_kernel 5, fill of FillFunctor 5"
    assert "kernels 30 us, of which 5 us beside others; a round takes" in shown
    rows = json.loads(saved.read_text())["rows"]
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines() if "64x1" in line]
    assert [line[-1] for line in lines] == ["autoregressive", "quantspec-kv, gamma 2"]
    predicted = {one["name"]: one["predicted"] for one in rows[1]["comparison"]}
    told = f"({predicted['tokens per round']:.2f})"
    assert [any(cell.endswith(told) for cell in line) for line in lines] == [False, True]
    assert [row["breakdown"]["rounds"] for row in rows] == [1, 1]
    heads = [part for part in rows[1]["breakdown"]["rows"] if part["operation"] == "head" and part["launches"]]
    assert [(part["part"], part["measured_us"]) for part in heads] == [("verify", 5)]


@pytest.mark.parametrize(
    "case",
    [
        "quantspec", "quantspec:4096", "quantspec:4096x1:0", "quantspec:4096x1:99", "autoregressive:4096x1", "int8:x1",
        "int8:4096x1:3", "quantspec@0.25:4096x1", "dapq@1.5:4096x1", "dapq@0:4096x1", "dapq@0.25:4096x1:2",
        "quantspec/512:4096x1", "h2o/512:4096x1", "dapq/0:4096x1", "dapq/99999999:4096x1", "dapq/:x",
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
    assert seen == [DecodeCase("autoregressive", 4096, 2), DecodeCase("dapq-quantspec", 4096, 2, given=plan)]
    model: Any = SimpleNamespace(shape=load_shape("Llama-3.1-8B"))
    run = seen[1].plan(model, h200_profile, 64)
    assert run == replace(plan, workload=run.workload)
    assert (run.workload.new_tokens, run.workload.hardware) == (64, h200_profile.hardware.name)


def test_a_case_may_keep_a_share_of_the_prompt(h200_profile: Any) -> None:
    model: Any = SimpleNamespace(shape=load_shape("Llama-3.1-8B"))
    plan = DecodeCase("dapq-quantspec", 32768, 8, 2, share=0.25).plan(model, h200_profile, 64)
    assert (plan.eviction.budget, plan.eviction.share, plan.eviction.tokens(32768)) == (0, 0.25, 8192)
    assert DecodeCase("dapq", 32768, 8).plan(model, h200_profile, 64).eviction.budget == 1024
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
