"""Measures products of integers (kernels/linear/csrc/integer.cuh) beside those of 16-bit floats, on Hopper.

    python scripts/measure_integer_products.py --output integer_products.json

A layer is what stands between two attentions of an 8B model: norm, QKV, output, norm, gate and up with SwiGLU, down, in
a CUDA graph over layers that do not fit the L2 cache: with today's products, with those of integers, and with each
product's best. Before anything is timed, its error against float32 is checked. Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import add_rms_norm
from ridgeplan.kernels.linear.cuda import compiled_for, device_limits
from ridgeplan.kernels.linear.schedule import LinearSchedule, make_integer_schedule, make_quantized_schedule
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.validate.machine import measured_here

HIDDEN, GROUP, EPS = 4096, 128, 1e-5
LAYERS = 5  # with distinct weights: 0.58 GB of 4 bits
ROTATE_BYTES = 500_000_000  # of the weights of a chain of one product
CHAIN = 12  # layers of a graph
REPLAYS, WARM_REPLAYS, TURNS = 15, 2, 7
MAX_ERROR = 2**-8  # of a product, relative to its norm: the unit roundoff of bfloat16

Weight = Int4Weight | Int8Weight
Plan = Mapping[str, LinearSchedule]
Weights = Mapping[str, Weight]


@dataclass(frozen=True)
class Shape:
    """A layer's product."""

    outputs: int
    inputs: int
    gated: bool = False

    def schedules(self, rows: int, bits: int, device: torch.device) -> dict[str, LinearSchedule]:
        """Today's kernel, and that of integers."""
        shape, limits = (rows, self.outputs, self.inputs), device_limits(device)
        schedules = {
            "today": make_quantized_schedule(*shape, GROUP, True, self.gated, limits, bits),
            "integers": make_integer_schedule(*shape, True, self.gated, limits, bits),
        }
        return {name: schedule for name, schedule in schedules.items() if schedule is not None}


SHAPES = {
    "qkv": Shape(6144, HIDDEN),
    "out": Shape(HIDDEN, HIDDEN),
    "gate_up": Shape(28672, HIDDEN, gated=True),
    "down": Shape(HIDDEN, 14336),
}


