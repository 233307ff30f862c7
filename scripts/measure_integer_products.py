"""Measures products of integers (kernels/linear/csrc/integer.cuh) beside those of 16-bit floats, on Hopper.

    python scripts/measure_integer_products.py --seconds 70 --output integer_products.json

A layer is what stands between two attentions of an 8B model: norm, QKV, output, norm, gate and up with SwiGLU, down, in
a CUDA graph over layers that do not fit the L2 cache. In turn, for each number of bits and rows: every variant for all
four products, then each product's best beside the others' (what cannot run a variant runs as today), then single
products. Before anything is timed, its error against float32 is checked. A variant whose name ends in "planes" takes x
of QKV and of gate and up as the norm's kernel quantized it; the other products, and all of other variants, quantize x
themselves. Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import add_rms_norm
from ridgeplan.kernels.linear import cuda
from ridgeplan.kernels.linear.cuda import LinearKernel, compiled_for, device_limits
from ridgeplan.kernels.linear.planes import add_rms_norm_planes, quantize_rows
from ridgeplan.kernels.linear.schedule import (
    IntegerVariant,
    LinearSchedule,
    make_integer_schedule,
    make_quantized_schedule,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.validate.machine import measured_here

HIDDEN, GROUP, EPS = 4096, 128, 1e-5
LAYERS = 5  # with distinct weights: 0.58 GB of 4 bits
ROTATE_BYTES = 500_000_000  # of the weights of a chain of one product
CHAIN = 12  # layers of a graph
REPLAYS, WARM_REPLAYS = 15, 2
MAX_ERROR = 2**-8  # of a product, relative to its norm: the unit roundoff of bfloat16
MAX_LAYER_ERROR = 2e-2
MIN_GAIN = 0.05  # of a layer, for which the runtime would change
KIB = 1024
STAGE_KIB = 17  # of 2048 inputs of 4 bits
WATCHDOG_S = 25  # after the time limit
FALLBACK = "the CUDA linear kernel does not compile"

Weight = Int4Weight | Int8Weight
Plan = Mapping[str, LinearSchedule]
Weights = Mapping[str, Weight]


@dataclass(frozen=True)
class Shape:
    """A layer's product."""

    outputs: int
    inputs: int
    gated: bool = False
    normed: bool = False  # its x comes from a norm

    def floats(self, rows: int, bits: int, device: torch.device) -> LinearSchedule:
        """Today's kernel."""
        shape = rows, self.outputs, self.inputs, GROUP, True, self.gated
        schedule = make_quantized_schedule(*shape, device_limits(device), bits)
        assert schedule is not None
        return schedule

    def integers(self, rows: int, bits: int, device: torch.device, variant: IntegerVariant) -> LinearSchedule | None:
        shape = rows, self.outputs, self.inputs, True, self.gated
        return make_integer_schedule(*shape, device_limits(device), bits, variant)


SHAPES = {
    "qkv": Shape(6144, HIDDEN, normed=True),
    "out": Shape(HIDDEN, HIDDEN),
    "gate_up": Shape(28672, HIDDEN, gated=True, normed=True),
    "down": Shape(HIDDEN, 14336),
}


