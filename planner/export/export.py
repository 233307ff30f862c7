"""Exports a plan as the serve command of another engine, with the latency predicted for that engine."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.engines.formats import DTYPES, formats_loss
from ridgeplan.planner.engines.rates import BAND, certainty_of_drafts
from ridgeplan.planner.export import drafts as drafting
from ridgeplan.planner.export.carry import Carried, rounds_of, served
from ridgeplan.planner.export.options import ServeCommandOptions, Served
from ridgeplan.planner.export.rules import Rule, applying
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.catalog.sharding import uneven
from ridgeplan.roofline.catalog.validation import INVISIBLE, UNPRINTABLE, brief
from ridgeplan.roofline.plan.plan import DrafterKind, require

PLAIN_TEXT = re.compile(rf"(?!-)(?=.*\S)[^{UNPRINTABLE}\ud800-\udfff]+")
SHELL_CHARACTERS = ";&|$`<>(){}[]*?!#'\"\\"  # which a hub id never has, and which are a command where quotes get lost
MODEL_NAME = re.compile(rf"[^{UNPRINTABLE}{INVISIBLE}{re.escape(SHELL_CHARACTERS)}]+")


@dataclass(frozen=True)
class Command:
    """A serve command. arguments: (name, value), where the value is a number, a text, True for a flag, or an object.

    Raises PlanError for a text that the engine could take for an option, or that breaks a line of a file.
    """

    serve: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        """Checks the model and every value that is a text; objects are escaped as JSON."""
        for text in (self.serve[-1], *(value for _, value in self.arguments if isinstance(value, str))):
            allowed = "allowed: texts in UTF-8 without control characters that do not begin with a dash"
            require(PLAIN_TEXT.fullmatch(text) is not None, f"the engine would get {brief(text)}; {allowed}")

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments as words."""
        return tuple(word for name, value in self.arguments for word in _words(name, value))

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command."""
        return (*self.serve, *self.options)

    def shell(self) -> str:
        """The command for a POSIX shell, one argument a line."""
        lines = [shlex.join(self.serve), *(shlex.join(_words(name, value)) for name, value in self.arguments)]
        return " \\\n  ".join(lines)

    def yaml(self) -> str:
        """The same arguments as YAML for `--config`; objects are JSON texts, as the arguments themselves are."""
        values = {name.removeprefix("--"): _json_text(value) for name, value in self.arguments}
        options = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=math.inf)
        return f"# {shlex.join(self.serve)} --config THIS-FILE\n{options}"


def _words(name: str, value: Any) -> Iterator[str]:
    yield name
    if value is not True:
        yield str(_json_text(value))


def _json_text(value: Any) -> Any:
    """An object as JSON text; other values unchanged."""
    return json.dumps(value) if isinstance(value, dict) else value


UNPREDICTED_DRAFTS = "the time of such drafts is not known, so times are not predicted"


@dataclass(frozen=True)
class EngineTimes:
    """Predicted milliseconds per output token, with a band that holds 90%, and those of the engine's plain decoding.

    measured: the engine's version, the machine and the date of the steps that its rates are fitted to, in words; ""
    where they are of this package's kernels.
    """

    low_ms: float
    tpot_ms: float
    high_ms: float
    plain_ms: float
    source: str
    measured: str = ""


@dataclass(frozen=True)
class Exported:
    """The command, how each axis of the plan is carried, the rules that apply, and the predicted times.

    unpredicted: why there are none. loss: what the engine's formats cost in quality; "" for the checkpoint's.
    """

    engine: str
    version: str
    command: Command
    carried: tuple[Carried, ...]
    rules: tuple[Rule, ...]
    times: EngineTimes | None
    unpredicted: str = ""
    loss: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "engine": self.engine,
            "version": self.version,
            "command": self.command.shell(),
            "words": list(self.command.words),
            "yaml": self.command.yaml(),
            "carried": [asdict(axis) for axis in self.carried],
            "warnings": [{"rule": rule.name, "says": rule.says, "sources": list(rule.sources)} for rule in self.rules],
            "predicted": asdict(self.times) if self.times else None,
            "unpredicted": self.unpredicted,
            "quality_cost": self.loss,
        }


def export(options: ServeCommandOptions) -> Exported:
    """A plan as a serve command of the options' engine.

    Raises PlanError where it does not fit, where the engine has no such argument or choice, and where a known
    incompatibility would make its output wrong. A plan's own head is the draft model unless the user names one.
    """
    folder, drafter = options.plan.workload.drafter_head, options.plan.speculation.drafter
    as_planned = options.draft_model is None and options.draft_method in ("draft_model", "eagle3")
    if folder and drafter.kind is DrafterKind.HEAD and as_planned:
        method = head_settings(folder).method
        options = replace(options, draft_model=None if method == "mtp" else folder, draft_method=method)
    check_models(options)
    _check_choices(options)
    problem = uneven(options.shape, options.plan.parallel)
    require(problem is None, f"{problem} do not divide by {options.plan.parallel}; allowed: degrees that divide them")
    running, carried = served(options)
    rules = tuple(applying(running))
    forbidden = next((rule for rule in rules if rule.forbids), None)
    require(forbidden is None, f"{forbidden.says} ({forbidden.sources[0]})" if forbidden else "")
    times, unpredicted = _times(running)
    model_argument = (options.engine.model,) if options.engine.model else ()
    command = Command((*options.engine.serve, *model_argument, options.model), tuple(_arguments(running)))
    loss = formats_loss(running.quantization, running.kv)
    return Exported(options.engine.title, options.schema.version, command, carried, rules, times, unpredicted, loss)


def check_models(options: ServeCommandOptions) -> None:
    """Raises PlanError for a model or a draft model that is neither a hub id nor a plain path."""
    for what, name in (("model", options.model), ("draft model", options.draft_model)):
        allowed = f"a hub id, or a path without any of {' '.join(SHELL_CHARACTERS)} and without invisible characters"
        require(name is None or bool(MODEL_NAME.fullmatch(name)), f"{what} is {brief(name)}; allowed: {allowed}")


def _check_choices(options: ServeCommandOptions) -> None:
    """Raises PlanError for a KV dtype or a draft method that this version of the engine lacks."""
    kv, schema, engine = options.kv_cache_dtype, options.schema, options.engine
    name = f"{engine.title} {schema.version}"
    known = [choice for choice in schema.arguments[engine.kv_cache_dtype]["choices"] if choice in DTYPES]
    require(kv is None or kv in known, f"kv_cache_dtype is {kv!r}; allowed in {name}: {', '.join(known)}")
    methods = drafting.METHODS
    require(options.draft_method in methods, f"draft method is {options.draft_method!r}; allowed: {', '.join(methods)}")
    fields = schema.objects.get("SpeculativeConfig", {})
    known = fields.get("method", {}).get("choices", methods)
    require(options.draft_method in known, f"{name} has no {options.draft_method}; allowed: a newer version")
    without_layers = options.draft_method == "mtp" and not options.shape.mtp_layers
    require(not without_layers, f"{options.shape.name} has no layers for mtp; allowed: another draft method")


def _arguments(running: Served) -> Iterator[tuple[str, Any]]:
    options, engine, plan = running.options, running.options.engine, running.options.plan
    yield engine.max_model_len, options.max_model_len
    degrees = [*engine.parallel_arguments(plan.parallel, options.shape.is_moe)]
    # SGLang divides its limit among the ranks of data-parallel attention; vLLM's is that of each rank.
    sharing = plan.parallel.data if "--enable-dp-attention" in dict(degrees) else 1
    yield engine.max_num_seqs, sharing * plan.workload.rank_batch
    yield engine.memory, options.memory_utilization
    yield from degrees
    if running.quantization:
        yield engine.quantization, running.quantization
    if running.kv != "auto":
        yield engine.kv_cache_dtype, running.kv
    if running.offload_gib:
        yield engine.cpu_offload, running.offload_gib
    if options.host_cache_gib:
        yield from engine.host_cache_arguments(options.host_cache_gib, options.host_cache_backend)
    if plan.workload.yarn_factor > 1:
        yield engine.overrides, {"rope_parameters": yarn_parameters(options)}
    if running.drafts is not None:
        yield from drafting.arguments(engine, options.schema, running.drafts, plan.parallel.tensor)


def yarn_parameters(options: ServeCommandOptions) -> dict[str, Any]:
    """RoPE's parameters, as transformers 5 names them in a config.json."""
    shape, factor = options.shape, options.plan.workload.yarn_factor
    original = shape.rope_original_context or shape.trained_context
    stretched = factor * shape.trained_context / original
    return {
        "rope_type": "yarn",
        "rope_theta": shape.rope_theta,
        "factor": stretched,
        "original_max_position_embeddings": original,
    }


