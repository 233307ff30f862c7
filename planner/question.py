"""The question to the planner: a model, a machine and a workload, and the options of the search, all checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.capacity import MEMORY_UTILIZATION, check_memory_options, usable_bytes, usable_host_bytes
from ridgeplan.planner.engines.formats import ENGINES
from ridgeplan.planner.engines.rates import PLUGIN_ROUND_S, EngineProfile, engine_profile
from ridgeplan.planner.lowering import expert_bits
from ridgeplan.planner.quality import Quality, QualityFloor, losses, parse_quality
from ridgeplan.planner.quantities import size_bytes, size_text, tokens
from ridgeplan.planner.resolution import resolve, with_drafter_rows, workload_for
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.links import links_title
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import MAX_DEVICES, SINGLE, Parallel
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.sharding import shard
from ridgeplan.roofline.catalog.validation import flag, number, one_of, together, whole
from ridgeplan.roofline.latency import TIMED_HEAD_DIM, Machine, experts_kind
from ridgeplan.roofline.plan.plan import (
    MAX_BATCH,
    MAX_TOKENS,
    DrafterKind,
    KVFormat,
    Plan,
    PlanError,
    TextKind,
    Workload,
    require,
)
from ridgeplan.roofline.plan.policy import PlanPart
from ridgeplan.roofline.plan.presets import preset_name
from ridgeplan.roofline.plan.support import (
    Backend,
    as_loaded,
    is_converted,
    missing_architecture,
    not_carried,
    unsupported,
)

MAX_GPUS = 1024
USUAL_YARN = 4.0  # factor that Qwen2.5's and Qwen3's cards name
SLOW_SHARE = 0.5  # of the bandwidth; products with low-bit weights below it hardly beat those with 16 bits


class Objective(StrEnum):
    """What is minimized: time per token, time of the whole request, or peak memory."""

    LATENCY = "latency"
    TOTAL = "total"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class SearchOptions(PlanPart):
    """What a search may use and give up. The keywords of `recommend` and of all other questions.

    Sizes are bytes, or texts such as "24GB". Raises PlanError for values that are not allowed.
    """

    batch: int = whole(1, MAX_BATCH, default=1)  # sequences
    new_tokens: int = whole(1, MAX_TOKENS, default=1024)  # generated for each sequence
    quality: Quality | QualityFloor = Quality.NEAR_LOSSLESS  # what the target may give up, also as a text
    objective: Objective = one_of(Objective, default=Objective.LATENCY)  # what is minimized
    memory_limit: float | None = None  # of the device; applies if it is less than memory_utilization allows
    memory_utilization: float = MEMORY_UTILIZATION  # share of the device's memory that plans may use
    profile: Profile | Path | str | None = None  # calibration to predict with, or its file
    acceptance: Path | str | None = None  # file of `ridgeplan acceptance`; by default the one that it saved
    routing_skew: float = number(0, 8, default=0.0)  # exponent of a Zipf law of the experts' loads; 0: the model's own
    yarn: bool = flag(False)  # stretch the rotary embedding beyond the model's context limit
    backend: Backend = one_of(Backend, default=Backend.RIDGEPLAN)  # what is to execute the plan
    kv_format: KVFormat | None = one_of(KVFormat, default=None)  # only plans with this KV cache; None for any
    offload: bool = flag(True)  # layers of KV may be kept on the host if plans do not fit otherwise
    host_memory: float | None = None  # that those layers may use; see `usable_host_bytes` for the default
    engine_profile: Path | str | None = None  # file of `ridgeplan calibrate --engine`; by default the one that it saved
    gpus: int | None = whole(1, MAX_GPUS, default=None)  # that may be used; by default as many as the degrees take
    tensor_parallel: int | None = whole(1, MAX_DEVICES, default=None)  # degrees; those of None are searched for
    pipeline_parallel: int | None = whole(1, MAX_DEVICES, default=None)
    data_parallel: int | None = whole(1, MAX_DEVICES, default=None)
    expert_parallel: bool | None = None
    text: TextKind | None = one_of(TextKind, default=None)  # kind of text, for plans with a drafter; None searches none
    drafter: DrafterKind | None = one_of(DrafterKind, default=None)  # suffix by default, of which the user measured ...
    acceptance_length: float = number(0, MAX_TOKENS, default=0.0)  # ... tokens of a pass with 4 proposals
    drafter_head: str | None = None  # folder of a trained draft head, which plans may then use

    def __post_init__(self) -> None:
        """Validates all fields; sizes become bytes."""
        for name in ("memory_limit", "host_memory"):
            if isinstance(size := getattr(self, name), str):
                vars(self)[name] = size_bytes(size)  # frozen instances refuse setattr
        vars(self)["quality"] = parse_quality(self.quality)
        super().__post_init__()
        check_memory_options(self.memory_utilization, self.memory_limit, self.host_memory)

    def skewed(self, shape: ModelShape) -> ModelShape:
        """The model with the skew of its experts' loads."""
        return replace(shape, routing_skew=self.routing_skew) if self.routing_skew else shape

    @property
    def least_gpus(self) -> int:
        """How many GPUs are named, or as many as the degrees take."""
        degrees = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        return self.gpus or math.prod(degree or 1 for degree in degrees)

    @property
    def several_gpus(self) -> bool:
        """Whether the model may be divided among GPUs."""
        degrees = (self.gpus, self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        return any((degree or 1) > 1 for degree in degrees)

    def described(self, workload: Workload) -> Workload:
        """A workload with what the options say of its text and drafter.

        Raises PlanError for an acceptance length below 1, a drafter without one, and a draft head that cannot be read.
        """
        length, folder = self.acceptance_length, self.drafter_head or ""
        allowed = "allowed: with it (1 to 5), or text or drafter_head instead of drafter"
        require(not self.drafter or length > 0, f"drafter is {self.drafter} without acceptance_length; {allowed}")
        if folder:
            head_settings(folder)
        described = replace(
            workload, text=self.text or "", acceptance_length=length, drafter=self.drafter or DrafterKind.SUFFIX,
            drafter_head=folder,
        )  # fmt: skip
        return with_drafter_rows(described, self.acceptance) if self.text else described

    @classmethod
    def of(cls, options: SearchOptions | None, changes: Mapping[str, Any], **defaults: Any) -> SearchOptions:
        """`options` with some fields changed; `defaults` apply if there are no options.

        Raises PlanError for values that are not allowed, and TypeError for unknown fields.
        """
        names = [item.name for item in fields(cls)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; allowed: {', '.join(names)}")
        return cls(**{**defaults, **changes}) if options is None else replace(options, **changes)


@dataclass(frozen=True)
class Question:
    """What a search answers. The limits are the bytes of the device and of the host that plans may use."""

    shape: ModelShape
    profile: Profile
    workload: Workload
    options: SearchOptions
    memory_limit_bytes: float
    host_limit_bytes: float

    @classmethod
    def of(
        cls, shape: ModelShape, profile: Profile, workload: Workload, options: SearchOptions, *,
        this_machine: bool = False,
    ) -> Question:  # fmt: skip
        """The question with the limits that the options set. this_machine: whether the host is this one.

        A CPU and a GPU that shares a CPU's memory offload nothing. Raises PlanError for options of host memory there.
        """
        share, limit = options.memory_utilization, options.memory_limit
        shape = options.skewed(shape)
        if workload.parallel != SINGLE:
            shape, options = shard(shape, workload.parallel), executed_by_engine(options)
        if profile.hardware.shares_host_memory:
            require(not options.host_memory, f"host_memory is set; allowed: none, as {_one_memory(profile.hardware)}")
            options = replace(options, offload=False, host_memory=0.0)
        usable = usable_bytes(profile.hardware.memory_bytes, share, limit, profile.hardware.name)
        host_usable = usable_host_bytes(options.host_memory, share, this_machine=this_machine)
        return cls(shape, profile, workload, options, usable, host_usable)

    def resized(self, context: int, batch: int) -> Question:
        """The same question at another context and batch. Raises PlanError for sizes out of range."""
        new_tokens, yarn = self.options.new_tokens, self.options.yarn
        workload = workload_for(self.shape, self.profile, context, new_tokens, batch, yarn=yarn)
        return replace(self, workload=replace(self.options.described(workload), parallel=self.workload.parallel))

    def on_gpus(self, parallel: Parallel) -> Question:
        """The same question for a model that is divided among GPUs; its shape is then what one of them holds."""
        workload = replace(self.workload, parallel=parallel)
        return replace(self, shape=shard(self.shape, parallel), workload=workload)

    def with_options(self, **changes: Any) -> Question:
        """The same question with other options; the limits stay."""
        return replace(self, options=replace(self.options, **changes))

    def oom_reason(self, peak_bytes: float, host_bytes: float) -> str | None:
        """Which memory is too small for these bytes of the device and of the host; None if both are enough."""
        if peak_bytes > self.memory_limit_bytes:
            return f"does not fit: needs {size_text(peak_bytes)} of {size_text(self.memory_limit_bytes)}"
        if host_bytes and self.profile.hardware.shares_host_memory:
            return f"does not fit: {_one_memory(self.profile.hardware)}, so no layer can be offloaded"
        if host_bytes > self.host_limit_bytes:
            return f"does not fit the host: needs {size_text(host_bytes)} of {size_text(self.host_limit_bytes)} there"
        return None

    def fits(self, peak_bytes: np.ndarray, host_bytes: np.ndarray) -> np.ndarray:
        """Whether each of several plans fits the device and the host."""
        return np.asarray((peak_bytes <= self.memory_limit_bytes) & (host_bytes <= self.host_limit_bytes))

    def constraint_violation(self, plan: Plan) -> str | None:
        """Why the options rule a plan out on any backend; None if they allow it."""
        quality, backend = self.options.quality, self.options.backend
        if not quality.admits(plan, backend):
            lost = losses(plan, backend)
            if isinstance(quality, QualityFloor):
                lost = [quality.verdict(plan, backend), *(loss.partition(":")[0] for loss in lost)]
            return f"quality: {'; '.join(lost)}"
        if self.options.kv_format not in (None, plan.kv.format):
            return f"KV format: {plan.kv.format.value}, not {self.options.kv_format.value}"
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """What the backend lacks to execute a plan, or the profile to predict it; None if nothing.

        Engines draft nothing beyond a head's configuration, which this package's runtime does.
        """
        missing = unsupported(plan, self.options.backend, self.shape, self.profile)
        return missing or (head_end(plan.workload) if self.engine and plan.speculation.drafter.trained else None)

    def priced(self, plan: Plan) -> bool:
        """Whether the engine's times cover a plan: as a step of a head also one with a block drafter, an estimate."""
        speculation = plan.speculation
        if speculation.drafter.kind is DrafterKind.BLOCK:
            drafter = replace(speculation.drafter, kind=DrafterKind.HEAD)
            plan = replace(plan, speculation=replace(speculation, drafter=drafter))
        return self.unsupported(plan) is None

    def require_engine_runs(self, plan: Plan) -> None:
        """Raises PlanError where the question names an engine that does not run the plan, and so has no times of it."""
        missing = None
        if self.options.backend is Backend.VLLM_PLUGIN:
            missing = not_carried(plan, self.shape)
        elif self.engine is not None:
            missing = self.unsupported(plan)
        device_note = "one GPU with " if self.options.several_gpus else ""  # as engines execute what spans several
        allowed = f"{device_note}`backend=ridgeplan`, or a plan that the engine runs"
        require(missing is None, f"{preset_name(plan)}: {missing}; allowed: {allowed}")

    @cached_property
    def machine(self) -> Machine:
        """The profile's machine with the memory limit, and the engine that runs the plan."""
        engine = self.engine.rates if self.engine else None
        machine = replace(Machine.of(self.profile), memory_bytes=self.memory_limit_bytes, engine=engine)
        if self.options.backend is not Backend.VLLM_PLUGIN:
            return machine
        return self._profile_of("vllm").with_overhead(self.workload, self.shape, machine)

    @cached_property
    def engine(self) -> EngineProfile | None:
        """The profile of the engine that runs the plan; None for this package's runtime.

        Raises BadEngineProfile for a damaged file, and PlanError where an engine cannot have a profile.
        """
        return self._profile_of(self.options.backend) if self.options.backend in ENGINES else None

    def _profile_of(self, engine: str) -> EngineProfile:
        path = self.options.engine_profile
        return engine_profile(engine, self.profile.hardware, Path(path) if path else None)

    @property
    def engine_title(self) -> str:
        """The engine's name, or this package's."""
        return self.engine.title if self.engine else "ridgeplan"

    @property
    def as_executed(self) -> Question:
        """The same for the model as the runtime holds it (`as_loaded`). Engines hold what the checkpoint has."""
        return replace(self, shape=as_loaded(self.shape)) if self.engine is None else self

    def first_notes(self) -> Iterator[str]:
        """Caveats that any answer states first: how the model was read, and kernels that never ran on a GPU."""
        shape, hardware = self.shape, self.profile.hardware
        if shape.note:
            yield shape.note
        runs = self.engine is None and hardware.kind == "gpu" and missing_architecture(shape, hardware) is None
        if runs and not shape.is_mla and shape.head_dim > TIMED_HEAD_DIM:
            yield (
                f"attention over heads of {shape.head_dim} channels never ran on a GPU: its kernels compile, and its "
                f"times are priced at the rates of {TIMED_HEAD_DIM} channels"
            )

    def notes(self) -> Iterator[str]:
        """Caveats of any prediction for this model, machine and workload."""
        shape, workload, hardware = self.shape, self.workload, self.profile.hardware
        yield from self.first_notes()
        if self.engine is not None:
            yield from self.engine.notes()
        elif self.options.backend is Backend.VLLM_PLUGIN:
            yield from plugin_notes(1e3 * float(self.machine.round_s - self.profile.round_s))
        elif missing := missing_architecture(shape, hardware):
            yield missing
        elif is_converted(shape):
            stored = "plans with stored weights (`estimate --preset stored`; not timed on a GPU) read the file's own"
            others = "all others decode them while loading, as does plain decoding, which speed-ups compare with"
            decoded = f"weights stored as {shape.weight_bits.format} are decoded while loading, for plain decoding, too"
            executed = bool(shape.weight_bits.stored.layers)
            yield f"{stored}; {others}" if executed else f"{decoded}, which speed-ups compare with"
        if self.engine is None and hardware.is_amd:
            yield f"{hardware.name} is an AMD GPU, on which this package's kernels have not run"
        if shape.states and "state" not in self.profile.classes:
            yield f"the recurrent states of {shape.state_layers:g} layers are priced as streams, and not calibrated"
        if self.engine is None and shape.is_moe and "grouped_linear" not in self.profile.classes:
            yield "products of routed experts are priced at rates of related kernels: theirs are not calibrated"
        backend = self.options.backend
        if (workload.text or workload.acceptance_length) and backend in (Backend.SGLANG, Backend.VLLM_PLUGIN):
            yield f"text and acceptance length are ignored: of drafters in {backend} nothing was measured"
        if end := head_end(workload):
            yield f"{end}, where {f'{self.engine_title} drafts nothing' if self.engine else 'its acceptance may decay'}"
        if workload.parallel != SINGLE:
            gpus = workload.parallel.gpus
            links = links_title(hardware, gpus)
            yield f"{gpus} GPUs ({workload.parallel}) over {links}: {self.engine_title} executes the plan"
        elif self.options.several_gpus:
            links = links_title(hardware, self.options.least_gpus)
            yield f"plans on several GPUs over {links}: {self.engine_title} executes them"
        if workload.yarn_factor > 1:
            far = f"; models that are not trained for it are released with up to {USUAL_YARN:g}x"
            beyond_usual = far if workload.yarn_factor > USUAL_YARN else ""
            yield f"rotary embeddings are stretched {workload.yarn_factor:g}x by YaRN{beyond_usual}"
        elif workload.final_context > shape.max_context:
            beyond = workload.final_context - shape.max_context
            yield (
                f"the last {beyond} new tokens lie beyond the model's limit of {shape.max_context} tokens, "
                "where engines stop; `yarn=True` stretches it"
            )
        if self.engine is None and self.profile.transferred_from:
            yield from instruction_bound_notes(self.profile)
            yield f"{hardware.name} is not calibrated: utilizations are those of {self.profile.transferred_from}"
        elif self.engine is None and self.profile.disturbed:
            yield (
                f"other programs disturbed the calibration of {self.profile.date}: its bands are wide, and "
                "`ridgeplan calibrate --quick` measures the machine again"
            )

    def limit_notes(self) -> Iterator[str]:
        """That the memory limit is more than may be used anyway."""
        limit, hardware = self.options.memory_limit, self.profile.hardware
        if limit is not None and limit > self.memory_limit_bytes:
            yield (
                f"the memory limit of {size_text(limit)} is more than {hardware.name} may use, "
                f"{size_text(self.memory_limit_bytes)} of {size_text(hardware.memory_bytes)}"
            )


def head_end(workload: Workload) -> str | None:
    """That sequences end beyond the configuration of the workload's draft head, if it has one; None otherwise."""
    limit = head_settings(workload.drafter_head).max_context if workload.drafter_head else 0
    end = f"sequences end at {workload.final_context} tokens, beyond the {limit} of the draft head's configuration"
    return end if 0 < limit < workload.final_context else None


def plugin_notes(overhead_ms: float) -> Iterator[str]:
    """What times of vLLM's plugin rest on, and whose weights and prompts a plan's figures are."""
    yield (
        f"vLLM takes {overhead_ms:.2f} ms of a step beyond this package's kernels, and {1e3 * PLUGIN_ROUND_S:g} ms "
        "more of a round with drafts: fitted to Llama-3.1-8B on an H200, to rounds of gamma 4 alone. Drafts count as "
        "accepted as in this package's runtime, and TTFT is its own: vLLM's was not timed with the plugin"
    )
    yield (
        "`ridgeplan export --to vllm --plugin` writes the serve command. vLLM rounds weights to nearest, which keeps "
        "less than the stated fidelity, unless `ridgeplan run PLAN --model` has saved a fit of the same checkpoint"
    )


def _one_memory(hardware: Hardware) -> str:
    name = hardware.name
    return f"{name} is a CPU" if hardware.kind == "cpu" else f"CPU and GPU of {name} share one memory"


def instruction_bound_notes(profile: Profile) -> Iterator[str]:
    """That instructions bind a machine's products with 8- and 4-bit weights: more bandwidth does not help them."""
    shares = {bits: profile.rates(f"linear_int{bits}").bandwidth_utilization for bits in (8, 4)}
    slow = {f"{bits}-bit": share for bits, share in shares.items() if share < SLOW_SHARE}
    if slow and not profile.hardware.has_hopper_kernels:
        yield (
            f"{' and '.join(slow)} weights run through Triton's kernels on {profile.hardware.name}, which reach "
            f"{' and '.join(f'{share:.0%}' for share in slow.values())} of its bandwidth, because instructions bind "
            f"them: measured on {profile.transferred_from}, scaled by SMs x clock"
        )


def expert_notes(plan: Plan, question: Question) -> Iterator[str]:
    """That routed experts of few bits are read slowly, where a plan of this package's runtime has them."""
    shape, profile = question.shape, question.profile
    bits = expert_bits(plan, shape)
    share, full_share = (profile.rates(experts_kind(each)).bandwidth_utilization for each in (bits, 16))
    if shape.is_moe and share < SLOW_SHARE:
        yield (
            f"experts of {bits} bits are read at {share:.0%} of the bandwidth, those of 16 bits at {full_share:.0%}; "
            "the backend vllm has that engine's times"
        )


def ask(
    model: str | ModelShape, gpu: str, context: int | str, options: SearchOptions | None = None, **changes: Any
) -> Question:
    """The question for what a user names, as `recommend` documents it. Raises ValueErrors that say what is wrong."""
    rows = {name: changes.get(name, getattr(options, name, None)) for name in ("profile", "acceptance")}
    options, (shape, profile), _ = together(
        [partial(SearchOptions.of, options, changes), partial(resolve, model, gpu, **rows),
         lambda: Workload("any", "any", tokens(context))]
    )  # fmt: skip
    require(options.several_gpus or not options.expert_parallel, "expert_parallel is true on one GPU; allowed: on more")
    options = executed_by_engine(options) if options.several_gpus else options
    workload = workload_for(shape, profile, tokens(context), options.new_tokens, options.batch, yarn=options.yarn)
    workload = options.described(workload)
    this_machine = gpu == "auto" and not isinstance(options.profile, (str, Path))  # what a program measured is of here
    return Question.of(shape, profile, workload, options, this_machine=this_machine)


def executed_by_engine(options: SearchOptions) -> SearchOptions:
    """The options for what spans several GPUs: vLLM executes it, unless SGLang is to.

    Raises PlanError for `any`, and for the plugin, of whose kernels no step was measured there.
    """
    executing = [Backend.VLLM, Backend.SGLANG]
    backend = Backend.VLLM if options.backend is Backend.RIDGEPLAN else options.backend
    allowed = f"allowed on several GPUs: {', '.join(executing)}"
    if backend is Backend.VLLM_PLUGIN:
        raise PlanError(
            f"{backend} shards tensors, but no step of it was measured on several GPUs, so it is not priced there; "
            f"{allowed}, or a one-GPU plan whose exported --tensor-parallel-size you raise"
        )
    require(backend in executing, f"backend is {backend}; {allowed}")
    return replace(options, backend=backend, offload=False, host_memory=None)
