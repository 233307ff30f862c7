"""Damaged checkpoints and GGUF files either run or are refused with one line, and nothing of them is left behind."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_values import METADATA, TENSORS, gguf_bytes, gguf_files
from hypothesis import given
from hypothesis import strategies as st
from mutations import HEAVY_FUZZ, assert_one_line, binary_files, json_files
from safetensors import safe_open
from tiny_families import FAMILY_SIZES

from ridgeplan import runtime
from ridgeplan.planner import Workload, preset
from ridgeplan.roofline.catalog.families import executable_architectures, families
from ridgeplan.runtime.errors import ModelError, UnsupportedPlan, WorkloadError
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.gguf import converted

REFUSED = (ModelError, WorkloadError, UnsupportedPlan)
PLAN = preset("autoregressive", Workload("any", "here", 64, 8))
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
     "attention_factor": 1.1},
    {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0},
)  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def configs(tiny_folder: Path) -> list[dict[str, Any]]:
    """A complete configuration of each family that runs, with the sizes of the tiny model and all kinds of RoPE."""
    tiny_config = json.loads((tiny_folder / "config.json").read_text())
    del tiny_config["model_type"]
    plain = [
        transformers.AutoConfig.for_model(
            families()[family].hub_type or family, **(tiny_config | FAMILY_SIZES.get(family, {}))
        ).to_dict()
        | {"model_type": family}
        for family in executable_architectures()
    ]
    return [{**value, "rope_parameters": {"rope_theta": 1e4, **rope}} for value in plain for rope in ROPES]


def link_all_but(name: str, source: Path, folder: Path) -> Path:
    """`folder` anew with links to the files of `source`, without the one called `name`, whose path is returned."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in source.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    return folder / name


def write_two_tokens(folder: Path) -> None:
    """Loads and runs the model in `folder`; a refusal is one line."""
    try:
        engine = runtime.load(PLAN, str(folder), device="cpu")
        [tokens] = engine.generate([1, 2, 3], 2).tokens
    except REFUSED as error:
        assert_one_line(error)
        return
    assert all(0 <= token < engine.config.shape.vocab for token in tokens)


@pytest.fixture(autouse=True)
def nothing_is_said(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Readers report what they dislike over many lines, Rust its panics; users get the one line of the error."""
    yield
    said = re.split(r"[\r\n]+", capfd.readouterr().err)
    assert [line for line in said if line.strip()] == []


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(data=st.data())
def test_checkpoints_with_damaged_configurations(
    tmp_path: Path, tiny_folder: Path, configs: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = link_all_but("config.json", tiny_folder, tmp_path / "model")
    path.write_bytes(data.draw(st.sampled_from(configs).flatmap(json_files)))
    write_two_tokens(path.parent)


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(data=st.data())
def test_checkpoints_with_damaged_indices(tmp_path: Path, tiny_folder: Path, data: st.DataObject) -> None:
    path = link_all_but("model.safetensors", tiny_folder, tmp_path / "model")
    path.with_name("shard.safetensors").symlink_to(tiny_folder / path.name)
    with safe_open(tiny_folder / path.name, framework="pt") as file:
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(file.keys(), "shard.safetensors")}
    path.with_name(INDEX).write_bytes(data.draw(json_files(index)))
    write_two_tokens(path.parent)


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(data=st.data())
def test_checkpoints_with_damaged_weights(tmp_path: Path, tiny_folder: Path, data: st.DataObject) -> None:
    path = link_all_but("model.safetensors", tiny_folder, tmp_path / "model")
    valid = (tiny_folder / path.name).read_bytes()
    path.write_bytes(data.draw(binary_files(valid, int.from_bytes(valid[:8], "little") + 8)))
    write_two_tokens(path.parent)


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(name=st.sampled_from(("tokenizer.json", "tokenizer_config.json")), data=st.data())
def test_damaged_tokenizers(tmp_path: Path, tiny_folder: Path, name: str, data: st.DataObject) -> None:
    path = link_all_but(name, tiny_folder, tmp_path / "model")
    path.write_bytes(data.draw(json_files(json.loads((tiny_folder / name).read_text()))))
    try:
        tokenizer = load_tokenizer(str(path.parent))
    except ModelError as error:
        assert_one_line(error)
        return
    assert all(isinstance(token, int) for token in tokenizer.encode("a"))


@pytest.mark.filterwarnings("ignore")
@HEAVY_FUZZ
@given(content=gguf_files() | binary_files(gguf_bytes(METADATA, TENSORS), 1024))
def test_conversions_of_damaged_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    try:
        write_two_tokens(converted(path))
    except ModelError as error:
        assert_one_line(error)
    cache = tmp_path / "ridgeplan" / "models"
    assert not list(cache.glob(".converting-*"))
    shutil.rmtree(cache, ignore_errors=True)
