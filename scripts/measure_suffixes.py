"""Measures suffix lookup on texts: how often it has proposals, and how often the text goes on as they say.

Prints rows for planner/acceptance/drafters.toml. A text's own next tokens stand for the target's. Rounds go on as a
round of decoding would: by the proposals that match, and one token more.

    python scripts/measure_suffixes.py --model smollm2-135m-instruct.gguf --kind code --ctx 4096 30720 a.py b.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from ridgeplan.kernels.sampling.suffix_lookup import suffix_lookup

DEPTH, MIN_MATCH = 8, 2


def measure(ids: Tensor, context: int, tokens: int) -> tuple[int, int, int, int]:
    """Passes, those with proposals, proposals that were compared and that matched, in `tokens` tokens after context."""
    passes = hits = compared = matched = 0
    place = context
    while place < context + tokens:
        proposed, counts = suffix_lookup(ids[None, :place], torch.tensor([place]).int(), DEPTH, MIN_MATCH)
        following = ids[place : place + DEPTH].tolist()
        equal = 0
        if counts[0]:
            while equal < DEPTH and proposed[0, equal] == following[equal]:
                equal += 1
            hits, compared, matched = hits + 1, compared + min(equal + 1, DEPTH), matched + equal
        passes, place = passes + 1, place + equal + 1
    return passes, hits, compared, matched


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="of the model, as rows have it")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--ctx", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--places", type=int, default=4, help="contexts in each text, spread over it")
    parser.add_argument("--what", default="", help="a description of the texts")
    chosen = parser.parse_args(arguments)
    model = Path(chosen.model)
    of_file = {"gguf_file": model.name} if model.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(model.parent if of_file else model, **of_file)
    texts = [
        torch.tensor(tokenizer(Path(path).read_text(errors="replace"))["input_ids"]).int() for path in chosen.texts
    ]
    for context in chosen.ctx:
        sums = torch.zeros(4, dtype=torch.int64)
        for ids in texts:
            last = len(ids) - context - chosen.tokens - DEPTH
            for place in range(0, last + 1, max(1, last // max(1, chosen.places - 1))) if last >= 0 else ():
                sums += torch.tensor(measure(ids[place:], context, chosen.tokens))
        passes, hits, compared, matched = sums.tolist()
        if not compared:
            continue
        print(
            f'  {{model = "{chosen.name or Path(chosen.model).stem}", context = {context}, hit = {hits / passes:.3f}, '
            f'acceptance = {matched / compared:.3f}, where = "{passes + matched} tokens of {chosen.what}"}},  '
            f"# {(passes + matched) / passes:.2f} tokens a pass"
        )


if __name__ == "__main__":
    main()
