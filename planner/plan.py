"""The plan: one point of a six-axis space, frozen, validated, with an exact JSON round trip."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from ridgeplan.roofline.speculation import MAX_GAMMA

SCHEMA = 1
MAX_TOKENS = 1 << 24


class PlanError(ValueError):
    """A plan that is malformed or contradicts itself; the message names the value and what is allowed."""


class KVFormat(StrEnum):
    """How keys and values are stored."""

    FULL = "bf16"
    SHADOW = "bf16+int4"  # bf16 for the target and INT4 upper codes that only drafts read
    INT8 = "int8"
    HIERARCHICAL = "int4x2"  # upper codes for drafts, upper and lower for the target (QuantSpec, section 4.2)


class EvictionPolicy(StrEnum):
    """What leaves the cache for good, once, after prefill."""

    NONE = "none"
    STREAMING = "streamingllm"
    H2O = "h2o"
    SNAPKV = "snapkv"
    PYRAMIDKV = "pyramidkv"
    LACACHE = "lacache"
    DAPQ = "dapq"


class TargetSelection(StrEnum):
    """Which tokens the target reads at a step."""

    FULL = "full"
    RETRIEVAL_HEAD = "retrieval-head"
    QUEST = "quest"
    CLUSTERKV = "clusterkv"
    SHADOWKV = "shadowkv"


class DraftCodes(StrEnum):
    """Which codes of a token a draft reads."""

    FULL = "full"
    UPPER = "upper"


class DraftSelection(StrEnum):
    """Which tokens a draft reads."""

    ALL = "all"
    STREAMING = "streamingllm"
    SNAPKV = "snapkv"
    QUEST = "quest"
    LAST_ACCEPTED = "specextend"
    VERIFIED = "specattn"
    RETRIEVAL_HEAD = "retrieval-head"


def require(condition: bool, message: str) -> None:
    """Raise PlanError(message) unless `condition` holds."""
    if not condition:
        raise PlanError(message)


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise PlanError unless `value` is a whole number in low..high."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and low <= value <= high, f"{name} is {value!r}; allowed: a whole number from {low} to {high}")


def require_ratio(name: str, value: Any) -> None:
    """Raise PlanError unless `value` is a finite number in (0, 1]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and math.isfinite(value) and 0 < value <= 1, f"{name} is {value!r}; allowed: above 0 up to 1")


@dataclass(frozen=True)
class Workload:
    """The question a plan answers: a model on a machine, at a context and batch."""

    model: str
    hardware: str
    context: int
    new_tokens: int = 1024
    batch: int = 1
    yarn_factor: float = 1.0  # above 1: rotary embedding stretched by YaRN to reach this context

    def __post_init__(self) -> None:
        for name in ("model", "hardware"):
            value = getattr(self, name)
            require(isinstance(value, str) and bool(value), f"{name} is {value!r}; allowed: a non-empty name")
        require_int("context", self.context, 1, MAX_TOKENS)
        require_int("new_tokens", self.new_tokens, 1, MAX_TOKENS)
        require_int("batch", self.batch, 1, 4096)
        number = isinstance(self.yarn_factor, (int, float)) and math.isfinite(self.yarn_factor)
        require(number and 1 <= self.yarn_factor <= 64, f"yarn_factor is {self.yarn_factor!r}; allowed: 1 to 64")

    @property
    def final_context(self) -> int:
        """Tokens of one sequence when generation ends."""
        return self.context + self.new_tokens


@dataclass(frozen=True)
class Weights:
    """Bits of the target's weights and of the draft's; 16 stands for the machine's full precision."""

    target_bits: int = 16
    draft_bits: int = 16
    group: int = 128  # parameters that share a scale and a minimum, along the input dimension

    def __post_init__(self) -> None:
        require(self.target_bits in (4, 8, 16), f"target_bits is {self.target_bits!r}; allowed: 16, 8 or 4")
        allowed = {self.target_bits, 4}
        require(self.draft_bits in allowed, f"draft_bits is {self.draft_bits!r}; allowed: {sorted(allowed)}")
        require(self.group in (32, 64, 128, 256), f"group is {self.group!r}; allowed: 32, 64, 128 or 256")

    @property
    def draft_differs(self) -> bool:
        """Whether a second, smaller copy of the weights is kept for drafts."""
        return self.draft_bits != self.target_bits


@dataclass(frozen=True)
class KVCache:
    """Storage of keys and values; quantized formats keep `group` to 2 x `group` recent tokens unquantized."""

    format: KVFormat = KVFormat.FULL
    group: int = 128

    def __post_init__(self) -> None:
        require(self.group in (32, 64, 128, 256), f"kv group is {self.group!r}; allowed: 32, 64, 128 or 256")

    @property
    def quantized(self) -> bool:
        """Whether any codes are stored."""
        return self.format is not KVFormat.FULL

    @property
    def target_bits(self) -> int:
        """Bits of an old token's element as the target reads it; 16 is full precision."""
        return 8 if self.format in (KVFormat.INT8, KVFormat.HIERARCHICAL) else 16


