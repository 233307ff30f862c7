"""Drafts greedily for many rounds and compares every token with plain decoding: suffix, head and cascade, ragged rows.

Weights, activations and caches are float32, in which greedy output must be the target's own, token by token. On a GPU
rounds are replays of graphs, and every generation has another set of ragged prompts.

    python scripts/soak_drafters.py soak.json --drafter-head head/ --rounds 20000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.validate.drafter_acceptance import CASCADE, HEAD, SUFFIX, case_plan, named_shape
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.prompts import sample_text

CONTEXT, NEW_TOKENS = 1024, 512


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring; the exit code, 1 for any token that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="folder, GGUF file or hub id; by default the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--drafter-head", default="")
    parser.add_argument("--batch", type=int, default=4, help="ragged prompts of a generation")
    parser.add_argument("--rounds", type=int, default=20000, help="of every drafter")
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
        for case in (SUFFIX, HEAD, CASCADE) if chosen.drafter_head else (SUFFIX, CASCADE):
            plan = case_plan(replace(plain, workload=replace(workload, drafter_head=chosen.drafter_head)), case, 4, 0)
            rounds = tokens = wrong = number = 0
            with shared.engine(plan) as drafting:
                begin = time.monotonic()
                while not number or (rounds < chosen.rounds and time.monotonic() - begin < chosen.seconds):
                    if number not in expected:
                        expected[number] = engine.generate(prompts(number), NEW_TOKENS).tokens
                    drafted = drafting.generate(prompts(number), NEW_TOKENS)
                    wrong += sum(row != other for row, other in zip(drafted.tokens, expected[number], strict=True))
                    rounds, tokens = rounds + drafted.statistics.rounds, tokens + drafted.statistics.generated
                    number += 1
            results[case] = {
                "rounds": rounds, "tokens": tokens, "generations": number, "rows that differ": wrong,
                "tokens per round": drafted.statistics.tokens_per_round, "seconds": time.monotonic() - begin,
            }  # fmt: skip
            chosen.output.write_text(json.dumps(results, indent=1) + "\n")
            print(case, results[case], flush=True)
    return int(any(result["rows that differ"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
