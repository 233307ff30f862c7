"""Serves simulated traffic on vLLM, and puts what it took beside what was predicted before it ran.

    python scripts/measure_traffic.py --output traffic.json [--seconds 270] [--only mixed lognormal uniform] [--seed 0]
        [--scale 1] [--span 14]

Needs a GPU and vLLM, which runs in this process with dummy weights of Llama-3.1-8B, so that each of its steps is seen.
Prompts are random tokens; arrivals and lengths are those of `ridgeplan capacity` with the same seed. Predictions are
written first, then each measurement as it ends:

- `mixed`: chosen prompts beside 0 to 64 decoding sequences, the median of repeated steps (see `logged_s`);
- `rows`: percentiles and throughput at three rates of each distribution of lengths, and the watts of nvidia-smi;
- `knees`: all requests at once, so that their throughput is the most that the engine reaches;
- `steps`: every step that processed a prompt while these were served; `decode_steps`: the others, by batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from gpu_turns import gpu_turn
from measure_vllm import LLAMA_8B, beside_others, engine_memory

from ridgeplan.dashboards.files import write_atomically
from ridgeplan.planner import SearchOptions, Traffic, serving_capacity
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import best_of_preset
from ridgeplan.planner.traffic.requests import Requests, generate_requests, parse_lengths
from ridgeplan.planner.traffic.serving import DEFAULT_PRESET, PERCENTILES
from ridgeplan.planner.traffic.simulate import Chunk, Server, StepTimes
from ridgeplan.planner.traffic.step_times import Replica
from ridgeplan.validate.engine_steps import InProcessVllm

MODEL, MAX_TOKENS, MODEL_LEN = "meta-llama/Llama-3.1-8B", 131_072, 40_000
BATCHED_TOKENS, MAX_NUM_SEQS = 8192, 128
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, *range(8, MAX_NUM_SEQS + 1, 8)]}
ALL_AT_ONCE = 1000.0  # requests per second
DECODES, CONTEXT, HELD_TOKENS, REPEATS = (0, 1, 16, 64), 4096, 4000, 3  # of mixed steps
# With 64 decodes, 8000 tokens are just within a step's budget; the last prompt takes two.
PROMPTS = ((512,), (2048,), (8000,), (1024,) * 4, (16_000,))


@dataclass(frozen=True)
class Load:
    """Lengths, rates below the knee in requests per second, and how many requests come at once at the knee."""

    isl: str
    osl: str
    rates: tuple[float, ...]
    at_once: int


LOADS = {
    "lognormal": Load("lognormal:1k", "lognormal:256", (6.0, 12.0, 18.0), 300),
    "uniform": Load("uniform:1k..7k", "128", (2.0, 4.0, 7.0), 128),
}


@dataclass(frozen=True)
class Arrivals:
    """The seed of requests, what the rates are multiplied by, and the seconds in which the requests of one arrive."""

    seed: int = 0
    scale: float = 1.0
    span_s: float = 14.0

    def rates(self, load: Load) -> tuple[float, ...]:
        """The rates of a load, the last of which is the knee's."""
        return (*(self.scale * rate for rate in load.rates), ALL_AT_ONCE)

    def traffic(self, load: Load, rate: float) -> Traffic:
        """The simulation's options, which are those of the engine too."""
        requests = load.at_once if rate == ALL_AT_ONCE else round(rate * self.span_s)
        return Traffic(
            requests=requests, seed=self.seed, replicas=1, batched_tokens=BATCHED_TOKENS, max_num_seqs=MAX_NUM_SEQS
        )


@dataclass(frozen=True)
class Step:
    """A step of the engine: decoding sequences, their tokens together, chunks of prompts, and its seconds."""

    decodes: int
    tokens: int
    chunks: tuple[Chunk, ...]
    seconds: float


