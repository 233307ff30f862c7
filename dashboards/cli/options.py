"""Options that several commands share, and the types of their values.

Names that vLLM and benchmark clients use for the same option are aliases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ridgeplan.dashboards.cli.groups import ThoroughCommand
from ridgeplan.dashboards.cli.output import number
from ridgeplan.dashboards.files import FileProblem, is_writable
from ridgeplan.planner import Plan, Prediction, quantities
from ridgeplan.planner.capacity import HOST_MEMORY_BYTES, MEMORY_UTILIZATION
from ridgeplan.planner.extras import require_package
from ridgeplan.planner.plan_file import SavedPlan, read_plan
from ridgeplan.planner.quality import Quality, parse_quality
from ridgeplan.planner.quantities import GB, size_text
from ridgeplan.roofline.catalog.files import existing_path, read_document
from ridgeplan.roofline.catalog.validation import INVISIBLE, UNPRINTABLE, brief
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DrafterKind, KVFormat, PlanError, TextKind, require
from ridgeplan.roofline.plan.support import Backend

Command = TypeVar("Command", bound=Callable[..., Any])


class Quantity(click.ParamType):
    """A number with a unit, as `ridgeplan.planner.quantities` parses it."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses a text; other values pass unchanged."""
        try:
            return self.parse(value) if isinstance(value, str) else value
        except PlanError as error:
            return self.fail(str(error), param, ctx)


def _positive_tokens(value: str) -> int:
    tokens = quantities.tokens(value)
    require(1 <= tokens <= MAX_TOKENS, f"{value!r} is out of range; allowed: 1 to {MAX_TOKENS}")
    return tokens


class QualityLimit(Quantity):
    """A step of quality, which the shell completes, or a floor."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The steps that begin with what is typed."""
        return [CompletionItem(step) for step in Quality if step.startswith(incomplete)]


TOKENS = Quantity("tokens", quantities.tokens)
POSITIVE_TOKENS = Quantity("tokens", _positive_tokens)
TOKEN_LIST = Quantity("tokens", quantities.values)
COUNT_LIST = Quantity("numbers", partial(quantities.values, parse=quantities.count))
SIZE = Quantity("size", quantities.size_bytes)
TIME = Quantity("time", quantities.duration_s)


class Names(click.ParamType):
    """A list of names, separated by commas or spaces; the name of a file may have spaces."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The distinct names in order."""
        if not isinstance(value, str):
            return tuple(value)
        apart = value if "," in value or existing_path(value) else ",".join(value.split())
        names = tuple(dict.fromkeys(name.strip() for name in apart.split(",") if name.strip()))
        return names or self.fail(f"{value!r} holds no name; allowed: one name, or several with commas", param, ctx)


class PlainText(click.ParamType):
    """A name that results will hold, or a file after which they name something."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, unchanged, unless it has control characters or invisible ones."""
        if re.search(f"[{UNPRINTABLE}{INVISIBLE}]", value):
            self.fail(f"{brief(value)} has characters that are not shown; allowed: a name without them", param, ctx)
        return value


class OutputFile(click.ParamType):
    """A file to write, checked before any work starts. folders: whether it may be a folder that exists."""

    name = "file"
    folders = False

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, if its folder exists and may be written to."""
        path = Path(value)
        if not is_writable(path) and not (self.folders and path.is_dir()):
            self.fail(f"cannot write {value!r}; allowed: a file in an existing, writable folder", param, ctx)
        return path


TABLE_SUFFIXES = (".csv", ".md", ".json", ".png")
DRAWN_SUFFIXES = (".png", ".html")


class FormatFile(OutputFile):
    """A file to write, of which the suffix says the format."""

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, if its suffix is one of the formats and it may be written."""
        path = super().convert(value, param, ctx)
        if path.suffix not in self.suffixes:
            self.fail(f"{value!r} ends in {path.suffix!r}; allowed: {', '.join(self.suffixes)}", param, ctx)
        if path.suffix in DRAWN_SUFFIXES:
            require_package("plotly")  # before the work, which may take minutes
        return path


