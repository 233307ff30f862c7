"""The table of the papers' mechanisms names files, tests and commands that exist, and says what the runtime can do."""

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ridgeplan.dashboards.cli import main
from ridgeplan.dashboards.figures import figures_named
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.policy import EVICTIONS, SELECTIONS
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import only_estimated
from ridgeplan.validate.papers.rows import PAPERS, load_tables
from ridgeplan.validate.studies.methods import METHODS, POLICIES

ROOT = Path(__file__).parents[1]
UNPUBLISHED = {"all", "progressive", "oracle", "random", "expected-attention"}  # policies of no paper of the four
PLACEHOLDERS = {"FILE", "MODEL", "PLAN", "CHECKPOINT"}
sys.path.append(str(ROOT / "docs"))
tables = importlib.import_module("mechanism_tables")
ROWS, ITEMS = tables.load_mechanisms(), tables.load_published()
KNOWN_WORDS = {*PLACEHOLDERS, *PRESETS, *PAPERS, *POLICIES, *METHODS, *(figure.name for figure in figures_named([]))}


def problem_of_test(name: str) -> str | None:
    """Why a test, a file and its function with :: between them, does not exist, if so."""
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return f"no file {path}"
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return None if function in names else f"no {function} in {path}"


def problem_of_command(line: str) -> str | None:
    """Why a line that starts with `ridgeplan` is no command of it, if so: unknown verbs, options, or words."""
    words = shlex.split(line)[1:]
    command: click.Command = main
    while isinstance(command, click.Group):
        context = click.Context(command)
        name = words.pop(0) if words else ""
        if (inner := command.get_command(context, name)) is None:
            return f"no command {name!r}"
        command = inner
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    values = {value for parameter in command.params for value in getattr(parameter.type, "choices", ())}
    for word in words:
        if not word.isdigit() and word not in (options if word.startswith("-") else KNOWN_WORDS | values):
            return f"{word!r} is not known to {command.name}"
    required = [parameter for parameter in command.params if parameter.required and isinstance(parameter, click.Option)]
    missing = [parameter.name for parameter in required if not {*parameter.opts} & {*words}]
    return f"{missing[0]} is required" if missing else None


def problems(shown: str) -> str | None:
    return problem_of_command(shown) if shown.startswith("ridgeplan ") else problem_of_test(shown)


def demonstrations() -> Iterator[str]:
    yield from dict.fromkeys(shown for row in ROWS for shown in row.shown)
    yield from dict.fromkeys(item.shown for item in ITEMS if item.shown)


@pytest.mark.parametrize("shown", list(dict.fromkeys(demonstrations())))
def test_what_demonstrates_a_mechanism_exists(shown):
    assert problems(shown) is None


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ("tests/none.py::test_x", "no file"),
        ("tests/test_mechanisms.py::test_that_is_not_here", "no test_that_is_not_here"),
        ("ridgeplan fly", "no command 'fly'"),
        ("ridgeplan study dapq --wings", "'--wings' is not known"),
        ("ridgeplan distill MODEL --text FILE", "output is required"),
        ("ridgeplan quality dapc", "'dapc' is not known"),
        ("ridgeplan figures quantspec-fig3", "'quantspec-fig3' is not known"),
    ],
)
def test_what_does_not_exist_is_noticed(shown, problem):
    assert problem in problems(shown)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_mechanism_names_files_that_exist_and_what_shows_it(row):
    assert [path for path in (*row.executed, *row.priced) if not (ROOT / path).is_file()] == []
    assert row.shown or not (row.executed or row.priced)
    assert row.missing or row.executed or row.priced, "what is left out says why"
    assert not row.preset or row.executed


@pytest.mark.parametrize("name", sorted({row.preset for row in ROWS if row.preset}))
def test_the_runtime_executes_the_presets_of_mechanisms_that_are_said_to_run(name):
    plan = preset(name, Workload("any", "any", 8192, 1024))
    assert only_estimated(plan, load_shape("meta-llama/Llama-3.1-8B"), has_head=True) is None


@pytest.mark.parametrize("policy", sorted({*EVICTIONS, *SELECTIONS} - UNPUBLISHED))
def test_every_policy_of_a_paper_has_a_row(policy):
    assert any(policy in f"{row.name} {row.preset} {' '.join(row.shown)}".lower().replace(" ", "-") for row in ROWS)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_predicted_table_is_among_the_published_items(paper):
    items = " ".join(item.items for item in ITEMS if item.paper.lower() == paper)
    for published in load_tables(paper):
        number = published.name.removeprefix("Table ").removeprefix("Fig ")
        words = {"Claims": "claims", "Headline": "claims", "Cliff": "cliff"}
        assert words.get(published.name, number) in items


# What the papers number and print results in: not symbols, hardware and drawings of methods.
TABLES = {"QuantSpec": range(1, 7), "SpeContext": (3, 4), "SpecAttn": (1, 2), "DapQ": range(1, 16)}
FIGURES = {
    "QuantSpec": (2, 4, 5, 6, 9),
    "SpeContext": (1, *range(5, 12)),
    "SpecAttn": range(2, 13),
    "DapQ": range(2, 6),
}


def numbers(items: str, kind: str) -> set[int]:
    """The numbers of the tables or figures that items name, such as 3, 9, 10 and 11 of 'Tables 3a and 9 to 11'."""
    named = set()
    for listed in re.findall(rf"{kind}s? ((?:\d+[a-z]?(?:, | and | to )?)+)", items):
        for first, last in re.findall(r"(\d+)[a-z]?(?: to (\d+))?", listed):
            named |= set(range(int(first), int(last or first) + 1))
    return named


def test_numbers_of_items():
    assert numbers("Tables 3a and 9 to 11, Figs 4, 10b and 12", "Table") == {3, 9, 10, 11}
    assert numbers("Tables 3a and 9 to 11, Figs 4, 10b and 12", "Fig") == {4, 10, 12}


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_and_figure_of_a_paper_is_among_the_published_items(paper):
    items = [item.items for item in ITEMS if item.paper == paper]
    for kind, expected in (("Table", TABLES), ("Fig", FIGURES)):
        assert set().union(*(numbers(each, kind) for each in items)) == {*expected[paper]}


@pytest.mark.parametrize("page", ["README.md", "docs/papers.md", "docs/glossary.md"])
def test_specattn_is_introduced_with_its_newer_name(page: str) -> None:
    (line, *_) = (line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "SpecAttn" in line)
    assert "Vegas" in line and "2602.07223" in line


def test_the_preset_of_specattn_is_explained_with_its_newer_name() -> None:
    assert "SpecAttn, now Vegas" in " ".join(CliRunner().invoke(main, ["explain", "specattn"]).stdout.split())
