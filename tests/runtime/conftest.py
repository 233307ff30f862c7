"""Tiny random models saved as transformers would, plans for them, and the embedded real model."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILY_SIZES

from ridgeplan import runtime
from ridgeplan.planner.capacity import offloaded_layers, predicted_memory
from ridgeplan.roofline import execution
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Drafter,
    Eviction,
    HostPart,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    Speculation,
    TargetAttention,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policy import make_selection
from ridgeplan.runtime.engine import Generation
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.policies import SELECTORS
from ridgeplan.runtime.policies.base import TokenSelector
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of, save_head
from ridgeplan.runtime.speculation.train_head import HeadTraining, train_head

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share busy cores spin at every small operation: on a loaded machine tests take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def quiet_library() -> Iterator[None]:
    """Loading would change transformers' verbosity two dozen times: a sixth of a tiny model's time."""
    logging, usual = transformers.logging, transformers.logging.get_verbosity()
    change = logging.set_verbosity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "set_verbosity", lambda level: level == logging.get_verbosity() or change(level))
        logging.set_verbosity_error()
        yield
        change(usual)


class Nonsense(TokenSelector):
    """Drafts read nothing but their own token."""

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        every = super().draft_metadata(ahead, queries)
        return type(every)(every.positions, every.slots, every.end - 1, every.end, None, every.lower)


@pytest.fixture
def nonsense(monkeypatch: pytest.MonkeyPatch) -> str:
    """The selection by whose name drafts read nothing."""
    monkeypatch.setitem(SELECTORS, "streamingllm", Nonsense)
    return "streamingllm"


@dataclass(frozen=True)
class TinyModel:
    """A random model: its folder, and transformers' own implementation as the reference."""

    folder: str
    reference: Any


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Factory of tiny models: `agreeable` weakens attention, so that quantized drafts often agree."""
    results: dict[str, TinyModel] = {}

    def make(family: str = "llama", *, agreeable: bool = False, **changes: Any) -> TinyModel:
        name = f"{family}-{agreeable}-{sorted(changes.items())}"
        if name not in results:
            torch.manual_seed(0)
            hub_type = families()[family].hub_type or family
            sizes = TINY | FAMILY_SIZES.get(family, {}) | changes
            config = transformers.AutoConfig.for_model(hub_type, **sizes)
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("bias", "sinks")):
                    torch.nn.init.normal_(parameter, std=0.2)
                if "norm" in parameter_name:  # ones, as transformers has them, would hide norms that are mixed up
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
                if "conv1d" in parameter_name:  # else keys are so small that normalizing them amplifies rounding
                    torch.nn.init.normal_(parameter, std=0.7)
                if agreeable and "o_proj" in parameter_name:
                    parameter.data.mul_(0.2)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(buffer, std=0.1)
            folder = str(tmp_path_factory.mktemp(family))
            model.save_pretrained(folder)
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": family}))
            results[name] = TinyModel(folder, model)
        return results[name]

    return make


@pytest.fixture(scope="session")
def head_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Factory of files of random retrieval heads for tiny models; of `layers` layers where they choose by layer."""

    def make(model: TinyModel, layers: int = 1) -> str:
        config, embedding = model.reference.config, model.reference.get_input_embeddings().weight.detach()
        q_heads = 4 if layers == 1 else 2 * layers
        config_of_head = HeadConfig(
            model="tiny", hidden=config.hidden_size, vocab=config.vocab_size, q_heads=q_heads, kv_heads=2, head_dim=16,
            context=64, layers=layers,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        q, k = (torch.randn(heads * 16, config.hidden_size, generator=generator) for heads in (q_heads, 2))
        weights = HeadWeights(torch.ones(config.hidden_size), q, k, probe_of(embedding))
        path = str(tmp_path_factory.mktemp("heads") / "head.safetensors")
        save_head(path, Head(config_of_head, weights))
        return path

    return make


@pytest.fixture(scope="session")
def draft_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Factory of folders of draft heads for tiny models, trained for a few steps on random tokens."""
    folders: dict[str, str] = {}

    def make(model: TinyModel) -> str:
        if model.folder not in folders:
            vocab = model.reference.config.vocab_size
            text = torch.randint(vocab, (256,), generator=torch.Generator().manual_seed(3)).tolist()
            training = HeadTraining(
                steps=25, tokens=48, rate=1e-2, warmup=2, draft_vocab=vocab - 2, unroll=2, own_tokens=400
            )
            trained = train_head(model.folder, lambda source: text, training, lambda step, loss: None, "cpu")
            folders[model.folder] = str(tmp_path_factory.mktemp("draft_heads"))
            trained.checkpoint.save(Path(folders[model.folder]))
        return folders[model.folder]

    return make


@pytest.fixture
def padded_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts from 48 tokens on attend at multiples of 32, as those from 8192 on do at multiples of 256."""
    monkeypatch.setattr(execution, "PADDED_PROMPT_TOKENS", 48)
    monkeypatch.setattr(execution, "PROMPT_STEP_TOKENS", 32)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Factory of plans; drafts read the upper codes where the format stores them."""

    def make(
        kv: str = "bf16",
        gamma: int = 0,
        *,
        context: int = 128,
        new_tokens: int = 128,
        batch: int = 1,
        group: int = 32,
        draft_bits: int = 16,
        target_bits: int = 16,
        weight_group: int = 32,
        codes: str | None = None,
        yarn_factor: float = 1.0,
        selection: str = "all",
        adaptive: bool = False,
        evict: str = "none",
        budget: int = 0,
        settings: Mapping[str, Any] | None = None,
        chunk: int = 0,
        target: str = "all",
        target_budget: int = 0,
        target_options: Mapping[str, Any] | None = None,
        placement: Placement | None = None,
        drafter: Drafter | None = None,
        drafter_head: str = "",
        **hyperparameters: Any,
    ) -> Plan:
        self_drafts = gamma > 0 and (drafter is None or drafter.cascades)
        stored = self_drafts and kv in ("int4x2", "bf16+int4")
        return Plan(
            Workload("tiny", "cpu", context, new_tokens, batch, yarn_factor, drafter_head=drafter_head),
            weights=Weights(target_bits, min(target_bits, draft_bits), weight_group),
            kv=KVCache(KVFormat(kv), group),
            eviction=Eviction(evict, budget, settings=settings or {}, chunk=chunk),
            attention=TargetAttention(make_selection(target, **(target_options or {})), target_budget),
            placement=placement or Placement(),
            speculation=Speculation(
                gamma,
                DraftCodes(codes or ("upper" if stored else "full")),
                make_selection(selection, **hyperparameters),
                adaptive,
                drafter or Drafter(),
            ),
        )

    return make


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """Factory of random prompts of the given lengths."""

    def make(*lengths: int, vocab: int = 128, seed: int = 1) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]

    return make


@pytest.fixture(scope="session")
def generated() -> Callable[..., Generation]:
    """Generations with new engines, each run once: many tests compare with the same plain decoding."""
    known: dict[str, Generation] = {}

    def generate(plan: Plan, folder: str, ids: list[list[int]], new_tokens: int) -> Generation:
        name = f"{plan} {folder} {ids} {new_tokens}"
        if name not in known:
            known[name] = runtime.load(plan, folder).generate(ids, new_tokens)
        return known[name]

    return generate


@pytest.fixture(scope="session")
def limited() -> Callable[..., tuple[Plan, int]]:
    """Gives a plan so little memory that at least `layers` layers must leave; returns it with their number.

    Slots for the layers on their way take the memory of two or more, so that one alone cannot leave.
    """

    def limit(
        plan: Plan, shape: ModelShape, layers: int, part: HostPart, budget: int = 64, *, cuda: bool = False, **more: Any
    ) -> tuple[Plan, int]:
        sms = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 1
        roomy = Device(memory_bytes=10**12, element_bytes=4, num_sms=sms, asynchronous=int(cuda))
        memory = predicted_memory(plan, shape, roomy)
        placement = Placement(True, budget if part is HostPart.ALL else 0, part, **more)
        for percent in range(1, 100):
            memory_bytes = int(memory.peak - percent / 100 * memory.kv)
            placed = replace(plan, placement=replace(placement, memory_bytes=memory_bytes))
            num_offloaded, _ = offloaded_layers(placed, shape, replace(roomy, memory_bytes=memory_bytes))
            if num_offloaded >= layers:
                return placed, num_offloaded
        raise AssertionError(f"no limit offloads {layers} layers")

    return limit


@pytest.fixture(scope="session")
def shape_of() -> Callable[[str], ModelShape]:
    """The shape of a model's folder."""
    return lambda folder: decoder_config(load_config(folder), folder, 1.0).shape
