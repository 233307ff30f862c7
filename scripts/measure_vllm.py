"""Measures vLLM's decode steps on models of dummy weights, one engine after another in processes of their own.

    python scripts/measure_vllm.py --output vllm.json [--seconds 460] [--only llama-bf16 ...]

Several such scripts may start engines on one GPU together, which is mostly the host's work (gpu_turns.py). KV_GB, of
the environment, is then the memory of each engine's cache.

Needs one GPU, an installed vLLM and this package; writes the file anew after every measured case. It produced the rows
of planner/engines/measured.toml; users measure their own engine with `ridgeplan calibrate --engine vllm`.

Routers get normally distributed weights, as dummy ones send all rows to the same few experts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_turns import gpu_turn

from ridgeplan.validate.engine_steps import NEW_TOKENS, InProcessVllm

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

ROUTERS = (".router.weight", "mlp.gate.weight")
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
# vLLM's own sizes, up to the largest batch.
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]}
CHUNK = 8192  # tokens of prompts in a step, which layers with windows hold as well
EXPERT_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
MODEL_CELLS = ((120_000, 1), (32_768, 1), (32_768, 8))  # those of measure_models.py
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 140000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
    "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
    },
    "dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "attention_bias": False,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip

PHI_4 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120,
    "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
    "max_position_embeddings": 140000, "original_max_position_embeddings": 140000, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 168,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024, "tie_word_embeddings": True,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
    "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
# The text model of Qwen3.5-9B, which vLLM 0.24 has with a vision tower only, as Qwen3-Next's class. That wants a layer
# of experts, so the last layer's MLP is two experts of half its size, both hit by every token.
QWEN3_5_9B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 248320, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
    "mlp_only_layers": [*range(31)], "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 6144,
    "shared_expert_intermediate_size": 0, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


# An EAGLE-3 head of Llama-3.1-8B: one layer with a vocabulary of its own.
EAGLE3_HEAD = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29], "use_aux_hidden_state": True},
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One engine: a model's config.json, vLLM's formats, and the cases (context, batch), longest context first.

    drafts: proposals of an EAGLE-3 head that a pass verifies; what is measured is the pass, whatever it accepts.
    """

    name: str
    model: str
    config: dict[str, Any]
    weights: str
    kv: str
    cases: tuple[tuple[int, int], ...]
    drafts: int = 0

    @property
    def quantization(self) -> str | None:
        """vLLM's argument: None for the checkpoint's own weights."""
        return None if self.weights == "auto" else self.weights

    @property
    def kv_cache_dtype(self) -> str | None:
        """vLLM's argument: None for the model's own type."""
        return None if self.kv == "auto" else self.kv


