"""Puts aiconfigurator's decode steps and prompts beside ours, and writes them to scripts/aiconfigurator.toml.

    python -m venv aic && aic/bin/pip install aiconfigurator
    python scripts/compare_aiconfigurator.py aic/bin/aiconfigurator

aiconfigurator runs in an environment of its own; it is no dependency. Its static generation of 256 tokens behind a
prompt is compared with our step halfway through them, and its static prompt with ours, both for vLLM 0.24.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import starmap

from published_parallel import STEPS, StepCase, prompt_ms, step_ms

PROMPT, NEW_TOKENS = 8192, 256
NAMES = {
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
}
FP8 = {"Llama-3.1-70B": "nvidia/Llama-3.1-70B-Instruct-FP8", "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B-FP8"}
SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm"}
# Model, GPU, weights, tp, pp, dp, whole experts, batch of all ranks.
CASES = tuple(starmap(StepCase, (
    ("Llama-3.1-8B", "h200", 16, 1, 1, 1, False, 1), ("Llama-3.1-8B", "h200", 16, 1, 1, 1, False, 16),
    *(("Llama-3.1-70B", "h200", 16, tp, 1, 1, False, batch) for tp in (2, 4, 8) for batch in (1, 16, 64)),
    *(("Llama-3.1-70B", "h100", 16, 4, 1, 1, False, batch) for batch in (1, 16)),
    *(("Llama-3.1-70B", "h200", 8, tp, 1, 1, False, batch) for tp in (2, 4) for batch in (1, 32)),
    *(("Llama-3.1-70B", "h200", 16, 4, 2, 1, False, batch) for batch in (1, 16)),
    *(("Qwen3-235B-A22B", "h200", 16, 8, 1, 1, False, batch) for batch in (1, 16, 64)),
    ("Qwen3-235B-A22B", "h200", 16, 8, 1, 1, True, 16),
    *(("Qwen3-235B-A22B", "h200", 8, 4, 1, 1, False, batch) for batch in (1, 16, 64)),
    *(("DeepSeek-V3", "h200", 16, 8, 1, 1, False, batch) for batch in (1, 16, 64)),
    ("DeepSeek-V3", "h200", 16, 8, 1, 1, True, 16), ("DeepSeek-V3", "h200", 16, 1, 1, 8, True, 64),
)))  # fmt: skip


def their_ms(command: str, case: StepCase, *, prompt: bool = False) -> float:
    """Milliseconds per token, or of a prompt, that aiconfigurator estimates. Raises ValueError where it prints none."""
    model = FP8[case.model] if case.weights == 8 else NAMES[case.model]
    ranks = case.tensor * case.data
    arguments = {
        "model-path": model, "system": SYSTEMS[case.gpu], "backend": "vllm",
        "estimate-mode": "static_ctx" if prompt else "static_gen",
        "tp-size": case.tensor, "pp-size": case.pipeline, "attention-dp-size": case.data, "isl": PROMPT,
        "osl": NEW_TOKENS, "batch-size": case.batch // case.data, "log-level": "ERROR",
    }  # fmt: skip
    if case.model in ("Qwen3-235B-A22B", "DeepSeek-V3"):
        arguments |= {"moe-ep-size": ranks if case.expert else 1, "moe-tp-size": 1 if case.expert else ranks}
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    run = subprocess.run([command, "cli", "estimate", *words], capture_output=True, text=True, check=False)
    name = "TTFT" if prompt else "TPOT"
    match = re.search(rf"{name}:\s+([\d.]+) ms", run.stdout)
    if match is None:
        raise ValueError(f"no {name} for {case}: {(run.stdout + run.stderr)[-300:]}")
    return float(match[1])


def table(name: str, case: StepCase, values: dict[str, float]) -> str:
    """A table of TOML."""
    fields = (f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}".replace("'", '"')
              for key, value in {**vars(case), **values}.items())  # fmt: skip
    return f"[[{name}]]\n" + "\n".join(fields) + "\n"


def main() -> None:
    """Writes every case, with what aiconfigurator says, and prints our difference."""
    command = sys.argv[1]
    version = subprocess.run([command, "version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    lines = [f"# Written by scripts/compare_aiconfigurator.py: {version}.\n"]
    for case in CASES:
        ms = their_ms(command, case)
        lines.append(table("steps", case, {"context": PROMPT, "new_tokens": NEW_TOKENS, "tpot_ms": ms}))
        print(case, f"{ms:.2f} ms, ours {step_ms(case, PROMPT, NEW_TOKENS) / ms - 1:+.1%}", flush=True)
    for case in dict.fromkeys(replace(case, batch=1) for case in CASES if case.pipeline == case.data == 1):
        ms = their_ms(command, case, prompt=True)
        lines.append(table("prompts", case, {"tokens": PROMPT, "ttft_ms": ms}))
        print("prompt", case, f"{ms:.2f} ms, ours {prompt_ms(case, PROMPT) / ms - 1:+.1%}", flush=True)
    STEPS.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
