"""Verbs that hold several: `bench` and `study`."""

from __future__ import annotations

import click

from ridgeplan.dashboards.cli.lazy_group import LazyGroup, examples

HERE = "ridgeplan.dashboards.cli"
BENCHMARKS = {
    "Benchmarks": {
        "kernels": ("bench:kernels", "This machine's kernels beside their peers."),
        "decode": ("bench_decode:decode", "Decoding at a large model's size, beside plain decoding."),
        "suite": ("bench_decode:suite", "The same over workloads, presets and gammas."),
        "planner": ("bench:planner", "How fast the planner answers."),
    }
}
STUDIES = {
    "Studies": {
        "drafts": ("study.drafts:drafts", "How often sparse drafts are accepted, by policy and ratio."),
        "retrieval": ("study.retrieval:retrieval", "What selections find of what the model attends to."),
        "dapq": ("study.dapq:dapq", "Whether queries follow positions more than content."),
    }
}


@click.group(
    cls=LazyGroup, package=HERE, sections=BENCHMARKS,
    epilog=examples(
        "ridgeplan bench planner", "ridgeplan bench kernels",
        "ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 32k",
    ),
)  # fmt: skip
def bench() -> None:
    """Measure this machine's speed against other software's."""


@click.group(
    cls=LazyGroup, package=HERE, sections=STUDIES,
    epilog=examples(
        "ridgeplan study drafts --text book.txt --ctx 4k", "ridgeplan study dapq", "ridgeplan study dapq --help"
    ),
)  # fmt: skip
def study() -> None:
    """Measure what the papers' methods rest on, with your model and text."""
