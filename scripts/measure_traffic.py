"""Serves simulated traffic on a real vLLM, and puts what it took beside what was predicted before it ran.

    python scripts/measure_traffic.py --output traffic.json [--gpu h200] [--rates 0.5,1.5,2.2] [--requests 300]
    python scripts/measure_traffic.py --output traffic.json --url http://localhost:8000

Without --url it starts `vllm serve` with dummy weights of Llama-3.1-8B and a tokenizer of words, so that nothing is
downloaded. Prompts are random tokens; arrivals and lengths are those of `ridgeplan capacity` with the same seed. The
predictions are written first, the measurements of each rate as they end: `rows`, one for each rate. `knees` have all
requests at once, so that their throughput is the most that the engine reaches. `mixed` are single steps: prompts that
arrive while others decode, and the decodes' gap between two tokens meanwhile. Watts are those of nvidia-smi, if any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from measure_vllm import LLAMA_8B

from ridgeplan.planner import SearchOptions, Traffic, serving_capacity
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import best_of_preset
from ridgeplan.planner.traffic.requests import Requests, generate_requests, parse_lengths, parse_rates
from ridgeplan.planner.traffic.serving import DEFAULT_PRESET, PERCENTILES
from ridgeplan.planner.traffic.step_times import Replica
from ridgeplan.validate.engine_steps import CompletionsServer, EngineFailed, Stream, random_prompts

MODEL, PORT, START_S, MAX_TOKENS = "meta-llama/Llama-3.1-8B", 8123, 400.0, 131_072
DISTRIBUTIONS = {"lognormal": ("lognormal:4k", "lognormal:256"), "constant": ("8k", "256")}
ALL_AT_ONCE = 1000.0  # requests per second
DECODES, CONTEXT, NEW_TOKENS, PAUSE_S = (1, 16, 64), 4096, 512, 0.2  # of a mixed step
PROMPTS = (512, 2048, 8000)  # with 64 decodes, the last is just within vLLM's 8192 tokens per step
Send = Callable[[list[int], int], Stream]


def serve(requests: Requests, prompts: Sequence[list[int]], send: Send) -> list[tuple[float, float, int]]:
    """Sends each request at its time: seconds to its first and to its last token, and how many tokens it got."""
    started = time.perf_counter() + 0.5

    def run(index: int) -> tuple[float, float, int]:
        due = started + float(requests.arrival_s[index])
        time.sleep(max(due - time.perf_counter(), 0.0))
        stream = send(prompts[index], int(requests.output_tokens[index]))
        return stream.stamps[0] - due, stream.stamps[-1] - due, stream.tokens

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(run, range(len(requests))))


def mixed_step_s(decodes: Sequence[list[int]], prompts: Iterator[list[int]], send: Send) -> float | None:
    """Seconds of a step that processes a prompt while all `decodes` decode: the median gap between two of their tokens.

    Prompts are sent one after another until the decodes end; None where none of them met all decodes.
    """
    met: list[tuple[float, float]] = []
    with ThreadPoolExecutor(len(decodes)) as pool:
        running = [pool.submit(send, prompt, NEW_TOKENS) for prompt in decodes]
        while not all(each.done() for each in running):
            sent = time.perf_counter()
            met.append((sent, send(next(prompts), 1).stamps[0]))
            time.sleep(PAUSE_S)
        stamps = [np.array(each.result().stamps) for each in running]
    first, last = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    gaps = [
        float(np.diff(each)[(each[1:] > sent) & (each[:-1] < answered)].max())
        for sent, answered in met
        if first < sent and answered < last
        for each in stamps
    ]
    return statistics.median(gaps) if gaps else None


def predicted_mixed_steps(gpu: str) -> list[dict[str, Any]]:
    """Milliseconds of every mixed step, and of the decodes alone."""
    question = ask(MODEL, gpu, CONTEXT, SearchOptions(backend="vllm", new_tokens=NEW_TOKENS))
    steps = Replica(best_of_preset(DEFAULT_PRESET, question).plan, question, MAX_TOKENS).server().steps
    mean = CONTEXT + NEW_TOKENS / 2
    return [
        {
            "decodes": count, "context": CONTEXT, "prompt": size,
            "decode_ms": 1e3 * steps.decode_s(count, count * mean),
            "predicted_ms": 1e3 * steps.mixed_s(count, count * mean, [(size, 0)]),
        }
        for count in DECODES
        for size in PROMPTS
    ]  # fmt: skip


@contextmanager
def measured_watts() -> Iterator[list[float]]:
    """Power of the first GPU, by nvidia-smi, twice a second until the block ends; nothing where there is none."""
    watts: list[float] = []
    command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-i", "0", "-lms", "500"]
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


def write_dummy_model(folder: Path) -> None:
    """The config.json of Llama-3.1-8B and a tokenizer of as many words."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    write_tokenizer(folder, LLAMA_8B["vocab_size"])


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{index}": index for index in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": MAX_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@contextmanager
def running_server(url: str | None) -> Iterator[CompletionsServer]:
    """The server of a URL, or a vLLM that is started, and ends with the block."""
    if url is not None:
        yield CompletionsServer.connect(url, LLAMA_8B["vocab_size"])
        return
    with tempfile.TemporaryDirectory() as name:
        write_dummy_model(Path(name))
        command = ["vllm", "serve", name, "--load-format", "dummy", "--port", str(PORT), "--max-model-len", "131072"]
        process = subprocess.Popen([*command, "--no-enable-prefix-caching"])
        try:
            yield _connected(process, f"http://127.0.0.1:{PORT}")
        finally:
            process.terminate()
            process.wait(60)


