"""The sizes of the suite, by device and thoroughness. No calibration measures any of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.calibration.sizes import Suite, load_suite
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.random_model import llama_like_shape

Workloads = tuple[tuple[int, int], ...]  # context, batch


@dataclass(frozen=True)
class OutputCase:
    """A preset at a workload of `prompt` tokens in and `output` tokens out."""

    preset: str
    prompt: int
    output: int
    batch: int

    def plan(self, shape: ModelShape, profile: Profile) -> Plan:
        """The plan."""
        return preset(self.preset, Workload(shape.name, profile.hardware.name, self.prompt, self.output, self.batch))


@dataclass(frozen=True)
class SuiteSizes:
    """Cases of the suite. steps and regret: for each of `models`. outputs: for that of them named `outputs_shape`.

    candidates: plans near the best that a workload's regret measures, beside the presets and the best of each family.
    generations: on the user's small models as they are; inflated: on the first of them inside `inflated_shape`.
    """

    kernels: Suite
    models: tuple[ModelShape, ...]
    steps: tuple[DecodeCase, ...]
    regret: Workloads
    candidates: int
    generations: tuple[DecodeCase, ...]
    new_tokens: int
    inflated_shape: str | None = None
    inflated: tuple[DecodeCase, ...] = ()
    outputs_shape: str | None = None
    outputs: tuple[OutputCase, ...] = ()


def sizes_for(suite: str, device: str) -> SuiteSizes:
    """The sizes of "smoke" or "full" for a device of type "cpu" or "cuda"."""
    if suite == "full":
        return full_sizes(device)
    return _smoke_cuda() if device == "cuda" else _smoke_cpu()


def full_sizes(device: str) -> SuiteSizes:
    """For a GPU: models of 0.5 to 8 billion parameters. A CPU runs the smallest of them at fewer sizes."""
    if device != "cuda":
        few = cases((("autoregressive", None), ("int8", None), ("quantspec", 3)), ((300, 1), (900, 2), (1800, 1)))
        shapes = (load_shape("SmolLM2-135M"), load_shape("Qwen2.5-0.5B"))
        return replace(_smoke_cpu(), models=shapes, steps=few, regret=((400, 1), (1500, 2)), candidates=4)
    plans = (("autoregressive", None), ("int8", None), ("quantspec", 4), ("quantspec-weights", 2))
    return SuiteSizes(
        kernels=load_suite("suite_cuda"),
        models=(load_shape("Qwen2.5-0.5B"), qwen_1_5b(), load_shape("Llama-3.1-8B"), load_shape("Qwen3-8B")),
        steps=cases(plans, _STEP_WORKLOADS),
        regret=((3000, 1), (3000, 16), (10_000, 4), (20_000, 1), (20_000, 8), (60_000, 2), (110_000, 1)),
        candidates=12,
        generations=cases((("autoregressive", None), ("quantspec", 4)), ((6000, 4), (24_000, 1))),
        new_tokens=256,
        inflated_shape="Llama-3.1-8B",
        outputs_shape=load_shape("Llama-3.1-8B").name,
        outputs=tuple(OutputCase(name, *lengths) for lengths, name in product(OUTPUTS, OUTPUT_PRESETS)),
        inflated=cases(
            (("autoregressive", None), ("int8", None), ("quantspec", 4), ("quantspec", 2)), ((6000, 8), (24_000, 2))
        ),
    )


# SpeContext, Table 3: tokens in and out, and the batch of its FlashInfer rows. DeepSeek-R1-Distill-Llama-8B has the
# shape of Llama-3.1-8B.
OUTPUTS = ((2048, 16_384, 16), (2048, 32_768, 8), (16_384, 2048, 8), (32_768, 2048, 8))
OUTPUT_PRESETS = (
    "autoregressive", "int8", "quest", "clusterkv", "shadowkv", "streamingllm-target", "progressive-target-int8",
    "specontext-resident",
)  # fmt: skip


def cases(plans: tuple[tuple[str, int | None], ...], workloads: Workloads) -> tuple[DecodeCase, ...]:
    """Every plan (preset and gamma) at every workload."""
    return tuple(DecodeCase(name, *workload, gamma) for workload, (name, gamma) in product(workloads, plans))


def qwen_1_5b() -> ModelShape:
    """Qwen2.5-1.5B: six query heads per KV head, which is neither a power of two nor in any calibration.

    Source: https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json
    """
    small = load_shape("Qwen2.5-0.5B")
    return replace(
        small, name="Qwen/Qwen2.5-1.5B", layers=28, hidden=1536, q_heads=12, kv_heads=2, head_dim=128,
        intermediate=8960, max_context=131072,
        source="https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json",
    )  # fmt: skip


def _smoke_cuda() -> SuiteSizes:
    """The full suite's kinds of cases on the smallest models, in about a minute."""
    plans, kernels = (("autoregressive", None), ("quantspec", 4)), load_suite("suite_cuda")
    return SuiteSizes(
        kernels=replace(kernels, heads=kernels.heads[:1], linear_shapes=kernels.linear_shapes[:2]),
        models=(load_shape("Qwen2.5-0.5B"), qwen_1_5b()),
        steps=cases(plans, ((2304, 1), (24_000, 4))),
        regret=((3000, 1), (20_000, 4)),
        candidates=4,
        generations=cases(plans, ((6000, 1),)),
        new_tokens=128,
    )


def _smoke_cpu() -> SuiteSizes:
    """SmolLM2-135M and a tiny model, in about two minutes on two cores."""
    plans = (("autoregressive", None), ("quantspec", 3))
    return SuiteSizes(
        outputs_shape="random 13M",
        outputs=(OutputCase("quest", 256, 2048, 1),),
        kernels=load_suite("suite_cpu"),
        models=(load_shape("SmolLM2-135M"), replace(llama_like_shape(4, 512, 1376, 8, 2, 64), name="random 13M")),
        steps=cases(plans, ((300, 1), (900, 2))),
        regret=((400, 1),),
        candidates=0,
        generations=cases(plans, ((384, 1),)),
        new_tokens=40,
    )


_STEP_WORKLOADS: Workloads = (
    (2304, 1), (2304, 16), (6000, 6), (12_000, 1), (24_000, 2), (24_000, 12), (48_000, 4), (120_000, 1),
)  # fmt: skip
