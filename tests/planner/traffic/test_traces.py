"""Trace files of Azure and of Mooncake."""

from pathlib import Path

import pytest

from ridgeplan.planner.traffic.traces import BadTrace, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.4799600,110,27
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 500, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}
"""


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_requests_are_sorted_by_their_arrival(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "code.csv", AZURE))
    assert list(requests.arrival_s) == pytest.approx([0.0, 0.5, 0.552], abs=1e-5)
    assert list(requests.prompt_tokens) == [110, 4808, 3180]
    assert list(requests.output_tokens) == [27, 10, 8]
    assert len(read_trace(written(tmp_path, "code.csv", AZURE), limit=2)) == 2


def test_mooncake_requests_have_the_hashes_of_their_full_blocks(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert list(requests.arrival_s) == [0.0, 0.5]
    assert [list(ids) for ids in requests.hash_ids] == [[46, 47], [46, 47]]
    assert requests.hash_tokens == 512


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("trace.txt", "", "ends in '.txt'; allowed: .csv, .jsonl"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n", "has no column GeneratedTokens; allowed: TIMESTAMP, ContextTokens"),
        ("trace.csv", AZURE + "today,1,1\n", "line 5: TIMESTAMP is 'today'; allowed: a date and time"),
        ("trace.csv", AZURE.replace("4808", "-1"), "line 2: ContextTokens is '-1'; allowed: whole numbers from 0"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("trace.csv", AZURE.replace("4808", "9" * 5000), "line 2: ContextTokens is '999"),
        ("trace.csv", AZURE.replace("4808", "9" * 200_000), "not UTF-8 text with fields of ordinary lengths"),
        ("trace.jsonl", MOONCAKE + "{\n", "line 3 is not JSON"),
        ("trace.jsonl", MOONCAKE + "[" * 100_000, "line 3 is not JSON"),
        ("trace.jsonl", '{"timestamp": 0}\n', "line 1 lacks timestamp or input_length or output_length"),
        ("trace.jsonl", MOONCAKE.replace("[46, 47]", "[1.5]"), "line 2: hash_ids is [1.5]; allowed: a list"),
        ("trace.jsonl", MOONCAKE.replace(', "hash_ids": [46, 47]}', "}"), "hash_ids are in some lines only"),
        ("trace.jsonl", MOONCAKE.replace("500", "true"), "line 2: timestamp is True; allowed: milliseconds"),
    ],
)
def test_a_damaged_trace_is_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(BadTrace) as raised:
        read_trace(written(tmp_path, name, text))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"cannot read trace '.*none\.csv': No such file"):
        read_trace(tmp_path / "none.csv")
