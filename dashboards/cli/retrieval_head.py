"""`ridgeplan distill` and `import-head`: a retrieval head trained on a text, or from an EAGLE-3 checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.options import OutputFile, options
from ridgeplan.dashboards.cli.output import progress, warnings_as_notes

MAX_TEXT_TOKENS = 1 << 22


@click.command(
    epilog=examples(
        "ridgeplan distill model.gguf --text book.txt --output head.safetensors",
        "ridgeplan distill Qwen/Qwen3-8B --text book.txt --output head.safetensors --checkpoint run.safetensors",
        "ridgeplan distill model.gguf --text book.txt --output head.safetensors --by-layer --queries 256",
        "ridgeplan run plan.json --prompt-file notes.txt --retrieval-head head.safetensors",
    )
)
@click.argument("model")
@options(
    click.option("--text", metavar="FILE", required=True, help="UTF-8 text to train on."),
    click.option("--output", type=OutputFile(), required=True, help="Write the head to this file."),
    click.option("--steps", type=int, default=1000, show_default=True, help="Optimizer steps."),
    click.option("--tokens", type=int, default=4096, show_default=True,
                 help="Tokens of a passage: as many as a context has where the head is used."),
    click.option("--batch", type=int, default=1, show_default=True, help="Passages of a step."),
    click.option("--rate", type=float, default=3e-3, show_default=True, help="Learning rate after the warm-up."),
    click.option("--language", type=float, default=1.0, show_default=True,
                 help="Weight of the loss of next tokens, the published one; 0 trains the head alone, in a third of "
                      "the time."),
    click.option("--attention", type=float, default=1.0, show_default=True,
                 help="Weight of the loss of attention to distant tokens; 0 trains as published."),
    click.option("--queries", type=int, default=64, show_default=True,
                 help="Tokens of a passage whose attention is learned."),
    click.option("--by-layer", is_flag=True,
                 help="Choose for each KV head of each layer, not once for all layers; not published."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the passages."),
    click.option("--checkpoint", type=OutputFile(), help="Keep checkpoints here, and continue from one."),
    click.option("--every", type=click.IntRange(1), default=100, show_default=True, help="Steps between checkpoints."),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: a GPU, if there is one]"),
)  # fmt: skip
def distill(
    model: str, text: str, output: Path, checkpoint: Path | None, every: int, device: str | None, **sizes: Any
) -> None:
    """Train a retrieval head for MODEL, a folder, a GGUF file or a hub id.

    A language model of one layer learns the output distribution of MODEL on the text, and what its layers attend to
    beyond the latest tokens; its queries and keys are kept.
    Plans that choose tokens by a head take the file: --retrieval-head of `run`, `quality` and `study retrieval`.
    """
    # Importing torch takes seconds.
    from ridgeplan.runtime.retrieval.distill import Training
    from ridgeplan.runtime.retrieval.distill import distill as train
    from ridgeplan.runtime.retrieval.head import save_head
    from ridgeplan.validate.prompts import read_prompt

    if checkpoint is not None and checkpoint.resolve() == output.resolve():
        raise click.UsageError(f"--checkpoint is {str(checkpoint)!r}, as --output is; allowed: another file")
    training, content = Training(**sizes), read_prompt(text)
    with warnings_as_notes(), progress() as bars:
        bar = bars.add_task("loading", total=training.steps)

        def show(step: int, loss: float) -> None:
            bars.update(bar, description=f"loss {loss:.3f}", completed=step)

        found = train(
            model, partial(_tokens, text=content), training, show, device=device, checkpoint=checkpoint, every=every
        )
    save_head(output, found.head)
    click.echo(f"{found.steps} steps, loss {found.loss:.3f} nats a token over the last tenth; wrote {output}")


def _tokens(source: str, text: str) -> list[int]:
    from ridgeplan.runtime.model.checkpoint import load_tokenizer
    from ridgeplan.validate.prompts import first_tokens

    return first_tokens(load_tokenizer(source), MAX_TEXT_TOKENS, text)


@click.command(
    epilog=examples(
        "ridgeplan import-head eagle3/ --model meta-llama/Llama-3.1-8B-Instruct --output head.safetensors",
        "ridgeplan import-head eagle3/ --model model.gguf --inputs full --output full.safetensors",
        "ridgeplan study retrieval --text book.txt --retrieval-head full.safetensors",
    )
)
@click.argument("checkpoint")
@options(
    click.option("--model", required=True, help="The checkpoint's target: a folder, a GGUF file or a hub id."),
    click.option("--output", type=OutputFile(), required=True, help="Write the head to this file."),
    click.option("--inputs", type=click.Choice(["embedding", "full"]), default="embedding", show_default=True,
                 help="Keep the embedding's half of the projections, or the target's features too."),
)  # fmt: skip
def import_head(checkpoint: str, model: str, output: Path, inputs: str) -> None:
    """Make a retrieval head of the EAGLE-3 model in CHECKPOINT, a folder or a safetensors file.

    "full" heads need features that do not exist before the target has run: they can be studied, not executed.
    """
    # Importing torch takes seconds.
    from ridgeplan.runtime.model.checkpoint import load_config, load_tensor
    from ridgeplan.runtime.model.config import decoder_config
    from ridgeplan.runtime.model.source import fetch_weights, model_source
    from ridgeplan.runtime.retrieval.eagle3 import import_eagle3
    from ridgeplan.runtime.retrieval.head import probe_of, save_head

    source = model_source(model)
    fetch_weights(model)
    shape = decoder_config(load_config(source), source).shape
    head = import_eagle3(checkpoint, shape, probe_of(load_tensor(source, "model.embed_tokens.weight")), inputs)
    save_head(output, head)
    click.echo(f"{head.config.q_heads} query heads, {head.config.kv_heads} KV heads; wrote {output}")
