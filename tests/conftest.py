"""Shared test setup: Triton's interpreter where no CUDA device is there, and skips that say why."""

import atexit
import gc
import os
import pydoc_data.topics
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.model_shape import UnknownModel
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.latency import KERNEL_CLASSES

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Triton reads this when a kernel is decorated, so it must be set before any kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# The collector would walk millions of objects of torch, sympy and transformers again and again.
gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Several workers finish together when the longest tests start first.
    items.sort(key=lambda item: "slow" not in item.keywords)
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # What is imported and collected stays: tests that collect garbage need not walk it, which takes a second.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report what they find at exit as leaks


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested: compiled on CUDA, else interpreted on the CPU."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(scope="session", autouse=True)
def no_saved_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps rows that `ridgeplan acceptance` and `quality` saved on this machine out of predictions."""
    nowhere = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeplan.planner.resolution.user_acceptance_path", lambda: nowhere / "acceptance.json")
        patch.setattr("ridgeplan.planner.quality.user_quality_path", lambda: nowhere / "quality.json")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_hub() -> Iterator[None]:
    """Keeps tests from asking the hub for a model's config.json."""

    def refuse(hub_id: str) -> Path:
        raise UnknownModel(f"{hub_id} is not asked for in tests")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeplan.roofline.catalog.models.fetched_config", refuse)
        yield


@pytest.fixture(autouse=True)
def unmeasured_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves walks over all of the process's pages, which took half the time of a small model's generation.

    Tests of measured memory have the mark `memory`.
    """
    memory = sys.modules.get("ridgeplan.runtime.memory")
    if memory is not None and request.node.get_closest_marker("memory") is None:
        monkeypatch.setattr(memory, "_library_bytes", lambda: 0)
        monkeypatch.setattr(memory, "return_freed_memory", lambda: None)
        monkeypatch.setattr("ridgeplan.runtime.loading.return_freed_memory", lambda: None)
        # It builds the model once more, so that measurements leave out what imports take.
        monkeypatch.setattr("ridgeplan.runtime.loading.import_model_code", lambda source, shape: None)


@pytest.fixture(autouse=True)
def saved_weights_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps weights that loading quantizes and saves apart: each test finds none.

    The folder is created by whoever saves there: few tests do, and `tmp_path` would create one for each.
    """
    folder = tmp_path_factory.getbasetemp() / "quantized" / uuid.uuid4().hex
    monkeypatch.setattr("ridgeplan.roofline.catalog.files.quantized_folder", lambda: folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct. Without its wheel tests skip, but never where all of them must run."""
    from ridgeplan.runtime import ModelError, embedded_model_path  # transformers takes seconds, which few tests need

    try:
        return embedded_model_path()
    except ModelError as error:
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent(str(error))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokens are bytes, for tests of what happens around a model."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=16384, initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def long_text() -> str:
    """About 465 kB of English prose: the Python language reference's topics."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every torch.empty of a floating type with NaN, so that reading unwritten memory shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(scope="session")
def h200_profile() -> Profile:
    """An H200 with round utilizations, so that tests of the model do not depend on a measurement."""
    quantized = ("linear_int4", "attention_int4", "attention_int8")
    rates = {kind: Rates(0.6 if kind in quantized else 0.85, 0.7, 2e-6, 0.05) for kind in KERNEL_CLASSES}
    return Profile(load_hardware("h200"), "test H200", {"torch": "none"}, "2026-01-01", rates)
