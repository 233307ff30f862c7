"""`recommend`, `estimate`, `models` and `gpus`: what they print and what they refuse."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli.output import number
from ridgeplan.planner import PRESETS, Plan
from ridgeplan.roofline.catalog.profile import Profile

LLAMA = "meta-llama/Llama-3.1-8B"
QUESTION = (LLAMA, "--gpu", "h200", "--ctx", 120_000)
HEADLINES = ("tpot_ms", "ttft_ms", "tokens_per_s", "peak_memory_bytes")


def as_json(result: Any) -> Any:
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_recommend_prints_one_json_object_with_all_figures(invoke: Any) -> None:
    answer = as_json(invoke("recommend", *QUESTION, "--json"))
    assert {"plan", "predicted", "baseline", "alternatives"} <= set(answer)
    for predicted in (
        answer["predicted"],
        answer["baseline"],
        *(alternative["predicted"] for alternative in answer["alternatives"]),
    ):
        assert {"speedup", "source", *HEADLINES} <= set(predicted)
        for name in HEADLINES:
            low, best, high = predicted["low"][name], predicted[name], predicted["high"][name]
            assert 0 < low <= best <= high < math.inf, name
    for other in answer["alternatives"]:
        assert set(other) == {"preset", "plan", "predicted", "rejected"}
        assert other["rejected"]
    named = {answer["preset"], *(alternative["preset"] for alternative in answer["alternatives"])}
    by_text = {"suffix", "cascade", "adaptive-cascade"}  # of which nothing is known without a kind of text
    assert set(PRESETS) - by_text <= named


def test_recommended_plan_is_a_plan_and_faster_than_the_baseline(invoke: Any) -> None:
    answer = as_json(invoke("recommend", *QUESTION, "--json"))
    plan = Plan.from_dict(answer["plan"])
    assert plan.workload.context == 120_000
    assert answer["predicted"]["tpot_ms"] < answer["baseline"]["tpot_ms"]
    assert answer["predicted"]["speedup"] == pytest.approx(
        answer["baseline"]["tpot_ms"] / answer["predicted"]["tpot_ms"]
    )


def test_recommend_without_json_explains_and_lists_alternatives(invoke: Any) -> None:
    result = invoke("recommend", *QUESTION, "--all")
    assert result.exit_code == 0
    for part in ("time per token: ", "peak memory: ", "recommended: ", "autoregressive", "speed-up"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ctx", "-3", "--memory-limit", "24", "--backend", "mine"),
         ("4 mistakes: ", "Missing option '--gpu'", "'-3' is negative; allowed: a positive number", "without a unit",
          "'mine' is not one of")),
        (("--gpu", "h200", "--ctx", "abc", "--batch", 0),
         ("2 mistakes: ", "'abc' is not a number of tokens", "batch is 0; allowed: a whole number from 1 to 4096")),
        (("--gpu", "h20o", "--ctx", "0", "--batch", 0),
         ("4 mistakes: ", "Did you mean", "unknown GPU 'h20o'", "context is 0", "batch is 0; allowed")),
    ],
)  # fmt: skip
def test_all_mistakes_are_named_at_once(refuses: Any, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    message = refuses("plan", "Llama-3.1-9B", *options)
    assert [part for part in words if part not in message] == []


def test_output_writes_the_plan_that_is_printed(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an older plan")
    answer = as_json(invoke("recommend", *QUESTION, "--output", path, "--json"))
    assert Plan.from_json(path.read_text()) == Plan.from_dict(answer["plan"])
    assert list(tmp_path.iterdir()) == [path]


def test_options_reach_the_planner(invoke: Any) -> None:
    exact = as_json(invoke("recommend", *QUESTION, "--quality", "exact", "--json"))
    assert exact["losses"] == []
    workload = as_json(invoke("recommend", *QUESTION, "--batch", 3, "--new-tokens", 17, "--json"))["plan"]["workload"]
    assert (workload["batch"], workload["new_tokens"]) == (3, 17)
    limited = as_json(invoke("recommend", *QUESTION, "--memory-limit", "40GiB", "--json"))
    assert limited["memory_limit_bytes"] == 40 * 2**30
    small = as_json(invoke("recommend", *QUESTION, "--objective", "memory", "--json"))["predicted"]["peak_memory_bytes"]
    assert small < exact["predicted"]["peak_memory_bytes"]


def test_context_beyond_the_limit_is_refused_and_stretched_if_asked(invoke: Any, refuses: Any) -> None:
    beyond = (LLAMA, "--gpu", "h200", "--ctx", 200_000, "--json")
    refusal = f"context 200000 is beyond the limit of {LLAMA}; allowed: up to 128k, or a plan with --yarn, which"
    assert refusal in refuses("recommend", *beyond)
    assert refusal in refuses("estimate", *beyond, "--preset", "int8")
    assert refusal in refuses("fit", LLAMA, "h200", "--ctx", 200_000)
    assert refusal in refuses("gamma", LLAMA, "h200", "--ctx", 200_000)
    within = as_json(invoke("recommend", LLAMA, "--gpu", "h200", "--ctx", 131_000, "--json"))
    assert any(
        "the last 952 new tokens lie beyond the model's limit of 131072 tokens" in note for note in within["notes"]
    )
    stretched = as_json(invoke("recommend", *beyond, "--yarn"))
    assert stretched["plan"]["workload"]["yarn_factor"] == 2.0
    assert any("YaRN" in note for note in stretched["notes"])


def test_profile_option_replaces_what_ships(invoke: Any, profile: Profile, tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    data = json.loads(profile.to_json())
    data["classes"]["linear"]["bandwidth_utilization"] = 0.1
    slow.write_text(json.dumps(data))
    answers = [as_json(invoke("estimate", *QUESTION, "--preset", "int8", "--json", *extra))["predicted"]["tpot_ms"]
               for extra in ((), ("--profile", slow))]  # fmt: skip
    assert answers[1] > 2 * answers[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {0: "meta-llama/Llama-3.1-9B"},
            "unknown model 'meta-llama/Llama-3.1-9B'. Did you mean meta-llama/Llama-3.1-8B",
        ),
        ({2: "h20o"}, "unknown GPU 'h20o'. Did you mean h20"),
        ({4: 0}, "context is 0; allowed: a whole number from 1"),
        ({4: -5}, "'-5' is negative; allowed: a positive number"),
        ({4: "long"}, "'long' is not a number of tokens"),
        ({4: 10**12}, "context is 1000000000000; allowed: a whole number from 1 to"),
        ({4: "12q"}, "'12q' is not a number of tokens; allowed: one such as 8192, 128k (131072) or 1M"),
        ({2: "missing.toml"}, "cannot read missing.toml: No such file"),
        ({0: "missing.gguf"}, "cannot read missing.gguf"),
    ],
)
def test_recommend_refuses_bad_questions(refuses: Any, change: dict[int, object], words: str) -> None:
    question = [change.get(index, value) for index, value in enumerate(QUESTION)]
    assert words in refuses("recommend", *question, "--json")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--batch", -1, "batch is -1; allowed: a whole number from 1"),
        ("--batch", 0, "batch is 0; allowed"),
        ("--new-tokens", 0, "new_tokens is 0; allowed"),
        ("--memory-limit", "nan", "'nan' is not a size; allowed: one with a unit"),
        ("--memory-limit", "-3GiB", "'-3GiB' is negative; allowed: a positive number"),
        ("--memory-limit", "0", "'0' is not a size"),
        ("--memory-limit", "24", "'24' is a size without a unit; allowed: one with a unit, such as 24GB or 24GiB"),
        ("--tp", 3, "32 query heads do not divide by tp 3; allowed: degrees that divide them"),
        ("--ep", "--json", "expert_parallel is true on one GPU; allowed: on more"),
        ("--gpus", 0, "gpus is 0; allowed: a whole number from 1 to 1024"),
        ("--kv-cache-dtype", "fp16", "'fp16' is not one of 'auto'"),
        ("--kv-cache-dtype", "fp8", "'fp8' is vLLM's; allowed: with --backend vllm, or int8, which has 8 bits, too"),
        ("--quantization", "fp8", "plans choose weights by --quality: exact keeps the checkpoint's, near-"),
        ("--max-model-len", "8k", "--ctx and --max-model-len were both given; allowed: one of them"),
        ("--quality", "perfect", "quality is 'perfect'; allowed: exact, near-lossless, 4-bit, lossy, or a floor"),
        ("--objective", "cost", "'cost' is not one of 'latency', 'total', 'memory'"),
        ("--profile", "missing.json", "cannot read profile 'missing.json': No such file"),
        ("--output", "/nowhere/plan.json", "cannot write '/nowhere/plan.json'; allowed: a file in an existing"),
        ("--output", "/", "cannot write '/'"),
        ("--output", "x.svg", "'x.svg' ends in '.svg'; allowed: .csv, .md, .json, .png"),
        ("--colour", "red", "No such option '--colour'"),
    ],
)
def test_recommend_refuses_bad_options(refuses: Any, option: str, value: object, words: str) -> None:
    assert words in refuses("recommend", *QUESTION, option, value)


def test_vllms_name_of_its_8_bit_cache_is_taken_with_vllm(invoke: Any) -> None:
    for options in (("--kv-cache-dtype", "fp8", "--backend", "vllm"), ("--backend", "vllm", "--kv-cache-dtype", "fp8")):
        answer = as_json(invoke("recommend", *QUESTION, *options, "--json"))
        assert answer["plan"]["kv"]["format"] == "int8"


def test_context_far_beyond_yarn_is_refused(refuses: Any) -> None:
    smollm = ("HuggingFaceTB/SmolLM2-135M-Instruct", "--gpu", "h200", "--ctx", 16_000_000)
    assert "allowed: up to 64x with YaRN" in refuses("recommend", *smollm, "--yarn")


def test_nothing_fits_is_3_and_says_what_it_takes(refuses: Any) -> None:
    line = refuses("recommend", *QUESTION, "--memory-limit", "4GiB", "--json", code=3)
    assert "nothing fits" in line
    assert "of 4.29 GB" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON profile"),
        ('{"schema": 1, "device"', "not a JSON profile"),
        ('{"schema": 99}', "schema 99 is newer"),
        ('{"schema": NaN}', "NaN stands for a number; allowed: finite numbers"),
        ('{"schema": 1}', "schema 1 is of an older version; make it again with `ridgeplan calibrate`"),
        ('{"schema": 2}', "schema 2 is of an older version; make it again with `ridgeplan calibrate`"),
        ('{"schema": 3}', "hardware, device, software"),
        ("[]", "it is []; allowed: an object"),
    ],
)
def test_damaged_profiles_are_refused(refuses: Any, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    line = refuses("recommend", *QUESTION, "--profile", path)
    assert words in line
    assert "broken.json" in line


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
def test_damaged_ggufs_are_refused(refuses: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert "broken.gguf" in refuses("recommend", path, *QUESTION[1:])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": NaN}']
)
def test_damaged_configs_are_refused(refuses: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "config.json" in refuses("recommend", path, *QUESTION[1:])


def test_auto_without_calibration_says_what_to_do(
    refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    assert "ridgeplan calibrate --quick" in refuses("recommend", LLAMA, "--gpu", "auto", "--ctx", 1000)


def test_auto_is_the_calibrated_machine(
    invoke: Any, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ridgeplan").mkdir()
    (tmp_path / "ridgeplan" / "profile.json").write_text(profile.to_json())
    answer = as_json(invoke("recommend", LLAMA, "--gpu", "auto", "--ctx", 1000, "--json"))
    assert answer["plan"]["workload"]["hardware"] == "h200"


def test_estimate_prints_a_preset_with_every_operation(invoke: Any) -> None:
    answer = as_json(invoke("estimate", *QUESTION, "--preset", "quantspec", "--gamma", 3, "--json"))
    assert answer["preset"] == "quantspec"
    assert answer["plan"]["speculation"]["gamma"] == 3
    assert answer["fits"] is True
    operations = answer["predicted"]["breakdown"]
    assert {op["part"] for op in operations} == {"prefill", "draft", "target"}
    drafts = sum(op["seconds"] for op in operations if op["part"] == "draft")
    assert 1e3 * drafts == pytest.approx(answer["predicted"]["draft_step_ms"], rel=0.05)


def test_estimate_of_a_plan_is_that_of_its_preset(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    by_name = as_json(invoke("estimate", *QUESTION, "--preset", "quantspec", "--json"))
    path.write_text(json.dumps(by_name["plan"]))
    assert as_json(invoke("estimate", "--plan", path, "--json")) == by_name


def test_estimate_tables_and_what_does_not_fit(invoke: Any) -> None:
    arguments = (LLAMA, "--gpu", "rtx4090", "--ctx", 100_000, "--preset", "quantspec")
    result = invoke("estimate", *arguments)
    assert "does not fit: needs 27.4 GB of 23.2 GB" in " ".join(result.stdout.split())
    assert "draft: attention" in result.stdout
    assert as_json(invoke("estimate", *arguments, "--json"))["fits"] is False


def test_estimate_says_what_ends_of_groups_cost(invoke: Any) -> None:
    """(tokens - 1) / 2 of a round's tokens for every group: of 3.44 tokens and groups of 128 1%."""
    arguments = ("estimate", LLAMA, "--gpu", "h200", "--ctx", 8192, "--gamma", 4)
    predicted = as_json(invoke(*arguments, "--preset", "quantspec", "--json"))["predicted"]
    acceptance = predicted["acceptance"]["best"]
    tokens = sum(acceptance**index for index in range(5))
    lost = 1 - 128 / (128 + (tokens - 1) / 2)
    assert predicted["tokens_per_round"] == pytest.approx(tokens * (1 - lost))
    words = " ".join(invoke(*arguments, "--preset", "quantspec").stdout.split())
    assert f"rounds end with groups of 128 tokens, which costs {lost:.1%} of a round's tokens" in words
    assert "rounds end with groups" not in " ".join(invoke(*arguments, "--preset", "specattn").stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*QUESTION, "--preset", "quantspek"), "unknown preset 'quantspek'. Did you mean quantspec"),
        ((*QUESTION, "--preset", "quantspec", "--gamma", 99), "gamma is 99; allowed: a whole number from 0 to 15"),
        ((*QUESTION, "--preset", "quantspec", "--gamma", 0), "gamma is 0 with draft codes"),
        ((LLAMA, "--gpu", "h200", "--ctx", 0, "--preset", "quantspec"), "context is 0; allowed"),
        ((*QUESTION, "--preset", "int8", "--batch", -2), "batch is -2; allowed"),
        (QUESTION, "estimate needs MODEL, --preset, --gpu and --ctx, or else --plan FILE"),
        (("quantspec", *QUESTION), "'quantspec' is a preset, not a model; allowed: --preset quantspec"),
    ],
)
def test_estimate_refuses(refuses: Any, arguments: tuple[object, ...], words: str) -> None:
    assert words in refuses("estimate", *arguments)


