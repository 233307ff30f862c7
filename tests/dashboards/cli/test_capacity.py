"""`ridgeplan capacity`: what it prints, writes and refuses."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

LINE = ("capacity", "Llama-3.1-8B", "--gpu", "h200", "--isl", "lognormal:4k", "--osl", "128", "--requests", "300")


def test_what_is_printed_is_what_its_json_holds(invoke: Any) -> None:
    line = (*LINE, "--rate", "1,3/s", "--ttft-p99", "2s", "--tpot-p99", "30ms", "--price", "2.5")
    answer = json.loads(invoke(*line, "--json").stdout)
    assert [row["rate"] for row in answer["rows"]] == [1.0, 3.0]
    assert all(row["meets"] for row in answer["rows"])
    assert (answer["limits"]["ttft_s"], answer["limits"]["tpot_s"]) == (2.0, 0.03)
    text = invoke(*line).stdout
    for row in answer["rows"]:
        assert f"\n{row['rate']:g}/s " in text
        assert f"${row['dollars_per_million_output']:.3g} per million output tokens, at $2.50 per GPU-hour" in text
    assert "steps with prompts are fitted to vLLM" in text.replace("\n  ", " ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--rate", "1"), "At 1/s, 1 GPU keeps up; no latency limit is set: 99% of the requests get their first token"),
        (
            ("--rate", "40"),
            r"At 40/s, 1 GPU serves only [\d.]+/s, so that the queue grows; at least \d+ GPUs are needed\.",
        ),
        (
            ("--rate", "40", "--ttft-p99", "1s"),
            r"At 40/s, (\d+) GPUs hold the latency limits: .* \(limit 1 s\) and take ",
        ),
        (("--rate", "40", "--ttft-p99", "1s", "--replicas", "2"), "At 40/s, 2 GPUs miss the latency limit on TTFT: "),
    ],
)
def test_a_verdict_says_how_many_gpus_and_whether_they_hold_the_limits(
    invoke: Any, changes: tuple[str, ...], words: str
) -> None:
    assert re.search(words, " ".join(invoke(*LINE, *changes).stdout.split()))


def test_equal_lines_print_equal_answers(invoke: Any) -> None:
    line = (*LINE, "--rate", "2/s", "--seed", "7", "--replicas", "2", "--json")
    assert invoke(*line).stdout == invoke(*line).stdout


def test_the_table_and_the_figure_are_written(invoke: Any, tmp_path: Path) -> None:
    for name in ("load.csv", "load.json", "load.md", "load.html"):
        result = invoke(*LINE, "--rate", "1,2/s", "--replicas", "1", "--ttft-p99", "2s", "-o", tmp_path / name)
        assert result.exit_code == 0, result.stderr
    rows = list(csv.DictReader((tmp_path / "load.csv").open(encoding="utf-8")))
    assert [row["rate"] for row in rows] == ["1.0", "2.0"]
    page = (tmp_path / "load.html").read_text(encoding="utf-8")
    assert "Throughput against time per token" in page and "<li>At 1/s, 1 GPU holds the latency limits: " in page
    assert "<h1>Serving capacity</h1>" in page


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ((), 2, "there is no rate; allowed: a rate of requests, or a trace"),
        (("--rate", "4/day"), 2, "'4/day' is not a rate of requests; allowed: one such as 4/s"),
        (("--rate", "1", "--isl", "normal:8k"), 2, "'normal:8k' is not a distribution of lengths"),
        (("--rate", "1", "--ttft-p99", "2"), 2, "'2' is not a time; allowed: one with a unit"),
        (("--rate", "1", "--requests", "0"), 2, "requests is 0; allowed: a whole number from 1 to 5000000"),
        (("--rate", "1", "--replicas", "0"), 2, "replicas is 0; allowed: a whole number from 1 to 4096"),
        (("--rate", "1", "--burstiness", "0"), 2, "burstiness is 0.0; allowed: a number from 0.01 to 100"),
        (("--rate", "1", "--price", "-1"), 2, "the price is -1"),
        (("--rate", "1", "--gpu", "h20o"), 2, "--gpu is h200,h20o; allowed: one GPU"),
        (("--rate", "1", "--isl", "200k"), 2, "context 200k is beyond the limit"),
        (("--trace", "none.csv"), 2, "a trace has lengths of its own; allowed: it alone, or isl and osl alone"),
        (("--rate", "1", "-o", "load.txt"), 2, "allowed: .csv, .md, .json, .png, .html"),
        (("--rate", "1", "--tpot-p99", "1ms"), 3, "ms even without load; allowed: a limit above that, not 1 ms"),
        (("--rate", "1", "--memory-limit", "10GB"), 3, "does not fit h200"),
    ],
)
def test_a_mistake_is_one_line(invoke: Any, changes: tuple[str, ...], code: int, words: str) -> None:
    result = invoke(*LINE, *changes)
    assert result.exit_code == code, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not result.stdout
