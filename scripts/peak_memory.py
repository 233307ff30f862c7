"""Peak memory of plans on this machine's GPU: predicted by purpose, allocated by torch, and reported by the driver.

python scripts/peak_memory.py peaks.json

Memory depends on sizes alone, so all weights are zero.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile, Rows

from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import MemoryBreakdown
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.engine import DraftParts, Engine
from ridgeplan.runtime.memory import MemoryMeter, PeakMemory
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.linear import Dense, GatedMLP
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, LayerWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_target
from ridgeplan.validate.machine import free_library_workspaces

NEW_TOKENS = 64
WARM_TOKENS = 512
NORM_EPS = 1e-5


@dataclass(frozen=True)
class MemoryCase:
    """A preset of a model of the catalog, at one context and batch.

    adaptive: with graphs of several gammas. share: of the prompt that an eviction leaves; 0 means the preset's own
    budget. chunk: tokens of the prompt after which it evicts; 0 means all.
    """

    model: str
    preset: str
    context: int
    batch: int
    adaptive: bool = False
    share: float = 0.0
    chunk: int = 0

    @property
    def name(self) -> str:
        """What rows call it."""
        kept = f" {self.share:.0%}" if self.share else ""
        kept += f" in chunks of {self.chunk}" if self.chunk else ""
        return f"{self.model} {self.preset}{kept}{' adaptive' if self.adaptive else ''} {self.context}x{self.batch}"

    def plan(self) -> Plan:
        """The plan. Raises PlanError."""
        plan = preset(self.preset, Workload(self.model, "here", self.context, NEW_TOKENS, self.batch))
        eviction = replace(plan.eviction, budget=0, share=self.share) if self.share else plan.eviction
        eviction = replace(eviction, chunk=self.chunk)
        return replace(plan, eviction=eviction, speculation=replace(plan.speculation, adaptive=self.adaptive))


LLAMA, SMALL = "meta-llama/Llama-3.1-8B", "Qwen2.5-0.5B"
CASES = (
    MemoryCase(LLAMA, "autoregressive", 4096, 1),
    MemoryCase(LLAMA, "autoregressive", 131072, 1),
    MemoryCase(LLAMA, "autoregressive", 16384, 16),
    MemoryCase(LLAMA, "int8", 131072, 1),
    MemoryCase(LLAMA, "int8", 32768, 8),
    MemoryCase(LLAMA, "quantspec", 4096, 1),
    MemoryCase(LLAMA, "quantspec", 32768, 8),
    MemoryCase(LLAMA, "quantspec", 131072, 1),
    MemoryCase(LLAMA, "quantspec", 4096, 1, adaptive=True),
    MemoryCase(LLAMA, "quantspec", 32768, 8, adaptive=True),
    MemoryCase(LLAMA, "quantspec-exact", 32768, 1),
    MemoryCase(LLAMA, "int4-weights", 4096, 1),
    MemoryCase(LLAMA, "int4-weights", 131072, 1),
    MemoryCase(LLAMA, "dapq", 32768, 8),
    MemoryCase(LLAMA, "snapkv", 131072, 1),
    MemoryCase(LLAMA, "pyramidkv", 32768, 8),
    MemoryCase(LLAMA, "dapq", 131072, 1, share=0.25),
    MemoryCase(LLAMA, "dapq-quantspec", 32768, 8, share=0.25),
    MemoryCase(LLAMA, "dapq-quantspec", 131072, 1, share=0.25),
    MemoryCase(LLAMA, "dapq", 131072, 1, chunk=4096),
    MemoryCase(LLAMA, "snapkv", 1 << 20, 1, chunk=4096),
    MemoryCase(LLAMA, "dapq-quantspec", 131072, 1, share=0.25, chunk=8192),
    MemoryCase(SMALL, "autoregressive", 4096, 1),
    MemoryCase(SMALL, "quantspec", 32768, 4),
    MemoryCase(SMALL, "int4-weights", 32768, 1),
)


@dataclass(frozen=True)
class MemoryRow:
    """A case's predicted and measured bytes.

    outside_after: `PeakMemory.outside`, after the generation. cache: bytes allocated for keys and values.
    """

    case: MemoryCase
    predicted: MemoryBreakdown
    measured: PeakMemory
    outside_after: int | None
    cache: int

    @property
    def predicted_device(self) -> float:
        """What the driver should report: what torch reserves, beside what was in use before."""
        return float(self.predicted.reserved_peak) + (self.measured.outside or 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; errors are relative to what was measured."""
        parts = {name: float(value) for name, value in vars(self.predicted).items()}
        peaks = {"allocated": float(self.predicted.peak), "device": self.predicted_device}
        cache = float(self.predicted.kv + self.predicted.buffers)
        return {
            **asdict(self.case),
            "predicted": {**parts, **peaks},
            "measured": {**asdict(self.measured), "outside_after": self.outside_after, "cache": self.cache},
            "errors": {
                name: peak / measured_value - 1
                for name, peak in peaks.items()
                if (measured_value := getattr(self.measured, name))
            }
            | {"cache": cache / self.cache - 1},
        }


