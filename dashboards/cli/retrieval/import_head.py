"""`ridgeplan import-head`: a retrieval head from an EAGLE-3 checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import OutputFile, options


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
    from ridgeplan.runtime.model.source import fetch_weights, model_source
    from ridgeplan.runtime.model_config import decoder_config
    from ridgeplan.runtime.retrieval.eagle3 import import_eagle3
    from ridgeplan.runtime.retrieval.file import save_head
    from ridgeplan.runtime.retrieval.head import probe_of

    source = model_source(model)
    fetch_weights(model)
    shape = decoder_config(load_config(source), source).shape
    head = import_eagle3(checkpoint, shape, probe_of(load_tensor(source, "model.embed_tokens.weight")), inputs)
    save_head(output, head)
    click.echo(f"{head.config.q_heads} query heads, {head.config.kv_heads} KV heads; wrote {output}")
