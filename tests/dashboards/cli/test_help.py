"""Help: every verb is listed, loads, and ends in three examples that its own parser accepts."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from ridgeplan.dashboards.cli import main
from ridgeplan.planner import Workload, preset


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group, groups too, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(main))


def examples_of(command: click.Command) -> list[str]:
    return [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_ends_in_three_examples_of_the_verb(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == 0
    assert len(examples_of(ALL[words])) >= 3
    for line in examples_of(ALL[words]):
        assert line in shown.output


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_no_option_has_two_defaults(words: tuple[str, ...]) -> None:
    context = click.Context(ALL[words], parent=click.Context(main, **main.context_settings))
    records = [record for option in ALL[words].params if (record := option.get_help_record(context))]
    assert not [record for record in records if record[1].count("default:") > 1]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the names that examples use."""
    monkeypatch.chdir(tmp_path)
    plan = preset("quantspec", Workload("meta-llama/Llama-3.1-8B", "h200", 8192)).to_json()
    for name in ("plan.json", "plan_a.json", "plan_b.json"):
        Path(name).write_text(plan)
    return tmp_path


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_examples_are_lines_that_parse(words: tuple[str, ...], files: Path) -> None:
    for line in examples_of(ALL[words]):
        arguments = shlex.split(line.split("$(")[-1].split(">")[0].rstrip('")'), comments=True)
        assert arguments[0] == "ridgeplan"
        command, rest = main, arguments[1:]
        while isinstance(command, click.Group):
            subcommand = command.get_command(click.Context(command), rest[0])
            assert subcommand is not None, line
            command, rest = subcommand, rest[1:]  # type: ignore[assignment]
        if "--help" not in rest:
            command.make_context(arguments[1], list(rest))


def test_a_list_says_what_each_verb_is_for() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert [title for title in ("Ask:", "Run:", "Measure:", "Look up:") if title not in shown] == []
    assert [
        name for name in ("plan", "fit", "compare", "sweep", "cost", "explain", "list") if f"  {name} " not in shown
    ] == []


@pytest.mark.parametrize("group", [(), ("list",), ("bench",), ("study",)])
def test_a_group_alone_is_its_help(group: tuple[str, ...]) -> None:
    bare, result = (CliRunner().invoke(main, [*group, *more]) for more in ((), ("--help",)))
    assert (bare.exit_code, bare.stdout) == (0, result.stdout)


def modules_after(*arguments: str) -> set[str]:
    """The modules that a process has loaded once the command ends."""
    run = f"try: main({[*arguments]!r})\nexcept SystemExit: pass"
    code = f"import sys\nfrom ridgeplan.dashboards.cli import main\n{run}\nprint(*sys.modules)"
    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.splitlines()[-1].split())


def test_help_loads_neither_the_planner_nor_numpy() -> None:
    """Which is what keeps it fast."""
    loaded = modules_after("--help")
    assert "click" in loaded
    assert loaded & {"numpy", "torch", "pydantic_core", "ridgeplan.planner"} == set()


def test_a_plan_loads_neither_torch_nor_sympy_nor_plotly() -> None:
    loaded = modules_after("plan", "Llama-3.1-8B", "--gpu", "h200", "--ctx", "8k")
    assert "ridgeplan.planner.recommend" in loaded
    assert loaded & {"torch", "transformers", "sympy", "scipy", "plotly", "rich"} == set()


def test_aliases_are_the_same_commands() -> None:
    assert ALL[("plan",)] is ALL[("recommend",)]
    assert ALL[("gpus",)] is ALL[("list", "gpus")]
    assert {("models",), ("presets",)} <= set(ALL)


@pytest.mark.parametrize(("typed", "meant"), [("pln", "plan"), ("compere", "compare"), ("recomend", "recommend")])
def test_a_mistyped_verb_has_near_ones(typed: str, meant: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"no command {typed!r}. Did you mean {meant}" in result.stderr


def test_verbs_and_their_options_are_completed() -> None:
    complete = get_completion_class("bash")
    assert complete is not None
    shell = complete(main, {}, "ridgeplan", "_RIDGEPLAN_COMPLETE")

    def completions(*words: str) -> set[str]:
        return {item.value for item in shell.get_completions(list(words[:-1]), words[-1])}

    assert completions("co") == {"compare", "cost", "completion"}
    assert {"--memory-limit", "--memory-utilization"} <= completions("plan", "--mem")
    assert completions("plan", "--quality", "") == {"exact", "near-lossless", "4-bit", "lossy"}
    assert completions("bench", "p") == {"planner"}


@pytest.mark.parametrize(
    "line",
    [
        ("study", "drafts", "--text", "book.txt", "--ctx", "abc", "--ratios", "many"),
        ("estimate", "Llama-3.1-8B", "--preset", "int8", "--gpu", "h200", "--ctx", "abc", "--batch", 0),
    ],
)
def test_lists_and_estimates_name_all_mistakes_at_once_too(refuses: Any, line: tuple[object, ...]) -> None:
    message = refuses(*line)
    assert "2 mistakes: (1) " in message
    assert "'abc' is not a number of tokens" in message