@dataclass(frozen=True, eq=False)
class LayerBench:
    """Layers, and inputs of `rows` rows."""

    device: torch.device
    rows: int
    layers: Sequence[Weights]
    hidden: Tensor
    norm: Tensor
    inputs: Mapping[int, Tensor]  # of single products, by width

    @classmethod
    def draw(cls, rows: int, layers: Sequence[Weights], device: torch.device) -> LayerBench:
        generator = torch.Generator(device).manual_seed(rows)
        widths = sorted({shape.inputs for shape in SHAPES.values()})
        drawn = {width: torch.randn(rows, width, device=device, generator=generator).bfloat16() for width in widths}
        norm = torch.rand(HIDDEN, device=device, generator=generator).bfloat16()
        return cls(device, rows, layers, drawn[HIDDEN], norm, drawn)

    def product(self, schedule: LinearSchedule, x: Tensor, weight: Weight) -> Tensor:
        kernel = compiled_for(schedule, self.device, "the CUDA linear kernel does not compile")
        if kernel is None:
            raise SystemExit(f"no kernel for {schedule.options}")
        return kernel.run(x, *(plane.packed for plane in weight.planes), bias=None)

    def layer(self, plan: Plan, weights: Weights, hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after the layer's attention, and the MLP's update. QKV's first columns stand for attention."""
        hidden, x = add_rms_norm(hidden, update, self.norm, EPS)
        qkv = self.product(plan["qkv"], x, weights["qkv"])
        attended = qkv.view(-1)[: self.rows * HIDDEN].view(self.rows, HIDDEN)
        update = self.product(plan["out"], attended, weights["out"])
        hidden, x = add_rms_norm(hidden, update, self.norm, EPS)
        return hidden, self.product(plan["down"], self.product(plan["gate_up"], x, weights["gate_up"]), weights["down"])

    def chain(self, plan: Plan) -> Tensor:
        hidden = update = self.hidden
        for index in range(CHAIN):
            hidden, update = self.layer(plan, self.layers[index % len(self.layers)], hidden, update)
        return update

    def layer_us(self, plan: Plan) -> float:
        return graph_us(lambda: self.chain(plan)) / CHAIN

    def product_us(self, name: str, schedule: LinearSchedule) -> float:
        """A product in a chain of its own, x in the L2 cache."""
        x, weights = self.inputs[SHAPES[name].inputs], [layer[name] for layer in self.layers]
        weights += [copied(weights[0]) for _ in range(len(weights), ROTATE_BYTES // weights[0].bytes)]
        return graph_us(lambda: [self.product(schedule, x, weight) for weight in weights][-1]) / len(weights)

    def error(self, name: str, schedule: LinearSchedule) -> float:
        """Against float32, of the worst row. Raises SystemExit where bfloat16 does not explain it."""
        weight, x = self.layers[0][name], self.inputs[SHAPES[name].inputs]
        expected = functional.linear(x.float(), weight.dequantize())
        if SHAPES[name].gated:
            gate, up = expected.chunk(2, 1)
            expected = functional.silu(gate) * up
        difference = self.product(schedule, x, weight).float() - expected
        error = float((difference.norm(dim=1) / expected.norm(dim=1)).max().nan_to_num(nan=float("inf")))
        if error > MAX_ERROR:
            raise SystemExit(f"{name}, {self.rows} rows: error {error}; allowed: {MAX_ERROR}, of {schedule.options}")
        return error

    def measure(self, bits: int) -> dict[str, Any]:
        """A section of the file."""
        options = {name: shape.schedules(self.rows, bits, self.device) for name, shape in SHAPES.items()}
        errors = dict.fromkeys(("today", "integers"), 0.0)
        for name, schedules in options.items():
            for kind, schedule in schedules.items():
                errors[kind] = max(errors[kind], self.error(name, schedule))
        products = {
            name: {kind: self.product_us(name, schedule) for kind, schedule in schedules.items()}
            for name, schedules in options.items()
        }
        best = {name: min(times, key=times.__getitem__) for name, times in products.items()}
        plans = {
            "today": {name: schedules["today"] for name, schedules in options.items()},
            "integers": {name: schedules.get("integers", schedules["today"]) for name, schedules in options.items()},
            "best of each": {name: schedules[best[name]] for name, schedules in options.items()},
        }
        turns = [{label: self.layer_us(plan) for label, plan in plans.items()} for _ in range(TURNS)]
        layers = {label: statistics.median(times[label] for times in turns) for label in plans}
        results = [self.chain(plans["integers"]) for _ in range(5)]
        equal = all(torch.equal(results[0], result) for result in results)
        timed = {name: {**times, "best": times[best[name]]} for name, times in products.items()}
        sizes = {"bits": bits, "rows": self.rows}
        return {
            **sizes,
            "errors": errors,
            "products": timed,
            "again": layers,
            "best plan": best,
            "equal launches": equal,
        }


def graph_us(run: Callable[[], object]) -> float:
    """Microseconds of a graph of `run`, the median of REPLAYS."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + WARM_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        stream.synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks[WARM_REPLAYS:])]
    return 1e3 * statistics.median(times)


def draw_weight(shape: Shape, bits: int, device: torch.device) -> Weight:
    def plane(step: float) -> Int4Weight:
        codes = torch.randint(16, (shape.outputs, shape.inputs), device=device, dtype=torch.uint8)
        scale = step * (0.5 + torch.rand(shape.outputs, shape.inputs // GROUP, device=device))
        return Int4Weight.pack(codes, scale, 0.5 * step * torch.randn_like(scale))

    step = 0.2 / shape.inputs**0.5
    return plane(step) if bits == 4 else Int8Weight(plane(step), plane(step / 16))


def copied(weight: Weight) -> Weight:
    """The same weight in other memory."""
    if isinstance(weight, Int8Weight):
        return Int8Weight(*(replace(plane, packed=plane.packed.clone()) for plane in weight.planes))
    return replace(weight, packed=weight.packed.clone())


def show(section: Mapping[str, Any]) -> None:
    times = {"a layer": section["again"], **section["products"]}
    parts = [f"{name} " + ", ".join(f"{kind} {us:.2f}" for kind, us in each.items()) for name, each in times.items()]
    print(f"W{section['bits']}, rows {section['rows']}:", *parts, sep="\n  ", flush=True)
    print(f"  errors {section['errors']}, equal launches {section['equal launches']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8], choices=[4, 8])
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("needs a GPU of Hopper's generation or a newer one")
    gc.collect()
    gc.disable()  # no graph may be freed while another is captured
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    sections: list[dict[str, Any]] = []
    for bits in arguments.bits:
        first = {name: draw_weight(shape, bits, device) for name, shape in SHAPES.items()}
        layers = [first, *({name: copied(weight) for name, weight in first.items()} for _ in range(LAYERS - 1))]
        for rows in arguments.rows:
            sections.append(LayerBench.draw(rows, layers, device).measure(bits))
            show(sections[-1])
            if arguments.output is not None:
                text = json.dumps({**measured_here(), "sections": sections}, indent=1)
                arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