class StepLog:
    """Every step of an engine in this process, in order.

    A step begins when the one before ends, or, where it was scheduled later than that, when it is scheduled. It ends
    when its tokens are read, which is after the host has launched the next one.
    """

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[Step] = []
        self._prompts: dict[str, int] = {}
        self._scheduled_s: dict[int, float] = {}
        self._ended_s = 0.0
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._ended

    def _scheduled(self, *arguments: Any, **named: Any) -> Any:
        output = self._schedule(*arguments, **named)
        self._scheduled_s[id(output)] = time.perf_counter()
        return output

    def _ended(self, output: Any, *rest: Any) -> Any:
        now_s = time.perf_counter()
        started_s = max(self._scheduled_s.pop(id(output)), self._ended_s)
        if output.num_scheduled_tokens:
            self.steps.append(Step(*self._contents(output), now_s - started_s))
            self._ended_s = now_s
        return self._update(output, *rest)

    def _contents(self, output: Any) -> tuple[int, int, tuple[Chunk, ...]]:
        """Decoding sequences, their tokens, and the chunks of prompts."""
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in output.scheduled_new_reqs:
            self._prompts[request.req_id] = len(request.prompt_token_ids)
            before[request.req_id] = request.num_computed_tokens
        decoding = [done for name, done in before.items() if done >= self._prompts[name]]
        chunks = [
            (output.num_scheduled_tokens[name], done) for name, done in before.items() if done < self._prompts[name]
        ]
        return len(decoding), sum(decoding), tuple(chunks)


@dataclass(frozen=True)
class Client:
    """Sends requests to an engine in this process."""

    engine: Any
    names: Iterator[int]

    def add(self, prompt: list[int], tokens: int) -> str:
        """Adds a request for so many tokens; returns its name."""
        vllm, name = import_module("vllm"), str(next(self.names))
        delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        params = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=delta
        )
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)
        return name

    def finish(self, names: Sequence[str]) -> None:
        """Runs steps until all these requests have ended."""
        left = set(names)
        while left:
            left -= {output.request_id for output in self.engine.step() if output.finished}

    def run(self, steps: int) -> None:
        """Runs steps of the engine."""
        for _ in range(steps):
            self.engine.step()

    def serve(
        self, requests: Requests, prompts: Sequence[list[int]], until_s: float
    ) -> list[tuple[float, float, int]] | None:
        """Sends each request at its time: seconds to its first and to its last token, and how many tokens it got.

        None where they have not all ended at the time `until_s`; the engine then drops the others.
        """
        names: dict[str, int] = {}
        first_s, last_s, tokens = [0.0] * len(requests), [0.0] * len(requests), [0] * len(requests)
        started_s, ended = time.perf_counter(), 0
        while ended < len(requests):
            now_s = time.perf_counter() - started_s
            while len(names) < len(requests) and requests.arrival_s[len(names)] <= now_s:
                index = len(names)
                names[self.add(prompts[index], int(requests.output_tokens[index]))] = index
            if not self.engine.has_unfinished_requests():
                time.sleep(max(float(requests.arrival_s[len(names)]) - now_s, 0.0))
                continue
            outputs = self.engine.step()
            now_s = time.perf_counter() - started_s
            if started_s + now_s > until_s:
                self.engine.abort_request(list(names))
                return None
            for output in outputs:
                index, new = names[output.request_id], len(output.outputs[0].token_ids)
                if new:
                    first_s[index] = first_s[index] or now_s - requests.arrival_s[index]
                    last_s[index], tokens[index] = now_s - requests.arrival_s[index], tokens[index] + new
                ended += output.finished
        return list(zip(first_s, last_s, tokens, strict=True))


