"""The short answer: seven lines and five rows that fit 80 columns, each labelled."""

import ast
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli import output
from ridgeplan.dashboards.cli.output import echo, number, print_table, progress, runs_progress, warnings_as_notes
from ridgeplan.roofline.catalog.validation import with_options
from ridgeplan.roofline.plan.presets import short_name

pytestmark = pytest.mark.usefixtures("questions_answered_once")
LLAMA = "meta-llama/Llama-3.1-8B"
QUESTIONS: dict[str, tuple[object, ...]] = {
    "a long context": (LLAMA, "--gpu", "h200", "--ctx", "128k"),
    "a batch": (LLAMA, "--gpu", "h200", "--ctx", "32k", "--batch", 8),
    "not calibrated": (LLAMA, "--gpu", "rtx4090", "--ctx", "8k"),
    "lossy": (LLAMA, "--gpu", "h200", "--ctx", "100k", "--quality", "lossy"),
    "exact": (LLAMA, "--gpu", "h200", "--ctx", "4k", "--quality", "exact"),
    "not run here": ("openai/gpt-oss-20b", "--gpu", "h200", "--ctx", "64k"),
    "for vllm": (LLAMA, "--gpu", "h200", "--ctx", "64k", "--backend", "vllm"),
    "stretched": (LLAMA, "--gpu", "h200", "--ctx", "1M", "--yarn"),
    "layers on the host": (LLAMA, "--gpu", "h200", "--ctx", "1M", "--yarn", "--batch", 4),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
def test_it_is_a_short_answer_of_80_columns(invoke: Any, question: tuple[object, ...]) -> None:
    result = invoke("plan", *question)
    assert result.exit_code == 0, result.stderr
    *warning, answer, ranking, legend = result.stdout.rstrip("\n").split("\n\n")
    assert bool(warning) is (question is QUESTIONS["layers on the host"])
    assert 7 <= len(answer.splitlines()) <= 9
    assert 4 <= len(re.findall(r"\d\.\d\dx", ranking)) <= 5
    assert 2 <= len(legend.splitlines()) <= 5
    assert "..." not in result.stdout
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
def test_its_figures_are_those_of_its_json(invoke: Any, question: tuple[object, ...]) -> None:
    text = invoke("plan", *question).stdout
    answer = json.loads(invoke("plan", *question, "--json").stdout)
    predicted, batch = answer["predicted"], answer["plan"]["workload"]["batch"]
    lines = text.split("\n\n")[-3].splitlines()
    assert short_name(answer["preset"]) in lines[1]
    assert f"{predicted['tpot_ms']:.3g} ms per token" in lines[2] or predicted["tpot_ms"] >= 999.5
    assert f"{number(predicted['tokens_per_s'])} tokens/s" in lines[3]
    plain_fits = answer["baseline"]["peak_memory_bytes"] <= answer["memory_limit_bytes"]
    assert f"{predicted['speedup']:.2f}x plain decoding" in lines[2]
    assert ("which does not fit" in lines[2]) is not plain_fits
    assert f"{predicted['peak_memory_bytes'] / 1e9:.3g} GB" in lines[4]
    assert lines[3].endswith(f"{number(predicted['tokens_per_s'] / batch)} each") is (batch > 1)
    assert f"[{predicted['source']}]: " in text


def test_what_does_not_fit_the_gpu_alone_is_no_plain_success(invoke: Any) -> None:
    """1M tokens x 16 of 64 KiB each (INT8) are 1.1 TB; the host has room for 1.5."""
    question = (*QUESTIONS["layers on the host"], "--host-memory", "1.5TB")
    answer = json.loads(invoke("plan", *question, "--json").stdout)
    warning = " ".join(invoke("plan", *question).stdout.split("\n\n")[0].split())
    assert warning.startswith(answer["warning"])
    assert f"KV of {answer['predicted']['offloaded_layers']} layers" in warning
    texts = [with_options(candidate["text"]) for candidate in answer["on_device"]]
    assert [text for text in texts if text not in warning] == []
    assert "Fits only with offloading: " in invoke("plan", *question).stdout


@pytest.mark.parametrize("batch", [1, 16])
def test_times_are_milliseconds_below_a_second(invoke: Any, batch: int) -> None:
    question = (LLAMA, "--gpu", "h200", "--ctx", "32k", "--batch", batch)
    ttft_ms = json.loads(invoke("plan", *question, "--json").stdout)["predicted"]["ttft_ms"]
    first = invoke("plan", *question).stdout.splitlines()[3].partition(" after ")[2].partition(";")[0]
    number, unit = first.rstrip(")").split()[-2:]  # in a batch, of the last request
    assert unit == ("ms" if ttft_ms < 1000 else "s")
    assert float(number.replace(",", "")) == pytest.approx(ttft_ms / (1 if unit == "ms" else 1e3), rel=5e-3)


@pytest.mark.parametrize("question", ["a long context", "lossy"])
def test_everything_given_up_is_named(invoke: Any, question: str) -> None:
    losses = json.loads(invoke("plan", *QUESTIONS[question], "--json").stdout)["losses"]
    text = " ".join(invoke("plan", *QUESTIONS[question]).stdout.split())
    line = text.partition("Quality cost: ")[2].partition("; --all shows the source")[0]
    assert len(losses) > 1 and line.count(": ") == len(losses)  # each has its first figure
    assert [name for name in (loss.partition(":")[0] for loss in losses) if name not in line] == []


def test_rows_of_the_ranking_can_be_told_apart(invoke: Any) -> None:
    ranking = invoke("plan", *QUESTIONS["a long context"]).stdout.split("\n\n")[1].splitlines()[1:]
    assert len({line[:34] for line in ranking}) == 5
    assert [line for line in ranking if line.endswith("...")] == []


def test_names_of_other_engines_mean_the_same(invoke: Any) -> None:
    ours = ("--ctx", 7168, "--batch", 4, "--new-tokens", 1024, "--memory-utilization", 0.8)
    theirs = ("--max-model-len", "8k", "--max-num-seqs", 4, "--osl", "1k", "--gpu-memory-utilization", 0.8,
              "--kv-cache-dtype", "auto", "--tp", 1)  # fmt: skip
    answer, other = (
        json.loads(invoke("plan", LLAMA, "--gpu", "h200", *line, "--json").stdout) for line in (ours, theirs)
    )
    assert answer == other
    document = json.loads(invoke("plan", LLAMA, "--gpu", "h200", "--isl", 7168, *ours[2:], "--json").stdout)
    assert document == answer


def test_a_preset_is_estimated_as_it_is_ranked(invoke: Any) -> None:
    """Both at the gamma that is fastest for the question."""
    question = (LLAMA, "--gpu", "h200", "--ctx", 120_000, "--json")
    ranked = json.loads(invoke("plan", *question).stdout)
    rows = {entry["preset"]: entry for entry in (ranked, *ranked["alternatives"])}
    for name in ("quantspec", "quantspec-kv", "int8", "specattn", "specontext"):
        answer = json.loads(invoke("estimate", *question, "--preset", name).stdout)
        assert answer["plan"] == rows[name]["plan"]
        assert answer["predicted"]["tpot_ms"] == pytest.approx(rows[name]["predicted"]["tpot_ms"])
        assert answer["predicted"]["gamma"] == rows[name]["predicted"]["gamma"]


@pytest.mark.parametrize("line", [("--ctx", "4k", "--max-model-len", "8k"), ("--max-model-len", "1k"), ()])
def test_a_context_is_needed_once(refuses: Any, line: tuple[str, ...]) -> None:
    words = refuses("plan", LLAMA, "--gpu", "h200", *line)
    assert (
        "needed; allowed: one" in words or "both given; allowed: one" in words or "leaves no room for a prompt" in words
    )


# Tables on stdout, as narrow as their cells are.


def test_columns_are_two_blanks_apart(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Plans", ("plan", "ms", "verdict"), [("int8", "4.19", "fits"), ("autoregressive", "12", "fits")])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Plans",
        "plan              ms  verdict",
        "int8            4.19  fits",
        "autoregressive    12  fits",
    ]


@pytest.mark.parametrize(("verdicts", "shown"), [(("", ""), False), (("", "does not fit"), True)])
def test_a_last_column_without_words_is_left_out(
    capsys: pytest.CaptureFixture[str], verdicts: tuple[str, str], shown: bool
) -> None:
    print_table("Plans", ("plan", "ms", "verdict"), [("a", "1", verdicts[0]), ("b", "2", verdicts[1])])
    assert ("verdict" in capsys.readouterr().out) is shown


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Plans", ("plan", "source"), [("int8", "[prior]")])
    assert "[prior]" in capsys.readouterr().out


HOSTILE = "a\x1b]0;owned\x07\x1b[31mred\x9b1m\r\u202e\u2028[/b]名\x00"
SHOWN = "a]0;owned[31mred1m[/b]名"


def test_nothing_that_is_printed_has_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"{HOSTILE}\n\tnext")
    echo(HOSTILE, err=True, nl=False)
    print_table(HOSTILE, ("name", "last"), [(HOSTILE, HOSTILE)])
    with warnings_as_notes():
        warnings.warn(HOSTILE, stacklevel=1)
    out, err = capsys.readouterr()
    assert out.startswith(f"{SHOWN}\n\tnext\n{SHOWN}\n") and out.count(SHOWN) == 4
    assert "".join(err.split()) == f"{SHOWN}note:{SHOWN}"  # a warning's line breaks become spaces