def _grid(contexts: tuple[int, ...], batches: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((context, batch) for context in contexts for batch in batches)


SETUPS = (
    Setup("llama-bf16", "meta-llama/Llama-3.1-8B", LLAMA_8B, "auto", "auto", _grid((32768, 4096), BATCHES)),
    Setup("gpt-oss-mxfp4", "openai/gpt-oss-20b", GPT_OSS_20B, "auto", "auto",
          ((120_000, 1), *_grid((32768, 4096), EXPERT_BATCHES))),
    Setup("qwen3-moe-bf16", "Qwen/Qwen3-30B-A3B", QWEN3_30B_A3B, "auto", "auto",
          ((120_000, 1), *_grid((32768, 4096), EXPERT_BATCHES))),
    Setup("llama-bf16-fp8-kv", "meta-llama/Llama-3.1-8B", LLAMA_8B, "auto", "fp8",
          ((120000, 1), (120000, 2), *_grid((32768, 8192), (1, 4, 6)))),
    Setup("llama-fp8", "meta-llama/Llama-3.1-8B", LLAMA_8B, "fp8", "fp8",
          (*_grid((32768,), (1, 2, 4, 6, 8, 12)), *_grid((4096,), (1, 4, 8, 16)))),
    Setup("qwen3-moe-fp8", "Qwen/Qwen3-30B-A3B", QWEN3_30B_A3B, "fp8", "fp8",
          (*_grid((32768,), (1, 2, 4, 8)), *_grid((4096,), (1, 4, 8, 16)))),
    *(
        Setup(name, model, config, "auto", "auto", MODEL_CELLS)
        for name, model, config in (
            ("gemma", "google/gemma-3-27b-it", GEMMA_3_27B),
            ("deepseek", "deepseek-ai/DeepSeek-V2-Lite", DEEPSEEK_V2_LITE),
            ("phi", "microsoft/phi-4", PHI_4),
            ("hybrid", "Qwen/Qwen3.5-9B", QWEN3_5_9B),
        )
    ),
    *(
        Setup(f"llama-fp8-eagle3-{drafts}", "meta-llama/Llama-3.1-8B", LLAMA_8B, "fp8", "fp8", cases, drafts)
        for drafts, cases in ((3, ((120000, 1), *_grid((32768,), (1, 8)), (4096, 1))), (5, ((120000, 1), (4096, 1))))
    ),
    Setup("llama-fp8-per-channel", "meta-llama/Llama-3.1-8B", LLAMA_8B, "fp8_per_channel", "fp8",
          _grid((4096,), (1, 8))),
)  # fmt: skip


def measure(setup: Setup, send: Any) -> None:
    """Starts the engine of a setup, and sends a dictionary for the engine and one for every case."""
    import torch

    folder = Path(f"/tmp/measure-vllm/{setup.name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(setup.config), encoding="utf-8")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    drafting: dict[str, Any] = {}
    if setup.drafts:
        head = folder / "head"
        head.mkdir(exist_ok=True)
        (head / "config.json").write_text(json.dumps(EAGLE3_HEAD), encoding="utf-8")
        drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": setup.drafts}
    longest = max(context for context, _ in setup.cases)
    with gpu_turn(timed=False):
        engine = InProcessVllm.start(
            str(folder), setup.config["vocab_size"], longest + 2 * NEW_TOKENS, load_format="dummy",
            quantization=setup.quantization, kv=setup.kv_cache_dtype, max_num_seqs=32, max_num_batched_tokens=CHUNK,
            dtype="bfloat16", compilation_config=GRAPHS, **beside_others(),
            gdn_prefill_backend="triton",  # FlashInfer's is compiled for minutes at first use
            **({"speculative_config": drafting} if drafting else {}),
        )  # fmt: skip
        routers = engine.llm.apply_model(spread_routers)[0]
    send({
        "setup": setup.name, "version": engine.version, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "routers": routers, "memory": engine_memory(engine.llm),
    })  # fmt: skip
    with gpu_turn(timed=True):
        for context, batch in setup.cases:
            tpot_ms, _ = engine.step(context, batch)
            send({"setup": setup.name, "model": setup.model, "weights": setup.weights, "kv": setup.kv,
                  "context": context, "batch": batch, **({"drafts": setup.drafts} if setup.drafts else {}),
                  "pass_ms" if setup.drafts else "tpot_ms": round(tpot_ms, 4)})  # fmt: skip


def beside_others(kv_gb: str | None = None) -> dict[str, Any]:
    """vLLM's arguments for an engine beside others, with so many GB for its cache (by default KV_GB, if it is set)."""
    kv_gb = kv_gb or os.environ.get("KV_GB")
    if kv_gb is None:
        return {}
    return {"kv_cache_memory_bytes": int(1e9 * float(kv_gb)), "gpu_memory_utilization": 0.1}


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words w0, w1, ..., for dummy models of servers that want text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{index}": index for index in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 131_072}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def spread_routers(model: Any) -> int:
    """Gives every router normal weights of its own; how many there are."""
    import torch

    for key, bias in model.named_parameters():
        if key.endswith("bias"):  # dummy ones, the same in every layer, would make all tokens alike
            bias.data.zero_()
    routers = [weight for key, weight in model.named_parameters() if key.endswith(ROUTERS)]
    generator = torch.Generator(device="cuda").manual_seed(11)
    for weight in routers:
        weight.data.copy_(torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype))
    return len(routers)


def engine_memory(llm: Any) -> dict[str, Any]:
    """Bytes that the engine took for weights, activations, graphs and the KV cache, and the tokens that it holds."""

    def of(worker: Any) -> dict[str, Any]:
        names = ("requested_memory", "peak_activation_memory", "non_torch_memory", "cudagraph_memory_estimate",
                 "available_kv_cache_memory_bytes")  # fmt: skip
        held = {name: int(getattr(worker, name)) for name in names if hasattr(worker, name)}
        return {**held, "weights": int(worker.model_runner.model_memory_usage)}

    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    return {
        **llm.collective_rpc(of)[0],
        "blocks": cache.num_gpu_blocks, "block_size": cache.block_size,
        "utilization": cache.gpu_memory_utilization,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
        "graph_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
    }  # fmt: skip


def _child(name: str, cases: list[str], output: Path, rows: Path) -> None:
    """Measures one setup, of its cases only these if any are named; each is written as it ends."""
    setup = next(setup for setup in SETUPS if setup.name == name)
    if cases:
        setup = replace(setup, cases=tuple(case for case in setup.cases if "{}x{}".format(*case) in cases))

    def send(row: dict[str, Any]) -> None:
        with rows.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        _write(output, rows)
        print(json.dumps(row)[:1500], flush=True)

    measure(setup, send)


def main() -> None:
    """Measures the setups one after another until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--only", nargs="*", default=[setup.name for setup in SETUPS])
    parser.add_argument("--cases", nargs="*", default=[], help="CONTEXTxBATCH; by default all of a setup")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = options.output.with_suffix(".jsonl")
    if options.child:
        _child(options.child, options.cases, options.output, rows)
        return
    deadline = time.monotonic() + options.seconds
    rows.write_text("", encoding="utf-8")
    import torch
    import vllm
    from vllm import LLM, SamplingParams  # noqa: F401  # once for all setups, which are forked off this process

    print(f"vLLM {vllm.__version__} imported, {deadline - time.monotonic():.0f} s left", flush=True)
    forks = not torch.cuda.is_initialized()
    for name in options.only:
        left = deadline - time.monotonic()
        if left < 45:
            print(f"no time left for {name}", flush=True)
            continue
        before = rows.stat().st_size
        if forks:
            forks = _forked(name, options.cases, options.output, rows, left) or rows.stat().st_size > before
        if not forks and rows.stat().st_size == before:
            command = [sys.executable, __file__, "--output", str(options.output), "--child", name]
            command += ["--cases", *options.cases]
            try:
                subprocess.run(command, timeout=max(deadline - time.monotonic(), 1), check=False)
            except subprocess.TimeoutExpired:
                print(f"{name}: time is up", flush=True)


def _forked(name: str, cases: list[str], output: Path, rows: Path, seconds: float) -> bool:
    """Measures a setup in a forked process; whether it ended well."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, cases, output, rows))
    process.start()
    process.join(seconds)
    if process.is_alive():
        print(f"{name}: time is up", flush=True)
        process.kill()
        process.join()
        return True
    return process.exitcode == 0


def _write(path: Path, rows: Path) -> None:
    """The document of all that was measured so far."""
    measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "engines": [row for row in measured if "version" in row],
        "rows": [row for row in measured if "tpot_ms" in row],
        "passes": [row for row in measured if "pass_ms" in row],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
