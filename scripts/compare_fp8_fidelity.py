"""Fidelity of FP8 weights and KV as vLLM rounds them, beside that of this package's 8-bit formats, on the same text.

FP8 is emulated in float32 with transformers: weights of all projections in E4M3 with a scale per tensor (vLLM 0.24,
`--quantization fp8`) or per output channel (`fp8_per_channel`), their inputs with a scale per token, keys behind RoPE
and values in E4M3 with a scale of 1 (`--kv-cache-dtype fp8`). Queries and probabilities, which vLLM rounds too, are
not. Fidelity is mean sum(min(p, q)) of next-token distributions p in full precision and q, after each token of the
continuations.

    python scripts/compare_fp8_fidelity.py --text news_from_nowhere.txt --output fp8.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from ridgeplan.planner import preset
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.runtime import load
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.validate.prompts import prompt_batch, read_prompt
from ridgeplan.validate.quality.fidelity import ForcedPassage, next_logits, overlap

PLANS = ("int8-weights", "int8", "int8-weights-int8", "int4-weights-int8")
FP8 = torch.float8_e4m3fn
TOP = torch.finfo(FP8).max


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    """x as E4M3 numbers times `scale`, in x's dtype."""
    return (x / scale).clamp(-TOP, TOP).to(FP8).to(x.dtype) * scale


class Fp8Cache(DynamicCache):
    """A cache that gives keys and values back as E4M3 holds them."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As of `DynamicCache`."""
        return super().update(rounded(key_states, 1.0), rounded(value_states, 1.0), layer_idx, *args, **kwargs)


def in_fp8(model: nn.Module, *, per_channel: bool) -> None:
    """Rounds the projections of a model in place, with a scale per output channel or per tensor, and their inputs."""

    def per_token(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].abs().amax(-1, keepdim=True).clamp_min(1e-12) / TOP
        return rounded(inputs[0], scale), *inputs[1:]

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and not name.endswith("lm_head"):
            magnitudes = layer.weight.data.abs()
            scale = magnitudes.amax(-1, keepdim=True) if per_channel else magnitudes.max()
            layer.weight.data = rounded(layer.weight.data, scale / TOP)
            layer.register_forward_pre_hook(per_token)


@torch.inference_mode()
def logits(model: Any, passages: Sequence[ForcedPassage], cache: type[DynamicCache]) -> list[Tensor]:
    """Logits [tokens, vocab] after each token of the continuations but their last."""
    results = []
    for passage in passages:
        held, count = cache(), len(passage.continuation) - 1
        model(torch.tensor([passage.prompt]), past_key_values=held, logits_to_keep=1)
        tokens = torch.tensor([passage.continuation[:count]])
        results.append(model(tokens, past_key_values=held).logits[0])
    return results


def fidelities(source: str, passages: Sequence[ForcedPassage], plans: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Of FP8 KV, of FP8 weights without and with it, and of plans."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    exact = logits(model, passages, DynamicCache)
    yield "fp8 KV", mean_overlap(exact, logits(model, passages, Fp8Cache))
    for weights, per_channel in (("fp8 weights", False), ("fp8_per_channel weights", True)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        in_fp8(model, per_channel=per_channel)
        for name, cache in ((weights, DynamicCache), (f"{weights} and KV", Fp8Cache)):
            yield name, mean_overlap(exact, logits(model, passages, cache))
    del model
    context = len(passages[0].prompt)
    new_tokens = len(passages[0].continuation)
    for name in plans:
        plan = preset(name, Workload("SmolLM2-135M", "cpu", context, new_tokens, len(passages)))
        with closing(load(plan, source, device="cpu")) as engine:
            yield name, mean_overlap(exact, list(next_logits(engine, passages)))


def mean_overlap(exact: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The mean over passages."""
    return sum(overlap(*pair) for pair in zip(exact, others, strict=True)) / len(exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Folder, GGUF file or hub id.  [default: the embedded SmolLM2]")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    source = model_source(options.model or "SmolLM2-135M")
    batch = prompt_batch(load_tokenizer(source), options.ctx + options.tokens + 1, options.passages,
                         read_prompt(options.text))  # fmt: skip
    passages = [ForcedPassage.split(ids, options.tokens) for ids in batch]
    results, rows = ResultsFile.at(options.output), []
    for name, fidelity in fidelities(source, passages, options.plans):
        rows.append({"format": name, "fidelity": fidelity})
        print(f"{name}: {fidelity:.4f}", flush=True)
        tokens = {"context": options.ctx, "tokens": options.tokens, "passages": options.passages}
        results.save(f"{Path(source).name} on {options.text.name}", {**tokens, "rows": rows})


if __name__ == "__main__":
    main()
