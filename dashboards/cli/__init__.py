"""The `ridgeplan` command: a file per verb or close group of verbs, and the options, tables and errors that they share.

A verb's file is imported when the verb runs, so that the command starts fast. Not here: computations (planner,
validate), the page and its figures (dashboards/app.py, dashboards/charts).
"""

from __future__ import annotations

import os

import click

from ridgeplan.dashboards.cli.groups import HERE, LazyGroup, command

# The module, the attribute and the summary of every verb. An alias has no summary and is not listed.
SECTIONS = {
    "Ask": {
        "plan": ("plan:plan", "Find the fastest plan for a model on a GPU."),
        "recommend": ("plan:plan", ""),
        "estimate": ("estimate:estimate", "Predict one preset or plan, operation by operation."),
        "brief": ("brief:brief", "Write an answer as one HTML file."),
        "fit": ("fit:fit", "Find the largest contexts and batches, or the smallest GPU."),
        "compare": ("compare:compare", "Compare GPUs, presets, models and plans."),
        "sweep": ("sweep:sweep", "Find the best plan at every point of a grid."),
        "cost": ("compare:cost", "Price a million tokens within latency limits."),
        "capacity": ("capacity:capacity", "Simulate requests, and find the GPUs that their rate needs."),
        "gamma": ("sweep:gamma", "Find the best number of drafts per round."),
        "export": ("export:export_plan", "Write a plan as the serve command of vLLM or SGLang."),
        "explain": ("estimate:explain", "Explain a plan's time and memory, or a term."),
    },
    "Run": {
        "run": ("run:run", "Execute a plan on a model and stream its text."),
        "chat": ("chat:chat", "Talk with a model in the terminal."),
        "serve": ("serve:serve", "Serve a model on localhost, OpenAI-compatible."),
        "validate": ("validate:validate", "Compare predictions with measurements on this machine."),
        "tune": ("acceptance:tune", "Tune gamma and sparse ratio by times measured on a text."),
        "demo": ("demo:demo", "Calibrate, plan, run and compare on this machine."),
        "dashboard": ("dashboard:dashboard", "Serve the what-if page on localhost."),
    },
    "Measure": {
        "calibrate": ("calibrate:calibrate", "Measure this machine for --gpu auto and --profile."),
        "import-measurements": (
            "import_measurements:import_measurements",
            "Correct a calibration by timings in a CSV file.",
        ),
        "acceptance": ("acceptance:acceptance", "Measure how often drafts are accepted on a text."),
        "quality": ("quality:quality", "Measure fidelity, perplexity and RULER scores of plans."),
        "study": ("groups:study", "Test the papers' claims on your model and text."),
        "distill": ("retrieval_head:distill", "Train a retrieval head for a model on a text."),
        "import-head": ("retrieval_head:import_head", "Convert an EAGLE-3 checkpoint to a retrieval head."),
        "bench": ("groups:bench", "Time kernels, decoding and the planner."),
    },
    "Look up": {
        "list": ("lists:lists", "List the models, GPUs and presets of the catalogs."),
        "models": ("lists:models", ""),
        "gpus": ("lists:gpus", ""),
        "presets": ("lists:presets", ""),
        "papers": ("papers:papers", "Compare published times and memory with predictions."),
        "figures": ("papers:figures", "Draw figures of the papers from the model."),
        "completion": ("groups:completion", "Print a completion script for bash, zsh or fish."),
    },
}


@command(
    cls=LazyGroup,
    package=HERE,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(package_name="ridgeplan")
def main() -> None:
    """Predict, plan, run and validate long-context LLM inference.

    Token counts may be written as 128k or 1M, memory as 24GB or 24GiB, times as 20ms or 2s. Exit codes: 0 success,
    1 closed pipe or a defect, 2 bad input, 3 nothing fits, 4 the machine is too busy to measure, 130 Ctrl-C,
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
