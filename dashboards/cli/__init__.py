"""The `ridgeplan` command: a file per verb or close group of verbs, and the options, tables and errors that they share.

A verb's file is imported when it runs, so that the command starts fast. Not here: computations (planner, validate), the
page and its figures (dashboards/app.py, dashboards/charts).
"""

from __future__ import annotations

import os

import click

from ridgeplan.dashboards.cli.groups import LazyGroup, examples

# Every verb: where it is, and what the list of verbs says of it. Two names of one place are aliases; the second is not
# listed.
HERE = "ridgeplan.dashboards.cli"
SECTIONS = {
    "Ask": {
        "plan": ("plan:plan", "The fastest plan for a model on a GPU, and why."),
        "recommend": ("plan:plan", ""),
        "estimate": ("estimate:estimate", "One preset's or plan's figures, operation by operation."),
        "fit": ("fit:fit", "The largest contexts and batches that fit, and the smallest GPU."),
        "compare": ("compare:compare", "GPUs, presets, models and plans side by side."),
        "sweep": ("sweep:sweep", "The best plan at every point of a grid, as CSV, JSON or HTML."),
        "cost": ("compare:cost", "Dollars per million tokens, and who meets the latency limits."),
        "gamma": ("sweep:gamma", "The best number of drafts a round, over contexts and batches."),
        "export": ("export:export_plan", "A plan as the serve command of vLLM or SGLang."),
        "explain": ("estimate:explain", "Where a plan's time and memory go, or what a word means."),
    },
    "Run": {
        "run": ("run:run", "Execute a plan on a model and stream its text."),
        "validate": ("validate:validate", "Predictions against measurements on this machine."),
        "tune": ("acceptance:tune", "The gamma and ratio that are fastest for a text."),
        "demo": ("demo:demo", "Calibrate, plan, run and compare on this machine."),
        "dashboard": ("machine:dashboard", "The what-if page, on localhost only."),
    },
    "Measure": {
        "calibrate": ("machine:calibrate", "This machine's speed, for --gpu auto and --profile."),
        "acceptance": ("acceptance:acceptance", "How often drafts are accepted on a text."),
        "quality": ("quality:quality", "Fidelity, perplexity and RULER scores of plans."),
        "study": ("groups:study", "What the papers' methods rest on, with your model and text."),
        "distill": ("retrieval_head:distill", "A retrieval head for a model, trained on a text."),
        "import-head": ("retrieval_head:import_head", "A retrieval head from an EAGLE-3 checkpoint."),
        "bench": ("groups:bench", "Speed of kernels, of decoding and of planning."),
    },
    "Look up": {
        "list": ("lists:lists", "Models, GPUs and presets that are known by name."),
        "models": ("lists:models", ""),
        "gpus": ("lists:gpus", "The known GPUs; --template prints a file for your own."),
        "presets": ("lists:presets", ""),
        "papers": ("papers:papers", "Published tables beside the model's predictions."),
        "figures": ("papers:figures", "Each paper's figures from the model, as HTML, CSV and PNG."),
        "completion": ("groups:completion", "Completion of commands in bash, zsh or fish."),
    },
}


@click.group(
    cls=LazyGroup,
    package=HERE,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples(
        "ridgeplan plan Llama-3.1-8B --gpu h200 --ctx 128k -o plan.json",
        "ridgeplan run plan.json --model Llama-3.1-8B --prompt-file book.txt",
        "ridgeplan explain gamma",
    ),
)
@click.version_option(package_name="ridgeplan")
def main() -> None:
    """Predict, plan, run and validate long-context LLM inference.

    Tokens may be written 128k or 1M, memory 24GB or 24GiB, times 20ms or 2s. Exit codes: 0 success, 2 bad input,
    3 nothing fits, 4 the machine is too busy to be measured.
    """
    # OpenMP's threads wait for each other in busy loops, which are very slow when another process occupies a core.
    # Shorter loops cost nothing on idle cores. OpenMP reads this when torch loads, which has not happened yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
