"""Loading: from a plan and a model's name to an engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.hardware import MIN_CAPABILITY
from ridgeplan.roofline.catalog.model_shape import ModelShape, sizes_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import DrafterKind, KVFormat, Plan
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.plan.policy import TokenSelection
from ridgeplan.roofline.plan.support import as_loaded, exceeds_window, missing_execution, missing_head
from ridgeplan.runtime.engine import DraftParts, Engine
from ridgeplan.runtime.errors import UnsupportedPlan, WorkloadError
from ridgeplan.runtime.heap import call_with_separate_heap, return_freed_memory
from ridgeplan.runtime.memory import MemoryMeter, readable_out_of_memory, require_memory, require_weight_memory
from ridgeplan.runtime.model.checkpoint import StateDict, import_model_code, load_config, load_state_dict, load_tensor
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.source import fetch_weights, model_source
from ridgeplan.runtime.model.weights import DecoderWeights, WeightFormat
from ridgeplan.runtime.policies.retrieval_head import NO_HEAD
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.quantization.calibration import (
    CalibrationText,
    counted,
    fitting_group,
    quantized_target,
    rounded_target,
)
from ridgeplan.runtime.quantization.saved import saved_weights, weights_path
from ridgeplan.runtime.retrieval.head import Head, load_head, shipped_head
from ridgeplan.runtime.speculation.draft_head import HeadCheckpoint
from ridgeplan.runtime.speculation.mtp_head import MTPCheckpoint
from ridgeplan.runtime.speculation.mtp_head import load_head as load_draft_head

HOST = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


def load(
    plan: Plan, model: str, *, device: str | None = None, dtype: torch.dtype | None = None,
    weights: DecoderWeights | None = None, draft_weights: DecoderWeights | None = None,
    calibration: Sequence[int] | None = None, memory_utilization: float = MEMORY_UTILIZATION,
    profile: Profile | None = None, retrieval_head: str | Path | None = None,
    drafter_head: str | Path | None = None, on_progress: OnProgress = silent,
) -> Engine:  # fmt: skip
    """An engine that executes `plan` with `model`: a safetensors folder, a GGUF file or a hub id.

    device: by default "cuda" where there is one (of several, CUDA_VISIBLE_DEVICES chooses), else "cpu". dtype: by
    default bfloat16 on CUDA, else float32. weights: another engine's `weights` of the same model, to share instead of
    reading them again if they are in the plan's format. draft_weights: its `draft_weights`, if plans differ in no bits
    or groups of weights. calibration: token ids, 1000 or more, of a text like what will be decoded; quantized weights
    are fitted to it, by default to one of the model's own (see `CalibrationText`). memory_utilization: share of a GPU's
    memory that may be used. profile: the device's rates, by default those of this machine, from which an adaptive gamma
    knows what rounds take. retrieval_head: a file of `ridgeplan distill`, for plans that choose tokens by one;
    by default the one that ships for the model, if any does. drafter_head: a folder of `ridgeplan distill --drafter` or
    an EAGLE-3 checkpoint, for plans whose drafter is a head; by default the one that the plan names. on_progress: is
    called with what is done while a GGUF file is converted or weights are quantized, the parts done, and their total.
    Raises UnsupportedPlan; ModelError, also for a head of another model; or WorkloadError for a calibration with tokens
    outside the vocabulary, for a missing head, and for a device that does not exist, is not that of `weights` or has
    too little memory. The last names the largest context and batch that would fit, and is raised before anything is
    allocated. ProfileError for a plan with an adaptive gamma on a machine whose rates are not known.
    """
    require_executable(plan)
    if plan.speculation.adaptive:
        profile = profile or this_machine()
    if calibration is not None and not plan.weights.quantized:
        warnings.warn("calibration changes nothing: the plan has no quantized weights", stacklevel=2)
    place = _device(device)
    if weights is not None and weights.embedding.device.type != place.type:
        raise WorkloadError(f"the shared weights are on {weights.embedding.device}; allowed: on {place.type}")
    dtype = _dtype(dtype, place)
    _require_described_memory(plan, model, place, dtype, weights, memory_utilization)
    if place.type == "cpu":
        return_freed_memory()  # from now on, so that large activations leave no gaps in the heap
    source = model_source(model, on_progress)
    config = decoder_config(load_config(source), source, plan.workload.yarn_factor)
    if config.shape.states or config.shape.is_mla or plan.weights.stored:
        require_executable(plan, config.shape)
    trained = _draft_head(plan, drafter_head, config)
    head = _head(plan, retrieval_head, config.shape, model, source)
    plan = plan if head is None else _chosen_by(plan, head)
    if weights is not None and weights.format != _format(plan, config.shape):
        weights = None
    meter = MemoryMeter(place, weights.bytes if weights else 0)
    _check_context(plan, config.shape)
    _compare_models(plan, config.shape, model)
    text = None if calibration is None else CalibrationText.from_tokens(calibration, config.shape.vocab)
    if weights is None:
        fetch_weights(model)
        # Weights that will be quantized stay on the host until then.
        held_on = place if plan.weights.target_bits == 16 else HOST
        require_weight_memory(source, config.shape, held_on, dtype, plan.weights)
    shared_bytes = weights.bytes if weights else 0
    offloading = require_memory(plan, config.shape, place, dtype, shared_bytes, memory_utilization)
    with readable_out_of_memory(place):
        target = weights or _target(plan, source, config, place, dtype, text, meter, on_progress)
        form = WeightFormat(4, plan.weights.group)
        path = weights_path(source, dtype, place, form, text, drafts=True) if plan.weights.draft_copy else None
        drafts = DraftParts(draft_weights, text, path, trained, on_progress)
        return Engine(
            plan, source, config, target, place, meter, drafts=drafts,
            profile=profile, head=head, offloaded=offloading,
        )  # fmt: skip


def require_described(plan: Plan, model: str, memory_utilization: float = MEMORY_UTILIZATION) -> None:
    """Raises the errors of `load` that follow from the plan and the model's description, before any download."""
    require_executable(plan)
    device = _device(None)
    _require_described_memory(plan, model, device, _dtype(None, device), None, memory_utilization)


