"""Drafts greedily for many rounds, and compares every token with what plain steps of the same target choose.

Each plan continues sets of ragged prompts, one set prompt by prompt, the next in batches; on a GPU rounds are replays
of graphs. What it generated of a set then goes through the plan's target together, in steps of one token. A token that
is not the one with the largest logit there differs, unless its logit is within rounding of the largest, as roundings
depend on how many rows a product or an attention has: it is a tie, counted apart, with the gap of the logits. Where a
token would differ, the target reads its row once more, alone. If the token is within rounding there, roundings count
for more than usual at this place, and it is a tie as well, with the gaps of both passes. What follows a tie is compared
like all else, since the target reads the tokens that the plan chose.

In float32 ties are rare; bfloat16 runs what float32 does not reach, the CUDA C++ kernels. Their calls are counted as
the host makes them: once a layer of a captured graph, however often it is replayed, and in plain steps. On a GPU of
Hopper's generation a case fails that did not run the kernels it is there for.

    python scripts/soak_drafters.py soak.json --drafter-head head/ --rounds 20000
    python scripts/soak_drafters.py soak.json --model qwen.gguf --dtype bfloat16 --cases codes --rounds 20000
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_turns import gpu_turn

from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.files import write_json
from ridgeplan.kernels.attention.cuda import AttentionKernel
from ridgeplan.kernels.device.cuda import has_wgmma
from ridgeplan.kernels.linear.cuda import LinearKernel
from ridgeplan.kernels.selection.cuda import TwoBitKernels
from ridgeplan.kernels.sparse_attention.cuda import SparseKernel
from ridgeplan.roofline.execution import RoundKind
from ridgeplan.roofline.plan.plan import DraftCodes, Plan, Speculation, Workload
from ridgeplan.roofline.plan.policies.dense import adaptive_cascade, quantspec_int8
from ridgeplan.roofline.plan.policies.selections import Progressive
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.speculation.speculator import RowResult
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.drafter_acceptance import CASCADE, HEAD, SUFFIX, case_plan, named_shape
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import measured_here
from ridgeplan.validate.prompts import sample_text

CONTEXT, NEW_TOKENS = 1024, 512
SET_PROMPTS = 16  # compared together, as the target's steps of one token otherwise take longer than the rounds
# Shares of the largest logit. In bfloat16 the gap of Qwen2.5-Coder-0.5B's two largest logits (17.9 in the mean) differs
# between passes of one token and of eight by 0.067 (rms) and at most 0.25, of 160 tokens on a CPU: five times the rms.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.02}
CODES = "codes"

INT8_DRAFT, INT8_TARGET = "4-bit product on INT8 tensor cores, 1 row", "8-bit product on INT8 tensor cores, 4 rows"
WGMMA_4_BIT, WGMMA_8_BIT = "wgmma attention to INT4", "wgmma attention to INT8"
PROGRESSIVE, SCAN = "progressive attention", "scan of 2-bit keys"


@dataclass(frozen=True)
class Case:
    """A plan of a workload, and kernels that it must run on Hopper in bfloat16."""

    plan: Callable[[Workload], Plan]
    kernels: tuple[str, ...] = ()


def drafts(gamma: int, **settings: Any) -> Callable[[Workload], Plan]:
    """`quantspec-int8` with other drafts."""
    speculation = Speculation(gamma, **{"codes": DraftCodes.UPPER, **settings})
    return lambda workload: replace(quantspec_int8(workload), speculation=speculation)


CODE_CASES = {
    "3 drafts": Case(drafts(3), (INT8_DRAFT, INT8_TARGET, WGMMA_8_BIT)),
    "7 drafts": Case(drafts(7), (INT8_DRAFT, WGMMA_8_BIT)),
    "progressive": Case(drafts(3, selection=Progressive()), (INT8_DRAFT, INT8_TARGET, PROGRESSIVE)),
    "2-bit scan": Case(drafts(3, selection=Progressive(), codes=DraftCodes.FULL), (INT8_DRAFT, INT8_TARGET, SCAN)),
    "adaptive cascade": Case(adaptive_cascade, (INT8_DRAFT, INT8_TARGET, WGMMA_4_BIT, WGMMA_8_BIT)),
}


def drafter_case(name: str) -> Case:
    """A drafter over a target in full precision."""
    return Case(lambda workload: case_plan(Plan(workload), name, 4, 0))


def linear_name(kernel: LinearKernel) -> str:
    """A product of codes by how it multiplies, or one of dense weights."""
    schedule = kernel.schedule
    cores = "INT8" if schedule.integer else "bf16"
    rows = f"{schedule.rows} row{'s' * (schedule.rows > 1)}"
    return f"{schedule.weights.bits}-bit product on {cores} tensor cores, {rows}"


def attention_name(kernel: AttentionKernel) -> str:
    """Attention by the codes that it reads."""
    variant = kernel.occupancy.variant
    read = f"INT{variant.bits}" if variant.bits else "full precision"
    return f"{'wgmma ' * variant.warpgroup}attention to {read}"


def sparse_name(kernel: SparseKernel) -> str:
    """Attention to chosen tokens."""
    return PROGRESSIVE if kernel.max_groups else "attention to an index list"


NAMES: dict[type, Callable[[Any], str]] = {
    LinearKernel: linear_name, AttentionKernel: attention_name, SparseKernel: sparse_name,
    TwoBitKernels: lambda kernel: SCAN,
}  # fmt: skip


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of CUDA C++ kernels in the body."""
    calls: Counter[str] = Counter()
    with ExitStack() as patches:
        for kind, name in NAMES.items():

            def counting(
                kernel: Any, *args: Any, run: Callable[..., Any] = kind.run, name: Callable[[Any], str] = name,
                **options: Any,
            ) -> Any:  # fmt: skip
                calls[name(kernel)] += 1
                return run(kernel, *args, **options)

            patches.enter_context(patch.object(kind, "run", counting))
        yield calls


