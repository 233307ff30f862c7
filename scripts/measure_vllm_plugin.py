"""Checks and measures vLLM with the plugin on a GPU, one engine after another in processes of their own.

    python scripts/measure_vllm_plugin.py --output plugin.json [--seconds 560] [--only fit plain ...]

Needs one GPU, an installed vLLM 0.24 and this package; nothing is downloaded. The file is written anew after every
case, and a case that fails leaves its error there and does not stop the next.

Checks, on a small model of random weights whose fit `runtime.load` has saved: greedy tokens of an engine without graphs
and without prefix caching (plain), with chunks of 512 tokens, prefix caching, preemptions and ragged arrivals
(scheduled, with the engine's counts of preemptions and of tokens from its cache), with drafts (drafts), and of a
server's concurrent clients over HTTP (server); then this package's runtime says of each token
how far it is from its own choice (compare). Times, on Llama-3.1-8B with dummy weights: stage1, fp8, stage2, bf16, and
this package's runtime (runtime).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from gpu_turns import gpu_turn
from measure_vllm import GRAPHS, LLAMA_8B, beside_others, write_tokenizer

from ridgeplan.planner import resolve
from ridgeplan.planner.export import ServeCommandOptions, engine_named, export_with_plugin, schema_for
from ridgeplan.planner.export.plugin import VERSION
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset

FOLDER = Path("/tmp/ridgeplan-vllm")
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16",
}  # fmt: skip
LENGTHS, GENERATED = (5, 127, 128, 129, 300, 700, 1100), 200  # of the checks' prompts
CASES = ((32768, 1), (4096, 8), (131072, 1), (32768, 8), (4096, 16), (131072, 4))  # the table in docs/vllm.md
PORT = 8124
SERVED_S = 15.0  # that are left to the server's clients
CHECKS_KV_GB = "2"  # vLLM's own measurement fails where other processes free memory meanwhile
MOST_RUNNING, REQUESTS, ARRIVALS_PER_S, SERVED_TOKENS = 32, 48, 4.0, 256  # of the measured throughput
SCHEDULED = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 24}  # 3,072 tokens for 3,889 and what they add
COUNTS = {"vllm:num_preemptions": "preemptions", "vllm:prefix_cache_hits": "cached_tokens"}
PROFILED = {(32768, 1), (131072, 1), (4096, 16)}  # the cases of which a round with drafts is profiled


@dataclass(frozen=True)
class Send:
    """Writes a row of a step to the file of lines and to the document. deadline: in `time.monotonic`'s seconds."""

    step: str
    output: Path
    rows: Path
    deadline: float

    def __call__(self, row: dict[str, Any]) -> None:
        with self.rows.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": self.step, **row}) + "\n")
        write(self.output, self.rows)
        print(json.dumps(row), flush=True)


