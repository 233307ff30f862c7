"""`fit` and `gamma`, both answers of `recommend`, and plans that `estimate` saves."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner import PRESETS, Plan, fit
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.support import missing_execution, missing_head

LLAMA = "meta-llama/Llama-3.1-8B"
QUESTION = (LLAMA, "--gpu", "h200", "--ctx", 120_000)


def as_json(result: Any) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_both_answers_are_shown_and_marked(invoke: Any) -> None:
    answer = as_json(invoke("recommend", *QUESTION, "--json"))
    best = answer["best_estimated"]
    running = Plan.from_dict(answer["plan"])
    assert best["rejected"]
    assert not (missing_execution(running) or missing_head(running))
    assert best["predicted"]["tpot_ms"] < answer["predicted"]["tpot_ms"]
    assert 0 < answer["predicted"]["beats_plain"] <= 1
    lines = invoke("recommend", *QUESTION, "--all").stdout
    text = " ".join(lines.split())  # as it is wrapped
    assert f"recommended: {answer['preset']}" in text
    assert f"fastest estimated: {best['preset']}" in text
    assert f"{answer['preset']}: recommended" in text
    assert [line for line in lines.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("model", "runs"), [("Qwen/Qwen3-8B", True), ("google/gemma-4-E4B-it", False)])
def test_of_a_model_that_the_runtime_lacks_no_plan_is_said_to_run(invoke: Any, model: str, runs: bool) -> None:
    """The runtime has the decoder of Qwen3, and not the caches that layers of Gemma 4 E4B share."""
    line = ("recommend", model, "--gpu", "h200", "--ctx", 8192)
    assert as_json(invoke(*line, "--json"))["model_runs"] is runs
    assert ("recommended:" in invoke(*line, "--all").stdout) is runs
    assert ("cannot execute yet" in invoke(*line).stdout) is not runs


def test_where_nothing_estimated_is_faster_there_is_no_second_answer(invoke: Any) -> None:
    line = ("recommend", *QUESTION, "--objective", "memory")
    assert as_json(invoke(*line, "--json"))["best_estimated"] is None
    assert "fastest estimated: no plan that is only estimated is faster" in invoke(*line, "--all").stdout


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_saved_as_a_plan(invoke: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    answer = as_json(invoke("estimate", *QUESTION, "--preset", name, "--output", path, "--json"))
    saved = Plan.from_json(path.read_text())
    assert saved == Plan.from_dict(answer["plan"])
    assert answer["not_executable"] == missing_execution(saved)
    assert as_json(invoke("estimate", "--plan", path, "--json"))["preset"] == name


def test_another_gpu_or_model_takes_the_place_of_the_plans_own(invoke: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", "Qwen/Qwen2.5-7B"
    as_json(invoke("estimate", *QUESTION, "--preset", "quantspec", "--gamma", 4, "--output", path, "--json"))
    line = ("estimate", other, "--plan", path, "--gpu", "h100")
    assert invoke(*line).stdout.startswith(f"{other} on h100-sxm, 120000 tokens of context")
    asked_anew = invoke(
        "estimate", other, "--preset", "quantspec", "--gamma", 4, "--gpu", "h100", "--ctx", 120_000, "--json"
    )
    assert as_json(invoke(*line, "--json")) == as_json(asked_anew)


def test_a_gguf_is_estimated_as_it_runs(invoke: Any, smollm2: Path) -> None:
    """The runtime decodes it to 16 bits, as which the catalog has the same model."""
    line = ("--preset", "int8", "--gpu", "h200", "--ctx", 4096, "--json")
    stored, catalog = (as_json(invoke("estimate", model, *line)) for model in (smollm2, "HuggingFaceTB/SmolLM2-135M"))
    assert stored["not_executable"] == []
    for figure in ("tpot_ms", "ttft_ms", "peak_memory_bytes"):
        assert stored["predicted"][figure] == pytest.approx(catalog["predicted"][figure])
    assert any("plans with stored weights" in note for note in stored["notes"])


def test_a_plan_that_is_only_estimated_says_so(invoke: Any) -> None:
    line = ("estimate", *QUESTION, "--preset")
    needs = "it needs a retrieval head for this model"
    assert needs in " ".join(invoke(*line, "specontext").stdout.split())
    assert "cannot execute" not in invoke(*line, "quantspec").stdout


def test_the_reserve_and_the_limit_decide_what_fits(invoke: Any) -> None:
    """Plain decoding of 120000 tokens takes 32 GiB of 140."""
    line = ("estimate", *QUESTION, "--preset", "autoregressive", "--json")
    answer = as_json(invoke(*line))
    assert (answer["fits"], answer["memory_limit_bytes"]) == (True, 0.9 * 150_754_820_096)
    assert as_json(invoke(*line, "--memory-utilization", "0.2"))["fits"] is False
    assert as_json(invoke(*line, "--memory-limit", "30GiB"))["fits"] is False
    clamped = as_json(invoke(*line, "--memory-limit", "140GiB"))
    assert clamped["memory_limit_bytes"] == answer["memory_limit_bytes"]
    assert any("the memory limit of 150 GB is more than h200 may use" in note for note in clamped["notes"])


def test_layers_leave_the_gpu_at_the_limit(invoke: Any) -> None:
    line = ("estimate", *QUESTION, "--preset", "specontext", "--json")
    assert as_json(invoke(*line))["predicted"]["offloaded_layers"] == 0
    limited = as_json(invoke(*line, "--memory-limit", "25GiB"))
    assert limited["predicted"]["offloaded_layers"] > 0
    assert limited["fits"] is True


def test_fit_is_the_planners(invoke: Any, profile: Profile) -> None:
    line = ("fit", LLAMA, "rtx4090", "--batch", 1, "--batch", 4, "--ctx", 8192)
    answer = fit(LLAMA, "rtx4090", batches=(1, 4), contexts=(8192,), profile=profile)
    assert as_json(invoke(*line, "--json")) == json.loads(json.dumps(answer.to_dict()))
    text = invoke(*line).stdout
    for row in (*answer.contexts, *answer.batches):
        assert f"{tokens_text(row.context)} " in text
        assert row.plan in text
    assert "note: rtx4090 is not calibrated" in text


def test_fit_of_one_preset_and_of_none_that_fits(invoke: Any) -> None:
    answer = as_json(invoke("fit", LLAMA, "rtx4090", "--preset", "quantspec", "--json"))
    assert {row["plan"] for row in (*answer["contexts"], *answer["batches"])} <= {"quantspec", ""}
    assert [row["batch"] for row in answer["contexts"]] == [1, 2, 4, 8, 16, 32, 64]
    assert "none fits" in invoke("fit", "meta-llama/Llama-3.1-70B", "rtx4090").stdout


def test_fit_may_leave_layers_on_the_host(invoke: Any, profile: Profile) -> None:
    line = ("fit", LLAMA, "rtx4090", "--batch", 8, "--ctx", 8192, "--offload", "--host-memory", "30GB", "--json")
    answer = fit(LLAMA, "rtx4090", batches=(8,), contexts=(8192,), profile=profile, offload=True, host_memory=30e9)
    assert as_json(invoke(*line)) == json.loads(json.dumps(answer.to_dict()))
    (row,) = answer.contexts
    assert "offload" in row.plan
    (on_device_only,) = fit(LLAMA, "rtx4090", batches=(8,), profile=profile).contexts
    (roomy,) = fit(LLAMA, "rtx4090", batches=(8,), profile=profile, offload=True, host_memory=60e9).contexts
    assert on_device_only.context < row.context < roomy.context


def test_gamma_is_a_table_of_contexts_and_batches(invoke: Any) -> None:
    line = ("gamma", LLAMA, "h200", "--ctx", 4096, "--ctx", 131_072, "--batch", 1, "--batch", 64)
    cells = as_json(invoke(*line, "--json"))["cells"]
    assert [(cell["context"], cell["batch"], cell["fits"]) for cell in cells] == [
        (4096, 1, True), (4096, 64, True), (131_072, 1, True), (131_072, 64, False),
    ]  # fmt: skip
    text = invoke(*line).stdout
    assert "does not fit" in text
    for cell in cells[:3]:
        assert f"{cell['gamma']} ({cell['speedup']:.2f}x)" in text


def test_gamma_says_what_its_figures_do_not_hold_for(invoke: Any) -> None:
    """The H200 is calibrated, the RTX 4090 is not; and of the H200 SpecAttn's kernels are not, QuantSpec's are."""
    sizes = ("--ctx", 4096, "--batch", 1, "--json")
    assert as_json(invoke("gamma", LLAMA, "h200", *sizes))["notes"] == []
    (elsewhere,) = as_json(invoke("gamma", LLAMA, "rtx4090", *sizes))["notes"]
    assert "rtx4090 is not calibrated" in elsewhere
    line = ("gamma", LLAMA, "h200", "--preset", "specattn", *sizes)
    (estimated,) = as_json(invoke(*line))["notes"]
    assert "not calibrated" in estimated
    assert f"note: {estimated}" in " ".join(invoke(*line[:-1]).stdout.split())  # as it is wrapped


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("fit", LLAMA), "without a GPU, fit needs one --ctx"),
        (("fit", LLAMA, "h200", "--gpu", "h100"), "GPU was given twice"),
        (("gamma", LLAMA), "gamma needs a GPU"),
        (("fit", LLAMA, "h20o"), "unknown GPU 'h20o'"),
        (("fit", LLAMA, "h200", "--batch", 0), "batch is 0; allowed"),
        (("fit", LLAMA, "h200", "--preset", "x"), "unknown preset 'x'"),
        (("fit", LLAMA, "h200", "--memory-utilization", 1.5), "memory_utilization is 1.5; allowed: above 0 up to 1"),
        (("gamma", LLAMA, "h200", "--preset", "int8"), "preset 'int8' drafts nothing"),
        (("gamma", LLAMA, "h200", "--ctx", 0), "context is 0; allowed"),
        (("recommend", *QUESTION, "--memory-utilization", 0), "memory_utilization is 0.0; allowed: above 0 up to 1"),
        (("recommend", *QUESTION, "--memory-utilization", "all"), "'all' is not a valid float"),
        (("estimate", *QUESTION, "--preset", "int8", "--output", "/nowhere/x.json"), "cannot write"),
    ],
)
def test_what_is_wrong_is_one_line(refuses: Any, line: tuple[object, ...], words: str) -> None:
    assert words in refuses(*line)


def test_a_checkpoint_in_a_format_that_is_not_known_is_refused(refuses: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512,
        "quantization_config": {"quant_method": "aqlm"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "quant_method 'aqlm' is not supported; supported: gptq" in refuses("recommend", tmp_path, *QUESTION[1:])


def test_a_preset_that_drafts_nothing_takes_no_gamma(invoke: Any) -> None:
    question = ("estimate", "Llama-3.1-8B", "--preset", "autoregressive", "--gpu", "h200", "--ctx", "4096")
    result = invoke(*question, "--gamma", "3")
    assert result.exit_code == 2
    assert "gamma is 3; allowed: none, as autoregressive drafts nothing" in result.stderr