class InTurn:
    """All rounds that a plan may have, one after the other: what would pay is not known, and all must be right."""

    def __init__(self, plan: Plan) -> None:
        self._kinds = cycle(plan.speculation.round_kinds)

    def next(self) -> RoundKind:
        """See `ridgeplan.runtime.speculation.gamma_control.GammaSchedule`."""
        return next(self._kinds)

    def add(self, kind: RoundKind, rows: Sequence[RowResult]) -> None:
        """Nothing to learn."""


@dataclass
class Tally:
    """What a case's tokens are beside those of plain steps.

    near: tokens at which the target's second largest logit is within rounding of the largest. ties: those of them at
    which the plan took another token than plain steps, by the gap. unstable: gaps beyond rounding,
    each with the gap in a pass of the row alone, which is within. differing: gaps beyond rounding in both. by_drafts:
    rounds with each number of drafts.
    """

    rounds: int = 0
    tokens: int = 0  # that were generated
    rejected: int = 0  # drafts
    near: int = 0
    ties: list[float] = field(default_factory=list)
    unstable: list[list[float]] = field(default_factory=list)
    differing: list[float] = field(default_factory=list)
    by_drafts: Counter[int] = field(default_factory=Counter)

    def add(self, statistics: Statistics) -> None:
        """The rounds of a generation."""
        self.rounds += statistics.rounds
        self.rejected += statistics.num_draft_tokens_verified - statistics.accepted
        self.by_drafts.update(dict(enumerate(statistics.rounds_at)))

    def compare(self, engine: Engine, prompts: Sequence[list[int]], generated: Sequence[list[int]]) -> None:
        """Every token that was generated for each prompt with the target's logits before it."""
        logits = engine.teacher_forced_logits(prompts, [row[:-1] for row in generated])
        rounding = ROUNDING[engine.weights.embedding.dtype]
        for index, (row, tokens) in enumerate(zip(logits, torch.tensor(generated, device=logits.device), strict=True)):
            best = row.float().topk(2).values
            gaps, within = best[:, 0] - row.gather(1, tokens[:, None])[:, 0], rounding * best[:, 0].abs()
            other = row.argmax(-1) != tokens
            self.near += int((best[:, 0] - best[:, 1] <= within).sum())
            self.ties += gaps[other & (gaps <= within)].tolist()
            self.tokens += len(tokens)
            places = (other & (gaps > within)).nonzero()[:, 0]
            if len(places):
                reread = engine.teacher_forced_logits(prompts[index : index + 1], [generated[index][:-1]])[0, places]
                reread_gaps = reread.max(-1).values.float() - reread.gather(1, tokens[places, None])[:, 0]
                tied = reread_gaps <= within[places]
                self.unstable += torch.stack([gaps[places], reread_gaps], dim=1)[tied].tolist()
                self.differing += gaps[places][~tied].tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring; the exit code, 1 for any token that differs and for kernels that did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="folder, GGUF file or hub id; by default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--drafter-head", default="")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cases", choices=("drafters", CODES), default="drafters")
    parser.add_argument("--only", choices=(*CODE_CASES, SUFFIX, HEAD, CASCADE), help="of the cases this one alone")
    parser.add_argument("--batch", type=int, default=4, help="ragged prompts of a generation")
    parser.add_argument("--rounds", type=int, default=20000, help="of all cases together")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which each case ends")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each prompt")
    chosen = parser.parse_args(arguments)
    names = (SUFFIX, HEAD, CASCADE) if chosen.drafter_head else (SUFFIX, CASCADE)
    cases = CODE_CASES if chosen.cases == CODES else {name: drafter_case(name) for name in names}
    if chosen.only and chosen.only not in cases:
        parser.error(f"--only {chosen.only}: allowed with these options: {', '.join(cases)}")
    cases = {name: case for name, case in cases.items() if chosen.only in (None, name)}
    source, results, failed = embedded_or(chosen.model), {}, False
    dtype, size = getattr(torch, chosen.dtype), chosen.batch
    shared = SharedWeights(source, dtype=dtype)
    model, head = named_shape(source).name, chosen.drafter_head
    workload = Workload(model, "this machine", CONTEXT, chosen.new_tokens, SET_PROMPTS, drafter_head=head)
    ids: list[int] = []

    def prompts(number: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(number)
        lengths = torch.randint(1, CONTEXT, (SET_PROMPTS,), generator=generator).tolist()
        starts = torch.randint(len(ids) - CONTEXT, (SET_PROMPTS,), generator=generator).tolist()
        return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    for name, case in cases.items():
        with (
            counted_calls() as calls,
            shared.engine(case.plan(workload)) as engine,
            patch.object(engine, "_schedule", lambda request, plan=engine.plan: InTurn(plan)),
        ):
            ids = ids or engine.tokenizer(sample_text())["input_ids"]
            tally, number, begin = Tally(), 0, time.monotonic()
            held: list[int] = []  # bytes on the GPU after each set
            while not number or (
                tally.rounds * len(cases) < chosen.rounds and time.monotonic() - begin < chosen.seconds
            ):
                texts, generated = prompts(number), []
                at_once = size if number % 2 else 1  # verification has rows of one sequence or of all
                with gpu_turn(timed=False):
                    for first in range(0, SET_PROMPTS, at_once):
                        generation = engine.generate(texts[first : first + at_once], chosen.new_tokens)
                        generated += generation.tokens
                        tally.add(generation.statistics)
                    tally.compare(engine, texts, generated)
                number += 1
                held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            on_hopper = dtype == torch.bfloat16 and engine.device.type == "cuda" and has_wgmma(engine.device)
            absent = [kernel for kernel in case.kernels if on_hopper and not calls[kernel]]
            results[name] = {
                "rounds": tally.rounds, "tokens": tally.tokens, "rejected drafts": tally.rejected,
                "sets of prompts": number,
                "rounds by drafts": {str(drafts): count for drafts, count in sorted((+tally.by_drafts).items())},
                "tokens that differ": len(tally.differing), "gaps of those": tally.differing,
                "gaps of ties in a pass of the row alone": tally.unstable,
                "ties": len(tally.ties), "gaps of ties": tally.ties, "tokens with a second within rounding": tally.near,
                "kernels called": dict(sorted(calls.items())), "kernels that did not run": absent,
                "memory growth bytes": held[-1] - held[min(1, number - 1)],
                "seconds": time.monotonic() - begin,
            }  # fmt: skip
        failed |= bool(tally.differing or absent)
        rounding = {"dtype": chosen.dtype, "rounding of the largest logit": ROUNDING[dtype]}
        write_json(chosen.output, {**measured_here(), **rounding, **results})
        print(name, results[name], flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