def run_mixed_steps(client: Client, draw: np.random.Generator) -> None:
    """Processes every group of prompts beside each number of decoding sequences, several times."""
    held: list[str] = []
    for count in DECODES:
        held += [client.add(random_tokens(draw, CONTEXT), HELD_TOKENS) for _ in range(count - len(held))]
        client.run(len(held) and 4 + len(held) * CONTEXT // BATCHED_TOKENS)
        for sizes, _ in itertools.product(PROMPTS, range(REPEATS)):
            client.finish([client.add(random_tokens(draw, size), 1) for size in sizes])
            client.run(3 if held else 0)
    client.engine.abort_request(held)
    client.run(2)  # what was scheduled with them


def mixed_rows(log: Sequence[Step], server: Server) -> list[dict[str, Any]]:
    """Steps with equal prompts beside as many decodes that ran at least twice: their median, and what is predicted."""
    groups: dict[tuple[int, tuple[Chunk, ...]], list[Step]] = defaultdict(list)
    for step in log:
        groups[step.decodes, step.chunks].append(step)
    rows = []
    for (decodes, chunks), same in groups.items():
        if chunks and len(same) > 1:
            measured_s = statistics.median(step.seconds for step in same)
            tokens = statistics.mean(step.tokens for step in same)
            predicted_s = logged_s(server, decodes, tokens, chunks)
            row = {"decodes": decodes, "tokens": round(tokens), "chunks": chunks, "count": len(same)}
            rows.append({**row, "predicted_ms": 1e3 * predicted_s, **error_of(predicted_s, measured_s)})
    return rows


def logged_s(server: Server, decodes: int, tokens: float, chunks: Sequence[Chunk]) -> float:
    """Seconds that the log has of a step with prompts between steps that decode.

    While the host launches it, the step before ends and is not read, so the rest of the launch counts with that one.
    Where prompts go on, the step before them took longer than a launch.
    """
    step_s = server.steps.mixed_s(decodes, tokens, chunks)
    if any(before for _, before in chunks):
        return step_s
    started_s = server.steps.decode_s(decodes, tokens - decodes)
    read_s = max(started_s, server.launch_s) if decodes else 0.0
    ended_s = max(max(started_s, server.host_s) + step_s, server.launch_s)
    return max(ended_s, read_s + server.host_s) - read_s


def decode_rows(log: Sequence[Step], steps: StepTimes) -> list[dict[str, Any]]:
    """Steps without prompts, by the number of sequences."""
    groups: dict[int, list[Step]] = defaultdict(list)
    for step in log:
        if not step.chunks:
            groups[step.decodes].append(step)
    rows = []
    for decodes, same in sorted(groups.items()):
        measured_s = statistics.median(step.seconds for step in same)
        tokens = statistics.median(step.tokens for step in same)
        predicted_s = steps.decode_s(decodes, tokens)
        row = {"decodes": decodes, "tokens": round(tokens), "count": len(same), "predicted_ms": 1e3 * predicted_s}
        rows.append({**row, **error_of(predicted_s, measured_s)})
    return rows


def error_of(predicted_s: float, measured_s: float) -> dict[str, float]:
    """Milliseconds that were measured, and the relative error of the prediction."""
    return {"measured_ms": round(1e3 * measured_s, 4), "error": predicted_s / measured_s - 1}


def predicted_server(gpu: str) -> Server:
    """Step times and the scheduler of the simulation."""
    question = ask(MODEL, gpu, CONTEXT, SearchOptions(backend="vllm"))
    replica = Replica(best_of_preset(DEFAULT_PRESET, question).plan, question, MAX_TOKENS)
    return replica.server(BATCHED_TOKENS, MAX_NUM_SEQS)


def predicted_rows(gpu: str, names: Sequence[str], arrivals: Arrivals) -> list[dict[str, Any]]:
    """A row for each rate of each load, and one for all requests at once."""
    rows = []
    for name, load in ((name, load) for name, load in LOADS.items() if name in names):
        for rate in arrivals.rates(load):
            answer = serving_capacity(
                MODEL, gpu, (rate,), isl=load.isl, osl=load.osl, traffic=arrivals.traffic(load, rate), backend="vllm"
            )
            rows.append({"lengths": name, "rate": rate, "predicted": asdict(answer.rows[0])})
    return rows


def measure_row(row: dict[str, Any], client: Client, arrivals: Arrivals, until_s: float) -> None:
    """Serves the requests of a row and adds what was measured."""
    load = LOADS[row["lengths"]]
    traffic = arrivals.traffic(load, row["rate"])
    lengths = parse_lengths(load.isl), parse_lengths(load.osl)
    rng = np.random.default_rng(traffic.seed)
    requests = generate_requests(row["rate"], traffic.requests, *lengths, MAX_TOKENS, traffic.burstiness, rng)
    prompts = [random_tokens(rng, size) for size in requests.prompt_tokens]
    with measured_watts() as watts:
        served = client.serve(requests, prompts, until_s)
    if served is None:
        row["unfinished"] = True
        return
    row["measured"] = summary(requests, served)
    row["errors"] = {name: row["predicted"][name] / value - 1 for name, value in row["measured"].items()}
    if watts:
        row["watts"] = statistics.mean(watts)
        row["joules_per_output_token"] = row["watts"] / row["measured"]["output_tokens_per_s"]


def random_tokens(draw: np.random.Generator, count: int) -> list[int]:
    """A prompt that no cache has."""
    return [int(token) for token in draw.integers(1000, 100_000, count)]


def summary(requests: Requests, served: Sequence[tuple[float, float, int]]) -> dict[str, float]:
    """Percentiles and throughput under the names of `LoadRow`."""
    first_s, last_s, tokens = (np.array(column) for column in zip(*served, strict=True))
    several = tokens > 1
    tpot_s = (last_s - first_s)[several] / (tokens[several] - 1)
    span_s = float((requests.arrival_s + last_s).max())
    times = {
        f"{name}_p{percentile}_ms": 1e3 * float(np.percentile(seconds, percentile))
        for name, seconds in (("ttft", first_s), ("tpot", tpot_s))
        for percentile in PERCENTILES
    }
    return {**times, "output_tokens_per_s": float(tokens.sum()) / span_s, "requests_per_s": len(served) / span_s}


def gpu_id() -> str:
    """This process's GPU as nvidia-smi names it: it need not be the machine's first one."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}" if torch.cuda.is_available() else "0"


@contextmanager
def measured_watts() -> Iterator[list[float]]:
    """Power of the GPU, by nvidia-smi, twice a second until the block ends; nothing where there is none."""
    watts: list[float] = []
    command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-i", gpu_id(), "-lms", "500"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield watts
        return
    try:
        yield watts
    finally:
        process.terminate()
        for line in process.communicate()[0].splitlines():
            watts += [float(line)] if line.strip().replace(".", "", 1).isdigit() else []


def started_engine(folder: Path) -> InProcessVllm:
    """vLLM with dummy weights of the shape of Llama-3.1-8B."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    return InProcessVllm.start(
        str(folder), LLAMA_8B["vocab_size"], MODEL_LEN, load_format="dummy", dtype="bfloat16",
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BATCHED_TOKENS, compilation_config=GRAPHS, **beside_others(),
    )  # fmt: skip


