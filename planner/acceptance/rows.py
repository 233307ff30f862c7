"""Rows of known acceptance, and how the draft of a row differs from its target in bits and tokens.

A row is one figure with what it depends on: the draft, the model, the context, the text, and how it was measured.
"""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ridgeplan.roofline.catalog.files import (
    NoHomeFolder,
    existing_path,
    fields_of_schema,
    json_or,
    naming_file,
    parse_json,
    read_document,
)
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.catalog.validation import Checked, brief, build, name_text, number, one_of, text, whole
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DraftCodes, KVFormat, Plan, PlanError
from ridgeplan.roofline.plan.policy import MIN_RATIO, SELECTIONS
from ridgeplan.roofline.round import conditional_acceptance

BITS = ("kv8", "kv4", "w4")
SPARSE_SELECTIONS = tuple(name for name in SELECTIONS if name != "all")
FEWER_BITS = ("w4kv4", "w4", "kv4")  # that drafts may have besides reading fewer tokens
# Names of rows: one difference, both kinds of fewer bits, or fewer bits of fewer tokens.
DRAFTS = (
    *BITS,
    "w4kv4",
    *SPARSE_SELECTIONS,
    *(f"{bits}+{tokens}" for tokens in SPARSE_SELECTIONS for bits in FEWER_BITS),
)


@cache
def differences(draft: str) -> tuple[str, ...]:
    """The single differences that a row's draft has together."""
    return tuple(
        difference for name in draft.split("+") for difference in (("w4", "kv4") if name == "w4kv4" else (name,))
    )


def row_name(plan: Plan) -> str:
    """The draft of a row that is measured with the plan; "" for drafts that are certain to be accepted."""
    return "+".join(draft_names(plan))


def draft_names(plan: Plan) -> tuple[str, ...]:
    """The drafts, as rows name them, that a plan's drafts are together."""
    names = plan_differences(plan)
    return ("w4kv4", *names[2:]) if names[:2] == ("w4", "kv4") else names


def plan_differences(plan: Plan) -> tuple[str, ...]:
    """The differences between a plan's drafts and its target; none for drafts that are certain to be accepted."""
    speculation = plan.speculation
    if not speculation.self_drafts:
        return ()
    weights = ("w4",) if plan.weights.draft_bits == 4 and plan.weights.draft_differs else ()
    codes = ("kv4",) if speculation.codes is DraftCodes.UPPER else ()
    tokens = (speculation.selection.name,) if speculation.sparse else ()
    names = (*weights, *codes, *tokens)
    # Drafts of a cache with an INT4 shadow that read its full precision: priced like INT8 storage.
    return names or (("kv8",) if plan.kv.format is KVFormat.SHADOW else ())


ROWS_SCHEMA = 1
REMEASURE = "make it again with `ridgeplan acceptance`"
HERE = Path(__file__).parent
# How 4-bit weights were made: rounded to nearest in groups of 64 with the head in 16 bits; or by runtime/quantization,
# from the Hessian's diagonal or the whole Hessian; or in a paper, which does not say.
QUANTIZERS = ("nearest-64", "diagonal", "gptq", "published")
MIN_ACCEPTANCE = 1e-6
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class AcceptanceRow(Checked):
    """One known acceptance. Raises PlanError for values out of range.

    gamma: drafts of a round, over whose positions the figure is the mean; or `position`, from 1, if it is of one.
    dtype: of the arithmetic. checkpoint: what the weights are, where that is not the published checkpoint. yarn: the
    factor by which YaRN stretched positions; 1 within the model's context limit.
    """

    error = PlanError
    draft: str = one_of(DRAFTS)
    model: str = name_text()
    parameters: float = number(1e-6, 1e5)  # billions
    context: int = whole(1, MAX_TOKENS)  # tokens
    acceptance: float = number(MIN_ACCEPTANCE, 1)
    source: str = one_of(SOURCES)
    where: str = text()
    ratio: float = number(MIN_RATIO, 1, default=1.0)
    gamma: int = whole(1, MAX_GAMMA, default=1)
    position: int = whole(0, MAX_TOKENS, default=0)
    quantizer: str = one_of(QUANTIZERS, default="published")
    dtype: str = one_of(DTYPES, default="float16")
    checkpoint: str = text("")
    yarn: float = number(1, 1e3, default=1.0)
    tokens: int = whole(0, MAX_TOKENS, default=0)  # of the text, over which acceptance is a mean
    date: str = text("")
    text: str = text("")  # last, as it hides the function of that name

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> AcceptanceRow:
        """From a profile. Raises PlanError, also for fields that are missing or unknown."""
        return build(cls, row, "acceptance row: ")

    def _owner(self) -> str:
        return "acceptance row: "

    @property
    def mean_position(self) -> float:
        """Position in a round, from 1; the mean over a round's positions for a figure of whole rounds."""
        return self.position or (self.gamma + 1) / 2

    @property
    def replaces(self) -> tuple[Any, ...]:
        """What a new measurement has in common with the one that it replaces."""
        how = (self.quantizer, self.dtype) if "w4" in self.draft else (self.dtype,)
        return (self.model, self.text, self.context, self.draft, self.ratio, self.gamma, self.position, *how)

    def __str__(self) -> str:
        """Model, context and where the figure is from."""
        labels = f" ({self.checkpoint})" if self.checkpoint else ""
        return f"{self.model}{labels} at {self.context} tokens: {self.where}"


