"""`ridgeplan distill` and `import-head`: a retrieval head trained on a text, or from an EAGLE-3 checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import model_folder
from ridgeplan.dashboards.cli.output import echo, progress
from ridgeplan.planner.acceptance.speculation_profile import NAME as PROFILE

MAX_TEXT_TOKENS = 1 << 22


class HeadOutput(opt.OutputFile):
    """A retrieval head's file, or a draft head's folder."""

    folders = True


@command()
@click.argument("model")
@click.option("--text", metavar="FILE", required=True, help="UTF-8 text to train on.")
@click.option("--output", type=HeadOutput(), required=True, help="Write the head to this file, or folder.")
@click.option("--drafter", is_flag=True, help="Train a draft head in EAGLE-3's form instead, and save its folder.")
@click.option("--draft-vocab", type=int, default=8192, help="Most frequent tokens, which a draft head predicts.")
@click.option("--unroll", type=int, default=5, help="Steps that a draft head is unrolled: training-time test.")
@click.option("--window", type=int, default=0, help="Latest tokens that a draft head reads; 0 for all.")
@click.option(
    "--own-tokens", type=int, help="Tokens that MODEL writes itself for a draft head.  [default: 65536, 0 on a CPU]"
)
@click.option("--minutes", type=float, default=0.0, help="End a draft head's training after this time; 0 for no limit.")
@click.option("--steps", type=int, default=1000, help="Optimizer steps.")
@click.option("--tokens", type=int, help="Tokens per passage, as in its use.  [default: 4096; 512 of a draft head]")
@click.option("--batch", type=int, default=1, help="Passages per step.")
@click.option("--rate", type=float, help="Learning rate after the warm-up.  [default: 3e-3; 1e-3 of a draft head]")
@click.option(
    "--language", type=float, default=1.0,
    help="Weight of the published next-token loss; 0 trains only the head, in a third of the time.",
)  # fmt: skip
@click.option(
    "--attention", type=float, default=1.0,
    help="Weight of the loss on attention to distant tokens; 0 trains as published.",
)  # fmt: skip
@click.option("--queries", type=int, default=64, help="Tokens per passage whose attention is learned.")
@click.option(
    "--by-layer", is_flag=True, help="Select per layer and KV head instead of once for all layers; not published."
)
@click.option("--seed", type=int, default=0, help="Seed of the passages.")
@click.option("--checkpoint", type=opt.OutputFile(), help="Save checkpoints to this file, and continue from one.")
@click.option("--every", type=click.IntRange(1), default=100, help="Steps between checkpoints.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Device to train on.  [default: a GPU, if there is one]"
)
def distill(
    model: str, text: str, output: Path, checkpoint: Path | None, every: int, device: str | None, drafter: bool,
    draft_vocab: int, unroll: int, window: int, own_tokens: int | None, minutes: float, tokens: int | None,
    rate: float | None, **sizes: Any,
) -> None:  # fmt: skip
    """Train a retrieval head for MODEL, a folder, a GGUF file or a hub id.

    A one-layer language model learns the output distribution of MODEL on the text and the attention of its layers to
    distant tokens. Its query and key projections become the head. `run`, `quality` and `study retrieval` take the file
    as --retrieval-head, for plans that select tokens with a head.

    With --drafter, a head learns to draft instead: one layer on the hidden states of MODEL, as EAGLE-3 has it. `plan`
    and `run` take its folder as --drafter-head. Only the options from --drafter to --rate, --seed and --device apply.

    Examples:
      ridgeplan distill model.gguf --text book.txt --output head.safetensors
      ridgeplan distill model.gguf --text book.txt --drafter --output head/ --steps 2000 --batch 4 --minutes 10
      ridgeplan distill Qwen/Qwen3-8B --text book.txt --output head.safetensors --checkpoint run.safetensors
      ridgeplan distill model.gguf --text book.txt --output head.safetensors --by-layer --queries 256
      ridgeplan run plan.json --prompt-file notes.txt --retrieval-head head.safetensors
    """
    # Importing torch takes seconds.
    from ridgeplan.runtime.retrieval.distill import Training
    from ridgeplan.runtime.retrieval.distill import distill as train
    from ridgeplan.runtime.retrieval.head import save_head
    from ridgeplan.validate.prompts import read_prompt

    if checkpoint is not None and checkpoint.resolve() == output.resolve():
        raise click.UsageError(f"--checkpoint is {str(checkpoint)!r}, as --output is; allowed: another file")
    if output.is_file() if drafter else output.is_dir():
        allowed = "a folder" if drafter else "a file, or a folder with --drafter"
        raise click.UsageError(f"--output is {str(output)!r}; allowed: {allowed}")
    content = read_prompt(text)
    if drafter:
        kept = {name: sizes[name] for name in ("steps", "batch", "seed")}
        kept |= {"tokens": 512 if tokens is None else tokens, "rate": 1e-3 if rate is None else rate}
        kept |= {"draft_vocab": draft_vocab, "unroll": unroll, "window": window, "own_tokens": own_tokens}
        _distill_drafter(model, content, output, device, {**kept, "seconds": 60 * minutes})
        return
    training = Training(**sizes, tokens=4096 if tokens is None else tokens, rate=3e-3 if rate is None else rate)
    with progress("loading") as on_progress:

        def show(step: int, loss: float) -> None:
            on_progress(f"loss {loss:.3f}", step, training.steps)

        result = train(
            model, partial(_tokens, text=content), training, show, device=device, checkpoint=checkpoint, every=every
        )
    save_head(output, result.head)
    echo(f"{result.steps} steps, loss {result.loss:.3f} nats per token over the last tenth; saved to {output}")


def _distill_drafter(model: str, content: str, output: Path, device: str | None, sizes: dict[str, Any]) -> None:
    import torch

    from ridgeplan.runtime.speculation.train_head import HeadTraining, train_head

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: size for name, size in sizes.items() if size is not None}
    training = HeadTraining(**{"own_tokens": (1 << 16) * (place == "cuda")} | given)
    with progress("loading") as on_progress:

        def show(step: int, loss: float) -> None:
            on_progress(f"loss {loss:.3f}" if loss else "writing", step, training.steps)

        result = train_head(model, partial(_tokens, text=content), training, show, place)
    result.checkpoint.save(output)
    (output / PROFILE).unlink(missing_ok=True)  # of the head that this one replaces
    echo(f"{result.steps} steps, loss {result.loss:.3f} nats per token over the last tenth; saved to {output}")


def _tokens(source: str, text: str) -> list[int]:
    from ridgeplan.runtime.model.checkpoint import load_tokenizer
    from ridgeplan.validate.prompts import first_tokens

    return first_tokens(load_tokenizer(source), MAX_TEXT_TOKENS, text)


@command()
@click.argument("checkpoint")
@click.option("--model", required=True, help="The checkpoint's target: a folder, a GGUF file or a hub id.")
@click.option("--output", type=opt.OutputFile(), required=True, help="Write the head to this file.")
@click.option(
    "--inputs", type=click.Choice(["embedding", "full"]), default="embedding",
    help="Inputs of the projections to keep: the embedding, or also the target's features.",
)  # fmt: skip
def import_head(checkpoint: str, model: str, output: Path, inputs: str) -> None:
    """Convert the EAGLE-3 model in CHECKPOINT, a folder or a safetensors file, to a retrieval head.

    Heads with "full" inputs need features that exist only after the target has run. They can be studied, not executed.

    Examples:
      ridgeplan import-head eagle3/ --model meta-llama/Llama-3.1-8B-Instruct --output head.safetensors
      ridgeplan import-head eagle3/ --model model.gguf --inputs full --output full.safetensors
      ridgeplan study retrieval --text book.txt --retrieval-head full.safetensors
    """
    # Importing torch takes seconds.
    from ridgeplan.runtime.model.checkpoint import load_config, load_tensor
    from ridgeplan.runtime.model.config import decoder_config
    from ridgeplan.runtime.model.source import fetch_weights, model_name
    from ridgeplan.runtime.retrieval.eagle3 import import_eagle3
    from ridgeplan.runtime.retrieval.head import probe_of, save_head

    source = model_folder(model)
    fetch_weights(model)
    shape = replace(decoder_config(load_config(source), source).shape, name=model_name(model))
    head = import_eagle3(checkpoint, shape, probe_of(load_tensor(source, "model.embed_tokens.weight")), inputs)
    save_head(output, head)
    echo(f"{head.config.q_heads} query heads, {head.config.kv_heads} KV heads; saved to {output}")
