r"""Measures suffix lookup on texts: how often it has proposals, and how often the text goes on as they say.

Prints rows for planner/acceptance/drafters.toml. A text's own next tokens stand for the target's. Rounds go on as a
round of decoding would: by the proposals that match, and one token more. A text is a file, a folder (its files in
order) or a Python package; `+` joins several to one. The rows of SmolLM2 are those of

    python scripts/measure_suffixes.py asyncio+email+http+unittest --kind code --places 16 --model MODEL.gguf \
        --ctx 4096 15360 30720 61440 122880
    python scripts/measure_suffixes.py /usr/share/doc/nodejs/api --kind docs --places 16 --model MODEL.gguf \
        --ctx 4096 15360 30720 61440 122880
    python scripts/measure_suffixes.py american_adventures.txt news_from_nowhere.txt --kind prose --model MODEL.gguf \
        --ctx 4096 15360 30720 61440 122880

on Python 3.11.7, and on the Markdown files of Node.js 20's documentation.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from ridgeplan.kernels.sampling.suffix_lookup import suffix_lookup

DEPTH, MIN_MATCH = 8, 2
SUFFIXES = (".py", ".md")  # of the files of a folder that make a text


def read_text(name: str) -> str:
    """A file, the files of a folder or of a Python package in order, or several of these with `+` between them."""
    parts = []
    for part in name.split("+"):
        path = Path(part)
        if not path.exists():
            spec = importlib.util.find_spec(part)
            if spec is None or spec.origin is None:
                raise SystemExit(f"{part!r} is not there; allowed: a file, a folder or a Python package")
            path = Path(spec.origin).parent
        files = sorted(each for each in path.glob("*") if each.suffix in SUFFIXES) if path.is_dir() else [path]
        parts += [each.read_text(errors="replace") for each in files]
    return "".join(parts)


def measure(ids: Tensor, context: int, tokens: int) -> tuple[int, Tensor, Tensor]:
    """Passes in `tokens` tokens after the context, and proposals compared and matched by position: [DEPTH]."""
    passes, place = 0, context
    compared, matched = torch.zeros(2, DEPTH, dtype=torch.int64)
    while place < context + tokens:
        proposed, counts = suffix_lookup(ids[None, :place], torch.tensor([place]).int(), DEPTH, MIN_MATCH)
        following = ids[place : place + DEPTH].tolist()
        equal = 0
        if counts[0]:
            while equal < DEPTH and proposed[0, equal] == following[equal]:
                equal += 1
            compared[: equal + 1] += 1
            matched[:equal] += 1
        passes, place = passes + 1, place + equal + 1
    return passes, compared, matched


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
    texts = [torch.tensor(tokenizer(read_text(name))["input_ids"]).int() for name in chosen.texts]
    for context in chosen.ctx:
        passes = 0
        compared, matched = torch.zeros(2, DEPTH, dtype=torch.int64)
        for ids in texts:
            last = len(ids) - context - chosen.tokens - DEPTH
            for place in range(0, last + 1, max(1, last // max(1, chosen.places - 1))) if last >= 0 else ():
                counts = measure(ids[place:], context, chosen.tokens)
                passes, compared, matched = passes + counts[0], compared + counts[1], matched + counts[2]
        if not passes:
            continue
        rates = ", ".join(f"{rate:.3f}" for rate in (matched / compared.clamp(min=1)).tolist())
        print(
            f'  {{model = "{chosen.name or model.stem}", context = {context}, '
            f"hit = {int(compared[0]) / passes:.3f}, acceptance = {int(matched.sum()) / int(compared.sum()):.3f}, "
            f"acceptance_at = [{rates}]}},  # {passes} passes, {1 + int(matched.sum()) / passes:.2f} tokens a pass",
            flush=True,
        )


if __name__ == "__main__":
    main()