def small_model() -> Path:
    """The folder of the checks' model."""
    import torch
    from safetensors.torch import save_file

    folder = FOLDER / "small"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    hidden, mlp, vocab = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["vocab_size"]
    generator = torch.Generator().manual_seed(7)

    def random(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return (gain * torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden, hidden**0.5),
        "lm_head.weight": random(vocab, hidden, 4),
    }
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(SMALL["num_hidden_layers"]):
        sizes = {
            "self_attn.q_proj": (512, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden),
            "self_attn.o_proj": (hidden, 512), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": random(*size) for name, size in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    (folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    write_tokenizer(folder, vocab)  # which servers want
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dummy_model() -> Path:
    """The folder of the shape that is timed, without weights."""
    folder = FOLDER / "llama"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    return folder


def prompts() -> list[list[int]]:
    """The checks' prompts; the last two begin with the same 512 tokens."""
    import random

    generator = random.Random(5)
    texts = [[generator.randrange(SMALL["vocab_size"]) for _ in range(length)] for length in LENGTHS]
    texts[-1][:512] = texts[-2][:512]
    return texts


def plan_of(model: str, name: str, context: int, new_tokens: int, batch: int) -> Plan:
    """A preset for a model's folder or name on this kind of GPU."""
    return preset(name, Workload(model, "h200", context, new_tokens=new_tokens, batch=batch))


def exported_arguments(model: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """What `ridgeplan export --plugin` tells vLLM, as `LLM` takes it."""
    shape, profile = resolve(model, "h200")
    options = ServeCommandOptions(plan, shape, profile, engine_named("vllm"), schema_for("vllm", VERSION), str(folder))
    arguments = export_with_plugin(options).command.arguments
    return {name.removeprefix("--").replace("-", "_"): value for name, value in arguments}


def start(folder: Path, **arguments: Any) -> Any:
    """vLLM in this process, with the plugin: by its entry point where the package is installed with one."""
    from vllm import LLM

    from ridgeplan.runtime.vllm import register

    register()
    return LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, **arguments)


def greedy(llm: Any, texts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(text)} for text in texts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def ragged(llm: Any, texts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The same for prompts of which one more arrives every 20 steps."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine, waiting, results, steps = llm.llm_engine, list(enumerate(texts)), {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 20 == 0:
            index, text = waiting.pop(0)
            engine.add_request(f"ragged-{index}", {"prompt_token_ids": list(text)}, sampling)
        for output in engine.step():
            if output.finished:
                results[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
        steps += 1
    return [results[index] for index in range(len(texts))]


def save_tokens(name: str, tokens: list[list[int]]) -> None:
    """For `compare`, which runs in another process."""
    (FOLDER / f"tokens-{name}.json").write_text(json.dumps(tokens), encoding="utf-8")


def saved_tokens() -> Iterator[tuple[str, list[list[int]]]]:
    """What engines have generated so far."""
    for path in sorted(FOLDER.glob("tokens-*.json")):
        yield path.stem.removeprefix("tokens-"), json.loads(path.read_text(encoding="utf-8"))


def agreement(tokens: list[list[int]], others: list[list[int]]) -> dict[str, Any]:
    """How many texts are the same, and the share of tokens before each text's first difference."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(tokens, others, strict=True)
    ]
    return {"texts_equal": sum(n == len(x) for n, x in zip(same, tokens, strict=True)), "texts": len(tokens),
            "tokens_equal": round(sum(same) / sum(map(len, tokens)), 4)}  # fmt: skip


def run_fit(send: Send) -> None:
    """Fits the small model's weights, which vLLM then loads."""
    from ridgeplan import runtime

    folder = small_model()
    plan = plan_of(str(folder), "quantspec-int8", 1100, GENERATED, len(LENGTHS))
    engine = runtime.load(plan, str(folder))
    send({"case": "fit", "format": repr(engine.weights.format)})


def checked(*, drafts: bool = False, **arguments: Any) -> Any:
    """An engine of the small model with the weights that `run_fit` has fitted, which serve drafts or might."""
    folder = small_model()
    plan = plan_of(str(folder), "quantspec-int8", 1100, GENERATED, len(LENGTHS))
    engine_arguments = exported_arguments(str(folder), plan, folder) | {
        "max_model_len": 2048,
        **beside_others(CHECKS_KV_GB),
    }
    if not drafts:
        engine_arguments.pop("speculative_config")
    return start(folder, **(engine_arguments | arguments))


def run_plain(send: Send) -> None:
    """Without graphs and without prefix caching, prompts whole: what the others are compared with."""
    llm = checked(enforce_eager=True, enable_prefix_caching=False)
    tokens = greedy(llm, prompts(), GENERATED)
    save_tokens("plain", tokens)
    send({"case": "plain", "texts": len(tokens)})


def run_scheduled(send: Send) -> None:
    """With graphs, prefix caching, chunks and preemptions; the same again from the cache; and ragged arrivals."""
    llm = checked(enable_prefix_caching=True, compilation_config=GRAPHS, disable_log_stats=False, **SCHEDULED)
    reference = dict(saved_tokens()).get("plain")
    runs = {"scheduled": greedy, "cached": greedy, "ragged": ragged}
    for name, generate in runs.items():
        tokens = generate(llm, prompts(), GENERATED)
        save_tokens(name, tokens)
        send({"case": name, **({} if reference is None else agreement(tokens, reference))})
    counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTS}
    send({"case": "counts", **{key: counts[name] for name, key in COUNTS.items()}})


def run_drafts(send: Send) -> None:
    """With drafts from upper planes, in a graph per round."""
    llm = checked(drafts=True, enable_prefix_caching=True, compilation_config=GRAPHS)
    steps = counted_steps(llm)
    tokens = greedy(llm, prompts(), GENERATED)
    save_tokens("drafts", tokens)
    reference = dict(saved_tokens()).get("plain")
    send({"case": "drafts", "steps": steps[0], **({} if reference is None else agreement(tokens, reference))})


def counted_steps(llm: Any) -> list[int]:
    """A list whose number grows with the engine's steps."""
    engine, count = llm.llm_engine, [0]
    run_step = type(engine).step

    def step() -> Any:
        count[0] += 1
        return run_step(engine)

    engine.step = step
    return count


def run_server(send: Send) -> None:
    """The exported command as it is, with drafts, in processes of its own: tokens that clients of its API get."""
    folder = small_model()
    plan = plan_of(str(folder), "quantspec-int8", 1100, GENERATED, len(LENGTHS))
    arguments = exported_arguments(str(folder), plan, folder) | {**beside_others(CHECKS_KV_GB), "port": PORT}
    words = [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(folder),
    ]  # -P: kernels/ is no package
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    process = subprocess.Popen(words, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        wait_for_server(process, send.deadline)
        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            tokens = list(pool.map(lambda text: completed(str(folder), text), prompts()))
    finally:
        process.terminate()
        process.wait(30)
    save_tokens("server", tokens)
    reference = dict(saved_tokens()).get("plain")
    send({"case": "server", **({} if reference is None else agreement(tokens, reference))})


def wait_for_server(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Returns when it answers. Raises RuntimeError if it ends before, or if the time is up: beside other engines that
    start on the same cores it took more than two minutes."""
    while time.monotonic() < deadline - SERVED_S:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5).close()
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(1)
    raise RuntimeError(f"the server did not answer; its exit status is {process.poll()}")


def completed(model: str, text: Sequence[int]) -> list[int]:
    """Greedy tokens of a prompt from the server."""
    body = {"model": model, "prompt": list(text), "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def run_compare(send: Send) -> None:
    """How far each engine's tokens are from this package's runtime's choices, in deviations of its logits."""
    from ridgeplan import runtime

    folder, texts = small_model(), prompts()
    plan = plan_of(str(folder), "quantspec-int8", 1100, GENERATED, len(LENGTHS))
    engine = runtime.load(plan, str(folder))
    expected = [list(row) for row in engine.generate(texts, GENERATED).tokens]
    for name, tokens in [("runtime", expected), *saved_tokens()]:
        exact, worst, count = 0, 0.0, 0
        for text, row in zip(texts, tokens, strict=True):
            logits = engine.teacher_forced_logits([text], [row[:-1]])[0].float()
            chosen = logits.gather(1, logits.new_tensor(row).long()[:, None])[:, 0]
            behind = (logits.amax(1) - chosen) / logits.std(1)
            exact, worst, count = exact + int((behind <= 0).sum()), max(worst, float(behind.max())), count + len(row)
        send({"case": f"compare {name}", "same_choice": round(exact / count, 4), "worst_deviations": round(worst, 3)})


def profiled_steps(llm: Any, prompts: Sequence[Sequence[int]], count: int = 8) -> dict[str, Any]:
    """Where the time of an engine's steps goes: on the host, on the device, by kind of launch and by name."""
    import torch
    from torch.autograd import DeviceType
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)
    names = [f"profiled-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    for _ in range(len(prompts) + 6):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        started = time.perf_counter()
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - started
    engine.abort_request(names)  # by these names, as `add_request` returns others
    assert not engine.has_unfinished_requests(), "LLM.generate would wait for what is profiled"
    device = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    averages = profile.key_averages()
    launches = {e.key: e.count / count for e in averages if e.key.startswith("cuda") or e.key.startswith("cuLaunch")}
    host = sorted(averages, key=lambda e: -e.self_cpu_time_total)[:16]
    kernels: dict[str, float] = {}
    for event in device:
        kernels[event.name[:60]] = kernels.get(event.name[:60], 0.0) + event.time_range.elapsed_us()
    return {
        "profiled_wall_ms": round(1e3 * wall_s / count, 3),
        "device_ms": round(sum(kernels.values()) / 1e3 / count, 3),  # kernels that wait for earlier ones count, too
        "busy_ms": round(busy_us([(e.time_range.start, e.time_range.end) for e in device]) / 1e3 / count, 3),
        "device_launches": len(device) / count,
        "host_calls": launches,
        "host_ms": {e.key[:60]: round(e.self_cpu_time_total / 1e3 / count, 3) for e in host},
        "kernel_ms": {k: round(v / 1e3 / count, 3) for k, v in sorted(kernels.items(), key=lambda x: -x[1])[:16]},
    }


def busy_us(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans (start, end): kernels that start early overlap those before them."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def run_times(name: str, plan_name: str | None, send: Send, **arguments: Any) -> None:
    """Milliseconds of a step, or of a round with drafts, of the 8B shape with dummy weights; then throughput."""
    folder, model = dummy_model(), "meta-llama/Llama-3.1-8B"
    engine_arguments: dict[str, Any] = {
        "max_model_len": 131_072 + 384,
        "gpu_memory_utilization": 0.92,
        "max_num_seqs": MOST_RUNNING,
        **beside_others(),
    }
    if plan_name is None:
        engine_arguments["compilation_config"] = GRAPHS
    else:
        plan = plan_of(model, plan_name, 131_072, 256, MOST_RUNNING)
        engine_arguments = exported_arguments(model, plan, folder) | engine_arguments
    gamma = engine_arguments.get("speculative_config", {}).get("num_speculative_tokens", 0)
    hf_overrides = {**engine_arguments.pop("hf_overrides", {}), "max_position_embeddings": 140_000}
    with gpu_turn(timed=False):
        llm = start(folder, load_format="dummy", enable_prefix_caching=True, max_num_batched_tokens=16384,
                    hf_overrides=hf_overrides, **(engine_arguments | arguments))  # fmt: skip
    with gpu_turn(timed=True):
        measure_times(name, llm, gamma, send)


def measure_times(name: str, llm: Any, gamma: int, send: Send) -> None:
    """The rows of `run_times` for an engine that has started."""
    from ridgeplan.validate.engine_steps import InProcessVllm, random_prompts

    engine = InProcessVllm(llm, "", LLAMA_8B["vocab_size"])
    for context, batch in CASES:
        try:
            step_ms, _ = engine.step(context, batch)
        except (ValueError, RuntimeError) as error:
            send({"case": name, "context": context, "batch": batch, "error": str(error)[:300]})
            continue
        row = {"case": name, "context": context, "batch": batch}
        send({**row, "step_ms": round(step_ms, 4), "gamma": gamma})
        if gamma and (context, batch) in PROFILED:
            texts = random_prompts(LLAMA_8B["vocab_size"], context, batch)
            send({**row, "case": f"{name} profile", **profiled_steps(llm, texts)})
    if not gamma:  # random tokens say nothing of how many drafts are accepted
        send({"case": f"{name} throughput", **throughput(llm)})


def throughput(llm: Any) -> dict[str, Any]:
    """Tokens per second of requests of 8k tokens that arrive at random, of which so many run at once."""
    import random

    from vllm import SamplingParams

    draw = random.Random(11)
    sampling = SamplingParams(temperature=0, max_tokens=SERVED_TOKENS, ignore_eos=True, detokenize=False)
    texts = [[draw.randrange(1000, 100_000) for _ in range(8192)] for _ in range(REQUESTS)]
    arrivals = list(itertools.accumulate(draw.expovariate(ARRIVALS_PER_S) for _ in texts))
    engine, added, running, steps, running_steps = llm.llm_engine, 0, 0, 0, 0
    started = time.perf_counter()
    while added < REQUESTS or running:
        while added < REQUESTS and running < MOST_RUNNING and arrivals[added] <= time.perf_counter() - started:
            engine.add_request(f"served-{added}", {"prompt_token_ids": texts[added]}, sampling)
            added, running = added + 1, running + 1
        if running:
            running -= sum(output.finished for output in engine.step())
            steps, running_steps = steps + 1, running_steps + running
    seconds = time.perf_counter() - started
    return {"requests": REQUESTS, "prompt": 8192, "arrivals_per_s": ARRIVALS_PER_S, "seconds": round(seconds, 3),
            "output_tokens_per_s": round(REQUESTS * SERVED_TOKENS / seconds, 1),
            "mean_running": round(running_steps / steps, 1)}  # fmt: skip


def run_runtime(send: Send) -> None:
    """The same of this package's runtime, on random weights and a filled cache."""
    import torch

    from ridgeplan.roofline.latency import Machine
    from ridgeplan.validate.random_model import RandomModel, measured_round

    name = "meta-llama/Llama-3.1-8B"
    shape, profile = resolve(name, "h200")
    with gpu_turn(timed=True):
        model = RandomModel.build(shape, torch.device("cuda"), Machine.of(profile))
        for plan_name in ("int8-weights-int8", "quantspec-int8"):
            for context, batch in CASES:
                plan = plan_of(name, plan_name, context, 256, batch)
                seconds = measured_round(model, plan).total_s
                row = {"case": f"runtime {plan_name}", "context": context, "batch": batch}
                send({**row, "step_ms": round(1e3 * seconds, 4), "gamma": plan.speculation.gamma})


CHECKS = ("fit", "plain", "scheduled", "drafts", "server", "compare")
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
STEPS: dict[str, Callable[[Send], None]] = {
    "fit": run_fit,
    "plain": run_plain,
    "scheduled": run_scheduled,
    "drafts": run_drafts,
    "server": run_server,
    "compare": run_compare,
    "stage1": lambda send: run_times("stage1", "int8-weights-int8", send),
    "fp8": lambda send: run_times("fp8", None, send, **FP8),
    "stage2": lambda send: run_times("stage2", "quantspec-int8", send),
    "runtime": run_runtime,
    "bf16": lambda send: run_times("bf16", None, send),
}


def child(send: Send) -> None:
    """Runs one step; each of its rows is written as it ends, and an error too. What checks run is timed by nobody."""
    started = time.perf_counter()
    try:
        with gpu_turn(timed=False) if send.step in CHECKS else nullcontext():
            STEPS[send.step](send)
    except BaseException as error:
        traceback.print_exc()
        send({"error": f"{type(error).__name__}: {error}"[:600]})
        raise SystemExit(1) from error
    finally:
        send({"took_s": round(time.perf_counter() - started, 1)})


def write(output: Path, rows: Path) -> None:
    """The document of all rows so far."""
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    document = {"date": time.strftime("%Y-%m-%d"), **next(iter(lines[:1]), {}), "rows": lines[1:]}
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def where_measured(version: str) -> dict[str, Any]:
    """The GPU and the software. The GPU's name is nvidia-smi's: CUDA must not start in the process that forks."""
    import torch

    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {"device": name, "software": {"vllm": version, "torch": str(torch.__version__)}}


def main() -> None:
    """Runs the steps one after another until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--only", nargs="*", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--together", action="store_true", help="start all at once; see measure_vllm.py")
    options = parser.parse_args()
    deadline, rows = time.monotonic() + options.seconds, options.output.with_suffix(".jsonl")
    FOLDER.mkdir(parents=True, exist_ok=True)
    import vllm

    rows.write_text(json.dumps(where_measured(vllm.__version__)) + "\n", encoding="utf-8")
    print(f"vLLM {vllm.__version__}, {deadline - time.monotonic():.0f} s left", flush=True)
    for names in [options.only] if options.together else [[name] for name in options.only]:
        if deadline - time.monotonic() < 20:
            print(f"no time left for {', '.join(names)}", flush=True)
            continue
        context = multiprocessing.get_context("fork")
        processes = {
            name: context.Process(target=child, args=(Send(name, options.output, rows, deadline),)) for name in names
        }
        for process in processes.values():
            process.start()
        for name, process in processes.items():
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                print(f"{name}: time is up", flush=True)
                process.kill()
                process.join()


if __name__ == "__main__":
    main()
