"""`run` on tiny models and on the embedded one, and the streaming of text."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan import runtime
from ridgeplan.dashboards.cli.model_inputs import CALIBRATION_TOKENS, calibration_tokens
from ridgeplan.dashboards.cli.output import printable
from ridgeplan.dashboards.cli.run import summary
from ridgeplan.dashboards.cli.run_inputs import PromptInput, token_ids
from ridgeplan.planner import Workload, preset
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.runtime.chat_template import TemplateProcess
from ridgeplan.runtime.model import checkpoint
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.runtime.text import before_stop, text_pieces


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec", Workload("any", "here", 64, 8)).to_json())
    return path


@pytest.fixture
def cpu_profile(profile: Any, tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    return path


def decode_utf8(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def test_pieces_add_up_and_never_split_a_character() -> None:
    text = "Zürich, 東京 🙂!"
    pieces = list(text_pieces(text.encode(), decode_utf8))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "東" in pieces


def test_a_token_costs_the_same_however_long_the_text() -> None:
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode_utf8(tokens)

    assert "".join(text_pieces(b"a word " * 100, decode)) == "a word " * 100
    assert max(decoded) <= 2


def test_an_unfinished_character_shows_at_the_end() -> None:
    assert "".join(text_pieces("ok🙂".encode()[:-1], decode_utf8)) == "ok\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--prompt", "a", "--prompt-file", "b"),
            "--prompt and --prompt-file cannot be combined; allowed: one of them",
        ),
        (("--prompt", "a", "--model", "missing.gguf"), "cannot read missing.gguf: No such file or directory"),
        (("--prompt", ""), "--prompt is empty; allowed: at least one character"),
        (("--prompt", "caf\udce9"), r"the argument 'caf\udce9' is not UTF-8; allowed: arguments in UTF-8"),
        (("--prompt", "a", "--model", ""), "--model is empty; allowed: a safetensors folder, a .gguf file or a hub id"),
        (("--prompt", "a", "--seed", "first"), "'first' is not a valid integer"),
        (("--prompt", "a", "--seed", "-2"), "-2 is not in the range x>=0"),
        (("--prompt", "a", "--temperature", "-1"), "-1.0 is not in the range x>=0"),
        (("--prompt", "a", "--top-k", "0"), "0 is not in the range x>=1"),
        (("--prompt", "a", "--top-p", "2"), "2.0 is not in the range 0<x<=1"),
    ],
)
def test_bad_requests_are_refused(refuses: Any, plan_path: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refuses("run", plan_path, *arguments)


def test_a_plan_that_cannot_be_executed_says_why(refuses: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    evicting, choosing = (preset(name, Workload("m", "h", 64, 8, parallel=Parallel(2))) for name in ("dapq", "quest"))
    path.write_text(replace(evicting, attention=choosing.attention).to_json())
    refused = refuses("run", path, "--prompt", "a")
    assert "can be estimated but not executed: target selection 'quest' after an eviction" in refused
    assert "tp 2 (2 GPUs; vLLM does)" in refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a" * 65, "the prompt has more than 64 tokens; allowed by the plan: 1 to 64"),
        ("\u4e2d", "the prompt has no tokens of this model's vocabulary; allowed by the plan: 1 to 64"),
    ],
)
def test_a_prompt_that_does_not_fit_the_plan_is_refused(
    refuses: Any, plan_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    def ascii_only(self: Any, text: str, **_: Any) -> list[int]:
        return list(text.encode("ascii", "ignore"))

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.encode", ascii_only)
    monkeypatch.setattr("ridgeplan.runtime.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert words in refuses("run", plan_path, "--model", tiny_folder, "--prompt", text)


def test_more_tokens_than_the_plans_are_refused_before_weights_are_read(
    refuses: Any, plan_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeplan.runtime.load", lambda *_, **__: pytest.fail("the model was loaded"))
    run = ("run", plan_path, "--model", tiny_folder, "--prompt", "a", "--max-new-tokens", 1000)
    assert "max_new_tokens is 1000; allowed by the plan: up to" in refuses(*run)


@pytest.mark.parametrize("keep", [0, 4, 1000, 90_000_000])
def test_truncated_models_are_refused(
    refuses: Any, plan_path: Path, smollm2: Path, tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[:keep])
    assert "broken.gguf" in refuses("run", plan_path, "--model", broken, "--prompt", "a")


@pytest.mark.model
def test_the_embedded_model_knows_the_capital_of_france(invoke: Any, tmp_path: Path, smollm2: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec-kv", Workload("any", "here", 64, 8)).to_json())
    result = invoke("run", path, "--prompt", "The capital of France is")
    assert result.exit_code == 0, result.stderr
    assert "Paris" in result.stdout


def test_run_streams_what_its_json_holds(invoke: Any, refuses: Any, plan_path: Path, tiny_folder: Path) -> None:
    arguments = ("run", plan_path, "--model", tiny_folder, "--prompt", "The capital", "--max-new-tokens", 8)
    streamed = invoke(*arguments)
    assert streamed.exit_code == 0, streamed.stderr
    answer = json.loads(invoke(*arguments, "--json").stdout)
    assert streamed.stdout.startswith(printable(answer["text"]))
    assert "acceptance" in streamed.stdout
    assert list(answer["startup_s"]) == ["packages", "plan", "model files and prompt", "weights", "first pass"]
    assert "\nfirst text after " in streamed.stdout
    assert len(answer["tokens"]) == answer["statistics"]["generated"] == 8
    assert answer["prompt_tokens"] == len("The capital")
    assert answer["statistics"]["tpot_ms"] > 0
    assert "max_new_tokens is 9; allowed by the plan: up to 8" in refuses(*arguments[:-1], 9)
    assert "temperature is nan" in refuses(*arguments, "--temperature", "nan")


def test_a_plan_for_another_machine_says_so_in_a_line(
    invoke: Any, plan_path: Path, cpu_profile: Path, tiny_folder: Path
) -> None:
    line = ("run", plan_path, "--model", tiny_folder, "--any-model", "--prompt", "The capital", "--max-new-tokens", 2)
    (note,) = re.findall(r"note: the plan.*\n", invoke(*line, "--profile", cpu_profile).stderr)
    name = json.loads(cpu_profile.read_text())["hardware"]["name"]
    assert note.startswith(f"note: the plan was made for here, but {name} executes it, so its predictions do not hold")
    plan_path.write_text(preset("quantspec", Workload("any", name, 64, 8)).to_json())
    assert "the plan was made for" not in invoke(*line, "--profile", cpu_profile).stderr


def test_sampling_options_reach_the_engine(invoke: Any, plan_path: Path, tiny_folder: Path) -> None:
    arguments = ("run", plan_path, "--model", tiny_folder, "--prompt", "The capital", "--json")
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 3}
    engine = runtime.load(preset("quantspec", Workload("m", "here", 64, 8)), str(tiny_folder))
    sampled = engine.generate(engine.tokenizer.encode("The capital"), 8, runtime.SamplingParams(**options))
    option_arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert json.loads(invoke(*arguments, *option_arguments).stdout)["tokens"] == sampled.tokens[0]
    assert json.loads(invoke(*arguments).stdout)["tokens"] != sampled.tokens[0]


def test_the_end_of_text_stops_a_run_and_is_not_shown(
    invoke: Any, plan_path: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """A copy of the model whose tokenizer calls the fourth token of its answer the end of text."""
    engine = runtime.load(preset("autoregressive", Workload("m", "here", 64, 8)), str(tiny_folder), device="cpu")
    tokenizer, prompt = engine.tokenizer, "Once upon a time"
    answer = engine.generate(tokenizer.encode(prompt), 8).tokens[0]
    end = answer.index(answer[3])
    folder = shutil.copytree(tiny_folder, tmp_path / "ending")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(answer[3])
    tokenizer.save_pretrained(folder)
    arguments = ("run", plan_path, "--model", folder, "--prompt", prompt)
    ended = json.loads(invoke(*arguments, "--json").stdout)
    assert ended["tokens"] == answer[: end + 1]
    shown = invoke(*arguments).stdout.partition("\n\n")[0]
    assert ended["text"] == tokenizer.decode(answer[:end])
    assert shown == printable(ended["text"])


def test_a_model_is_planned_for_its_prompt(invoke: Any, cpu_profile: Path, tiny_folder: Path) -> None:
    arguments = ("run", tiny_folder, "--prompt", "The capital", "--max-new-tokens", 4, "--profile", cpu_profile)
    result = invoke(*arguments, "--json", "--ctx", 64, "--quality", "exact")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    workload = answer["plan"]["workload"]
    assert (workload["context"], workload["new_tokens"], len(answer["tokens"])) == (64, 4, 4)
    assert "note: planned for 64 tokens of context and 4 new ones: " in result.stderr


def test_a_run_far_slower_than_predicted_says_so(invoke: Any, cpu_profile: Path, tiny_folder: Path) -> None:
    """The profile's CPU reads and computes thousands of times as fast as any."""
    document = json.loads(cpu_profile.read_text())
    document["hardware"] |= {"bandwidth_bytes_per_s": 1e15, "compute_flops": 1e18}
    for rates in document["classes"].values():
        rates["launch_s"] = 0.0
    cpu_profile.write_text(json.dumps(document))
    arguments = ("run", tiny_folder, "--prompt", "The capital", "--profile", cpu_profile, "--quality", "exact")
    note = re.compile(r"note: (plain )?decoding took [\d.e+]+x the time that the calibration of .* predicts: ")
    assert note.search(invoke(*arguments, "--max-new-tokens", 100).stderr)
    assert not note.search(invoke(*arguments, "--max-new-tokens", 4).stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model", "--prompt", "a"), "unknown model 'no-such-model'"),
        (("Llama-3.1-8B", "--model", "x", "--prompt", "a"), "a model was given twice"),
        (("Llama-3.1-8B", "--prompt", "a", "--quality", "best"), "'best'"),
        (("Llama-3.1-8B", "--system", "Be short."), "--chat and --system need a message"),
        (("Llama-3.1-8B", "--prompt", "a", "--stop", ""), "--stop is empty"),
        (("Llama-3.1-8B", "--prompt", "a", "--prompts", "b"), "--prompts cannot be combined"),
    ],
)
def test_bad_questions_for_a_model_are_refused(refuses: Any, arguments: tuple[str, ...], words: str) -> None:
    assert words in refuses("run", *arguments)