def _require_described_memory(
    plan: Plan, model: str, device: torch.device, dtype: torch.dtype, weights: DecoderWeights | None, share: float
) -> None:
    """Raises WorkloadError by the model's description alone, before a GGUF file is converted or a hub id downloaded."""
    try:
        shape = as_loaded(load_shape(model))
    except ValueError:
        return  # not described here; once its configuration is there, memory is checked again
    if shape.is_mla or plan.weights.stored:
        require_executable(plan, shape)
    require_memory(plan, shape, device, dtype, weights.bytes if weights else 0, share)


def _target(
    plan: Plan, source: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype,
    text: CalibrationText | None, meter: MemoryMeter, on_progress: OnProgress,
) -> DecoderWeights:  # fmt: skip
    """The target's weights on `device`. Those that become codes are fitted once, and then read as they were saved."""

    def read() -> StateDict:
        with meter.uncounted():
            import_model_code(source, config.shape)
        return load_state_dict(source, config, dtype, plan.weights.stored)

    if plan.weights.target_bits == 16:
        return read().decoder_weights(device)
    weight_format = WeightFormat(*plan.weights.target_format)

    def fitted() -> DecoderWeights:
        """Dense weights are on the device only one layer at a time."""
        dense, decoder = read(), Decoder(config, device)
        ends, fit_to = dense.ends(device), text
        if fit_to is None:
            on_progress("sampling a text to fit weights to, once", 0, config.shape.layers)
            layers = dense.layers(device, keep=True)
            if device.type == "cpu":
                fit_to = CalibrationText.sampled(decoder, ends, layers)
            else:  # the dense model may not fit the device, so a copy rounded to nearest writes the text
                fit_to = CalibrationText.of_model(decoder, rounded_target(ends, layers, weight_format))
        layers = counted(dense.layers(device), config.shape.layers, on_progress)
        return quantized_target(decoder, ends, layers, weight_format, fit_to)

    path = weights_path(source, dtype, device, weight_format, text)
    return saved_weights(path, device, lambda: call_with_separate_heap(fitted, device))


def _head(plan: Plan, path: str | Path | None, shape: ModelShape, model: str, source: str) -> Head | None:
    """The retrieval head where the plan chooses by one: of a file, else the one that ships for the model.

    Raises ModelError, and WorkloadError without one.
    """
    if missing_head(plan) is None:
        if path is not None:
            warnings.warn("the retrieval head changes nothing: the plan does not choose by one", stacklevel=3)
        return None
    if path is None:
        return _shipped_head(shape, model, source)
    head = load_head(path)
    head.require_shape(shape)
    return head


