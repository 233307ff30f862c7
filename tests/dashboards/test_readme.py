"""README's figures of an H200 are those of the files that ship beside them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli_bench_decode import COLUMNS, Case, row_texts
from ridgeplan.dashboards.cli_output import number
from ridgeplan.planner import Workload, recommend
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.models import load_shape
from ridgeplan.roofline.profile import load_profile
from ridgeplan.validate.decode_bench import with_plain
from ridgeplan.validate.measure import tpot_ms_at

ROOT = Path(__file__).parents[2]
VOCAB = 151_936  # of Qwen2.5, in which the 8B shape ran
CLASSES = {
    "linear, bf16": "linear",
    "linear, 4-bit weights": "linear_int4",
    "output head, bf16": "head",
    "decode attention, bf16, head_dim 128": "attention",
    "decode attention, INT8": "attention_int8",
    "decode attention, INT4": "attention_int4",
    "decode attention, bf16, head_dim 64": "attention_d64",
    "decode attention, INT8, head_dim 64": "attention_int8_d64",
    "decode attention, INT4, head_dim 64": "attention_int4_d64",
    "norms, activation": "elementwise",
    "rotary embedding + cache append": "rope",
    "sampling": "sampling",
    "quantization": "quantize",
}


@pytest.fixture(scope="module")
def section() -> str:
    """What README says of the H200 before its kernels."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("## Measured on an H200\n")[2].partition("\n## ")[0]


def shipped(name: str) -> Any:
    """A JSON file of `validate`."""
    return json.loads((ROOT / "validate" / name).read_text(encoding="utf-8"))


def decoded() -> list[Any]:
    """The measured cases, in README's order."""
    rows: list[Any] = shipped("decode_h200.json")["rows"]
    return rows