def test_options_of_planning_are_refused_beside_a_plan(refuses: Any, plan_path: Path) -> None:
    assert "--batch cannot be given with a PLAN; allowed: with a MODEL" in refuses(
        "run", plan_path, "--prompt", "a", "--batch", 2
    )


def test_a_prompt_comes_from_standard_input(
    invoke: Any, plan_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", plan_path, "--model", tiny_folder, "--json")
    monkeypatch.setattr("ridgeplan.dashboards.cli.run_inputs._read_stdin", lambda: "The capital")
    assert (
        json.loads(invoke(*run, "--prompt-file", "-").stdout)["tokens"]
        == json.loads(invoke(*run, "--prompt", "The capital").stdout)["tokens"]
    )


def test_a_long_prompt_keeps_its_end_with_truncate(invoke: Any, plan_path: Path, tiny_folder: Path) -> None:
    run, text = ("run", plan_path, "--model", tiny_folder, "--json"), "ab" * 10 + "c" * 64
    cut = json.loads(invoke(*run, "--prompt", text, "--truncate").stdout)
    assert cut["prompt_tokens"] == 64
    assert cut["tokens"] == json.loads(invoke(*run, "--prompt", "c" * 64).stdout)["tokens"]


def test_text_ends_before_a_stop_word(invoke: Any, plan_path: Path, tiny_folder: Path) -> None:
    run = ("run", plan_path, "--model", tiny_folder, "--prompt", "The capital", "--json")
    whole = json.loads(invoke(*run).stdout)
    word = whole["text"][2:4]
    cut = json.loads(invoke(*run, "--stop", word).stdout)
    assert cut["text"] == whole["text"].partition(word)[0]
    assert len(cut["tokens"]) < len(whole["tokens"])


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_stop_words_are_found_across_pieces(size: int) -> None:
    text = "one two stop three"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert "".join(before_stop(pieces, ["stop", "three"])) == "one two "
    assert "".join(before_stop(pieces, ["absent", "stops"])) == text
    assert "".join(before_stop(pieces, [])) == text


def test_text_that_begins_a_stop_word_is_held_back() -> None:
    shown = before_stop(iter(["a st", "op b", " c"]), ["stopped"])
    assert list(shown) == ["a ", "stop b", " c", ""]


def test_lines_of_prompts_give_lines_of_answers(
    invoke: Any, plan_path: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('"The capital"\n\n{"id": "b", "prompt": "Once upon a time"}\n')
    result = invoke("run", plan_path, "--model", tiny_folder, "--prompts", lines)
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(answer["index"], answer.get("id"), answer["finish_reason"]) for answer in answers] == [
        (0, None, "length"), (1, "b", "length"),
    ]  # fmt: skip
    single = json.loads(invoke("run", plan_path, "--model", tiny_folder, "--prompt", "The capital", "--json").stdout)
    assert (answers[0]["tokens"], answers[0]["text"]) == (single["tokens"], single["text"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 of"), ("7", "is 7; allowed: a text in quotes"), ('{"text": "a"}', "allowed: a text in quotes"),
        ('{"prompt": ""}', "has no prompt"), ('{"prompt": "a", "messages": []}', "has no prompt"), ("[]", "is []"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(refuses: Any, plan_path: Path, tmp_path: Path, line: str, words: str) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(f'"The capital"\n{line}\n')
    assert words in refuses("run", plan_path, "--prompts", lines)


def test_prompts_share_a_tokenizer_and_a_process_for_templates(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of which takes half a second to start."""
    folder, events = tmp_path / "chatty", []
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}:")
    load, start = checkpoint.load_tokenizer, TemplateProcess._started
    monkeypatch.setattr(checkpoint, "load_tokenizer", lambda source: events.append("load") or load(source))
    monkeypatch.setattr(TemplateProcess, "_started", lambda self: events.append("start") or start(self))
    inputs = [PromptInput(messages=({"role": "user", "content": text},)) for text in ("a", "bc")]
    assert token_ids(inputs, str(folder), 8, cut=False) == [[64, 25], [65, 66, 25]]  # of a:, bc:
    assert events == ["load", "start"]


@pytest.mark.parametrize("graphs", [True, False])
def test_what_graphs_cost_is_shown(graphs: bool) -> None:
    figures = Statistics(
        gamma=1, prompt_tokens=(8,), rounds=4, sequence_rounds=4, generated=8, decoded=7, verified_at=(4,),
        accepted_at=(3,), flushes=0, prefill_s=1.0, draft_s=1e-3, verify_s=2e-3, flush_s=0.0, decode_s=0.02,
        idle_s=68e-6 * graphs, capture_s=0.25 * graphs, peak_memory_bytes=None, first_use_s=1.8 * graphs,
    )  # fmt: skip
    shown = summary(figures)
    assert summary(replace(figures, rounds=0, generated=1, idle_s=0.0)).startswith("1 token after 1 s of prefill, ")
    assert "peak memory not measured" in shown
    assert ("first use of the kernels before the prefill took 1.8 s" in shown) == graphs
    assert ("graph capture before the first round took 0.25 s" in shown) == graphs
    assert ("the device waits 17 us for the host between rounds" in shown) == graphs


@pytest.mark.parametrize(("words", "noted"), [(199, True), (200, False)])
def test_a_short_calibration_text_is_noted(
    capsys: Any, tiny_folder: Path, tmp_path: Path, words: int, noted: bool
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * words, encoding="utf-8")
    assert calibration_tokens(str(tiny_folder), str(text))
    assert ("good calibration needs 1000 or more" in capsys.readouterr().err) == noted


def test_drafts_are_fitted_to_the_calibration_file(
    invoke: Any, plan_path: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def quantized(decoder: Any, weights: Any, group: int, text: CalibrationText, _: Any) -> Any:
        seen.append(text.tokens.numel())
        short = CalibrationText(text.tokens[:, :64], natural=False)  # the fit itself has tests of its own
        return quantized_draft(decoder, weights, group, short)

    monkeypatch.setattr("ridgeplan.runtime.engine.quantized_draft", quantized)
    text = tmp_path / "text.txt"
    text.write_text("A text like the one to come. " * 1200, encoding="utf-8")
    model = ("--model", tiny_folder)
    result = invoke("run", plan_path, *model, "--prompt", "A text", "--calibration", text, "--json")
    assert result.exit_code == 0, result.stderr
    assert seen == [CALIBRATION_TOKENS]
    plain = tmp_path / "plain.json"
    plain.write_text(preset("autoregressive", Workload("SmolLM2-135M", "here", 64, 8)).to_json())
    assert (
        "calibration changes nothing"
        in invoke("run", plain, *model, "--any-model", "--prompt", "A", "--calibration", text).stderr
    )


def test_a_model_of_other_sizes_is_refused_before_anything_is_loaded(
    invoke: Any, refuses: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(preset("autoregressive", Workload("meta-llama/Llama-3.1-8B", "h200", 64, 8)).to_json())
    with monkeypatch.context() as patched:
        patched.setattr("ridgeplan.runtime.load", lambda *_, **__: pytest.fail("a model was loaded"))
        line = refuses("run", path, "--model", tiny_folder, "--prompt", "a")
        assert "the plan is for meta-llama/Llama-3.1-8B (8.03B), but --model is" in line
        assert "without --model the embedded HuggingFaceTB/SmolLM2-135M" in refuses("run", path, "--prompt", "a")
    run = ("run", path, "--model", tiny_folder, "--prompt", "a", "--max-new-tokens", 2, "--any-model")
    assert invoke(*run).exit_code == 0


def test_memory_is_checked_before_a_gguf_is_converted(
    refuses: Any, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """135M parameters in float32 take 0.54 GB."""
    monkeypatch.setattr("ridgeplan.runtime.memory.available_bytes", lambda: 400_000_000)
    monkeypatch.setattr("ridgeplan.runtime.loading.model_source", lambda *_: pytest.fail("the file was converted"))
    path = tmp_path / "plan.json"
    path.write_text(preset("autoregressive", Workload("HuggingFaceTB/SmolLM2-135M", "here", 64, 8)).to_json())
    assert "0.4 GB may be used" in refuses("run", path, "--model", smollm2, "--prompt", "a")