def peak_rows(device: torch.device) -> Rows:
    """The cases. In one process: what is outside torch's allocator grows as kernels are loaded."""
    return {case.name: partial(_measured, case, device) for case in CASES}


def _measured(case: MemoryCase, device: torch.device) -> dict[str, Any]:
    return measure_peak(case, load_shape(case.model), device).to_dict()


@torch.no_grad()
def measure_peak(case: MemoryCase, shape: ModelShape, device: torch.device) -> MemoryRow:
    """Prefills and generates once, after a short generation that captures the round's graph."""
    plan, cuda = case.plan(), device.type == "cuda"
    _free_everything(device)
    meter = MemoryMeter(device)
    engine = _engine(plan, shape, device, meter)
    prompt = [1] * case.context
    engine.generate([prompt[:WARM_TOKENS]] * case.batch, 2)
    if cuda:
        torch.cuda.empty_cache()
    engine.generate([prompt] * case.batch, NEW_TOKENS)
    statistics, cache_bytes = engine.statistics, engine.cache.bytes if engine.cache else 0
    engine.close()
    del engine
    _free_everything(device)
    peaks = PeakMemory(statistics.peak_memory_bytes, statistics.peak_device_bytes, statistics.outside_bytes)
    predicted = predicted_memory(plan, shape, device_like(device))
    return MemoryRow(case, predicted, peaks, MemoryMeter(device).peak().outside, cache_bytes)


def _free_everything(device: torch.device) -> None:
    """Frees what is held by nothing that lives: garbage, libraries' workspaces and the allocator's unused blocks."""
    gc.collect()
    free_library_workspaces(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_like(device: torch.device) -> Device:
    """What memory depends on of this device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        grouped = int(properties.major == 9)
        return Device(0, element_bytes=2, num_sms=properties.multi_processor_count, grouped_experts=grouped)
    return Device(memory_bytes=0, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0)


def zero_weights(shape: ModelShape, device: torch.device) -> DecoderWeights:
    """Dense weights of this shape, all zero."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        qkv_width = shape.q_width + 2 * shape.kv_width
        return LayerWeights(
            mixer_norm=RMSNorm(zeros(shape.hidden), NORM_EPS),
            mixer=AttentionWeights(
                qkv=_projection(zeros, qkv_width, shape.hidden, biased=shape.attention_bias),
                output=_projection(zeros, shape.hidden, shape.q_width),
            ),
            mlp_norm=RMSNorm(zeros(shape.hidden), NORM_EPS),
            mlp=GatedMLP(
                _projection(zeros, 2 * shape.intermediate, shape.hidden),
                _projection(zeros, shape.hidden, shape.intermediate),
            ),
        )

    embedding = zeros(shape.vocab, shape.hidden)
    head = embedding if shape.tied_embeddings else zeros(shape.vocab, shape.hidden)
    norm = RMSNorm(zeros(shape.hidden), NORM_EPS)
    return DecoderWeights(embedding, tuple(layer() for _ in range(shape.layers)), norm, Dense(head))


def _projection(zeros: Any, outputs: int, inputs: int, biased: bool = False) -> Dense:
    return Dense(zeros(outputs, inputs), zeros(outputs) if biased else None)


def _engine(plan: Plan, shape: ModelShape, device: torch.device, meter: MemoryMeter) -> Engine:
    """An engine on zero weights, in the plan's format."""
    config, weights = DecoderConfig.plain(shape), zero_weights(shape, device)
    text = CalibrationText(torch.zeros(1, 64, dtype=torch.int64), natural=False)
    if plan.weights.target_bits != 16:
        ends, layers = replace(weights, layers=()), weights.layers
        weights = quantized_target(
            Decoder(config, device), ends, layers, WeightFormat(*plan.weights.target_format), text
        )
        del layers
    return Engine(plan, "", config, weights, device, meter, drafts=DraftParts(text=text))


def main() -> None:
    """Measures all cases on this machine's GPU and saves each; what the file has already is not measured again."""
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        raise SystemExit("needs a GPU, and one argument: where to save the results as JSON")
    ResultsFile.at(Path(sys.argv[1])).measure("peaks", peak_rows(torch.device("cuda")))


if __name__ == "__main__":
    main()
