r"""Times plans with drafters on a GPU beside the best plan without: code, documentation and prose, four workloads.

For every kind of text and workload it plans Llama-3.1-8B with and without drafters, and runs `ridgeplan bench suite`
with a small real model inflated to that shape: acceptance is real, time is the large model's. One command makes the
results file, which has the suite's documents by kind of text and workload:

    python scripts/measure_drafters.py drafters_h200.json --code code.py --docs manual.md --prose novel.txt \
        --drafter-head head/

A head of the small model (`ridgeplan distill --drafter --draft-vocab 32000`) is placed in the large shape as the small
model is: its products, its cache and its 32,000 draft tokens have the sizes of a head for Llama-3.1-8B, and its
proposals are the small head's (`Inflater.draft_head` in validate/decode_bench/inflation.py).

The texts need 130k tokens for all workloads; shorter ones leave the long workloads out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ridgeplan import planner
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Plan, Speculation, TextKind, Workload

RUN = "from ridgeplan.dashboards.cli import main; main()"
SHAPE = "Llama-3.1-8B"
WORKLOADS = ((4096, 1), (32768, 1), (32768, 8), (122880, 1))
NEW_TOKENS, DEPTH = 512, 4


def plans(context: int, batch: int, kind: str, gpu: str, head: str, folder: Path) -> list[Path]:
    """Files of the best plan with any drafter, its adaptive form, those of each drafter, and the best plan without."""
    ask = {"batch": batch, "new_tokens": NEW_TOKENS, "yarn": True}
    best = planner.recommend(SHAPE, gpu, context, text=kind, drafter_head=head or None, **ask)
    cascade = planner.estimate(SHAPE, gpu, context, preset="cascade", text=kind, **ask)
    without = planner.recommend(SHAPE, gpu, context, **ask).plan
    chosen = {"best": best.plan, "adaptive": best.adaptive, "suffix cascade": cascade.plan, "without": without}
    for name, passes in (("head", 0), ("head cascade", 1)) if head else ():
        chosen[name] = with_head(best.plan.workload, cascade.plan, passes, head_settings(head).window)
    paths = []
    for name, plan in chosen.items():
        if plan is not None:
            paths.append(folder / f"{kind}_{context}x{batch}_{name.replace(' ', '_')}.json")
            paths[-1].write_text(plan.to_json())
    return paths


def with_head(workload: Workload, cascade: Plan, passes: int, window: int) -> Plan:
    """The cascade's formats with a head of depth 4: to the target, or to `passes` passes of the self-draft."""
    drafter = Drafter(DrafterKind.HEAD, DEPTH, passes, window=window)
    if passes:
        speculation = replace(cascade.speculation, gamma=DEPTH, drafter=drafter)
        return replace(cascade, workload=workload, speculation=speculation)
    weights = replace(cascade.weights, draft_bits=cascade.weights.target_bits)
    return replace(cascade, workload=workload, weights=weights, speculation=Speculation(DEPTH, drafter=drafter))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", help="small model that computes the tokens")
    parser.add_argument("--drafter-head", default="", help="folder of its draft head")
    parser.add_argument("--workloads", nargs="*", help="such as 4096x1, of those that are known")
    for kind in TextKind:
        parser.add_argument(f"--{kind}", type=Path)
    chosen, document, failed = parser.parse_args(arguments), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in TextKind:
            text = getattr(chosen, kind)
            for context, batch in WORKLOADS if text else ():
                if chosen.workloads and f"{context}x{batch}" not in chosen.workloads:
                    continue
                result = Path(folder) / "rows.json"
                files = plans(context, batch, kind, chosen.gpu, chosen.drafter_head, Path(folder))
                command = [sys.executable, "-c", RUN, "bench", "suite", "--model-shape", SHAPE]
                command += ["--prompt-file", str(text), "--new-tokens", str(NEW_TOKENS), "--output", str(result)]
                command += ["--model", chosen.model] if chosen.model else []
                command += [word for path in files for word in ("--plan", str(path))]
                if subprocess.run(command, check=False).returncode == 0:
                    document[f"{kind} {context}x{batch}"] = json.loads(result.read_text())
                    chosen.output.write_text(json.dumps(document, indent=1) + "\n")
                else:
                    failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
