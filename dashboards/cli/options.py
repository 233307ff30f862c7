"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ridgeplan.dashboards.user_errors import FileProblem
from ridgeplan.planner import Plan, PlanError
from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.planner.interface import quantities
from ridgeplan.planner.interface.plan_file import SavedPlan, read_plan
from ridgeplan.planner.plan import MAX_TOKENS, require
from ridgeplan.roofline.catalog.documents import read_document

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
calibration_file = click.option(
    "--calibration", metavar="FILE", help="UTF-8 text like what will be decoded, to fit 4-bit weights to."
)
