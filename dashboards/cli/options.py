"""Options shared by several commands, and the types of their values. Names of vLLM's and of benchmarks are aliases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ridgeplan.dashboards.cli.output import number
from ridgeplan.dashboards.user_errors import FileProblem
from ridgeplan.planner import Plan, Prediction, quantities
from ridgeplan.planner.capacity import HOST_MEMORY_BYTES, MEMORY_UTILIZATION
from ridgeplan.planner.plan_file import SavedPlan, read_plan
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.quantities import GB, size_text
from ridgeplan.roofline.catalog.files import read_document
from ridgeplan.roofline.plan.plan import MAX_TOKENS, KVFormat, PlanError, require
from ridgeplan.roofline.plan.support import Backend

Command = TypeVar("Command", bound=Callable[..., Any])


class Quantity(click.ParamType):
    """A number with a unit, as `ridgeplan.planner.quantities` parses it."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What the parser makes of a text."""
        try:
            return self.parse(value) if isinstance(value, str) else value
        except PlanError as error:
            return self.fail(str(error), param, ctx)


def _positive_tokens(value: str) -> int:
    found = quantities.tokens(value)
    require(1 <= found <= MAX_TOKENS, f"{value!r} is out of range; allowed: 1 to {MAX_TOKENS}")
    return found


TOKENS = Quantity("tokens", quantities.tokens)
POSITIVE_TOKENS = Quantity("tokens", _positive_tokens)
TOKEN_LIST = Quantity("tokens", quantities.values)
COUNT_LIST = Quantity("numbers", partial(quantities.values, parse=quantities.count))
SIZE = Quantity("size", quantities.size_bytes)
TIME = Quantity("time", quantities.duration_s)


class Names(click.ParamType):
    """Names with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Each once, in the order given."""
        if not isinstance(value, str):
            return tuple(value)
        found = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
        return found or self.fail(f"{value!r} holds no name; allowed: one, or several with commas", param, ctx)


def may_be_written(path: Path) -> bool:
    """Whether a regular file of that name can be written; a device or a pipe of that name would be replaced."""
    try:
        target = Path(os.path.realpath(path))
        free = target.is_file() or not target.exists()
        return free and target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError):  # an invalid file name
        return False


class OutputFile(click.ParamType):
    """A file to write. Checked before any work starts."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, if its folder exists and may be written to."""
        path = Path(value)
        if not may_be_written(path):
            self.fail(f"cannot write {value!r}; allowed: a file in an existing, writable folder", param, ctx)
        return path


class SavedPlanFile(click.ParamType):
    """A plan's file, as written by `plan --output`, with what it says of its model and machine."""

    name = "plan.json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SavedPlan:
        """The plan. Raises PlanError or FileProblem naming the file."""
        if isinstance(value, SavedPlan):
            return value
        try:
            return read_plan(read_document(Path(value)))
        except (OSError, ValueError) as error:
            if isinstance(error, PlanError):
                raise PlanError(f"plan {value!r}: {error}") from error
            raise FileProblem(f"cannot read plan {value!r}: {getattr(error, 'strerror', None) or error}") from error


class PlanFile(SavedPlanFile):
    """The plan alone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The plan. Raises as SavedPlanFile does."""
        return value if isinstance(value, Plan) else super().convert(value, param, ctx).plan


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combines several click decorators, in the order in which `--help` shows them."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
profile_file = click.option("--profile", metavar="FILE", help="Calibration to predict with, of `ridgeplan calibrate`.")
acceptance_file = click.option(
    "--acceptance", metavar="FILE", help="Rows of `ridgeplan acceptance`.  [default: those that it saved]"
)
yarn = click.option("--yarn", is_flag=True, help="Stretch rotary embeddings beyond the model's context limit.")
memory_utilization = click.option(
    "--memory-utilization", "--gpu-memory-utilization", "memory_utilization", type=float, default=MEMORY_UTILIZATION,
    show_default=True, help="Share of the machine's memory that may be used.",
)  # fmt: skip
model_to_run = click.option(
    "--model", help="Folder, GGUF file or hub id to run.  [default: the embedded SmolLM2-135M-Instruct]"
)
prompt_file = click.option(
    "--prompt-file", metavar="FILE", help="UTF-8 text to continue.  [default: a text that comes with Python]"
)
retrieval_head = click.option(
    "--retrieval-head", metavar="FILE", help="Head of `ridgeplan distill`, for plans that choose tokens by one."
)
calibration_file = click.option(
    "--calibration", metavar="FILE", help="UTF-8 text like what will be decoded, to fit 4-bit weights to."
)


class ListCommand(click.Command):
    """A command whose `multiple` options take all values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        lists = {name for one in self.params if isinstance(one, click.Option) and one.multiple for name in one.opts}
        return super().parse_args(ctx, list(_repeated(args, lists)))


def _repeated(args: list[str], lists: set[str]) -> Iterator[str]:
    """The arguments, with the option's name before every further value of a list."""
    option, taken = "", False
    for arg in args:
        if arg.startswith("-"):
            option, taken = arg if arg in lists else "", False
        elif option:
            if taken:
                yield option
            taken = True
        yield arg


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