TABLE_FILE, TABLE_OR_PAGE = FormatFile(*TABLE_SUFFIXES), FormatFile(*TABLE_SUFFIXES, ".html")


class SavedPlanFile(click.ParamType):
    """A plan file as `plan --output` writes it, with the shape of its model and the profile of its machine."""

    name = "plan.json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SavedPlan:
        """Reads the file. Raises PlanError or FileProblem, which name it."""
        if isinstance(value, SavedPlan):
            return value
        try:
            return read_plan(read_document(Path(value)))
        except (OSError, ValueError) as error:
            if isinstance(error, PlanError):
                raise PlanError(f"plan {value!r}: {error}") from error
            raise FileProblem(f"cannot read plan {value!r}: {getattr(error, 'strerror', None) or error}") from error


class PlanFile(SavedPlanFile):
    """A plan file of which only the plan is needed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads the plan. Raises as SavedPlanFile does."""
        return value if isinstance(value, Plan) else super().convert(value, param, ctx).plan


def combine(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """One decorator for several options, in the order in which `--help` lists them."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def repeated(
    name: str, variable: str, kind: Any, text: str, default: Any = (), *, otherwise: str = "", **settings: Any
) -> Any:
    """An option that is repeated for several values. text: its help, without the full stop.

    otherwise: what applies without the option, where that is no value of it.
    """
    text = f"{text}; repeat for several." + (f"  [default: {otherwise}]" if otherwise else "")
    return click.option(name, variable, type=kind, default=default, multiple=True, help=text, **settings)


def listed(name: str, kind: Any, text: str, default: Any = ()) -> Any:
    """An option of a `ListCommand` that takes a list of values. text: its help."""
    return click.option(name, type=kind, multiple=True, default=default, help=text)


class ListCommand(ThoroughCommand):
    """A command whose `multiple` options are lists: they take every value up to the next option, also with commas."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats the option's name before every further value of a list, then parses as click does."""
        lists = {name for param in self.params if isinstance(param, click.Option) and param.multiple
                 for name in param.opts}  # fmt: skip
        repeated: list[str] = []
        option = ""
        for arg in args:
            if arg.startswith("-"):
                option = arg if arg in lists else ""
            for value in arg.split(",") if option and arg != option else (arg,):
                if option and arg != option and repeated[-1] != option:
                    repeated.append(option)
                repeated.append(value)
        return super().parse_args(ctx, repeated)


GPU_HELP = "A name from `ridgeplan list gpus`, a TOML file, or auto for this machine."
DEFAULT_NEW_TOKENS = 1024
DEFAULT_RUN_TOKENS = 128
CTX = ("--ctx", "--isl", "--input-len")
BATCH = ("--batch", "--max-num-seqs", "--concurrency")
NEW_TOKENS = ("--new-tokens", "--osl", "--output-len")
# vLLM's and SGLang's names of the same KV-cache formats.
KV_NAMES = {
    "auto": None, "bfloat16": KVFormat.FULL, "float16": KVFormat.FULL, "int8_per_token_head": KVFormat.INT8,
} | {form.value: form for form in KVFormat} | {"fp8": KVFormat.INT8}  # fmt: skip


def one_name(ctx: click.Context, param: click.Parameter, names: Sequence[str]) -> str | None:
    """The only name of an option that takes one; None without a name."""
    several = ",".join(names)
    if "," in several:
        raise click.UsageError(f"--gpu is {several}; allowed: one GPU; `ridgeplan compare` takes --gpu {several}")
    return several if names else None


one_gpu = partial(click.option, "--gpu", multiple=True, callback=one_name)


# The workload.
gpu = one_gpu(required=True, help=GPU_HELP)
ctx = click.option(*CTX, "ctx", type=TOKENS, help="Prompt length in tokens, such as 128k, which is 131072.")
max_model_len = click.option("--max-model-len", type=TOKENS, help="Prompt and new tokens together; replaces --ctx.")
batch = click.option(*BATCH, "batch", type=int, default=1, help="Sequences that run together.")
new_tokens = click.option(
    *NEW_TOKENS, "new_tokens", type=TOKENS, default=DEFAULT_NEW_TOKENS, help="Tokens to generate per sequence."
)
workload = combine(ctx, max_model_len, batch, new_tokens)
gpu_argument = combine(click.argument("gpu", required=False), one_gpu("gpu_option", help=GPU_HELP))


def distinct(ctx: click.Context, param: click.Parameter, lists: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The distinct values of an option that takes a list and may be repeated."""
    return tuple(dict.fromkeys(value for values in lists for value in values))


def context_list(text: str) -> Callable[[Command], Command]:
    """The option --ctx of a command that takes several contexts."""
    return click.option(*CTX, "contexts", type=TOKEN_LIST, multiple=True, callback=distinct, help=text)


def batch_list(text: str) -> Callable[[Command], Command]:
    """The option --batch of a command that takes several batches."""
    return click.option(*BATCH, "batches", type=COUNT_LIST, multiple=True, callback=distinct, help=text)


gpu_names = click.option(
    "--gpu", "gpu_names", type=Names(), multiple=True, callback=distinct, help="GPUs, separated by commas."
)

# Which plans are allowed.
quality = click.option(
    "--quality", type=QualityLimit("|".join(Quality), parse_quality), default="near-lossless",
    help="exact keeps the model's output distribution; near-lossless also allows 8-bit weights and KV cache, 4-bit "
    "also 4-bit weights, lossy also dropping tokens. Or a floor such as 'fidelity>=0.95' or 'RULER>=80'.",
)  # fmt: skip


def _kv_format(ctx: click.Context, param: click.Parameter, value: str) -> KVFormat | None:
    """The format of a name. vLLM's fp8 is what INT8 becomes there (formats.toml)."""
    if value == "fp8" and ctx.params.get("backend", Backend.VLLM) != Backend.VLLM:
        raise click.BadParameter("'fp8' is vLLM's; allowed: with --backend vllm, or int8, which has 8 bits, too")
    return KV_NAMES[value]


kv_format = click.option(
    "--kv-cache-dtype", "kv_format", type=click.Choice([*KV_NAMES]), default="auto",
    callback=_kv_format, help="Consider only plans with this KV-cache format.",
)  # fmt: skip


def chosen_backend(default: str | None, otherwise: str = "") -> Callable[[Command], Command]:
    """The option --backend. otherwise: what stands for a default that is None."""
    text = "Engine that will run the plan; any includes plans that no engine runs yet."
    text += f"  [default: {otherwise}]" if otherwise else ""
    return click.option("--backend", type=click.Choice([*map(str, Backend)]), default=default, help=text, is_eager=True)


engine_profile = click.option(
    "--engine-profile", metavar="FILE",
    help="Measured steps of the --backend, written by `ridgeplan calibrate --engine`.  [default: the saved ones]",
)  # fmt: skip
parallel = combine(
    click.option("--gpus", type=int, help="GPUs that the model may be divided among; vLLM executes such plans."),
    click.option("--tp", "--tensor-parallel-size", "tensor_parallel", type=int,
                 help="Degree of tensor parallelism.  [default: 1, or with --gpus the fastest]"),
    click.option("--pp", "--pipeline-parallel-size", "pipeline_parallel", type=int,
                 help="Degree of pipeline parallelism, in the same way."),
    click.option("--dp", "--data-parallel-size", "data_parallel", type=int,
                 help="Degree of data parallelism of attention, over which experts are sharded, in the same way."),
    click.option("--ep/--no-ep", "--enable-expert-parallel/--no-enable-expert-parallel", "expert_parallel",
                 default=None, help="Whole experts on a GPU, or slices of all.  [default: the faster]"),
)  # fmt: skip
# An option of vLLM, whose error names the option here that decides the same.
quantization = click.option(
    "--quantization", hidden=True, expose_value=False, callback=lambda ctx, param, value: value and param.type.fail(
        "plans choose weights by --quality: exact keeps the checkpoint's, near-lossless also has 8 bits", param, ctx),
)  # fmt: skip
limits = combine(quality, quantization, kv_format, chosen_backend("ridgeplan"), engine_profile, parallel)
only_preset = click.option("--preset", help="Consider only this preset.  [default: every plan that runs]")

# What predictions rest on.
memory_utilization = click.option(
    "--memory-utilization", "--gpu-memory-utilization", "memory_utilization", type=float, default=MEMORY_UTILIZATION,
    help="Fraction of the machine's memory that plans may use.",
)  # fmt: skip
memory_limit = click.option("--memory-limit", type=SIZE, help="Memory that plans may use at most, such as 24GB.")
host_memory = click.option(
    "--host-memory", type=SIZE,
    help="Host memory for layers that do not fit the GPU.  [default: with auto that fraction of this machine's, else "
    f"{size_text(HOST_MEMORY_BYTES)}]",
)  # fmt: skip
profile_file = click.option("--profile", metavar="FILE", help="Calibration written by `ridgeplan calibrate`.")
acceptance_file = click.option(
    "--acceptance", metavar="FILE", help="Acceptance written by `ridgeplan acceptance`.  [default: the saved rows]"
)
yarn = click.option("--yarn", is_flag=True, help="Scale rotary embeddings beyond the model's context limit (YaRN).")
routing_skew = click.option(
    "--routing-skew", type=float, default=0.0, show_default=False,
    help="Exponent of a Zipf law of how often each expert is chosen, from 0 to 8.  [default: 0, all alike]",
)  # fmt: skip
text_kind = click.option(
    "--text", type=click.Choice([*map(str, TextKind)]), help="Kind of text, for plans with a drafter.  [default: none]"
)
acceptance_length = click.option(
    "--acceptance-length", type=float, default=0.0, show_default=False,
    help="Tokens of a pass that verifies four proposals of --drafter, as you measured them.",
)  # fmt: skip
measured_drafter = click.option(
    "--drafter", type=click.Choice([kind for kind in map(str, DrafterKind) if kind != "none"]),
    help="The drafter that --acceptance-length was measured with.  [default: suffix]",
)  # fmt: skip
drafter_head = click.option(
    "--drafter-head", type=PlainText(), metavar="FOLDER",
    help="Draft head that plans may use: of `ridgeplan distill --drafter`, EAGLE-3's, or a model with an MTP layer.",
)  # fmt: skip
DRAFTING = ("text", "acceptance_length", "drafter", "drafter_head")
drafting = combine(text_kind, acceptance_length, measured_drafter, drafter_head)
priced_by = combine(
    memory_utilization, memory_limit, host_memory, profile_file, acceptance_file, yarn, routing_skew, drafting
)

# Models and texts to run.
model_to_run = click.option(
    "--model", help="Folder, GGUF file or hub id to run.  [default: the embedded SmolLM2-135M-Instruct]"
)
any_model = click.option(
    "--any-model", is_flag=True, help="Run a model whose sizes differ from those of the plan's model."
)
prompt_file = click.option(
    "--prompt-file", metavar="FILE", help="UTF-8 text to continue.  [default: a text that ships with Python]"
)
max_new_tokens = click.option(
    "--max-new-tokens", "--new-tokens", "--osl", "max_new_tokens", type=TOKENS,
    help=f"Tokens to generate.  [default: {DEFAULT_RUN_TOKENS}, or the plan's if fewer]",
)  # fmt: skip
retrieval_head = click.option(
    "--retrieval-head", type=PlainText(), metavar="FILE",
    help="Head from `ridgeplan distill`, for plans that select with one.  [default: the one that ships for the model]",
)  # fmt: skip
calibration_file = click.option(
    "--calibration", type=PlainText(), metavar="FILE",
    help="UTF-8 text similar to the workload, to fit 4-bit weights to.",
)  # fmt: skip
text_file = click.option(
    "--text", type=PlainText(), metavar="FILE", required=True, help="UTF-8 text similar to the workload."
)


def sample_or_text(text: str) -> Callable[[Command], Command]:
    """The option --text where a sample text is the default. text: its help."""
    return click.option(
        "--text", type=PlainText(), metavar="FILE", help=f"{text}  [default: a text that ships with Python]"
    )


text_name = click.option(
    "--text-name", type=PlainText(), help="Name of the text in saved rows.  [default: the file's name]"
)
contexts = listed("--ctx", TOKENS, "Context lengths in tokens, a list.", (4096,))
tokens_after = click.option("--tokens", type=int, default=256, help="Tokens to measure after each context.")


# What a command writes.
def rows_output(name: str) -> Callable[[Command], Command]:
    """The option of a command that saves acceptance or quality rows."""
    return click.option(
        name, type=OutputFile(), help="Merge rows into this file.  [default: the file that `plan` reads]"
    )


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
table_output = click.option(
    "-o", "--output", type=TABLE_FILE, help=f"Write the table to this file: {', '.join(TABLE_SUFFIXES)}."
)
plan_output = click.option(
    "-o", "--output", type=TABLE_FILE, help="Write the plan to this .json file, or the table as .csv, .md or .png."
)
trace_output = click.option(
    "--trace", type=OutputFile(), help="Write a round to this file as a Chrome trace, for Perfetto or chrome://tracing."
)
json_output = click.option("--output", type=OutputFile(), help="Write the results to this file as JSON.")
html_output = click.option(
    "--html", type=OutputFile(), help="Write tables and plots to this file, a self-contained page."
)


def context_of(ctx: int | None, max_model_len: int | None, new_tokens: int) -> int:
    """Prompt tokens from --ctx or --max-model-len.

    Raises UsageError for neither, for both, or for a --max-model-len that leaves no room for a prompt.
    """
    if ctx is not None and max_model_len is not None:
        raise click.UsageError("--ctx and --max-model-len were both given; allowed: one of them")
    if ctx is None and max_model_len is None:
        raise click.UsageError("--ctx or --max-model-len is needed; allowed: one of them, such as --ctx 128k")
    if ctx is not None:
        return ctx
    prompt = (max_model_len or 0) - new_tokens
    if prompt < 1:
        raise click.UsageError(
            f"--max-model-len {max_model_len} leaves no room for a prompt and {new_tokens} new tokens"
        )
    return prompt


def gpu_of(argument: str | None, option: str | None) -> str | None:
    """The GPU from the argument or from --gpu; None for neither. Raises UsageError for both."""
    if argument is not None and option is not None:
        raise click.UsageError("the GPU was given twice; allowed: as the second argument or by --gpu")
    return option if argument is None else argument


FIGURES_NOTE = "last TTFT: ms, of the batch's last request; tokens/s: of the batch"
FIGURES = ("gamma", "TPOT ms", "low", "high", "last TTFT", "tokens/s", "GB", "speed-up")


PLAIN_DOES_NOT_FIT = "*: over plain decoding, which does not fit"


def speedup_text(speedup: float, plain_fits: bool) -> str:
    """A speed-up over plain decoding, marked where that does not fit."""
    return f"{speedup:.2f}x{'' if plain_fits else '*'}"


def figures(prediction: Prediction) -> tuple[str, ...]:
    """The cells under `FIGURES`."""
    best = prediction.best
    times = best.tpot_ms, prediction.low.tpot_ms, prediction.high.tpot_ms, best.ttft_ms
    sizes = best.tokens_per_s, best.peak_memory_bytes / GB
    return str(prediction.gamma), *map(number, (*times, *sizes)), f"{prediction.speedup:.2f}x"