def _draft_head(plan: Plan, path: str | Path | None, config: DecoderConfig) -> HeadCheckpoint | MTPCheckpoint | None:
    """The head of the plan's drafter, where that is one. Raises ModelError, and WorkloadError without one."""
    if plan.speculation.drafter.kind is not DrafterKind.HEAD:
        if path is not None:
            warnings.warn("the draft head changes nothing: the plan's drafter is not a head", stacklevel=3)
        return None
    folder = path or plan.workload.drafter_head
    if not folder:
        allowed = "a folder of `ridgeplan distill --drafter`, an EAGLE-3 checkpoint, or a model's own MTP layer"
        raise WorkloadError(f"the plan's drafter is a head and none was given; allowed: {allowed}")
    return load_draft_head(folder, config)


def _shipped_head(shape: ModelShape, model: str, source: str) -> Head:
    """This package's head for the model. Raises WorkloadError without one."""

    def embedding() -> Tensor:
        fetch_weights(model)
        return load_tensor(source, EMBEDDING)

    head = shipped_head(shape, embedding)
    if head is None:
        raise WorkloadError(NO_HEAD)
    return head


def _chosen_by(plan: Plan, head: Head) -> Plan:
    """The plan as it is executed with this head, which chooses for each layer or once for all."""

    def of_head(selection: TokenSelection) -> TokenSelection:
        if not isinstance(selection, RetrievalHead) or selection.level == "batch":
            return selection
        return replace(selection, by_layer=head.config.layers > 1)

    attention, speculation = plan.attention, plan.speculation
    return replace(
        plan,
        attention=replace(attention, selection=of_head(attention.selection)),
        speculation=replace(speculation, selection=of_head(speculation.selection)),
    )


def require_executable(plan: Plan, shape: ModelShape | None = None) -> None:
    """Raises UnsupportedPlan, listing what the runtime cannot execute, with `shape` for this model."""
    missing = missing_execution(plan, shape)
    if missing:
        raise UnsupportedPlan(f"this plan can be estimated but not executed: {'; '.join(missing)}")


def _format(plan: Plan, shape: ModelShape) -> WeightFormat:
    """`DecoderWeights.format` of the plan's target."""
    target = WeightFormat(*plan.weights.target_format)
    return target if target.group is None else replace(target, group=fitting_group(shape.hidden, target.group))


def _device(name: str | None) -> torch.device:
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    name = name or available[-1]
    if name not in available:
        raise WorkloadError(f"device is {name!r}; allowed here: {', '.join(available)}")
    capability = torch.cuda.get_device_capability() if name == "cuda" else MIN_CAPABILITY
    if capability < MIN_CAPABILITY:
        allowed = "8.0 (Ampere) or more, or the CPU, with CUDA_VISIBLE_DEVICES="
        raise WorkloadError(f"this GPU has compute capability {'.'.join(map(str, capability))}; allowed: {allowed}")
    return torch.device(name)


def _dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    return dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def _compare_models(plan: Plan, shape: ModelShape, model: str) -> None:
    """Warns if the plan was made for a model of other sizes, as its prediction and choices then do not apply."""
    try:
        planned = load_shape(plan.workload.model)
    except ValueError:
        return  # the name cannot be resolved here
    if sizes_of(planned) != sizes_of(shape):
        warnings.warn(
            f"the plan is for {planned.name} ({planned.parameters / 1e9:.3g}B parameters), but {Path(model).name[:80]} "
            f"runs ({shape.parameters / 1e9:.3g}B): its predictions do not hold",
            stacklevel=3,
        )


def _check_context(plan: Plan, shape: ModelShape) -> None:
    """Raises UnsupportedPlan if a sliding window is shorter than what the plan's drafts or codes read.

    Warns if sequences exceed the model's context limit.
    """
    final = plan.workload.final_context
    if exceeds_window(plan, shape):
        raise UnsupportedPlan(
            f"the model's sliding window is {shape.window_tokens} tokens and the plan's sequences reach {final}; "
            f"allowed there: kv format {KVFormat.FULL.value!r} with gamma 0 and no eviction"
        )
    missing = missing_execution(plan, shape)
    if missing:
        raise UnsupportedPlan(f"this plan can be estimated for the model but not executed: {'; '.join(missing)}")
    if final > shape.max_context:
        warnings.warn(
            f"sequences of {final} tokens pass the model's limit of {shape.max_context}; a plan that `ridgeplan plan "
            "--yarn` makes stretches it",
            stacklevel=3,
        )
