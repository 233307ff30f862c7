"""Drafts greedily for many rounds and compares every token with plain decoding: suffix, head and cascade, ragged rows.

Weights, activations and caches are float32, in which greedy output must be the target's own, token by token. On a GPU
rounds are replays of graphs, and every generation has another set of ragged prompts. A row may differ from where the
target's logits of both tokens are equal but for rounding, which depends on how many queries a pass has: it is a tie.

    python scripts/soak_drafters.py soak.json --drafter-head head/ --rounds 20000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gpu_turns import gpu_turn

from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.files import write_json
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.runtime.engine import Engine
from ridgeplan.validate.drafter_acceptance import CASCADE, HEAD, SUFFIX, case_plan, named_shape
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import measured_here
from ridgeplan.validate.prompts import sample_text

CONTEXT, NEW_TOKENS = 1024, 512
ROUNDING = 1e-3  # of float32 logits


def gap(engine: Engine, prompt: list[int], expected: list[int], drafted: list[int]) -> float:
    """Of the target's logits where two continuations of a prompt differ first."""
    place = next(at for at, pair in enumerate(zip(expected, drafted, strict=True)) if pair[0] != pair[1])
    logits = engine.teacher_forced_logits([prompt], [expected[:place]])[0, -1]
    return float(logits[expected[place]] - logits[drafted[place]])


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring; the exit code, 1 for any token that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="folder, GGUF file or hub id; by default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--drafter-head", default="")
    parser.add_argument("--batch", type=int, default=4, help="ragged prompts of a generation")
    parser.add_argument("--rounds", type=int, default=20000, help="of all drafters together")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which each drafter ends")
    chosen = parser.parse_args(arguments)
    source, results = embedded_or(chosen.model), {}
    shared = SharedWeights(source, dtype=torch.float32)
    workload = Workload(named_shape(source).name, "this machine", CONTEXT, NEW_TOKENS, chosen.batch)
    plain = Plan(workload)
    with shared.engine(plain) as engine:
        ids = engine.tokenizer(sample_text())["input_ids"]

        def prompts(number: int) -> list[list[int]]:
            generator = torch.Generator().manual_seed(number)
            lengths = torch.randint(1, CONTEXT, (chosen.batch,), generator=generator).tolist()
            starts = torch.randint(len(ids) - CONTEXT, (chosen.batch,), generator=generator).tolist()
            return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]

        expected: dict[int, list[list[int]]] = {}
        cases = (SUFFIX, HEAD, CASCADE) if chosen.drafter_head else (SUFFIX, CASCADE)
        for case in cases:
            plan = case_plan(replace(plain, workload=replace(workload, drafter_head=chosen.drafter_head)), case, 4, 0)
            rounds = tokens = number = 0
            gaps: list[float] = []
            held: list[int] = []  # bytes on the GPU after each generation
            with shared.engine(plan) as drafting:
                begin = time.monotonic()
                while not number or (rounds * len(cases) < chosen.rounds and time.monotonic() - begin < chosen.seconds):
                    with gpu_turn(timed=False):
                        if number not in expected:
                            expected[number] = engine.generate(prompts(number), NEW_TOKENS).tokens
                        drafted = drafting.generate(prompts(number), NEW_TOKENS)
                        rows = zip(prompts(number), expected[number], drafted.tokens, strict=True)
                        gaps += [gap(engine, *row) for row in rows if row[1] != row[2]]
                    rounds, tokens = rounds + drafted.statistics.rounds, tokens + drafted.statistics.generated
                    number += 1
                    held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            results[case] = {
                "rounds": rounds, "tokens": tokens, "generations": number,
                "rows that differ": sum(abs(each) > ROUNDING for each in gaps), "gaps": gaps,
                "memory growth bytes": held[-1] - held[0],
                "tokens per round": drafted.statistics.tokens_per_round, "seconds": time.monotonic() - begin,
            }  # fmt: skip
            write_json(chosen.output, {**measured_here(), **results})
            print(case, results[case], flush=True)
    return int(any(result["rows that differ"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