def _connected(process: subprocess.Popen[bytes], url: str) -> CompletionsServer:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return CompletionsServer.connect(url, LLAMA_8B["vocab_size"])
        except EngineFailed:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(2)


def main() -> None:
    """Predicts every rate, then serves it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--url")
    parser.add_argument("--rates", type=parse_rates, default=parse_rates("1,3,5"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--lengths", choices=[*DISTRIBUTIONS], nargs="*", default=[*DISTRIBUTIONS])
    options = parser.parse_args()
    traffic = Traffic(requests=options.requests, replicas=1)
    rows: list[dict[str, Any]] = []
    for name in options.lengths:
        rates, (isl, osl) = (*options.rates, ALL_AT_ONCE), DISTRIBUTIONS[name]
        answer = serving_capacity(MODEL, options.gpu, rates, isl=isl, osl=osl, traffic=traffic, backend="vllm")
        rows += [{"lengths": name, "rate": row.rate, "predicted": asdict(row)} for row in answer.rows]
    document = {
        "date": time.strftime("%Y-%m-%d"), "gpu": options.gpu, "requests": options.requests,
        "rows": [row for row in rows if row["rate"] != ALL_AT_ONCE],
        "knees": [row for row in rows if row["rate"] == ALL_AT_ONCE],
        "mixed": predicted_mixed_steps(options.gpu),
    }  # fmt: skip

    def save(row: dict[str, Any] | None = None) -> None:
        if row is not None:
            print(json.dumps({key: value for key, value in row.items() if key != "predicted"}), flush=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    save()
    with running_server(options.url) as server:
        document["vllm"] = server.version
        server.stream(random_prompts(server.vocab, 4096, 1)[0], 32)  # compiles what the first request needs
        draw = np.random.default_rng(2)
        for step in document["mixed"]:
            decodes = draw.integers(1000, 100_000, (step["decodes"], CONTEXT)).tolist()
            prompts = iter(lambda size=step["prompt"]: draw.integers(1000, 100_000, size).tolist(), None)
            seconds = mixed_step_s(decodes, prompts, server.stream)
            if seconds is not None:
                step |= {"measured_ms": 1e3 * seconds, "error": step["predicted_ms"] / (1e3 * seconds) - 1}
            save(step)
        for place, row in enumerate(rows):
            lengths = (parse_lengths(text) for text in DISTRIBUTIONS[row["lengths"]])
            rng = np.random.default_rng(traffic.seed)
            requests = generate_requests(row["rate"], traffic.requests, *lengths, MAX_TOKENS, traffic.burstiness, rng)
            draw = np.random.default_rng([1, place])
            texts = [draw.integers(1000, 100_000, size).tolist() for size in requests.prompt_tokens]
            with measured_watts() as watts:
                row["measured"] = summary(requests, serve(requests, texts, server.stream))
            row["errors"] = {name: row["predicted"][name] / value - 1 for name, value in row["measured"].items()}
            if watts:
                row["watts"] = statistics.mean(watts)
                row["joules_per_output_token"] = row["watts"] / row["measured"]["output_tokens_per_s"]
            save(row)


if __name__ == "__main__":
    sys.exit(main())