def table(text: str, head: str) -> list[list[str]]:
    """The cells of the table that `head` begins."""
    lines = text[text.index(f"\n{head}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def figures(row: Any) -> dict[str, tuple[float, float]]:
    """Predicted and measured by name."""
    return {one["name"]: (one["predicted"], one["measured"]) for one in row["comparison"]}


def test_decoding_is_the_shipped_measurement(section: str) -> None:
    head = f"| {' | '.join(COLUMNS).replace(' ms', ', ms').replace(' s |', ', s |').replace(' GB', ', GB')} |"
    assert table(section, head) == [list(row_texts(row)) for row in decoded()]


def test_the_command_runs_the_shipped_cases(section: str) -> None:
    command = section[section.index("ridgeplan bench suite") :].partition("```")[0]
    cases = with_plain([Case().convert(value, None, None) for value in re.findall(r"--case (\S+)", command)])
    report = shipped("decode_h200.json")
    ran = [(row["preset"], row["context"], row["batch"], row["gamma"]) for row in report["rows"]]
    assert ran == [(case.preset, case.context, case.batch, case.gamma or 0) for case in cases]
    (new_tokens,) = {row["measured"]["generated"] // row["batch"] for row in report["rows"]}
    assert f"--new-tokens {new_tokens} " in command
    assert f"--model-shape {report['shape']} " in command
    told = f"temperature {report['temperature']:g}, {new_tokens} new tokens a sequence, {report['date']}"
    fitted = f"fitted to {report['calibration_tokens']} tokens of another one, one H200, {told}"
    assert fitted in " ".join(section.split())


def test_the_ablation_is_the_shipped_measurement(section: str) -> None:
    ablation = section.partition("<details>")[2]
    rows = [row_texts(row) for row in shipped("decode_ablation_h200.json")["rows"]]
    assert table(ablation, "| workload |") == [[*cells[:6], cells[-1]] for cells in rows]


def test_the_round_by_kernel_is_the_shipped_measurement(section: str) -> None:
    text = " ".join(section.split())
    (row,) = [row for row in shipped("decode_ablation_h200.json")["rows"] if row["preset"] == "quantspec"]
    found = row["breakdown"]
    expected = [
        [
            f"{one['part']} {one['operation']}",
            f"{one['launches']:.4g}",
            *map(number, (one["measured_us"], one["predicted_us"])),
        ]
        for one in found["rows"]
    ]
    assert table(section, "| part of a round |") == expected
    assert f"add up to {found['kernels_us'] / 1e3:.1f} ms, of which {found['overlap_us'] / 1e3:.1f} pass beside" in text
    present = next(
        row["measured"] for row in decoded() if (row["context"], row["batch"], row["gamma"]) == (131072, 1, 3)
    )
    round_s = present["gamma"] * present["draft_s"] + present["verify_s"] + present["flush_s"] / present["rounds"]
    assert f"a round took {found['round_us'] / 1e3:.1f} ms and now takes {1e3 * round_s:.1f}" in text


def test_classes_are_those_of_the_shipped_profile(section: str) -> None:
    classes = shipped("profiles/nvidia-h200.json")["classes"]
    expected = []
    for name, kind in CLASSES.items():
        rates = classes[kind]
        launch = f"{1e6 * rates['launch_s']:.1f}"
        expected.append([name, f"{rates['bandwidth_utilization']:.0%}", launch, f"{rates['spread']:.0%}"])
    assert table(section, "| class |") == expected
    assert f"{classes['prefill_linear']['compute_utilization']:.0%} of 990 TFLOP/s" in section
    assert shipped("profiles/nvidia-h200.json")["date"] in section


def test_targets_are_told_as_they_were_measured(section: str) -> None:
    text = " ".join(section.split())
    found = {(row["context"], row["batch"], row["preset"], row["gamma"]): row for row in decoded()}
    plain, drafted = found[131072, 1, "autoregressive", 0], found[131072, 1, "quantspec", 3]
    saved = plain["measured"]["peak_memory_bytes"] - drafted["measured"]["peak_memory_bytes"]
    shape = load_shape("meta-llama/Llama-3.1-8B")
    kv = 131072 * shape.layers * shape.kv_elements_per_token_per_layer * 2
    assert f"| met: {saved / 1e9:.1f} GB, {saved / kv:.0%};" in text

    def over(context: int, batch: int, gamma: int) -> str:
        return f"{found[context, batch, 'quantspec', gamma]['over_vllm']:.2f}x"

    for context, aim in ((131072, "QuantSpec at 131072x1 2.0x over vLLM"), (4096, "at 4096x1 1.8x")):
        assert f"| {aim} | met: {over(context, 1, 3)} with gamma 3; {over(context, 1, 4)} with gamma 4 |" in text
    assert f"| at 131072x4 1.9x | met: {over(131072, 4, 3)} |" in text
    assert f"| at 32768x8 1.7x | met: {over(32768, 8, 3)} |" in text
    peaks = [figures(row)["peak memory"] for row in decoded()]
    assert max(abs(predicted / measured - 1) for predicted, measured in peaks) < 0.002
    first, shorter = (found[context, 1, "quantspec", 3]["measured"]["ttft_ms"] / 1e3 for context in (131072, 32768))
    assert f"met: {first:.1f} s and {shorter:.1f} s" in text


def test_waits_for_the_host_are_told_as_they_were_measured(section: str) -> None:
    text = " ".join(section.split())
    step, drafted = (
        next(row["measured"] for row in decoded() if row["preset"] == name) for name in ("autoregressive", "quantspec")
    )
    wait_us, share, whole = (1e6 * drafted["idle_s"] / drafted["rounds"], *(
        row["idle_s"] / row["decode_s"] for row in (drafted, step)
    ))  # fmt: skip
    assert f"met: {wait_us:.0f} us, {share:.1%} of a round, {whole:.1%} of a plain step" in text


def test_plain_decoding_is_as_near_to_its_bytes_as_told(section: str) -> None:
    shape = load_shape("meta-llama/Llama-3.1-8B")
    weight_bytes = 2 * (shape.parameters - shape.vocab * shape.hidden)  # of the embedding a row is read
    plain = [row for row in decoded() if row["preset"] == "autoregressive"]
    assert "met in all five workloads" in section
    assert len(plain) == 5
    told: dict[str, list[str]] = {}
    for row in plain:
        tokens = row["context"] * row["batch"]
        kv_bytes = 2 * tokens * shape.layers * shape.kv_elements_per_token_per_layer
        ratio = row["measured"]["tpot_ms"] * 1e-3 / ((weight_bytes + kv_bytes) / 4.3e12)
        assert row["over_vllm"] >= 1
        if row["context"] >= 32768:
            assert ratio <= 1.12
            told.setdefault(f"{ratio:.2f}x", []).append(f"{row['context']}x{row['batch']}")
    assert "; " + ", ".join(f"{ratio} at {' and '.join(where)}" for ratio, where in told.items()) in section


def test_what_is_told_of_predictions_holds(section: str) -> None:
    text = " ".join(section.split())
    errors = [
        predicted / measured - 1
        for row in decoded()
        for predicted, measured in [figures(row)["tpot at the measured acceptance" if row["gamma"] else "tpot"]]
    ]
    assert f"between {-min(errors):.0%} too low and {max(errors):.0%} too high" in text
    # The shipped profile is the one that predicted them.
    profile = load_profile(ROOT / "validate" / "profiles" / "nvidia-h200.json")
    shape = replace(load_shape("meta-llama/Llama-3.1-8B"), vocab=VOCAB)
    for row, error in zip(decoded(), errors, strict=True):
        measured = row["measured"]
        workload = Workload(shape.name, "h200", row["context"], measured["generated"] // row["batch"], row["batch"])
        plan = preset(row["preset"], workload)
        if row["gamma"]:
            plan = replace(plan, speculation=replace(plan.speculation, gamma=row["gamma"]))
        now = tpot_ms_at(plan, shape, profile, measured["acceptance"]) / measured["tpot_ms"] - 1
        assert now == pytest.approx(error, abs=0.005)


def test_the_recommendation_is_the_shipped_profiles() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    profile = load_profile(ROOT / "validate" / "profiles" / "nvidia-h200.json")
    answer = recommend("meta-llama/Llama-3.1-8B", "h200", 120_000, profile=profile)
    assert f"--gpu h200 --ctx 120000\n{answer.explain()}\n```" in readme


def test_commands_in_readme_exist(invoke: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^\| `ridgeplan ((?:bench )?[a-z]+)", readme, re.MULTILINE))
    assert len(commands) >= 9
    for command in commands:
        assert invoke(*command.split(), "--help").exit_code == 0
