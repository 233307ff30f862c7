"""Published times of models on several GPUs, and aiconfigurator's, beside ours."""

from __future__ import annotations

from statistics import median

from readme_tables import table

from ridgeplan.dashboards.cli.output import number
from ridgeplan.validate.papers.parallel import ServedRow, other_steps, served_rows, source_title


def parallel_published() -> str:
    """Every published row with our figure and the error; medians first."""
    pairs = [(row, row.predicted()) for row in served_rows()]
    errors = {row: predicted / row.published - 1 for row, predicted in pairs}
    groups = {
        "time per token, dense": [row for row in errors if row.tpot_ms and "Llama" in row.model],
        "time per token, experts": [row for row in errors if row.tpot_ms and "Llama" not in row.model],
        "highest load, dense": [row for row in errors if not row.tpot_ms and "Llama" in row.model],
        "highest load, experts": [row for row in errors if not row.tpot_ms and "Llama" not in row.model],
        "all": [*errors],
    }
    medians = []
    for name, rows in groups.items():
        sizes = [abs(errors[row]) for row in rows]
        medians.append((name, str(len(rows)), f"{median(sizes):.1%}", f"{max(sizes):.0%}"))
    cells = [(row.source, row.model, f"{row.gpu}, {row.degrees}", _load(row), *_figures(row, predicted),
              f"{errors[row]:+.0%}") for row, predicted in pairs]  # fmt: skip
    sources = [(key, source_title(key)) for key in dict.fromkeys(row.source for row in errors)]
    columns = ("source", "model", "GPUs", "prompt + output, requests", "published", "predicted", "error")
    tables = (
        table(("rows", "count", "median error", "largest"), medians),
        table(columns, cells),
        table(("source", "what it is"), sources),
    )
    return "\n\n".join(tables)


def _load(row: ServedRow) -> str:
    return f"{row.prompt} + {row.output}, {row.concurrency or 'highest load'}"


def _figures(row: ServedRow, predicted: float) -> tuple[str, str]:
    unit = "ms" if row.tpot_ms else "tokens/s a GPU"
    return f"{number(row.published)} {unit}", f"{number(predicted)} {unit}"


def parallel_others() -> str:
    """Every step that aiconfigurator estimated, with ours and the difference."""
    rows = [
        (case.model, f"{case.gpu}, {case.degrees}", "FP8" if case.weights == 8 else "checkpoint", str(case.batch),
         number(theirs), number(ours), f"{ours / theirs - 1:+.0%}")
        for case, theirs, ours in other_steps()
    ]  # fmt: skip
    differences = [abs(ours / theirs - 1) for _, theirs, ours in other_steps()]
    summary = f"{len(rows)} steps; the median difference is {median(differences):.1%}."
    columns = ("model", "GPUs", "weights", "batch", "aiconfigurator ms", "ours ms", "difference")
    return f"{summary}\n\n{table(columns, rows)}"