@pytest.mark.parametrize("command", [("run",), ("validate",), ("estimate", "--plan")])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON plan"),
        ('{"schema": 1, "workload"', "not a JSON plan"),
        ('{"schema": 2}', "schema 2 is newer than this version reads; allowed: up to 1"),
        (
            '{"schema": 1, "workload": {"model": "m", "hardware": "h", "context": NaN}}',
            "NaN stands for a number; allowed: finite numbers",
        ),
        ('{"schema": 1, "workload": {"model": "m", "hardware": "h", "context": 0}}', "context is 0; allowed"),
        (
            '{"schema": 1, "workload": {"model": "m", "hardware": "h", "context": 1}, "x": 1}',
            "x is not a field; allowed: workload",
        ),
    ],
)
def test_damaged_plans_are_refused(
    refuses: Any, tmp_path: Path, command: tuple[str, ...], text: str, words: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    line = refuses(*command, path)
    assert words in line
    assert "broken.json" in line


def test_missing_and_unreadable_plans_are_refused(refuses: Any, tmp_path: Path) -> None:
    assert "No such file" in refuses("run", tmp_path / "none.json")
    assert "allowed: a name of the catalog, a folder with a config.json" in refuses("run", tmp_path).lower()


def test_a_plan_keeps_its_own_workload(refuses: Any, invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert invoke("recommend", *QUESTION, "--output", path).exit_code == 0
    assert "--ctx cannot be combined with --plan" in refuses("estimate", "--plan", path, "--ctx", 0)


def test_unknown_command_suggests_a_near_one(refuses: Any) -> None:
    assert "recommend" in refuses("recomend")


def test_models_and_gpus(invoke: Any) -> None:
    models = {item["name"]: item for item in as_json(invoke("models", "--json"))}
    assert models[LLAMA]["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert models[LLAMA]["executable"] is True
    gpus = {item["name"]: item for item in as_json(invoke("gpus", "--json"))}
    assert gpus["h200"]["ridge_point"] == pytest.approx(206, rel=0.01)
    assert gpus["h200"]["sources"]["compute_flops"]
    assert LLAMA.split("/")[1] in invoke("models").stdout
    assert "h200" in invoke("gpus").stdout


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0123456, "0.0123"), (6.4712, "6.47"), (999.7, "1,000"), (12070.3, "12,070")]
)
def test_numbers_need_no_exponents(value: float, shown: str) -> None:
    assert number(value) == shown