def name_of(variant: IntegerVariant) -> str:
    """For example `half s1024 34/all early planes`: CTAs of half an SM, stages of 1024 inputs, KiB in flight."""
    flights = [variant.before_x_bytes, variant.after_x_bytes]
    parts = ["half" if variant.sm_ctas == 2 else "full", f"s{variant.stage_inputs}"]
    parts.append("/".join("all" if size >= 1 << 20 else str(size // KIB) for size in flights))
    parts += ["early"] * variant.early + ["planes"] * variant.from_planes
    return " ".join(parts)


def variants(planes: bool) -> Iterator[IntegerVariant]:
    """With any x before it is there, and every limit that may matter; x from planes if `planes`."""
    sizes = [2 * STAGE_KIB * KIB + KIB, 4 * STAGE_KIB * KIB + KIB, 1 << 20]
    for before, after in itertools.product([STAGE_KIB * KIB + KIB, *sizes], sizes[1:]):
        if before <= after:
            for early in (False, True):
                yield IntegerVariant(planes, 1, early, 2048, before, after)
    for stage_inputs, before, after in itertools.product((2048, 1024), [STAGE_KIB * KIB + KIB, *sizes], sizes):
        if before <= after:
            yield IntegerVariant(planes, 2, True, stage_inputs, before, after)
    yield IntegerVariant(planes, 2, False, 2048)


@dataclass(frozen=True, eq=False)
class LayerBench:
    """Layers of `bits`-bit weights, and inputs of `rows` rows."""

    device: torch.device
    bits: int
    rows: int
    layers: Sequence[Weights]
    hidden: Tensor
    norm: Tensor
    inputs: Mapping[int, Tensor]  # of single products, by width

    @classmethod
    def draw(cls, bits: int, rows: int, layers: Sequence[Weights], device: torch.device) -> LayerBench:
        generator = torch.Generator(device).manual_seed(rows)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).bfloat16()

        widths = {shape.inputs for shape in SHAPES.values()}
        hidden, norm = rand(rows, HIDDEN), torch.rand(HIDDEN, device=device, generator=generator).bfloat16()
        return cls(device, bits, rows, layers, hidden, norm, {width: rand(rows, width) for width in sorted(widths)})

    def today(self) -> dict[str, LinearSchedule]:
        return {name: shape.floats(self.rows, self.bits, self.device) for name, shape in SHAPES.items()}

    def plan(self, variant: IntegerVariant) -> dict[str, LinearSchedule]:
        """All products by `variant`; planes only where a norm makes them."""
        options = {name: self.option(name, variant) for name in SHAPES}
        return self.today() | {name: schedule for name, schedule in options.items() if schedule is not None}

    def option(self, name: str, variant: IntegerVariant) -> LinearSchedule | None:
        shape = SHAPES[name]
        variant = replace(variant, from_planes=variant.from_planes and shape.normed)
        return shape.integers(self.rows, self.bits, self.device, variant)

    def kernel(self, schedule: LinearSchedule) -> LinearKernel:
        kernel = compiled_for(schedule, self.device, FALLBACK)
        if kernel is None:
            raise RuntimeError(f"{schedule.options} does not compile")
        return kernel

    def product(self, schedule: LinearSchedule, x: Tensor, weight: Weight) -> Tensor:
        return self.kernel(schedule).run(x, *(plane.packed for plane in weight.planes), bias=None)

    def layer(self, plan: Plan, weights: Weights, hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after the layer's attention, and the MLP's update. QKV's first columns stand for attention."""
        hidden, x = self._norm(plan["qkv"], hidden, update)
        qkv = self.product(plan["qkv"], x, weights["qkv"])
        attended = qkv.view(-1)[: self.rows * HIDDEN].view(self.rows, HIDDEN)
        update = self.product(plan["out"], attended, weights["out"])
        hidden, x = self._norm(plan["gate_up"], hidden, update)
        return hidden, self.product(plan["down"], self.product(plan["gate_up"], x, weights["gate_up"]), weights["down"])

    def _norm(self, schedule: LinearSchedule, hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        if schedule.x_planes == 2:
            return add_rms_norm_planes(hidden, update, self.norm, EPS)
        return add_rms_norm(hidden, update, self.norm, EPS)

    def chain(self, plan: Plan) -> tuple[Tensor, Tensor]:
        hidden = update = self.hidden
        for index in range(CHAIN):
            hidden, update = self.layer(plan, self.layers[index % len(self.layers)], hidden, update)
        return hidden, update

    def layer_us(self, plan: Plan) -> float:
        return graph_us(lambda: self.chain(plan)) / CHAIN

    def product_us(self, name: str, schedule: LinearSchedule) -> float:
        """A product in a chain of its own, x in the L2 cache."""
        x, weights = self.x_of(name, schedule), [layer[name] for layer in self.layers]
        weights += [copied(weights[0]) for _ in range(len(weights), ROTATE_BYTES // weights[0].bytes)]
        return graph_us(lambda: [self.product(schedule, x, weight) for weight in weights][-1]) / len(weights)

    def x_of(self, name: str, schedule: LinearSchedule) -> Tensor:
        x = self.inputs[SHAPES[name].inputs]
        return quantize_rows(x) if schedule.x_planes == 2 else x

    def error(self, name: str, schedule: LinearSchedule, expected: Tensor) -> float:
        return relative_error(self.product(schedule, self.x_of(name, schedule), self.layers[0][name]), expected)

    def expected(self, name: str) -> Tensor:
        weight, shape = self.layers[0][name], SHAPES[name]
        y = functional.linear(self.inputs[shape.inputs].float(), weight.dequantize())
        gate, up = y.chunk(2, 1) if shape.gated else (None, y)
        return y if gate is None else functional.silu(gate) * up


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the worst row."""
    difference = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(difference.max().nan_to_num(nan=float("inf")))


def graph_us(run: Callable[[], object]) -> float:
    """Microseconds of a graph of `run`, the median of REPLAYS."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
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


@dataclass(eq=False)
class Report:
    """What has been measured so far, and the file that it goes to."""

    path: Path | None
    deadline: float
    started: float
    variants: Mapping[str, IntegerVariant]
    sections: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def write(self) -> None:
        if self.path is not None:
            self.path.write_text(
                json.dumps({**measured_here(), "sections": self.sections}, indent=1) + "\n", encoding="utf-8"
            )

    def show(self) -> None:
        """One table: layers, then single products."""
        for section in self.sections:
            rows = section.get("layers", {})
            print(f"\nW{section['bits']}, rows {section['rows']}: a layer's products with both norms, us")
            for name, us in sorted(rows.items(), key=lambda item: item[1])[:12]:
                print(f"  {us:7.2f}  {name}")
            if "again" in section:
                again = dict(section["again"])
                today = again.pop("today")
                for label, us in again.items():
                    verdict = "wire it" if us <= (1 - MIN_GAIN) * today else "keep today's"
                    print(f"  again in turn: today {today:.2f}, {label} {us:.2f}, {1 - us / today:+.1%}: {verdict}")
                if "one variant" in section:
                    variant = self.variants[section["one variant"]]
                    print(f"  one variant: ({section['bits']}, {section['rows']}): {variant!r}")
            print("  best plan:", section.get("best plan"))
            for name, times in section.get("products", {}).items():
                print(f"  {name:8}", ", ".join(f"{key} {us:.2f}" for key, us in times.items()))
            refused = section.get("refused", {})
            print(
                "  errors:", section.get("errors"), "refused:", len(refused), dict(itertools.islice(refused.items(), 2))
            )
            print("  equal launches:", section.get("equal launches"))
        print(f"{time.monotonic() - self.started:.0f} s", flush=True)


def distinct(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Without repetitions: what cannot run a variant runs as today."""
    kept: dict[str, Plan] = {}
    for label, plan in plans.items():
        if plan not in kept.values():
            kept[label] = plan
    return kept


def warm(benches: list[LayerBench], plans: list[tuple[LayerBench, Plan]]) -> None:
    """Compiles all variants, several at a time."""
    schedules = {schedule.options: (bench, schedule) for bench, plan in plans for schedule in plan.values()}
    device = benches[0].device

    def compile_one(item: tuple[LayerBench, LinearSchedule]) -> bool:
        torch.zeros(1, device=device)  # makes the device's context the thread's
        return compiled_for(item[1], device, FALLBACK) is not None

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        done = list(pool.map(compile_one, schedules.values()))
    if not all(done):
        cuda._compiled.cache_clear()
    print(f"{len(done)} kernels compiled, {done.count(False)} refused", flush=True)


def check(bench: LayerBench, section: dict[str, Any], plans: Mapping[str, Plan], today: Plan) -> dict[str, Plan]:
    """The plans whose products and layer agree with float32."""
    errors: dict[str, float] = section.setdefault("errors", {})
    refused: dict[str, list[float] | str] = section.setdefault("refused", {})
    measured: dict[tuple[str, LinearSchedule], float] = {}
    expected = {name: bench.expected(name) for name in SHAPES}
    reference = bench.layer(today, bench.layers[0], bench.hidden, bench.hidden)
    agreeing: dict[str, Plan] = {}
    for label, plan in plans.items():
        try:
            for name, schedule in plan.items():
                if (name, schedule) not in measured:
                    measured[name, schedule] = bench.error(name, schedule, expected[name])
            results = bench.layer(plan, bench.layers[0], bench.hidden, bench.hidden)
        except RuntimeError as error:  # it does not compile, or the driver refuses its launch
            refused[label] = str(error)[:300]
            continue
        worst = max(measured[item] for item in plan.items())
        layer_error = max(relative_error(*pair) for pair in zip(results, reference, strict=True))
        if plan == today or (worst <= MAX_ERROR and layer_error <= MAX_LAYER_ERROR):
            agreeing[label] = plan
            kind = "today" if plan == today else "integers"
            errors[kind] = max(errors.get(kind, 0.0), worst)
        else:
            refused[label] = [worst, layer_error]
    return agreeing


def best_of_each(bench: LayerBench, report: Report, layers: dict[str, float], plans: Mapping[str, Plan]) -> Plan:
    """Starts from the fastest plan, and changes one product after the other to what is fastest beside the others."""
    label = min(layers, key=layers.__getitem__)
    best, best_us = dict(plans[label]), layers[label]
    names = dict.fromkeys(SHAPES, label)
    for name in SHAPES:
        for other in sorted(layers, key=layers.__getitem__):
            trial = best | {name: plans[other][name]}
            if other not in plans or trial[name] == best[name] or report.left_s < 0:
                continue
            us = bench.layer_us(trial)
            if us < best_us * 0.998:
                best, best_us, names = trial, us, names | {name: other}
    report.sections[-1]["best plan"] = names
    layers["best of each"] = bench.layer_us(best)
    return best


def measure(bench: LayerBench, report: Report, plans: Mapping[str, Plan], until: float) -> None:
    """A section of the report; sweeps stop at `until`, of the monotonic clock."""
    section: dict[str, Any] = {"bits": bench.bits, "rows": bench.rows}
    report.sections.append(section)
    limited = replace(report, deadline=min(report.deadline, until))
    layers: dict[str, float] = {}
    section["layers"] = layers
    agreeing: dict[str, Plan] = {}
    for half in (False, True):  # what shares an SM last, as it is new
        some = {label: plan for label, plan in plans.items() if label.startswith("half") == half}
        some = check(bench, section, some, plans["today"])
        agreeing |= some
        for label, plan in some.items():
            if label == "today" or limited.left_s > 0:
                layers[label] = bench.layer_us(plan)
        report.write()
    plans = agreeing
    best = best_of_each(bench, limited, layers, plans)
    uniform = [label for label in layers if label in report.variants and not report.variants[label].from_planes]
    final = {"today": plans["today"], "best of each": best}
    if uniform:
        section["one variant"] = min(uniform, key=layers.__getitem__)
        final["one variant"] = plans[section["one variant"]]
    again = [{label: bench.layer_us(plan) for label, plan in final.items()} for _ in range(7)]
    section["again"] = {label: statistics.median(times[label] for times in again) for label in final}
    products: dict[str, dict[str, float]] = {}
    section["products"] = products
    for name, shape in SHAPES.items():
        rows = {"today": plans["today"][name], "best": best[name]}
        for planes in (False, True):
            schedule = shape.integers(bench.rows, bench.bits, bench.device, IntegerVariant(planes))
            if schedule is not None:
                rows["quantized before, full" if planes else "full"] = schedule
        products[name] = {label: bench.product_us(name, schedule) for label, schedule in rows.items()}
    outputs = [bench.chain(best)[1].clone() for _ in range(5)]
    section["equal launches"] = all(torch.equal(outputs[0], output) for output in outputs)
    report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=70, help="time limit")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 2, 8])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8], choices=[4, 8])
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("needs a GPU of Hopper's generation or a newer one")
    gc.collect()
    gc.disable()  # no graph may be freed while another is captured
    started = time.monotonic()
    named = {name_of(variant): variant for planes in (False, True) for variant in variants(planes)}
    report = Report(arguments.output, started + arguments.seconds, started, named)

    def give_up() -> None:
        print("time is over", flush=True)
        report.show()
        report.write()
        os._exit(1)

    watchdog = threading.Timer(arguments.seconds + WATCHDOG_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    device = torch.device("cuda", torch.cuda.current_device())
    print(torch.cuda.get_device_name(device), torch.__version__, torch.version.cuda)
    torch.manual_seed(0)
    benches = []
    for bits in arguments.bits:
        first = {name: draw_weight(shape, bits, device) for name, shape in SHAPES.items()}
        layers = [first, *({name: copied(weight) for name, weight in first.items()} for _ in range(LAYERS - 1))]
        rows_list = arguments.rows if bits == 4 else [rows for rows in arguments.rows if rows in (1, 4)]
        benches += [LayerBench.draw(bits, rows, layers, device) for rows in rows_list]
    plans = [
        distinct({"today": bench.today()} | {label: bench.plan(variant) for label, variant in named.items()})
        for bench in benches
    ]
    warm(benches, [(bench, plan) for bench, each in zip(benches, plans, strict=True) for plan in each.values()])
    print(f"{time.monotonic() - started:.0f} s of preparation", flush=True)
    try:
        for index, (bench, each) in enumerate(zip(benches, plans, strict=True)):
            now = time.monotonic()
            try:
                measure(bench, report, each, now + (report.deadline - now) / (len(benches) - index))
            except RuntimeError as error:
                print(f"W{bench.bits}, rows {bench.rows}: {error}", flush=True)
    finally:
        report.show()
        report.write()


if __name__ == "__main__":
    main()
