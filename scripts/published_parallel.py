"""Published times of models on several GPUs, and aiconfigurator's, beside ours: docs/parallel.md has the tables.

published_parallel.toml has the published rows, and aiconfigurator.toml what scripts/compare_aiconfigurator.py wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.planner import Traffic, serving_capacity
from ridgeplan.planner.engines.rates import engine_profile
from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import parse_toml, read_document
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.sharding import shard
from ridgeplan.roofline.catalog.validation import Checked, build
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.validate.papers.rows import PublishedError

ROWS, STEPS = (Path(__file__).with_name(f"{name}.toml") for name in ("published_parallel", "aiconfigurator"))
ALL_AT_ONCE = 1e5  # requests per second: as many run as are allowed, until the last ones
MAX_SEQUENCES = 2048  # of a rank at the highest load, as by default in TensorRT-LLM
REQUESTS = {True: 1500, False: 3000}  # at the highest load, of long ones and of others, as published


@dataclass(frozen=True, kw_only=True)
class ServedRow(Checked):
    """One published row. concurrency: 0 for the highest load, at which `tokens_per_s_per_gpu` was measured."""

    error = PublishedError
    source: str = check.text()
    model: str = check.text()
    gpu: str = check.text()
    prompt: int = check.whole(1, 10**7)
    output: int = check.whole(1, 10**7)
    preset: str = check.text("autoregressive")
    tensor: int = check.whole(1, 64, default=1)
    data: int = check.whole(1, 64, default=1)
    expert: bool = check.flag(False)
    concurrency: int = check.whole(0, 10**5, default=0)
    tpot_ms: float = check.number(0, 1e6, default=0.0)
    tokens_per_s_per_gpu: float = check.number(0, 1e9, default=0.0)

    def _contradiction(self) -> str | None:
        timed = bool(self.concurrency), bool(self.tpot_ms), not self.tokens_per_s_per_gpu
        return None if len(set(timed)) == 1 else "allowed: concurrency and tpot_ms, or tokens_per_s_per_gpu"

    @property
    def published(self) -> float:
        """The figure: milliseconds per token, or output tokens per second of a GPU."""
        return self.tpot_ms or self.tokens_per_s_per_gpu

    @property
    def degrees(self) -> Parallel:
        """The degrees of parallelism."""
        return Parallel(self.tensor, 1, self.data, self.expert)

    def predicted(self) -> float:
        """Our figure, of simulated requests that all wait from the start, of which `concurrency` run."""
        sequences = -(-self.concurrency // self.data) or MAX_SEQUENCES
        long = max(self.prompt, self.output) > 2000
        requests = max(4 * self.concurrency, 8) if self.concurrency else REQUESTS[long]
        traffic = Traffic(requests=requests, replicas=1, max_num_seqs=sequences)
        answer = serving_capacity(
            self.model, self.gpu, (ALL_AT_ONCE,), isl=str(self.prompt), osl=str(self.output), traffic=traffic,
            preset=self.preset, backend="vllm", tensor_parallel=self.tensor, data_parallel=self.data,
            expert_parallel=self.expert,
        )  # fmt: skip
        row = answer.rows[0]
        return row.tpot_p50_ms if self.tpot_ms else row.output_tokens_per_s_per_gpu


@cache
def served_rows() -> tuple[ServedRow, ...]:
    """Every published row. Raises PublishedError."""
    return tuple(_rows(_tables(ROWS)))


def source_title(key: str) -> str:
    """What a source is, with its address, as Markdown."""
    source = _tables(ROWS)["sources"][key]
    return f"[{source['title']}]({source['url']})"


def _rows(tables: dict[str, Any]) -> Iterator[ServedRow]:
    for group in tables["groups"]:
        shared = {name: value for name, value in group.items() if name != "rows"}
        if shared.get("source") not in tables["sources"]:
            raise PublishedError(f"source is {shared.get('source')!r}; allowed: {', '.join(tables['sources'])}")
        yield from (build(ServedRow, {**shared, **row}, f"{shared['source']}: ") for row in group["rows"])


@dataclass(frozen=True)
class StepCase:
    """A decode step. batch: of all data-parallel ranks. weights: 16 for the checkpoint's own, 8 for FP8."""

    model: str
    gpu: str
    weights: int
    tensor: int
    pipeline: int
    data: int
    expert: bool
    batch: int

    @property
    def degrees(self) -> Parallel:
        """The degrees of parallelism."""
        return Parallel(self.tensor, self.pipeline, self.data, self.expert)


def step_ms(case: StepCase, context: int, new_tokens: int) -> float:
    """Milliseconds of our step halfway through the new tokens."""
    shape, profile = load_shape(case.model), engine_profile("vllm", load_hardware(case.gpu))
    workload = Workload(shape.name, case.gpu, context, new_tokens, case.batch, parallel=case.degrees)
    step = profile.step(workload, case.weights, "auto")
    return 1e3 * float(profile.rates.step_s(shard(shape, case.degrees), profile.hardware, step))


def prompt_ms(case: StepCase, tokens: int) -> float:
    """Milliseconds until our first token of a prompt that is processed in one pass."""
    preset = "autoregressive" if case.weights == 16 else "int8-weights"
    answer = serving_capacity(
        case.model, case.gpu, (1.0,), isl=str(tokens), osl="1", preset=preset, backend="vllm",
        traffic=Traffic(requests=1, replicas=1, batched_tokens=tokens), tensor_parallel=case.tensor,
        expert_parallel=case.expert,
    )  # fmt: skip
    return answer.rows[0].ttft_p50_ms


@cache
def other_prompts() -> tuple[tuple[StepCase, float, float], ...]:
    """Prompts of aiconfigurator.toml, with its milliseconds and ours."""
    rows = [dict(row) for row in _tables(STEPS)["prompts"]]
    cases = [(row.pop("tokens"), row.pop("ttft_ms"), StepCase(**row)) for row in rows]
    return tuple((case, theirs, prompt_ms(case, tokens)) for tokens, theirs, case in cases)


@cache
def other_steps() -> tuple[tuple[StepCase, float, float], ...]:
    """Cases of aiconfigurator.toml, with its milliseconds per token and ours."""
    steps = []
    for row in _tables(STEPS)["steps"]:
        values = dict(row)
        context, new_tokens, theirs = (values.pop(name) for name in ("context", "new_tokens", "tpot_ms"))
        case = StepCase(**values)
        steps.append((case, theirs, step_ms(case, context, new_tokens)))
    return tuple(steps)


@cache
def _tables(path: Path) -> dict[str, Any]:
    return parse_toml(read_document(path))