def to_text(document: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for key, value in document.items():
        rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(key)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Predicts every rate, then serves it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--seconds", type=float, default=270.0, help="in all, start of the engine included")
    parser.add_argument("--only", choices=["mixed", *LOADS], nargs="*", default=["mixed", *LOADS])
    parser.add_argument("--seed", type=int, default=Arrivals.seed, help="of arrivals and lengths")
    parser.add_argument("--scale", type=float, default=Arrivals.scale, help="what the rates are multiplied by")
    parser.add_argument("--span", type=float, default=Arrivals.span_s, help="seconds in which those of a rate arrive")
    options = parser.parse_args()
    arrivals = Arrivals(options.seed, options.scale, options.span)
    until_s = time.perf_counter() + options.seconds
    rows, server = predicted_rows(options.gpu, options.only, arrivals), predicted_server(options.gpu)
    document = {
        "date": time.strftime("%Y-%m-%d"), "gpu": options.gpu, "arrivals": asdict(arrivals), "mixed": [],
        "rows": [row for row in rows if row["rate"] != ALL_AT_ONCE],
        "knees": [row for row in rows if row["rate"] == ALL_AT_ONCE],
    }  # fmt: skip

    def save(*printed: dict[str, Any]) -> None:
        for row in printed:
            print(json.dumps({key: value for key, value in row.items() if key != "predicted"}), flush=True)
        print(f"{until_s - time.perf_counter():.0f} s left", flush=True)
        write_atomically(options.output, to_text(document))

    save()
    with tempfile.TemporaryDirectory() as name:
        with gpu_turn(timed=False):
            vllm = started_engine(Path(name))
        document |= {"vllm": vllm.version, "engine": engine_memory(vllm.llm)}
        with gpu_turn(timed=True):
            measure(document, vllm.llm.llm_engine, server, arrivals, until_s, save, "mixed" in options.only)


def measure(
    document: dict[str, Any], engine: Any, server: Server, arrivals: Arrivals, until_s: float, save: Any, mixed: bool
) -> None:
    """Adds measurements to the document, as long as there is time; `save` is called with each.

    mixed: whether chosen prompts are processed first.
    """
    log, client = StepLog(engine.engine_core.engine_core.scheduler), Client(engine, itertools.count())
    draw = np.random.default_rng(2)
    client.finish([client.add(random_tokens(draw, size), 8) for size in (64, 2048, CONTEXT, 16_000)])  # a warm-up
    if mixed:
        log.steps.clear()
        run_mixed_steps(client, draw)
        document["mixed"] = mixed_rows(log.steps, server)
        save(*document["mixed"])
    log.steps.clear()
    for row in (*document["rows"], *document["knees"]):
        measure_row(row, client, arrivals, until_s)
        document["steps"] = [
            [step.decodes, step.tokens, step.chunks, round(1e3 * step.seconds, 3)] for step in log.steps if step.chunks
        ]
        document["decode_steps"] = decode_rows(log.steps, server.steps)
        save(row)


if __name__ == "__main__":
    sys.exit(main())
