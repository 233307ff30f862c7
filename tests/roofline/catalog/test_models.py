"""Fetching a config.json from the hub: one request that fails fast, and one line that says how to get it."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ridgeplan.roofline.catalog.config_json import OFFLINE, REACH_S, fetched_config
from ridgeplan.roofline.catalog.model_shape import UnknownModel
from ridgeplan.roofline.catalog.models import load_shape

CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
    '"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512}'
)


class Session:
    """A hub's answer to HEAD, and how it was asked."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.asked = failure, []

    def head(self, url: str, timeout: float) -> None:
        self.asked.append((url, timeout))
        if self.failure:
            raise self.failure


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_an_offline_variable_asks_nobody(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    session = Session()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setenv(name, "1")
    with pytest.raises(UnknownModel, match=f"{name} is set; `hf download some/model config.json`") as caught:
        fetched_config("some/model")
    assert session.asked == [] and "\n" not in str(caught.value)


@pytest.mark.parametrize("failure", [OSError("no route"), RuntimeError("a library's own")], ids=str)
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    session = Session(failure)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    with pytest.raises(UnknownModel, match=r"cannot be reached within 3 s; `hf download some/model config\.json`"):
        fetched_config("some/model")
    assert [timeout for _, timeout in session.asked] == [REACH_S] == [3]


def test_only_the_config_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def download(hub_id: str, file: str, **options: Any) -> str:
        calls.append((hub_id, file))
        path = tmp_path / "config.json"
        path.write_text(CONFIG)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("ridgeplan.roofline.catalog.models.fetched_config", fetched_config)
    shape = load_shape("some/model")
    assert (shape.name, shape.layers, calls) == ("some/model", 2, [("some/model", "config.json")])


def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("404 Client Error. (Request ID: 1)\n\nEntry not found")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(UnknownModel, match=r"cannot download config\.json of some/model: 404 Client Error") as caught:
        fetched_config("some/model")
    assert "\n" not in str(caught.value)


def test_a_name_without_an_owner_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hub_id: str) -> Path:
        raise AssertionError(hub_id)

    monkeypatch.setattr("ridgeplan.roofline.catalog.models.fetched_config", fail)
    for name in ("gpt2-large-made-up", "a/b/c", "./a", ""):
        with pytest.raises(UnknownModel):
            load_shape(name)