def _times(running: Served) -> tuple[EngineTimes | None, str]:
    options, step = running.options, running.step()
    plain_s = float(options.speed.rates.step_s(options.sharded, options.hardware, step)) + running.host_s
    drafts, batch = running.drafts, options.plan.workload.rank_batch
    if drafts is None or 0 < drafts.longest < step.context:
        return _banded(running, [running.kv], plain_s, plain_s), ""
    rounds = rounds_of(running, drafts)
    if rounds is None:
        return None, UNPREDICTED_DRAFTS
    gamma, accepted = drafts.gamma_at(batch), drafts.accepted
    of_ends = (replace(rounds, drafts=replace(drafts, end=end)) for end in (2, 1, 0))
    fast_s, tpot_s, slow_s = (float(at_end.tpot_s(batch, gamma)) for at_end in of_ends)
    times = _banded(running, [running.kv, drafts.kv], tpot_s, plain_s)
    source = max(times.source, accepted.source, key=SOURCES.index)
    low_ms, high_ms = times.low_ms * fast_s / tpot_s, times.high_ms * slow_s / tpot_s
    return replace(times, low_ms=low_ms, high_ms=high_ms, source=source), ""


def _banded(running: Served, kvs: Sequence[str], tpot_s: float, plain_s: float) -> EngineTimes:
    """The times with the band of the least certain cache, at one acceptance."""
    options, step, drafts = running.options, running.step(), running.drafts
    certainties = [options.speed.certainty(step, DTYPES[kv].kind, options.sharded) for kv in kvs]
    source, spread = max(certainties, key=lambda certainty: certainty[1])
    if drafts is not None:
        source, spread = certainty_of_drafts(source, spread, drafts.method in drafting.LOOKUPS)
    factor, tpot_ms, measured = 1 + BAND * spread, 1e3 * tpot_s, options.speed.measured.source
    return EngineTimes(tpot_ms / factor, tpot_ms, tpot_ms * factor, 1e3 * plain_s, source, measured)