class _Replacing(Protocol):
    @property
    def replaces(self) -> tuple[Any, ...]: ...


Row = TypeVar("Row", bound=_Replacing)
Saved = TypeVar("Saved")


def merged(rows: Iterable[Row], more: Iterable[Row]) -> tuple[Row, ...]:
    """`rows` and `more`, which replace rows that they repeat."""
    return tuple({row.replaces: row for row in (*rows, *more)}.values())


def rows_json(rows: Sequence[AcceptanceRow], commands: Sequence[str], drafters: Sequence[Any] = ()) -> str:
    """JSON text that `read_rows` reads. commands: what made it, for its reader. drafters: rows of drafters."""
    document = {"schema": ROWS_SCHEMA, "commands": list(commands), "rows": [asdict(row) for row in rows]}
    document |= {"drafters": [asdict(row) for row in drafters]} if drafters else {}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_rows(text: str | bytes) -> tuple[AcceptanceRow, ...]:
    """Rows from untrusted JSON text. Raises PlanError, one line."""
    rows = fields_of_schema(json_or(PlanError, text), ROWS_SCHEMA, REMEASURE, PlanError).get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlanError(f"rows is {brief(rows)}; allowed: a list of acceptance rows; {REMEASURE}")
    return tuple(map(AcceptanceRow.read, rows))


def load_rows(path: str | Path) -> tuple[AcceptanceRow, ...]:
    """The rows of a file of `ridgeplan acceptance`. Raises PlanError naming the file."""
    with naming_file("acceptance rows", Path(path), PlanError):
        return read_rows(read_document(Path(path)))


def saved_or_empty(
    path: Callable[[], Path], load: Callable[[Path], tuple[Saved, ...]], without: str
) -> tuple[Saved, ...]:
    """The rows of the user's own file, if it is there. without: a warning's words where it is damaged."""
    try:
        saved = existing_path(str(path()))
        return load(saved) if saved else ()
    except NoHomeFolder:
        return ()
    except PlanError as error:
        warnings.warn(f"{without}: {error}", stacklevel=3)
        return ()


def commands_of(path: str | Path) -> tuple[str, ...]:
    """The commands that made a file of rows; none for one that was written by hand."""
    commands = parse_json(read_document(Path(path))).get("commands", [])
    return tuple(command for command in commands if isinstance(command, str)) if isinstance(commands, list) else ()


@cache
def shipped_rows() -> tuple[AcceptanceRow, ...]:
    """The rows of rows.toml and of measured/*.json."""
    tables = tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))["row"]
    measured = (row for path in sorted((HERE / "measured").glob("*.json")) for row in load_rows(path))
    return (*(row for table in tables for row in _rows_of(table)), *measured)


def _rows_of(table: dict[str, Any]) -> Iterator[AcceptanceRow]:
    """A table's rows: fields that its entries share are written once.

    Instead of the conditional acceptance an entry may hold `share`, accepted over all drafted tokens (docs/papers.md,
    QuantSpec-6), or `accepted`, tokens accepted in a round of gamma drafts.
    """
    for entry in table.pop("entries"):
        fields = {**table, **entry}
        if "accepted" in fields:
            fields["share"] = fields.pop("accepted") / fields["gamma"]
        if "share" in fields:
            fields["acceptance"] = conditional_acceptance(fields.pop("share"), fields.get("gamma", 1))
        yield AcceptanceRow(**fields)


@cache
def variant_name(name: str) -> str:
    """A model's name without its owner and GGUF type (.Q4_1), in lower case."""
    return re.sub(r"[.-](i?q\d\w*|b?f16|f32)$", "", name.rsplit("/", 1)[-1].casefold())


@cache
def core_name(name: str) -> str:
    """The name that all tunings of a model share: also without -Instruct and -Coder."""
    return re.sub(r"-(instruct|coder)", "", variant_name(name))
