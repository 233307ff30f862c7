"""Published times of models on several GPUs, and aiconfigurator's, beside ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from readme_tables import table

from ridgeplan import planner
from ridgeplan.dashboards.cli.output import number
from ridgeplan.dashboards.cli.plan import serve_command
from ridgeplan.planner.quantities import GB, time_text, tokens

# Published rows are compared by a program outside the package.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from published_parallel import ServedRow, other_prompts, other_steps, served_rows, source_title

ASKED = tuple((name, context) for name in ("Llama-3.1-70B", "Qwen3-235B-A22B", "DeepSeek-V3")
              for context in ("32k", "128k"))  # fmt: skip
LOST = 4  # degrees shown beside the chosen ones


def parallel_plans() -> str:
    """The plans for 8 H200, why the nearest other degrees lost, and the commands that serve them."""
    rows, commands = [], []
    for name, context in ASKED:
        shape, profile = planner.resolve(name, "h200")
        stretched = tokens(context) > shape.max_context
        answer = planner.recommend(name, "h200", context, gpus=8, yarn=stretched)
        rows += _degrees(name, context, answer)
        commands.append(serve_command(answer, profile))
    columns = ("model", "context", "degrees", "plan", "TPOT", "GB of a GPU", "why not")
    return f"{table(columns, rows)}\n\n```\n" + "\n".join(commands) + "\n```"


def _degrees(name: str, context: str, answer: planner.Recommendation) -> Iterator[tuple[str, ...]]:
    """The chosen degrees and the nearest others."""
    for place, row in enumerate(answer.degrees[: LOST + 1]):
        first = (name, context) if not place else ("", "")
        yield (*first, str(row.parallel), row.plan, time_text(row.tpot_ms), f"{row.peak_bytes / GB:.1f}",
               row.verdict or "chosen")  # fmt: skip


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
    """Every step and every prompt that aiconfigurator estimated, with ours and the difference."""
    parts = []
    for what, cases in (("steps", other_steps()), ("prompts of 8192 tokens", other_prompts())):
        rows = [
            (case.model, f"{case.gpu}, {case.degrees}", "FP8" if case.weights == 8 else "checkpoint",
             *([str(case.batch)] if what == "steps" else []), number(theirs), number(ours), f"{ours / theirs - 1:+.0%}")
            for case, theirs, ours in cases
        ]  # fmt: skip
        differences = [abs(ours / theirs - 1) for _, theirs, ours in cases]
        batch = ("batch",) if what == "steps" else ()
        columns = ("model", "GPUs", "weights", *batch, "aiconfigurator ms", "ours ms", "difference")
        summary = f"{len(rows)} {what}; the median difference is {median(differences):.1%}."
        parts += [summary, table(columns, rows)]
    return "\n\n".join(parts)
