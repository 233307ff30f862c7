"""Whatever the arguments, the command succeeds or explains itself in one line; it never shows a traceback."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from mutations import EXTREMES, FUZZ, HEAVY_FUZZ

from ridgeplan.dashboards.cli import main
from ridgeplan.planner import PRESETS, Workload, preset

NAMES = ("Llama-3.1-8B", "h200", "a100", "quantspec", *sorted(PRESETS), "auto", "near-lossless", "latency", "16")
STRANGE = (
    "",
    " ",
    "-",
    "--",
    "~nosuchuser/x",
    "/",
    ".",
    "..",
    "/dev/null",
    "/proc/self/mem",
    "x" * 5000,
    "\udce9",
    "é",
)
SIZES = ("24GiB", "1e999", "1e309GB", "0", "-1GB", "nan", "9" * 400)
NUMBERS = tuple(str(value) for value in (*EXTREMES, "1e999", "nan", "inf", "-inf", "9" * 400, 8, 4096, "0x10", "1_0"))
# What a question takes beside its options, so that most cases get as far as an answer.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "recommend": ("Llama-3.1-8B", "--gpu", "h200", "--ctx", "4096"),
    "estimate": ("Llama-3.1-8B", "--gpu", "h200", "--ctx", "4096", "--preset", "quantspec"),
    "fit": ("Llama-3.1-8B", "h200", "--batch", "4", "--ctx", "4096"),
    "gamma": ("Llama-3.1-8B", "h200", "--batch", "4", "--ctx", "4096"),
    "compare": ("Llama-3.1-8B", "--gpu", "h200,h100", "--ctx", "4096"),
    "sweep": ("Llama-3.1-8B", "--gpu", "h200", "--over", "ctx=4k,batch=1..4"),
    "cost": ("Llama-3.1-8B", "--gpu", "h200", "--ctx", "4096", "--price", "2.5"),
    "explain": ("gamma",),
    "models": (),
    "gpus": (),
}


def words(plausible: Sequence[str]) -> st.SearchStrategy[str]:
    """An argument: mostly one that might be meant. The system lets none hold a NUL."""
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
    return st.one_of(*[st.sampled_from(tuple(pool)) for pool in (plausible, NUMBERS, SIZES, STRANGE) if pool], text)


def values(option: click.Option, own_names: Sequence[str]) -> st.SearchStrategy[str]:
    """Arguments for an option, three in four of its type."""
    if isinstance(option.type, click.Choice):
        fitting = st.sampled_from(option.type.choices)
    elif option.type.name == "integer":
        fitting = st.sampled_from([str(value) for value in EXTREMES if isinstance(value, int)]) | st.integers().map(str)
    else:
        fitting = words((*NAMES, *own_names))
    return st.one_of(fitting, fitting, fitting, words((*NAMES, *own_names)))


def command_of(name: str) -> click.Command:
    """The command of a name, which is imported by it."""
    subcommand = main.get_command(click.Context(main), name)
    assert subcommand is not None
    return subcommand


@st.composite
def arguments(draw: st.DrawFn, command: str, question: Sequence[str], own_names: Sequence[str] = ()) -> list[str]:
    """The command with its question, of which a word may be wrong, and up to three of its options."""
    line = list(question)
    if line and draw(st.integers(0, 2)) == 0:
        line[draw(st.integers(0, len(line) - 1))] = draw(words((*NAMES, *own_names)))
    options = [parameter for parameter in command_of(command).params if isinstance(parameter, click.Option)]
    for option in draw(st.lists(st.sampled_from(options), max_size=3)) if options else ():
        line.append(option.opts[-1])
        if not option.is_flag:
            line.append(draw(values(option, own_names)))
    surplus = draw(words(own_names)) if draw(st.integers(0, 9)) == 0 else None
    return [command, *line] if surplus is None else [command, *line, surplus]


def ends_well(line: list[str], folder: Path) -> Result:
    """Exit code 0, or 2 or 3 with one line on stderr and nothing on stdout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(main, line)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2, 3), result.stderr
    if result.exit_code:
        assert result.stdout == ""
        last = result.stderr.splitlines()[-1]
        assert last.startswith("error: ") and len(last) <= 1600
        assert all(earlier.startswith("note: ") for earlier in result.stderr.splitlines()[:-1])
    return result


@FUZZ
@given(data=st.data())
def test_questions(tmp_path: Path, data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(sorted(QUESTIONS)))
    line = data.draw(arguments(command, QUESTIONS[command]))
    result = ends_well(line, tmp_path)
    if result.exit_code == 0 and "--json" in line and "--help" not in line:
        json.loads(result.stdout)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec", Workload("any", "here", 64, 8)).to_json(), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(data=st.data())
def test_runs(tmp_path: Path, plan_file: Path, tiny_folder: Path, data: st.DataObject) -> None:
    own_names = (str(tiny_folder), str(plan_file))
    question = (str(plan_file), "--model", str(tiny_folder), "--prompt", "ab")
    result = ends_well(data.draw(arguments("run", question, own_names)), tmp_path)
    assert result.exit_code != 3
