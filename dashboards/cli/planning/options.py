"""Options and cells of tables that commands of planning share."""

from __future__ import annotations

import click

from ridgeplan.dashboards.cli.options import Size
from ridgeplan.dashboards.cli.output import number
from ridgeplan.planner import Prediction
from ridgeplan.planner.quality import Quality
from ridgeplan.roofline.device import GIB

GPU_HELP = "A name of `ridgeplan gpus`, a TOML file, or auto for this machine."
FIGURES = ("TPOT ms", "low", "high", "TTFT ms", "tokens/s", "GiB", "speed-up")

new_tokens = click.option(
    "--new-tokens", type=int, default=1024, show_default=True, help="Tokens to generate for each."
)
quality = click.option(
    "--quality", type=click.Choice([*map(str, Quality)]), default="near-lossless", show_default=True,
    help="What the target may give up.",
)  # fmt: skip
memory_limit = click.option(
    "--memory-limit", type=Size(), help="Memory that may be used, such as 24GiB, where that is less than this share."
)


def figures(predicted: Prediction) -> tuple[str, ...]:
    """The cells of `FIGURES`."""
    best = predicted.best
    return (
        number(best.tpot_ms), number(predicted.low.tpot_ms), number(predicted.high.tpot_ms), number(best.ttft_ms),
        number(best.tokens_per_s), f"{best.peak_memory_bytes / GIB:.2f}", f"{predicted.speedup:.2f}x",
    )  # fmt: skip
