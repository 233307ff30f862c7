"""Commands with plans whose gamma adapts: recommend, estimate, bench decode and run; and `ridgeplan tune`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli.bench_decode import row_texts
from ridgeplan.dashboards.cli.run import summary
from ridgeplan.planner import Plan
from ridgeplan.roofline.catalog.profile import user_acceptance_path
from ridgeplan.roofline.execution import RoundShape
from ridgeplan.runtime.statistics import Statistics

LLAMA = "meta-llama/Llama-3.1-8B"
QUESTION = (LLAMA, "--gpu", "h200", "--ctx", 32768)
TEXT = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeplan.planner.resolution.user_acceptance_path", user_acceptance_path)


def test_recommend_writes_the_adaptive_form_if_asked(invoke: Any, tmp_path: Path) -> None:
    fixed, adaptive = tmp_path / "fixed.json", tmp_path / "adaptive.json"
    answer = json.loads(invoke("recommend", *QUESTION, "--output", fixed, "--json").stdout)
    invoke("recommend", *QUESTION, "--output", adaptive, "--adaptive")
    assert Plan.from_json(fixed.read_text()).to_dict() == answer["plan"]
    assert Plan.from_json(adaptive.read_text()).to_dict() == answer["adaptive"]
    assert answer["adaptive"]["speculation"]["adaptive"] is True


def test_estimate_shows_where_an_adaptive_gamma_settles(invoke: Any) -> None:
    command = ("estimate", *QUESTION, "--preset", "quantspec", "--gamma", 6, "--adaptive")
    answer = json.loads(invoke(*command, "--json").stdout)
    assert answer["plan"]["speculation"]["gamma"] == 6
    (row,) = [line for line in invoke(*command).stdout.splitlines() if "adaptive up to 6" in line]
    assert re.split(r"\s{2,}", row)[1] == str(answer["predicted"]["gamma"])


@pytest.mark.parametrize("preset", ["autoregressive", "int8"])
def test_a_plan_without_drafts_cannot_adapt(refuses: Any, preset: str) -> None:
    line = refuses("estimate", *QUESTION, "--preset", preset, "--adaptive")
    assert line == f"error: adaptive is given; allowed: none, as {preset} drafts nothing\n"


def test_bench_cases_may_adapt(invoke: Any, refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "ridgeplan.dashboards.cli.bench_decode.report", lambda cases, **rest: seen.append((cases, rest))
    )
    cases = ("--case", "quantspec:4096x1:0-6", "--case", "quantspec:4096x1:6")
    assert invoke("bench", "suite", "--model-shape", "any", *cases, "--random-tokens").exit_code == 0
    decode = ("bench", "decode", "--model-shape", "any", "--ctx", 64, "--gamma", 3)
    invoke(*decode, "--adaptive"), invoke(*decode)
    assert [[(case.preset, case.gamma, case.adaptive) for case in cases] for cases, _ in seen] == [
        [("autoregressive", None, False), ("quantspec", 6, True), ("quantspec", 6, False)],
        [("autoregressive", 3, False), ("quantspec", 3, True)],
        [("autoregressive", 3, False), ("quantspec", 3, False)],
    ]
    assert [rest["random_tokens"] for _, rest in seen] == [True, False, False]
    for wrong in ("quantspec:4096x1:0-", "quantspec:4096x1:0-16", "quantspec:4096x1:1-6", "int8:4096x1:0-3"):
        assert "is not a case" in refuses("bench", "suite", "--model-shape", "any", "--case", wrong)


@pytest.mark.parametrize(
    "options, words",
    [
        (("--adaptive", "--breakdown"), "--breakdown cannot be combined with an adaptive gamma"),
        (("--random-tokens", "--prompt-file", "x"), "--random-tokens and --prompt-file cannot be combined"),
    ],
)
def test_options_that_exclude_each_other(refuses: Any, options: tuple[str, ...], words: str) -> None:
    assert words in refuses("bench", "decode", "--model-shape", "SmolLM2-135M", "--ctx", 64, *options)


def test_a_table_tells_adaptive_gammas_from_others() -> None:
    figures = {"tpot_ms": 6.0, "tokens_per_round": 2.5, "acceptance": 0.75, "ttft_ms": 500.0, "peak_memory_bytes": None,
               "generated": 8}  # fmt: skip
    names = ("tpot", "tpot at the measured acceptance", "tokens per round", "acceptance", "prefill", "peak memory")
    compared = [{"name": name, "predicted": 1.0, "measured": None} for name in names]
    compared.append({"name": "speed-up over plain decoding", "predicted": 2.0, "measured": 1.5})
    row = {"preset": "quantspec", "context": 64, "batch": 2, "gamma": 6, "over_vllm": None, "measured": figures,
           "comparison": compared}  # fmt: skip
    assert row_texts(row | {"adaptive": True})[-1] == "quantspec, gamma adaptive up to 6"
    assert row_texts(row | {"adaptive": False})[-1] == row_texts(row)[-1] == "quantspec, gamma 6"


@pytest.mark.parametrize(
    "rounds_of, words",
    [
        ([((0, 0, 0), 3), ((2, 2, 0), 9)], "12 rounds of 0 to 2 drafts (0 in 3, 2 in 9 rounds) ("),
        ([((2, 2, 0), 12)], "12 rounds of 2 drafts ("),
        ([((2, 0, 2), 3), ((2, 1, 1), 2), ((2, 2, 0), 7)], "2 drafts (2 proposed in 3, 2 in a cascade in 2, 2 in 7"),
    ],
)
def test_a_summary_counts_the_rounds_of_each_tier(rounds_of: list[Any], words: str) -> None:
    counts = tuple((RoundShape(*shape), rounds) for shape, rounds in rounds_of)
    statistics = Statistics(
        gamma=2, prompt_tokens=(10,), rounds=12, sequence_rounds=12, generated=30, decoded=30, verified_at=(9, 9),
        accepted_at=(9, 9), flushes=0, prefill_s=0.1, draft_s=0.001, verify_s=0.001, flush_s=0.0, decode_s=0.1,
        idle_s=0.0, capture_s=0.0, peak_memory_bytes=None, rounds_of=counts, drafted=18,
    )  # fmt: skip
    assert words in summary(statistics)
    assert "tokens per round\n" in summary(statistics)
    assert summary(replace(statistics, flushes=1)).count(" 1 flush\n") == 1


def test_a_summary_says_what_each_tier_did() -> None:
    of_target = Statistics(
        gamma=2, prompt_tokens=(10,), rounds=12, sequence_rounds=12, generated=30, decoded=30, verified_at=(9, 6),
        accepted_at=(6, 3), flushes=0, prefill_s=0.1, draft_s=0.0, verify_s=0.004, flush_s=0.0, decode_s=0.1,
        idle_s=0.0, capture_s=0.0, peak_memory_bytes=None, rounds_at=(0, 0, 12), drafted=18, proposal_rounds=9,
        propose_s=0.001, proposals_compared=15, proposals_matched=9,
    )  # fmt: skip
    text = summary(of_target)
    assert "2 drafts (1 ms together) and a verification (4 ms)" in text
    assert "the drafter had proposals in 75% of the rounds, acceptance 0.600 (conditional)\n" in f"{text}\n"
    cascade = summary(replace(of_target, draft_passes=12, draft_s=0.002))
    assert "2 drafts (2 ms each)" in cascade and "0.600 (conditional); a pass drafts 1.50 tokens" in cascade


@pytest.fixture
def plan_path(invoke: Any, tiny_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    sizes = ("--gpu", "h200", "--ctx", 260, "--new-tokens", 64)
    invoke("estimate", tiny_folder, *sizes, "--preset", "quantspec", "--output", path)
    return path


@pytest.fixture
def tuning(plan_path: Path, tiny_folder: Path, profile_path: Path, tmp_path: Path) -> tuple[object, ...]:
    text = tmp_path / "cities.txt"
    text.write_text(TEXT, encoding="utf-8")
    return (
        "tune", plan_path, "--model", tiny_folder, "--text", text, "--tokens", 192, "--gamma", 3, "--profile",
        profile_path,
    )  # fmt: skip


def test_validate_compares_an_adaptive_plan(
    invoke: Any, plan_path: Path, tiny_folder: Path, profile_path: Path, tmp_path: Path
) -> None:
    plan = json.loads(plan_path.read_text())
    plan["speculation"] |= {"gamma": 6, "adaptive": True}
    plan_path.write_text(json.dumps(plan), encoding="utf-8")
    text = tmp_path / "cities.txt"
    text.write_text(TEXT, encoding="utf-8")
    arguments = (
        "validate",
        plan_path,
        "--any-model",
        "--model",
        tiny_folder,
        "--prompt-file",
        text,
        "--profile",
        profile_path,
    )
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    compared = {row["name"]: row for row in json.loads(result.stdout)["validation"]["plan"]["rows"]}
    assert {"draft step", "verification", "tokens per round", "tpot at the measured acceptance"} <= set(compared)
    assert compared["tokens per round"]["measured"] >= 1


def test_run_takes_the_rates_of_an_adaptive_plan_from_a_profile(
    invoke: Any, refuses: Any, plan_path: Path, tiny_folder: Path, profile_path: Path
) -> None:
    plan = json.loads(plan_path.read_text())
    plan["speculation"] |= {"gamma": 6, "adaptive": True}
    plan_path.write_text(json.dumps(plan), encoding="utf-8")
    arguments = ("run", plan_path, "--model", tiny_folder, "--prompt", "Hello", "--max-new-tokens", 8)
    result = invoke(*arguments, "--profile", profile_path, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["tokens"]) == 8
    assert "cannot read" in refuses(*arguments, "--profile", plan_path.with_name("none.json"))


def test_tune_prints_its_steps_and_writes_the_plan_and_rows_that_estimate_uses(
    invoke: Any, tuning: tuple[object, ...], plan_path: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    command = ("estimate", tiny_folder, "--plan", plan_path, "--json")
    before = json.loads(invoke(*command).stdout)["predicted"]["acceptance"]
    output = tmp_path / "tuned.json"
    answer = json.loads(invoke(*tuning, "--output", output, "--json").stdout)
    assert answer["path"] == str(user_acceptance_path())
    assert Plan.from_json(output.read_text()).to_dict() == answer["plan"]
    assert answer["plan"]["speculation"]["gamma"] == answer["steps"][-1]["chosen"]["gamma"]
    rows = json.loads(user_acceptance_path().read_text())["rows"]
    assert len(rows) == answer["rows"] >= 1
    assert {(row["draft"], row["text"]) for row in rows} == {("w4kv4", "cities")}
    assert {(row["gamma"], row["position"]) for row in rows} >= {(1, 1), (2, 1), (3, 1)}
    assert (answer["measured"], answer["generations"]) == (True, 4)
    after = json.loads(invoke(*command).stdout)["predicted"]["acceptance"]
    assert (before["source"], after["source"]) == ("extrapolated", "measured")
    assert "cities" in after["where"]
    result = invoke(*tuning)
    shown = result.stdout
    assert "up to 4 generations of 192 tokens after 260, about" in result.stderr
    assert "ms per token (measured), " in shown
    assert "Step: gamma" in shown
    assert shown.count("chosen") == 1
    assert "x plain decoding with the same target" in shown or "noise" in shown  # as busy as the machine is
    assert json.loads(user_acceptance_path().read_text())["rows"] == rows  # in place of its own


def test_quick_tuning_predicts_the_times_of_one_generation(invoke: Any, tuning: tuple[object, ...]) -> None:
    result = invoke(*tuning, "--quick", "--json")
    answer = json.loads(result.stdout)
    assert "1 generation of 192 tokens after 260" in result.stderr
    assert (answer["measured"], answer["generations"], answer["spread"]) == (False, 1, None)
    assert {row["gamma"] for row in json.loads(user_acceptance_path().read_text())["rows"]} == {3}
    assert "ms per token (predicted), " in invoke(*tuning, "--quick").stdout


def test_tune_without_enough_drafts_saves_no_rows(invoke: Any, tuning: tuple[object, ...]) -> None:
    shown = invoke(*tuning, "--tokens", 2).stdout
    assert "increase --tokens" in shown
    assert not user_acceptance_path().exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (("--gamma", 16), "16 is not in the range 1<=x<=15"),
        (("--text", "missing.txt"), "cannot read text file 'missing.txt'"),
        (("--profile", "missing.json"), "missing.json"),
    ],
)
def test_tune_refuses(refuses: Any, tuning: tuple[object, ...], options: tuple[object, ...], words: str) -> None:
    assert words in refuses(*tuning, *options)


def test_tune_refuses_a_model_of_other_sizes_than_the_plan_is_for(
    refuses: Any, tuning: tuple[object, ...], tmp_path: Path
) -> None:
    output = tmp_path / "tuned.json"
    without_model = (*tuning[:2], *tuning[4:])
    message = refuses(*without_model, "--output", output)
    assert "without --model the embedded HuggingFaceTB/SmolLM2-135M" in message
    assert message.rstrip().endswith("allowed: the plan's model as --model")
    assert not output.exists()


def test_tune_leaves_damaged_rows_alone(refuses: Any, tuning: tuple[object, ...], tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("{", encoding="utf-8")
    assert "rows.json" in refuses(*tuning, "--rows", rows)
    assert rows.read_text() == "{"