def test_labels_of_progress_bars_are_neither_markup_nor_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("loading") as show:
        show(HOSTILE, 1, 2)
    err = capsys.readouterr().err
    assert SHOWN in err and "\x1b]" not in err and "\x07" not in err


def test_long_work_prints_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_S", float("inf"))
    with progress("loading") as show:
        show("too early for a line", 1, 4)
    monkeypatch.setattr(output, "LINE_S", 0.0)
    # The first call comes after 100 s of loading, and the steps take 10, 2 and 4 s.
    clock = iter([0.0, 100.0, 110.0, 112.0, 116.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with progress("loading") as show:
        for done in (0, 1, 2, 3):
            show(f"vt, prompt {done + 1} of 8", done, 8)
    assert capsys.readouterr().err.splitlines() == [
        "vt, prompt 1 of 8 (0 of 8)",
        "vt, prompt 2 of 8 (1 of 8)",  # less than a quarter is done
        "vt, prompt 3 of 8 (2 of 8, about 36 s left)",
        "vt, prompt 4 of 8 (3 of 8, about 27 s left)",
    ]


def test_runs_in_turns_print_lines_of_which_is_loaded_or_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_S", 0.0)
    clock = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with runs_progress(["plain decoding", "the plan"], 8) as advance:
        for index, tokens in ((0, 0), (0, 1), (1, 0), (1, 2)):
            advance(index, tokens)
    assert capsys.readouterr().err.splitlines() == [
        "loading the model and the prompt of plain decoding, 0 of 8 tokens (0 of 16)",
        "running plain decoding, 1 of 8 tokens (1 of 16)",
        "loading the model and the prompt of the plan, 0 of 8 tokens (1 of 16)",
        "running the plan, 2 of 8 tokens (3 of 16)",
    ]


def test_bars_tell_no_time_left_before_a_quarter_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for done, has_estimate in ((1, False), (2, True)):
        with progress("loading") as show:
            show("step", done, 8)
        assert ("-:--:--" in capsys.readouterr().err) == has_estimate


PRINTERS = ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write")


def test_commands_print_through_one_function() -> None:
    """`echo` removes control characters; click's own would let them through."""
    folder = Path(sys.modules[echo.__module__].__file__ or "").parents[1]
    calls = {
        f"{path.name}: {ast.unparse(node.func)}"
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS
    }
    assert calls == {"output.py: click.echo"}