def test_failed_write_leaves_nothing_behind(refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Callable[..., None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    path = tmp_path / "plan.json"
    assert "cannot write" in refuses("recommend", *QUESTION, "--output", path)
    assert list(tmp_path.iterdir()) == []


def test_output_to_a_link_keeps_the_link(invoke: Any, tmp_path: Path) -> None:
    target, link = tmp_path / "plan.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert invoke("recommend", *QUESTION, "--output", link).exit_code == 0
    assert link.is_symlink()
    assert Plan.from_json(target.read_text()).workload.hardware == "h200"


def test_a_pipe_is_not_replaced_by_a_file(refuses: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "cannot write" in refuses("recommend", *QUESTION, "--output", pipe)
    assert pipe.is_fifo()


def test_the_longest_file_name_is_written(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 250}.json"
    assert invoke("recommend", *QUESTION, "--output", path).exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("arguments", [("", "--gpu", "h200"), (LLAMA, "--gpu", "")])
def test_an_empty_name_is_not_the_plans_own(
    refuses: Any, invoke: Any, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    path = tmp_path / "plan.json"
    assert invoke("recommend", *QUESTION, "--output", path).exit_code == 0
    assert "unknown " in refuses("estimate", *arguments, "--plan", path)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HF_HOME"])
def test_a_folder_name_that_no_system_takes_holds_nothing(
    refuses: Any, monkeypatch: pytest.MonkeyPatch, variable: str, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # not the user's, where this machine may be calibrated
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    assert "ridgeplan calibrate" in refuses("recommend", LLAMA, "--gpu", "auto", "--ctx", 4096)
    assert "unknown model 'a/b'" in refuses("recommend", "a/b", "--gpu", "h200", "--ctx", 4096)


def test_a_saved_plan_keeps_the_skew_of_its_experts_loads(invoke: Any, tmp_path: Path) -> None:
    question = ("Qwen3-30B-A3B", "--gpu", "h200", "--ctx", 8192, "--routing-skew", 1, "--json")
    path = tmp_path / "plan.json"
    planned = as_json(invoke("plan", *question, "-o", path))
    priced = as_json(invoke("estimate", "--plan", path, "--json"))
    assert priced["predicted"]["tpot_ms"] == pytest.approx(planned["predicted"]["tpot_ms"])
