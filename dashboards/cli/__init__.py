"""The `ridgeplan` command: a file per verb or close group of verbs, and the options, tables and errors that they share.

commands.toml names every verb. A verb's file is imported when the verb runs, so that the command starts fast. Not here:
computations (planner, validate), the page and its figures (dashboards/app.py, dashboards/charts).
"""

from __future__ import annotations

import gc
import os

import click

from ridgeplan.dashboards.cli.groups import LazyGroup, command


@command(
    cls=LazyGroup,
    table="ridgeplan",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(package_name="ridgeplan")
def main() -> None:
    """Predict, plan, run and validate long-context LLM inference.

    Token counts may be written as 128k (k = 1024) or 1M, memory as 24GB or 24GiB, times as 20ms or 2s. Exit codes:
    0 success, 1 closed pipe or a defect, 2 bad input, 3 nothing fits, 4 the machine is too busy to measure, 130 Ctrl-C,
    143 SIGTERM.

    Examples:
      ridgeplan plan Llama-3.1-8B --gpu h200 --ctx 128k -o plan.json
      ridgeplan run plan.json --model Llama-3.1-8B --prompt-file book.txt
      ridgeplan explain gamma
    """
    # OpenMP's threads wait for each other in busy loops, which are very slow when another process occupies a core.
    # Shorter loops cost nothing on idle cores. OpenMP reads this when torch loads, which has not happened yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # NumPy multiplies and inverts small matrices only, for which threads of many cores wait longer than they work.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imports of torch and transformers make 400,000 objects that stay, and by default each is looked at many times.
    gc.set_threshold(50_000)
