"""`ridgeplan papers`: tables, JSON, files and refusals."""

import csv
import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from ridgeplan.dashboards.figures import paper_figure


def test_json_has_every_table_with_its_summary(invoke: Any) -> None:
    result = invoke("papers", "--json")
    assert result.exit_code == 0, result.stderr
    tables = json.loads(result.stdout)["tables"]
    assert {table["paper"] for table in tables} == {"quantspec", "specontext", "specattn", "dapq"}
    for table in tables:
        assert set(table) == {"paper", "name", "title", "predicted", "unpredicted", "median_error", "cells", "targets"}
        assert table["predicted"] + table["unpredicted"] == len(table["cells"])
        for cell in table["cells"]:
            assert set(cell) == {
                "case", "method", "metric", "published", "predicted", "error", "flag", "engine", "beyond_ms",
            }  # fmt: skip
            numbers = all(isinstance(cell[side], (int, float)) for side in ("published", "predicted"))
            assert (cell["error"] is not None) == numbers


def test_tables_show_cells_targets_and_reasons(invoke: Any) -> None:
    result = invoke("papers", "--paper", "quantspec", "--paper", "specattn")
    assert result.exit_code == 0, result.stderr
    for part in ("quantspec, Table 3", "OOM", "target: both out-of-memory cells right: 2 of 2, met", "not modelled"):
        assert part in result.stdout
    assert "dapq" not in result.stdout


def test_output_writes_the_json_that_is_printed(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "papers.json"
    result = invoke("papers", "--paper", "dapq", "--json", "--output", path)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(result.stdout)


def test_an_unknown_paper_and_a_wrong_file_are_refused(refuses: Any, tmp_path: Path) -> None:
    assert "unknown paper 'magicdec'; allowed: quantspec" in refuses("papers", "--paper", "magicdec")
    assert "cannot write" in refuses("papers", "--output", tmp_path / "none" / "papers.json")


def test_the_command_imports_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from ridgeplan.dashboards.cli import main\n"
        "try: main(['papers', '--paper', 'dapq', '--json'])\n"
        "finally: print({'torch', 'sympy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    process = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "set()"


# `ridgeplan figures`: the list, files, settings and refusals.


@pytest.fixture
def no_kaleido(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_figure, "can_draw", lambda: False)


def test_figures_are_listed_with_the_papers_settings(invoke: Any) -> None:
    shown = invoke("figures", "specattn").stdout
    assert "Fig 10b: overhead of choosing tokens (gpu=h100-nvl)" in shown
    assert "quantspec" not in shown


def test_a_page_and_a_csv_for_each_figure(invoke: Any, tmp_path: Path, no_kaleido: None) -> None:
    result = invoke("figures", "quantspec-fig2", "quantspec-fig4", "--output", tmp_path / "new", "--set", "gpu=h200")
    assert result.stdout.startswith("2 figures as html, csv in ")
    assert "kaleido" in result.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "figures.html", "quantspec-fig2.csv", "quantspec-fig4.csv",
    ]  # fmt: skip
    with (tmp_path / "new" / "quantspec-fig4.csv").open(encoding="utf-8") as file:
        assert {row["gpu"] for row in csv.DictReader(file)} == {"h200"}
    assert "Fig 4: speed-up of 4-bit weights" in (tmp_path / "new" / "figures.html").read_text(encoding="utf-8")


def test_json_has_rows_and_settings(invoke: Any) -> None:
    (figure,) = json.loads(invoke("figures", "quantspec-fig4", "--json", "--set", "gamma=6").stdout)["figures"]
    assert figure["settings"] == {"gpu": "a6000", "gamma": 6}
    assert {row["gamma"] for row in figure["rows"]} == {6}


def test_png_files_are_moved_into_the_folder(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_images(figures: Any, files: Any, **_: Any) -> None:
        for figure, file in zip(figures, files, strict=True):
            Path(file).write_text(figure.layout.title.text, encoding="utf-8")

    monkeypatch.setattr(paper_figure, "can_draw", lambda: True)
    monkeypatch.setattr(paper_figure.pio, "write_images", write_images)
    result = invoke("figures", "specattn-fig6", "quantspec-fig4", "--output", tmp_path, "--format", "png")
    assert result.stdout.startswith("2 figures as png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quantspec-fig4.png", "specattn-fig6.png"]


def test_without_kaleido_or_chrome_nothing_is_written(
    refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_chrome(*_: Any, **__: Any) -> None:
        raise RuntimeError("\n\nKaleido requires Google Chrome to be installed.\n")

    monkeypatch.setattr(paper_figure, "can_draw", lambda: False)
    command = ("figures", "specattn-fig6", "--output", tmp_path, "--format", "png", "--format", "html")
    assert "PNG files need kaleido: `pip install 'ridgeplan[png]" in refuses(*command)
    monkeypatch.setattr(paper_figure, "can_draw", lambda: True)
    monkeypatch.setattr(paper_figure.pio, "write_images", no_chrome)
    assert "`plotly_get_chrome` installs it. Kaleido requires Google Chrome" in refuses(*command)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nope",), "unknown figure 'nope'; allowed: quantspec"),
        (("dapq", "--set", "gamma=3"), "no chosen figure has the setting 'gamma'; allowed: budget, gpu, model"),
        (("dapq", "--set", "gpu"), "'gpu' is not a setting; allowed: a slider and its value"),
        (("dapq", "--set", "gpu=x"), "gpu is 'x'; allowed: h20, a6000"),
    ],
)
def test_wrong_names_and_settings_are_refused(refuses: Any, arguments: tuple[str, ...], text: str) -> None:
    assert text in refuses("figures", *arguments)