@dataclass(frozen=True)
class Eviction:
    """One-time eviction after prefill down to `budget` tokens per layer (0 with policy none)."""

    policy: EvictionPolicy = EvictionPolicy.NONE
    budget: int = 0

    def __post_init__(self) -> None:
        _require_budget("eviction", self.policy is not EvictionPolicy.NONE, self.budget)


@dataclass(frozen=True)
class Placement:
    """Where KV lives: all on the GPU, or layers leave it at Algorithm 1's thresholds (SpeContext)."""

    offload: bool = False
    budget: int = 0  # tokens of an offloaded layer that are on the GPU at a step

    def __post_init__(self) -> None:
        require(isinstance(self.offload, bool), f"offload is {self.offload!r}; allowed: true or false")
        _require_budget("placement", self.offload, self.budget)


@dataclass(frozen=True)
class TargetAttention:
    """What the target reads at a step: everything, or `budget` selected tokens."""

    selection: TargetSelection = TargetSelection.FULL
    budget: int = 0

    def __post_init__(self) -> None:
        _require_budget("attention", self.selection is not TargetSelection.FULL, self.budget)


@dataclass(frozen=True)
class Speculation:
    """Self-speculation: gamma drafted tokens a round, from these codes of a share `ratio` of the tokens."""

    gamma: int = 0
    codes: DraftCodes = DraftCodes.FULL
    selection: DraftSelection = DraftSelection.ALL
    ratio: float = 1.0

    def __post_init__(self) -> None:
        require_int("gamma", self.gamma, 0, MAX_GAMMA)
        require_ratio("ratio", self.ratio)
        whole = self.selection is DraftSelection.ALL
        require(
            not whole or self.ratio == 1.0,
            f"ratio is {self.ratio!r}; allowed: 1.0 when drafts read all tokens",
        )

    @property
    def active(self) -> bool:
        """Whether any token is drafted."""
        return self.gamma > 0


def _require_budget(axis: str, active: bool, budget: Any) -> None:
    if active:
        require_int(f"{axis} budget", budget, 1, MAX_TOKENS)
    else:
        require(budget == 0, f"{axis} budget is {budget!r}; allowed: 0 when {axis} is off")


@dataclass(frozen=True)
class Plan:
    """A strategy with all its hyperparameters. Invariants are checked at construction (PlanError)."""

    workload: Workload
    weights: Weights = field(default_factory=Weights)
    kv: KVCache = field(default_factory=KVCache)
    eviction: Eviction = field(default_factory=Eviction)
    placement: Placement = field(default_factory=Placement)
    attention: TargetAttention = field(default_factory=TargetAttention)
    speculation: Speculation = field(default_factory=Speculation)
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        require_int("tensor_parallel", self.tensor_parallel, 1, 64)
        upper = self.speculation.codes is DraftCodes.UPPER
        has_upper = self.kv.format in (KVFormat.SHADOW, KVFormat.HIERARCHICAL)
        require(
            has_upper or not upper,
            f"codes is 'upper' with kv format {self.kv.format.value!r}; allowed: "
            "'bf16+int4' or 'int4x2', which store upper codes",
        )
        idle = not self.speculation.active and (upper or self.weights.draft_differs)
        require(not idle, "gamma is 0 with draft codes or draft weights set; allowed: gamma of 1 or more")

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, with its schema version first."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """Exact JSON: `Plan.from_json(plan.to_json()) == plan`."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Parse and validate untrusted data. Raises PlanError naming the first value that is wrong."""
        require(isinstance(data, dict), f"a plan is a JSON object, not {type(data).__name__}")
        fields = dict(data)
        version = fields.pop("schema", None)
        require(
            isinstance(version, int) and not isinstance(version, bool),
            f"schema is {version!r}; allowed: {SCHEMA}",
        )
        require(version <= SCHEMA, f"schema {version} is newer than this version reads; allowed: up to {SCHEMA}")
        require(version >= 1, f"schema is {version}; allowed: {SCHEMA}")
        return _build(cls, fields, "plan")

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parse and validate untrusted JSON text. Raises PlanError."""
        try:
            data = json.loads(text, parse_constant=_reject_constant)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PlanError(f"not a JSON plan: {error}") from error
        return cls.from_dict(data)


T = TypeVar("T")


def _reject_constant(name: str) -> Any:
    raise PlanError(f"number {name} in a plan; allowed: finite numbers")


def _build(kind: type[T], data: Any, where: str) -> T:
    """Construct a dataclass from untrusted values, converting nested dataclasses and enums by annotation."""
    require(isinstance(data, dict), f"{where} is {data!r}; allowed: an object")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    require(not unknown, f"{where} has unknown field {unknown[:1]}; allowed: {', '.join(hints)}")
    values = {name: _convert(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    missing = [
        f.name
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"{where} lacks field {missing[:1]}")
    return kind(**values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where)  # type: ignore[arg-type]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        allowed = [str(member) for member in kind]
        require(
            isinstance(value, str) and value in allowed,
            f"{where} is {value!r}; allowed: {', '.join(allowed)}",
        )
        return kind(value)
    wanted = (int, float) if kind is float else kind
    good = isinstance(value, wanted) and not (isinstance(value, bool) and kind is not bool)
    require(good, f"{where} is {value!r}; allowed: {kind.__name__}")
    return value
