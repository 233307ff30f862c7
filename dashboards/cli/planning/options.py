"""Options and cells of tables that commands of planning share. Names of vLLM's and of benchmarks are aliases."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ridgeplan.dashboards.cli.options import (
    SIZE,
    TOKENS,
    acceptance_file,
    memory_utilization,
    options,
    profile_file,
    yarn,
)
from ridgeplan.dashboards.cli.output import number
from ridgeplan.planner import Prediction
from ridgeplan.planner.capacity import HOST_MEMORY_BYTES
from ridgeplan.planner.interface.quantities import GB, size_text
from ridgeplan.planner.plan import KVFormat, PlanError
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.support import Backend

GPU_HELP = "A name of `ridgeplan list gpus`, a TOML file, or auto for this machine."
FIGURES = ("gamma", "TPOT ms", "low", "high", "TTFT ms", "tokens/s", "GB", "speed-up")
DEFAULT_NEW_TOKENS = 1024
# vLLM's and SGLang's names of cache formats that mean the same here.
KV_NAMES = {
    "auto": None, "bfloat16": KVFormat.FULL, "float16": KVFormat.FULL, "int8_per_token_head": KVFormat.INT8,
} | {one.value: one for one in KVFormat}  # fmt: skip

CTX = ("--ctx", "--isl", "--input-len", "ctx")
BATCH = ("--batch", "--max-num-seqs", "--concurrency", "batch")
NEW_TOKENS = ("--new-tokens", "--osl", "--output-len", "new_tokens")


def _one_device(ctx: click.Context, param: click.Parameter, value: int) -> None:
    if value != 1:
        raise PlanError(f"tensor parallelism is {value}; allowed: 1, as plans are priced for one GPU")


ctx = click.option(*CTX, type=TOKENS, help="Tokens of a prompt, such as 128k.")
max_model_len = click.option("--max-model-len", type=TOKENS, help="Prompt and new tokens together, instead of --ctx.")
batch = click.option(*BATCH, type=int, default=1, show_default=True, help="Sequences at a time.")
new_tokens = click.option(
    *NEW_TOKENS, type=TOKENS, default=DEFAULT_NEW_TOKENS, show_default=True, help="Tokens to generate for each."
)
quality = click.option(
    "--quality", type=click.Choice([*map(str, Quality)]), default="near-lossless", show_default=True,
    help="What the target may give up.",
)  # fmt: skip
memory_limit = click.option(
    "--memory-limit", type=SIZE, help="Memory that may be used, such as 24GB, where that is less than this share."
)
host_memory = click.option(
    "--host-memory",
    type=SIZE,
    help="Memory of the host for layers that do not fit the GPU.  [default: with auto this share of the machine's, "
    f"else {size_text(HOST_MEMORY_BYTES)}]",
)
backend = click.option(
    "--backend", type=click.Choice([*map(str, Backend)]), default="ridgeplan", show_default=True,
    help="What is to run the plan; any: also what nothing runs yet.",
)  # fmt: skip
kv_format = click.option(
    "--kv-cache-dtype", "kv_format", type=click.Choice([*KV_NAMES]), default="auto", show_default=True,
    callback=lambda ctx, param, value: KV_NAMES[value], help="Only plans with this KV cache.",
)  # fmt: skip
tensor_parallel = click.option(
    "--tp", "--tensor-parallel-size", type=int, default=1, show_default=True, expose_value=False,
    callback=_one_device, help="GPUs that share a model; only 1 is priced.",
)  # fmt: skip
limits = options(quality, kv_format, backend, tensor_parallel)  # of what may be answered
# What figures rest on.
priced_by = options(memory_utilization, memory_limit, host_memory, profile_file, acceptance_file, yarn)


def context_of(ctx: int | None, max_model_len: int | None, new_tokens: int) -> int:
    """The prompt's tokens, from either option. Raises UsageError for none, both, or a limit without room for them."""
    if (ctx is None) == (max_model_len is None):
        raise click.UsageError("--ctx or --max-model-len is needed; allowed: one of them, such as --ctx 128k")
    if ctx is not None:
        return ctx
    prompt = (max_model_len or 0) - new_tokens
    if prompt < 1:
        raise click.UsageError(f"--max-model-len {max_model_len} has no room for a prompt and {new_tokens} new tokens")
    return prompt


def figures(predicted: Prediction) -> tuple[str, ...]:
    """The cells of `FIGURES`."""
    best = predicted.best
    return (
        str(predicted.gamma), number(best.tpot_ms), number(predicted.low.tpot_ms), number(predicted.high.tpot_ms),
        number(best.ttft_ms), number(best.tokens_per_s), number(best.peak_memory_bytes / GB),
        f"{predicted.speedup:.2f}x",
    )  # fmt: skip


def one_gpu(word: str | None, option: str | None) -> str | None:
    """The GPU that was given as a word or by --gpu, None for neither. Raises UsageError for both."""
    if word is not None and option is not None:
        raise click.UsageError("GPU was given twice; allowed: as the second word or by --gpu")
    return option if word is None else word


def flat(several: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The values of an option that takes several and may be repeated."""
    return tuple(dict.fromkeys(one for values in several for one in values))
