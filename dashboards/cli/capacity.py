"""`ridgeplan capacity`: simulated traffic on one or more GPUs, and the GPUs that a rate of requests needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_answer, print_notes, print_table, wrapped, write_page
from ridgeplan.dashboards.cli.table_file import write_table
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.queries.cost import LatencyLimits
from ridgeplan.planner.traffic.requests import LENGTHS, parse_lengths, parse_rates
from ridgeplan.planner.traffic.serving import DEFAULT_PRESET, LoadRow, ServingCapacity, Traffic, serving_capacity
from ridgeplan.roofline.catalog.parallel import SINGLE

LENGTH, RATES = opt.Quantity("lengths", parse_lengths), opt.Quantity("rates", parse_rates)
BACKENDS = ("vllm", "sglang", "ridgeplan")
COLUMNS = ("rate", "GPUs", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "tok/s/GPU", "goodput", "KV", "")


@command()
@click.argument("model")
@opt.gpu
@click.option("--rate", "rates", type=RATES, default=(), help="Requests per second: 4/s, 240/min, or several: 1,2,4/s.")
@click.option(*opt.CTX, "isl", type=LENGTH, help=f"Prompt lengths: {LENGTHS}.  [default: 8k]")
@click.option(*opt.NEW_TOKENS, "osl", type=LENGTH, help="Output lengths, in the same way.  [default: 512]")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Requests of a trace instead, at its "
              "own rate without --rate: Azure's .csv or Mooncake's .jsonl.")  # fmt: skip
@click.option("--ttft-p99", type=opt.TIME, help="Limit on the 99th percentile of TTFT, such as 2s.")
@click.option("--tpot-p99", type=opt.TIME, help="Limit on the 99th percentile of TPOT, such as 30ms.")
@click.option("--replicas", type=int, help="Copies of the model, each on a GPU, or on as many as its degrees of "
              "parallelism take.  [default: the fewest within the limits]")  # fmt: skip
@click.option("--prefill-replicas", type=int, help="Copies that process prompts alone, beside --replicas that decode.")
@click.option("--backend", type=click.Choice(BACKENDS), default="vllm", help="Engine whose steps are simulated.")
@click.option("--preset", default=DEFAULT_PRESET, help="The plan that every GPU runs.")
@click.option("--gamma", type=int, help="Drafts per round.  [default: the preset's fastest at batch 1]")
@click.option("--price", type=float, help="Dollars per GPU-hour.  [default: the catalog's, if it has one]")
@click.option("--watts", type=float, help="Power of a busy GPU.  [default: as measured, or else the board's limit]")
@opt.parallel
@click.option("--requests", type=int, default=Traffic.requests, help="Requests to simulate at each rate.")
@click.option("--seed", type=int, default=Traffic.seed, help="Seed of arrivals, lengths and acceptance.")
@click.option("--burstiness", type=float, default=Traffic.burstiness, help="Shape of the gamma distribution of gaps "
              "between arrivals: 1 is a Poisson process, less is burstier.")  # fmt: skip
@click.option("--prefix-share", type=float, default=Traffic.prefix_share, help="Share of prompts in the prefix cache.")
@click.option("--max-num-batched-tokens", "batched_tokens", type=opt.POSITIVE_TOKENS,
              help="Tokens of a step.  [default: vLLM's]")  # fmt: skip
@click.option("--max-num-seqs", type=int, help="Sequences that run together.  [default: vLLM's, or 256]")
@opt.engine_profile
@opt.memory_utilization
@opt.memory_limit
@opt.profile_file
@opt.acceptance_file
@click.option("-o", "--output", type=opt.TABLE_OR_PAGE,
              help="Write the table or its figure to this file: .csv, .md, .json, .png, .html.")  # fmt: skip
@opt.as_json
def capacity(
    model: str, gpu: str, rates: Sequence[float], isl: Any, osl: Any, trace: Path | None, ttft_p99: float | None,
    tpot_p99: float | None, replicas: int | None, prefill_replicas: int | None, preset: str, gamma: int | None,
    price: float | None, watts: float | None, requests: int, seed: int, burstiness: float, prefix_share: float,
    batched_tokens: int | None, max_num_seqs: int | None, output: Path | None, as_json: bool, **search: Any,
) -> None:  # fmt: skip
    """Simulate requests to MODEL that arrive over time, and find how many GPUs they need.

    Every step of continuous batching is simulated: chunked prefill beside decodes, KV blocks, preemption, prefix cache
    and speculation. Step times are the predictions of the other commands. TTFT includes queueing; TPOT is the mean of a
    request. GPUs take requests in turn.

    Examples:
      ridgeplan capacity Llama-3.1-8B --gpu h200 --rate 4/s --isl lognormal:8k --ttft-p99 2s --tpot-p99 30ms
      ridgeplan capacity Llama-3.1-8B --gpu h200 --rate 0.5,1,2/s --replicas 1 --price 2.5 -o load.html
      ridgeplan capacity Llama-3.1-70B --gpu h100 --gpus 4 --rate 2/s --ttft-p99 2s --tpot-p99 40ms
      ridgeplan capacity Llama-3.1-8B --gpu h100 --trace conversation.jsonl --requests 5000 --replicas 4
    """
    traffic = Traffic(
        requests=requests, seed=seed, burstiness=burstiness, prefix_share=prefix_share, batched_tokens=batched_tokens,
        max_num_seqs=max_num_seqs, replicas=replicas, prefill_replicas=prefill_replicas,
    )  # fmt: skip
    result = serving_capacity(
        model, gpu, rates, isl=isl, osl=osl, trace=trace, traffic=traffic, limits=LatencyLimits(ttft_p99, tpot_p99),
        preset=preset, gamma=gamma, price=price, watts=watts, options=SearchOptions(**search),
    )  # fmt: skip
    if output is not None and output.suffix == ".html":
        write_page(output, "capacity_page", result)
    else:
        write_table(output, result, result.to_dict())
    print_answer(result.to_dict(), as_json, lambda: _print(result))


def _print(result: ServingCapacity) -> None:
    degrees = f", {result.degrees}" if result.degrees != str(SINGLE) else ""
    kv_tokens = f"KV cache of {result.kv_tokens:,} tokens{' in each rank' * ('dp' in result.degrees)}"
    echo(f"{result.model} on {result.gpu}{degrees}, {result.plan}, by {result.backend}; {kv_tokens}")
    echo(f"prompts {result.prompts}, outputs {result.outputs}; {result.traffic.requests} requests per rate")
    for verdict in result.verdicts:
        echo(wrapped(verdict))
    print_notes(result.notes)
    print_table("Load (ms; output tokens/s of a GPU; goodput in requests/s within the limits)", COLUMNS,
                map(_cells, result.rows))  # fmt: skip
    for spending in filter(None, (row.spending for row in result.rows)):
        echo(spending)


def _cells(row: LoadRow) -> tuple[str, ...]:
    """The cells under `COLUMNS`."""
    times = (row.ttft_p50_ms, row.ttft_p90_ms, row.ttft_p99_ms, row.tpot_p50_ms, row.tpot_p90_ms, row.tpot_p99_ms)
    remarks = [f"misses {', '.join(row.misses)}"] if row.misses else []
    remarks += [f"{row.preemptions} preemptions"] if row.preemptions else []
    remarks += [f"{row.cached_share:.0%} cached"] if row.cached_share else []
    return (
        f"{row.rate:.4g}/s", str(row.gpus), *map(number, times), number(row.output_tokens_per_s_per_gpu),
        number(row.goodput_per_s), f"{row.kv_mean:.0%}", "; ".join(remarks),
    )  # fmt: skip
