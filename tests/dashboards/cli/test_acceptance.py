"""`ridgeplan acceptance`: its files, its lists, its errors, and that recommend uses what it saved."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from ridgeplan.dashboards.cli.options import ListCommand
from ridgeplan.planner.acceptance import commands_of
from ridgeplan.roofline.catalog.profile import user_acceptance_path

TEXT = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cities.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeplan.planner.resolution.user_acceptance_path", user_acceptance_path)


def saved() -> list[dict[str, Any]]:
    return json.loads(user_acceptance_path().read_text())["rows"]


def test_a_file_says_what_made_it_without_the_folders(
    invoke: Any, tiny_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for context in ("260", "300"):
        typed = [
            "acceptance",
            str(tiny_folder),
            "--text",
            str(text),
            "--ctx",
            context,
            "--tokens",
            "8",
            "--drafts",
            "kv8",
        ]
        monkeypatch.setattr("sys.argv", ["/anywhere/ridgeplan", *typed])
        invoke(*typed)
    assert commands_of(user_acceptance_path()) == tuple(
        f"ridgeplan acceptance {tiny_folder.name} --text cities.txt --ctx {context} --tokens 8 --drafts kv8"
        for context in (260, 300)
    )


def test_rows_are_saved_and_recommend_and_estimate_use_them(invoke: Any, tiny_folder: Path, text: Path) -> None:
    command = ("estimate", tiny_folder, "--preset", "quantspec", "--gpu", "h200", "--ctx", 260, "--json")
    before = json.loads(invoke(*command).stdout)["predicted"]["acceptance"]
    answer = json.loads(
        invoke(
            "acceptance", tiny_folder, "--text", text, "--ctx", 260, "--tokens", 16, "--drafts", "w4kv4", "--json"
        ).stdout
    )
    assert answer["path"] == str(user_acceptance_path())
    assert len(answer["rows"][0]["by_position"]) == 8
    after = json.loads(invoke(*command).stdout)["predicted"]["acceptance"]
    assert (before["source"], after["source"]) == ("extrapolated", "measured")
    assert "cities" in after["where"]
    assert after["high"] - after["low"] < before["high"] - before["low"]
    assert abs(after["best"] - answer["rows"][0]["acceptance"]) < 0.1
    document = json.loads(invoke("recommend", tiny_folder, "--gpu", "h200", "--ctx", 260, "--json").stdout)
    used = [item["predicted"]["acceptance"] for item in (document, *document["alternatives"])]
    assert any(prediction["source"] == "measured" and "cities" in prediction["where"] for prediction in used)


def test_rows_of_the_same_kind_are_replaced_and_others_kept(invoke: Any, tiny_folder: Path, text: Path) -> None:
    run = ("acceptance", tiny_folder, "--text", text, "--tokens", 8)
    invoke(*run, "--ctx", 260, "--drafts", "kv8", "streamingllm:0.5")
    invoke(*run, "--ctx", 260, 300, "--drafts", "kv8")
    assert [(row["draft"], row["context"]) for row in saved()] == [
        ("kv8", 260), ("streamingllm", 260), ("kv8", 300),
    ]  # fmt: skip


def test_a_file_can_be_named_and_given_to_recommend(invoke: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    printed = invoke("acceptance", tiny_folder, "--text", text, "--text-name", "Cities", "--ctx", 260, "--tokens", 8,
                     "--drafts", "w4kv4", "--output", path)  # fmt: skip
    assert f"saved to {path}" in printed.stdout
    assert "w4kv4" in printed.stdout
    assert not user_acceptance_path().exists()
    command = ("estimate", tiny_folder, "--preset", "quantspec", "--gpu", "h200", "--ctx", 260)
    assert "[measured]" not in invoke(*command).stdout
    answer = json.loads(invoke(*command, "--acceptance", path, "--json").stdout)
    assert "Cities" in answer["predicted"]["acceptance"]["where"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--drafts", "kv3"), "draft is 'kv3'; allowed: kv8, kv4, w4, w4kv4 or streamingllm:RATIO"),
        (("--ctx", "0"), "context is 0"),
        (("--ctx", "many"), "'many' is not a number of tokens"),
        (("--tokens", "5"), "tokens is 5; allowed: a multiple of 8"),
        (("--ctx", "100000"), "beyond the model's limit of 16384; allowed: less, or more with --yarn"),
        (("--text-name", "a\u200bb"), r"'a\u200bb' has characters that are not shown"),
        (("--text-name", "a\u3164"), r"'a\u3164' has characters that are not shown"),
        (("--ctx", "16000"), "needed: 16256"),
        (("--output", "/nowhere/rows.json"), "cannot write '/nowhere/rows.json'"),
        (("--calibration", "/nowhere/text"), "cannot read text file '/nowhere/text'"),
    ],
)
def test_mistakes_are_one_line(
    refuses: Any, tiny_folder: Path, text: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refuses("acceptance", tiny_folder, "--text", text, *arguments)
    assert not user_acceptance_path().exists()


def test_a_text_is_needed_and_must_exist(refuses: Any, tiny_folder: Path) -> None:
    assert "--text" in refuses("acceptance", tiny_folder)
    assert "cannot read text file" in refuses("acceptance", tiny_folder, "--text", "/nowhere/text")


def test_a_damaged_file_is_refused_and_not_overwritten(
    refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"schema": 1, "rows": [{"draft": "kv4"}]}', encoding="utf-8")
    before = path.read_bytes()
    assert "rows.json" in refuses("acceptance", tiny_folder, "--text", text, "--output", path)
    assert "rows.json" in refuses("recommend", "Llama-3.1-8B", "--gpu", "h200", "--ctx", 4096, "--acceptance", path)
    assert path.read_bytes() == before


def parsed(*arguments: str) -> tuple[Any, ...]:
    results: list[Any] = []

    @click.command(cls=ListCommand)
    @click.argument("model", required=False)
    @click.option("--ctx", type=int, multiple=True)
    @click.option("--text")
    @click.option("--json", "as_json", is_flag=True)
    def command(**values: Any) -> None:
        results.append(values)

    command.main(list(arguments), standalone_mode=False)
    return results[0]["model"], results[0]["ctx"], results[0]["text"], results[0]["as_json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("m", "--ctx", "1", "2", "3", "--text", "t"),
        ("m", "--ctx", "1,2", "3", "--text", "t"),
        ("m", "--text", "t", "--ctx", "1,2,3"),
        ("m", "--ctx", "1", "--ctx", "2", "3", "--text", "t"),
        ("m", "--text", "t", "--ctx", "1", "2", "3"),
        ("m", "--ctx=1", "--ctx", "2", "3", "--text", "t"),
        ("--text", "t", "m", "--ctx", "1", "2", "3"),
    ],
)
def test_lists_take_values_up_to_the_next_option(arguments: tuple[str, ...]) -> None:
    assert parsed(*arguments) == ("m", (1, 2, 3), "t", False)
    assert parsed(*arguments, "--json") == ("m", (1, 2, 3), "t", True)


def test_drafts_and_drafters_are_measured_apart(refuses: Any, tiny_folder: Path, text: Path) -> None:
    command = ("acceptance", tiny_folder, "--text", text, "--drafts", "kv8", "--drafter", "suffix")
    assert "--drafts and --drafter measure in different ways; allowed: one of them" in refuses(*command)
